"""Several answers to one prompt: how likely one of k is right, and how likely the commonest of k is."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at(total: int, correct: int, k: int) -> float:
    """Chance that one of `k` answers is right, drawn without replacement from `total` of which `correct` are:
    1 - C(total - correct, k) / C(total, k), the unbiased estimate of pass@k (Chen et al. 2021, section 2.1).

    A product of `correct` factors in [0, 1], so that nothing overflows. Raises `ValueError` unless
    0 < k <= total and 0 <= correct <= total.
    """
    if not 0 < k <= total or not 0 <= correct <= total:
        raise ValueError(f"pass@{k} of {correct} right among {total} answers is not defined")
    wrong = total - correct
    if wrong < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / number for number in range(wrong + 1, total + 1))


def maj_at(answers: Sequence[str], right: Sequence[bool], k: int) -> float:
    """How often the commonest of `k` answers is right: the mean over the `len(answers) // k` disjoint groups
    of `k`, in the order of the answers. What is left over is not looked at.

    Answers are the same where their texts are. One that was scored differently counts as right by the share
    of the group's that were; a tie is decided by a fair draw, of which this is the expectation. Raises
    `ValueError` unless 0 < k <= len(answers).
    """
    if not 0 < k <= len(answers) or len(right) != len(answers):
        raise ValueError(f"maj@{k} of {len(answers)} answers with {len(right)} verdicts is not defined")
    starts = range(0, len(answers) - k + 1, k)
    votes = [_vote(answers[start : start + k], right[start : start + k]) for start in starts]
    return math.fsum(votes) / len(votes)


def _vote(answers: Sequence[str], right: Sequence[bool]) -> float:
    """Expected correctness of the commonest of `answers`."""
    verdicts: dict[str, list[bool]] = {}
    for answer, verdict in zip(answers, right, strict=True):
        verdicts.setdefault(answer, []).append(verdict)
    most = max(map(len, verdicts.values()))
    winners = [found for found in verdicts.values() if len(found) == most]
    return math.fsum(sum(found) / most for found in winners) / len(winners)
