"""The student writes: an embedded, continuously batched sampling engine."""
