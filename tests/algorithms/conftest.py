"""Groups of scored samples, and one setting for every property test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import settings

from opd.types import Sample, SampleGroup

# The same examples on every machine, and no time limit: the first call pays for loading libraries.
settings.register_profile("algorithms", deadline=None, derandomize=True)
settings.load_profile("algorithms")


def make_group(rewards: Sequence[float | None], lengths: Sequence[int] | None = None) -> SampleGroup:
    """One sample a reward; `lengths[i]` response tokens (3 by default), the second not trained on."""
    samples = []
    for index, reward in enumerate(rewards):
        length = 3 if lengths is None else lengths[index]
        mask = np.ones(length, dtype=bool)
        mask[1:2] = False
        samples.append(
            Sample(
                uid=f"g/{index}",
                group_uid="g",
                domain="sort",
                prompt_ids=np.array([1, 2], dtype=np.int32),
                response_ids=np.full(length, 3, dtype=np.int32),
                loss_mask=mask,
                reward=reward,
            )
        )
    return SampleGroup("g", "sort", samples)


@pytest.fixture(scope="session")
def group() -> Callable[..., SampleGroup]:
    return make_group
