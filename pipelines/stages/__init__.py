"""The stages of a run: their order, the one loop of those that are trained, and what each learns."""
