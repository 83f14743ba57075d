"""Frozen teachers, the samples of each, and the order in which teachers score. See README.md."""
