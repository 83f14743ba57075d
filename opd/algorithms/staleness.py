"""How old the tokens of a step are, in policy versions, and leaving out those that are too old."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opd.types import Sample


def staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """`staleness/mean` and `/max` over the tokens that count, for a learner at `version`; empty without."""
    ages = np.concatenate([version - s.policy_versions[s.loss_mask] for s in samples] or [np.zeros(0)])
    if not len(ages):
        return {}
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}


def drop_stale(samples: Sequence[Sample], version: int, limit: int) -> dict[str, float]:
    """Take tokens that are more than `limit` versions old out of the loss masks, in place.

    Returns `staleness/dropped`, their share of the tokens that counted.
    """
    before = after = 0
    for sample in samples:
        before += int(np.count_nonzero(sample.loss_mask))
        sample.loss_mask = sample.loss_mask & (version - sample.policy_versions <= limit)
        after += int(np.count_nonzero(sample.loss_mask))
    return {"staleness/dropped": 1.0 - after / before if before else 0.0}
