"""Rollouts: an embedded, continuously batched sampling engine, and the servers in its place."""
