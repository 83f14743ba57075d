"""The penalty for leaving a frozen reference policy, as an advantage (k1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opd.algorithms.opd_term import opd_advantages
from opd.errors import TeacherError

REFERENCE = "reference"


def reference_kl_advantages(
    base: Sequence[np.ndarray],
    logprobs: Sequence[np.ndarray],
    ref_logprobs: Sequence[np.ndarray | None],
    masks: Sequence[np.ndarray],
    *,
    coef: float,
) -> list[np.ndarray]:
    """`adv - coef * (log p - log p_ref)` per token: the gradient of KL(p || p_ref) at each state.

    One `[R]` array a sample; `logprobs` are the trainer's own. Applied after group normalisation. As a loss
    the same quantity would have no gradient; the forms for a loss are in `opd.losses.kl_estimators`. Raises
    `TeacherError` if a reference log-probability is missing or not finite.
    """
    references: list[np.ndarray] = []
    for index, reference in enumerate(ref_logprobs):
        if reference is None:
            raise TeacherError(
                f"sample {index} of the step has no reference log-probabilities; score it first"
            )
        references.append(reference)
    return opd_advantages(
        base,
        logprobs,
        references,
        masks,
        coef=coef,
        baseline="none",
        discount=0.0,
        teachers=[REFERENCE] * len(masks),
    )
