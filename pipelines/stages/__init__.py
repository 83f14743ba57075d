"""Define the stages of a run: their order, the one training loop, and the algorithm of each."""
