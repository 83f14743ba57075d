"""Compute intervals for a run's numbers: accuracies, differences, retention and recovery.

One answer to each prompt is an independent Bernoulli trial. Several answers to one prompt are not
independent. Their intervals are over prompts, from the variance of the prompts' means. `worth` gives the
number of independent answers that would be as informative. The intervals cover the evaluation's own sampling
noise, not the effect of another training seed. Models that answered the same prompts with the same noise are
still treated as independent. So the interval of their difference is a little too wide.
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
"""Below this number of answers an accuracy is known to no better than 10 points."""
LAST = 20
"""Maximum steps in the mean for the end of a stage."""


@dataclass(frozen=True, slots=True)
class Count:
    """`correct` right answers out of `total`."""

    correct: int
    total: int
    worth: float | None = None
    """Number of independent answers if prompts have several answers. `None`: all."""

    def __post_init__(self) -> None:
        if self.total < 1 or not 0 <= self.correct <= self.total or (self.worth or 1) <= 0:
            raise DataError(
                f"an accuracy of {self.correct} right answers out of {self.total} cannot be estimated: "
                "give at least one answer and no more right ones than there are answers"
            )

    @property
    def accuracy(self) -> float:
        """Share of right answers, in [0, 1]."""
        return self.correct / self.total

    @property
    def effective_size(self) -> float:
        """The number of independent answers."""
        return self.total if self.worth is None else self.worth


class Interval(NamedTuple):
    """An estimate with the bounds of its confidence interval."""

    value: float
    low: float
    high: float


def wilson_interval(count: Count, confidence: float = 0.95) -> Interval:
    """Return the score interval of a binomial proportion (Wilson 1927).

    It never leaves [0, 1] and never has width 0. Raises `DataError` if `confidence` is not strictly between 0
    and 1.
    """
    return score_interval(count.accuracy, count.effective_size, confidence)


def score_interval(p: float, n: float, confidence: float = 0.95) -> Interval:
    """Return Wilson's interval of a share `p` that is known as well as from `n` independent answers."""
    z = _normal_quantile(confidence)
    scale = 1 / (1 + z * z / n)
    centre = scale * (p + z * z / (2 * n))
    half = scale * z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Interval(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)))


def effective_answers(means: Sequence[float], each: int) -> float:
    """Return the number of independent answers that the prompts' `means` of `each` answers are worth.

    That many answers would give the mean over prompts the same variance. It is at least one a prompt, if all
    answers to it agree, and at most all of them.
    """
    n, p = len(means), float(np.mean(means))
    variance = float(np.var(means, ddof=1)) / n if n > 1 else 0.0
    if p in (0.0, 1.0) or n < 2:
        return float(n)
    return float(min(max(p * (1 - p) / variance, n) if variance > 0 else n * each, n * each))


def over_prompts(values: Sequence[float], each: int, confidence: float = 0.95) -> Interval:
    """Return the mean of the prompts' `values`, with an interval over prompts. Values are shares in [0, 1],
    each known as from `each` answers or fewer.
    """
    # Sums of shares may exceed 1 by rounding.
    mean = min(1.0, max(0.0, float(np.mean(values))))
    return score_interval(mean, effective_answers(values, each), confidence)


def contrast_interval(terms: Sequence[tuple[float, Count]], confidence: float = 0.95) -> Interval:
    """Return `sum_i c_i p_i` over independent proportions, its interval recovered from their Wilson
    intervals.

    The method is variance estimates recovery (Zou and Donner 2008, section 2). With coefficients (1, -1) it
    is Newcombe's hybrid score interval for a difference (1998, method 10).
    """
    value, below, above = 0.0, 0.0, 0.0
    for coefficient, count in terms:
        p, low, high = wilson_interval(count, confidence)
        reach = sorted((coefficient * low, coefficient * high))
        value += coefficient * p
        below += (coefficient * p - reach[0]) ** 2
        above += (reach[1] - coefficient * p) ** 2
    return Interval(value, value - math.sqrt(below), value + math.sqrt(above))


def mean_accuracy(counts: Sequence[Count], confidence: float = 0.95) -> Interval:
    """Return the plain mean of the accuracies of several domains."""
    return contrast_interval([(1 / len(counts), count) for count in counts], confidence)


def accuracy_difference(a: Count, b: Count, confidence: float = 0.95) -> Interval:
    """Return the accuracy of `a` minus that of `b`, two independent evaluations."""
    return contrast_interval([(1.0, a), (-1.0, b)], confidence)


def mean_difference(a: Sequence[Count], b: Sequence[Count], confidence: float = 0.95) -> Interval:
    """Return the mean over domains of accuracy `a` minus accuracy `b`. Both lists have the same domains."""
    pairs = list(zip(a, b, strict=True))
    share = 1 / len(pairs)
    return contrast_interval([term for x, y in pairs for term in ((share, x), (-share, y))], confidence)


def paired_interval(differences: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of paired differences, one a training seed, with Student's interval over them.

    It covers another seed's training and evaluation. With one seed it is unbounded.
    """
    n, mean = len(differences), float(np.mean(differences))
    if n < 2:
        return Interval(mean, -math.inf, math.inf)
    half = _student_quantile(confidence, n - 1) * float(np.std(differences, ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def _student_quantile(confidence: float, freedom: int) -> float:
    """Return the `t` within which Student's distribution has `confidence`, by halving."""
    _normal_quantile(confidence)  # refuses an impossible level
    low, high = 0.0, 1.0
    while _student_share(high, freedom) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_share(middle, freedom) < confidence else (low, middle)
    return high


def _student_share(t: float, freedom: int) -> float:
    """Return the share of Student's distribution between -t and t. It is a finite sum for whole degrees of
    freedom (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def retention_interval(
    pairs: Sequence[tuple[Count, Count]], confidence: float = 0.95, seed: int = 0
) -> Interval | None:
    """Return the mean over domains of student accuracy / teacher accuracy.

    `pairs` holds (student, teacher) per domain. The interval is a parametric bootstrap. `None` if a teacher
    has no right answer at all.
    """
    if not pairs or any(teacher.correct == 0 for _, teacher in pairs):
        return None
    rng = np.random.default_rng(seed)
    value = float(np.mean([student.accuracy / teacher.accuracy for student, teacher in pairs]))
    draws = np.mean(
        [_draw_accuracies(student, rng) / _draw_accuracies(teacher, rng) for student, teacher in pairs],
        axis=0,
    )
    return _percentile_interval(value, draws, confidence)


def recovery_interval(
    student: Count, base: Count, teacher: Count, confidence: float = 0.95, seed: int = 0
) -> Interval | None:
    """Return the normalised recovery `(student - base) / (teacher - base)`.

    The interval is a parametric bootstrap. 1 is the teacher's level and 0 the base's. Above 1 the student is
    better than its teacher. `None` if the teacher is not above the base beyond chance, because the ratio then
    has no finite interval.
    """
    if accuracy_difference(teacher, base, confidence).low <= 0:
        return None
    value = (student.accuracy - base.accuracy) / (teacher.accuracy - base.accuracy)
    rng = np.random.default_rng(seed)
    drawn_student, drawn_base, drawn_teacher = (
        _draw_accuracies(count, rng) for count in (student, base, teacher)
    )
    # Drop the few draws in which the teacher is not ahead, because the ratio means nothing there.
    ahead = drawn_teacher > drawn_base
    gain = (drawn_teacher - drawn_base)[ahead]
    return _percentile_interval(value, (drawn_student - drawn_base)[ahead] / gain, confidence)


def at_the_end(values: Sequence[float]) -> tuple[float, int]:
    """Return the mean of a noisy series' last steps, and their number. These are the last quarter, at most
    `LAST`. Every single number for the end of a curve is this one.
    """
    count = min(LAST, max(1, len(values) // 4))
    return float(np.mean(values[-count:])), count


def _draw_accuracies(count: Count, rng: np.random.Generator) -> np.ndarray:
    """Return [DRAWS] plausible accuracies, from Beta(correct + 1/2, wrong + 1/2).

    Resampling Binomial(n, p) instead would give no spread if every answer was right.
    """
    scale = count.effective_size / count.total
    wrong = count.total - count.correct
    return rng.beta(scale * count.correct + 0.5, scale * wrong + 0.5, DRAWS)


def _percentile_interval(value: float, draws: np.ndarray, confidence: float) -> Interval:
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Interval(value, min(value, float(low)), max(value, float(high)))


def _normal_quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise DataError(f"evaluation.confidence is {confidence}: give a level strictly between 0 and 1")
    return NormalDist().inv_cdf(0.5 + confidence / 2)
