"""Environments that agents act in."""
