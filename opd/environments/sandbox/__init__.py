"""Where the tools of agents run."""
