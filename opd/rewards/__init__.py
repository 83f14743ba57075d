"""Rewards by name: how answers are read, compared and, where they are code, run."""
