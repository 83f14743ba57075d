"""Frozen teachers, which samples go to which, and the order they are worked through. See README.md."""
