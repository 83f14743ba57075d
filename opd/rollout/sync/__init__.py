"""New weights on their way to rollout engines: one verb, several transports."""
