"""Measure the accuracy of a run's models, with intervals, and store some answers."""
