"""Write and read a run's files: its folder and lock, digests of inputs, results.json and model cards."""
