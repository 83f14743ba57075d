"""From rewards and log-probabilities to per-token advantages and loss weights; weight merging."""
