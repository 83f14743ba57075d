"""On-policy distillation as an advantage: `adv' = adv - coef * (log p_student - log p_teacher)`.

The log-ratio of the sampled token, `r = log p - log t`, is the k1 estimate of KL(p || t). Times the score
function, `E[r * grad log p] = p * (r - KL)` is the reverse KL's exact gradient; differentiated as a loss it
would have an expected gradient of exactly 0. So `r` enters here, as a number, and never as a loss.

Apply it after any whitening or group normalisation: whitening the sum rescales `coef` and removes the term's
mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from opd.errors import TeacherError

Arrays = Sequence[np.ndarray]


def opd_advantages(
    base: Arrays,
    student_logprobs: Arrays,
    teacher_logprobs: Arrays,
    masks: Arrays,
    *,
    coef: float,
    baseline: Literal["none", "batch_mean"],
    discount: float,
    teachers: Sequence[str | None],
) -> list[np.ndarray]:
    """Advantages `[R]` (dtype of `base`) with the distillation term, 0 where the mask is False.

    All lists have one `[R]` array a sample. `student_logprobs` are the trainer's own, at the sampling
    temperature; the engine's would turn the objective into KL(engine || teacher). `discount` 0 credits a
    token with its own log-ratio, which leaves out its effect on later states; 1 gives the gradient of the KL
    between whole responses. `batch_mean` subtracts the mean of each teacher's terms over the step, which
    scales the expected gradient by `1 - 1/N` for `N` independent tokens. It is taken off the return, never
    off each token's log-ratio: a constant per token, summed over the rest of the response, would reward
    length. Samples whose teacher is `None` keep their base advantages. Raises `TeacherError` for
    log-probabilities that are missing or not finite.
    """
    columns = zip(student_logprobs, teacher_logprobs, masks, teachers, strict=True)
    returns: list[np.ndarray | None] = []
    for index, (student, teacher, mask, name) in enumerate(columns):
        where = f"sample {index} of the step, teacher {name!r}"
        returns.append(None if name is None else opd_returns(student, teacher, mask, discount, where))
    means = _teacher_means(returns, teachers) if baseline == "batch_mean" else {}
    return [
        with_opd_term(advantage, term, mask, coef, means.get(name, 0.0))
        for advantage, term, mask, name in zip(base, returns, masks, teachers, strict=True)
    ]


def opd_returns(
    student: np.ndarray, teacher: np.ndarray, mask: np.ndarray, discount: float, where: str
) -> np.ndarray:
    """[M] float64: the term of one sample at the tokens that `mask` `[R]` counts, without coefficient and
    baseline. `where` names the sample, for errors; see `opd_advantages`.
    """
    return discounted_returns(_log_ratio(student, teacher, mask, where), discount)


def with_opd_term(
    base: np.ndarray, returns: np.ndarray | None, mask: np.ndarray, coef: float, mean: float = 0.0
) -> np.ndarray:
    """[R] advantages of one sample (dtype of `base`): less `coef` times its `returns`, of which `mean` is the
    baseline; 0 where `mask` is False.
    """
    adjusted = np.where(mask, base, 0.0)
    if returns is not None:
        adjusted[mask] -= coef * (returns - mean)
    return adjusted.astype(base.dtype)


def discounted_returns(values: np.ndarray, discount: float) -> np.ndarray:
    """[R] `sum_j discount^j * values[i + j]`, float64, by doubling windows (`log2 R` vector operations)."""
    returns = values.astype(np.float64)
    window, factor = 1, float(discount)
    while window < len(returns) and factor > 0.0:
        returns[:-window] += factor * returns[window:]
        window, factor = 2 * window, factor * factor
    return returns


def _log_ratio(student: np.ndarray, teacher: np.ndarray, mask: np.ndarray, where: str) -> np.ndarray:
    """Log-ratio of the masked-in tokens only: environment tokens are no steps of the policy."""
    if not len(student) == len(teacher) == len(mask):
        raise TeacherError(
            f"{where}: {len(teacher)} teacher and {len(student)} student log-probabilities for"
            f" {len(mask)} response tokens; score exactly the response tokens"
        )
    ratio = (student.astype(np.float64) - teacher.astype(np.float64))[mask]
    if not np.isfinite(ratio).all():
        token = int(np.flatnonzero(mask)[np.flatnonzero(~np.isfinite(ratio))[0]])
        raise TeacherError(
            f"{where}: log-probability of response token {token} is not finite (student {student[token]},"
            f" teacher {teacher[token]}); both models need the whole vocabulary and a finite temperature"
        )
    return ratio


def _teacher_means(
    returns: Sequence[np.ndarray | None], teachers: Sequence[str | None]
) -> dict[str | None, float]:
    sums: dict[str | None, float] = {}
    counts: dict[str | None, int] = {}
    for term, name in zip(returns, teachers, strict=True):
        if term is not None:
            sums[name] = sums.get(name, 0.0) + float(term.sum())
            counts[name] = counts.get(name, 0) + len(term)
    return {name: sums[name] / max(counts[name], 1) for name in sums}
