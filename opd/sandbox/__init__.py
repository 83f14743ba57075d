"""Sandboxes for untrusted code: commands of agents, and answers with their tests."""
