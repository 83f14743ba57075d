"""What the functions of one sample make of a whole step, for tests that look at all of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opd.train.advantages import opd_returns, teacher_means, with_opd_term
from opd.train.loss_weights import (
    CorrectionSums,
    apply_correction,
    per_teacher_scales,
    policy_scales,
    token_weights,
)

Arrays = Sequence[np.ndarray]


def opd_advantages(
    base: Arrays,
    student: Arrays,
    teacher: Arrays,
    masks: Arrays,
    *,
    coef: float,
    baseline: str = "none",
    discount: float = 0.0,
    teachers: Sequence[str],
) -> list[np.ndarray]:
    """Advantages [R] with the distillation term, one array a sample."""
    columns = zip(student, teacher, masks, teachers, strict=True)
    returns = [
        opd_returns(own, other, mask, discount, f"sample {index}, teacher {name!r}")
        for index, (own, other, mask, name) in enumerate(columns)
    ]
    said = [(name, float(term.sum()), len(term)) for name, term in zip(teachers, returns, strict=True)]
    means = teacher_means(said) if baseline == "batch_mean" else {}
    rows = zip(base, returns, masks, teachers, strict=True)
    return [with_opd_term(own, term, mask, coef, means.get(name, 0.0)) for own, term, mask, name in rows]


@dataclass
class Correction:
    """What a correction makes of a step's samples, one array each."""

    masks: list[np.ndarray]
    weights: list[np.ndarray]
    metrics: dict[str, float]


def correct(config, rollout: Arrays, recomputed: Arrays, masks: Arrays) -> Correction:
    """`apply_correction`, sample by sample."""
    found = [apply_correction(config, *row) for row in zip(rollout, recomputed, masks, strict=True)]
    sums = CorrectionSums()
    for mask, one in zip(masks, found, strict=True):
        sums.add(mask, *one)
    metrics = {} if config is None else sums.metrics()
    return Correction([one[0] for one in found], [one[1] for one in found], metrics)


def policy_weights(masks: Arrays, aggregation: str = "token", max_new_tokens: int = 1) -> list[np.ndarray]:
    """[R] weights of each sample by `policy_scales`."""
    scales = policy_scales(counts_of(masks), aggregation, max_new_tokens)  # type: ignore[arg-type]
    return [token_weights(mask, scale) for mask, scale in zip(masks, scales, strict=True)]


def per_teacher_weights(masks: Arrays, teachers: Sequence[str | None], shares=None) -> list[np.ndarray]:
    """[R] weights of each sample by `per_teacher_scales`."""
    scales = per_teacher_scales(counts_of(masks), teachers, shares)
    return [token_weights(mask, scale) for mask, scale in zip(masks, scales, strict=True)]


def counts_of(masks: Arrays) -> list[int]:
    """How many tokens each mask counts."""
    return [int(np.count_nonzero(mask)) for mask in masks]
