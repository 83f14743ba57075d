"""`storage.trajectories: disk`: a merge whose responses are on disk until their micro-batch.

`samples` writes a batch's responses as they end and learns from them, `files` is where they go and what a
killed run finds there, `batch` what is known of all of them at once: rewards, ages, counts, the same on every
rank. `step` trains on them by a plan made from metadata; `policy` is a step's policy stream.
"""
