"""A reward for the runs of `test_hub_run.py`."""


def right(sample):
    """Whether the answer begins as it should."""
    return float(sample.text[:1] == str(sample.label)[:1])
