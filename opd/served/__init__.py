"""Models behind HTTP: one client for teachers and rollout engines."""
