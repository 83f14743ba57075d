"""Durable files, tensors and checkpoints. See `storage/README.md` for the map."""
