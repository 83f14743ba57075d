"""A reward for `tests/cli`."""


def length(sample):
    """How long an answer is, as a share of five signs."""
    return float(len(sample.text) > 2)
