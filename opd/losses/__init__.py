"""Per-token losses on `[N]` tensors; each name says whose gradient it has."""
