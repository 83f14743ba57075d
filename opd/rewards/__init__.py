"""Reward functions: how they are found, called and checked. Importable without torch."""
