"""What a run leaves on disk: its folder and lock, the digests of its inputs, results.json and model cards."""
