"""Where code that nobody trusts runs: commands of agents, and answers with their tests."""
