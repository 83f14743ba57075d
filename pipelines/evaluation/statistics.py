"""Intervals for the numbers a run reports: accuracies, differences, retention and recovery.

Every answer is counted as an independent Bernoulli trial. That is exact for one sample per held-out prompt
and slightly too narrow for several. The intervals speak of the evaluation's own sampling noise; they say
nothing about how much another training seed would change. Models that answered the same prompts with the same
noise are still treated as independent, which makes the interval of their difference a little too wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from opd.errors import DataError

DRAWS = 20_000
FEW = 100
"""Answers below which an accuracy is known to no better than 10 points."""
LAST = 20
"""Most steps that one number for the end of a stage is the mean of."""


@dataclass(frozen=True, slots=True)
class Count:
    """`correct` right answers out of `total`."""

    correct: int
    total: int

    def __post_init__(self) -> None:
        if self.total < 1 or not 0 <= self.correct <= self.total:
            raise DataError(
                f"an accuracy of {self.correct} right answers out of {self.total} cannot be estimated: "
                "give at least one answer and no more right ones than there are answers"
            )

    @property
    def accuracy(self) -> float:
        """Share of right answers, in [0, 1]."""
        return self.correct / self.total


class Interval(NamedTuple):
    """An estimate with the bounds of its confidence interval."""

    value: float
    low: float
    high: float


def wilson(count: Count, confidence: float = 0.95) -> Interval:
    """Score interval of a binomial proportion (Wilson 1927); never leaves [0, 1] and never has width 0.

    Raises `DataError` if `confidence` is not strictly between 0 and 1.
    """
    z, n, p = _z(confidence), count.total, count.accuracy
    scale = 1 / (1 + z * z / n)
    centre = scale * (p + z * z / (2 * n))
    half = scale * z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Interval(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)))


def contrast(terms: Sequence[tuple[float, Count]], confidence: float = 0.95) -> Interval:
    """`sum_i c_i p_i` over independent proportions, its interval recovered from their Wilson intervals.

    Method of variance estimates recovery (Zou and Donner 2008, section 2); with coefficients (1, -1) it is
    Newcombe's hybrid score interval for a difference (1998, method 10).
    """
    value, below, above = 0.0, 0.0, 0.0
    for coefficient, count in terms:
        p, low, high = wilson(count, confidence)
        reach = sorted((coefficient * low, coefficient * high))
        value += coefficient * p
        below += (coefficient * p - reach[0]) ** 2
        above += (reach[1] - coefficient * p) ** 2
    return Interval(value, value - math.sqrt(below), value + math.sqrt(above))


def mean_accuracy(counts: Sequence[Count], confidence: float = 0.95) -> Interval:
    """Plain mean of the accuracies of several domains."""
    return contrast([(1 / len(counts), count) for count in counts], confidence)


def difference(a: Count, b: Count, confidence: float = 0.95) -> Interval:
    """Accuracy of `a` minus accuracy of `b`, two independent evaluations."""
    return contrast([(1.0, a), (-1.0, b)], confidence)


def mean_difference(a: Sequence[Count], b: Sequence[Count], confidence: float = 0.95) -> Interval:
    """Mean over domains of accuracy `a` minus accuracy `b`; both lists follow the same domains."""
    pairs = list(zip(a, b, strict=True))
    share = 1 / len(pairs)
    return contrast([term for x, y in pairs for term in ((share, x), (-share, y))], confidence)


def retention(
    pairs: Sequence[tuple[Count, Count]], confidence: float = 0.95, seed: int = 0
) -> Interval | None:
    """Mean over domains of student accuracy / teacher accuracy, with a parametric-bootstrap interval.

    `pairs` holds (student, teacher) per domain. `None` where a teacher has no right answer at all.
    """
    if not pairs or any(teacher.correct == 0 for _, teacher in pairs):
        return None
    rng = np.random.default_rng(seed)
    value = float(np.mean([student.accuracy / teacher.accuracy for student, teacher in pairs]))
    draws = np.mean([_draw(student, rng) / _draw(teacher, rng) for student, teacher in pairs], axis=0)
    return _percentiles(value, draws, confidence)


def recovery(
    student: Count, base: Count, teacher: Count, confidence: float = 0.95, seed: int = 0
) -> Interval | None:
    """Normalised recovery `(student - base) / (teacher - base)` with a parametric-bootstrap interval.

    1 is the teacher's level and 0 the base's; above 1 the student is better than its teacher. `None` where
    the teacher is not above the base beyond chance: the ratio then has no finite interval.
    """
    if difference(teacher, base, confidence).low <= 0:
        return None
    value = (student.accuracy - base.accuracy) / (teacher.accuracy - base.accuracy)
    rng = np.random.default_rng(seed)
    drawn_student, drawn_base, drawn_teacher = (_draw(count, rng) for count in (student, base, teacher))
    # Few draws are left in which the teacher is not ahead; the ratio means nothing there.
    ahead = drawn_teacher > drawn_base
    gain = (drawn_teacher - drawn_base)[ahead]
    return _percentiles(value, (drawn_student - drawn_base)[ahead] / gain, confidence)


def at_the_end(values: Sequence[float]) -> tuple[float, int]:
    """Where a noisy series has ended: the mean of its last steps, and how many they are: the last quarter, at
    most `LAST`. Wherever one number stands for the end of a curve, it is this one.
    """
    count = min(LAST, max(1, len(values) // 4))
    return float(np.mean(values[-count:])), count


def _draw(count: Count, rng: np.random.Generator) -> np.ndarray:
    """[DRAWS] plausible accuracies, from Beta(correct + 1/2, wrong + 1/2).

    Resampling Binomial(n, p) instead would give no spread at all where every answer was right.
    """
    return rng.beta(count.correct + 0.5, count.total - count.correct + 0.5, DRAWS)


def _percentiles(value: float, draws: np.ndarray, confidence: float) -> Interval:
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Interval(value, min(value, float(low)), max(value, float(high)))


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise DataError(f"evaluation.confidence is {confidence}: give a level strictly between 0 and 1")
    return NormalDist().inv_cdf(0.5 + confidence / 2)
