"""Scoring questions for any server program, the probe, and signs of lost weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from opd.served.http_client import UnavailableError

EXACT, HALF = 1e-3, 0.25
"""Nats by which log-probabilities of the same model may differ: served in float32, and in anything less."""
PROBE = np.array([3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 7, 2, 3], dtype=np.int32)
"""Ids below 8: every vocabulary has them, also a wrong one."""


@dataclass(frozen=True, slots=True)
class Question:
    """Score `tokens[start + 1:]`, each given the tokens before it."""

    uid: str
    tokens: np.ndarray
    """[T] int32."""
    start: int
    """The first position whose prediction is wanted: the prediction of token `start + 1`."""

    @property
    def token_count(self) -> int:
        """Number of scored tokens."""
        return len(self.tokens) - 1 - self.start


def unreadable_error(cause: str) -> UnavailableError:
    """Return the error for an answer that cannot be decoded because of `cause`."""
    return UnavailableError(f"the answer has another form than it should have ({cause})", answered=True)


def logprob_tolerance(settings: dict[str, Any] | None) -> float:
    """Return the nats by which the probe's log-probabilities may differ from the weights' own."""
    return EXACT if "float32" in str((settings or {}).get("dtype")) else HALF


SAME = 1e-4
"""Nats by which log-probabilities may differ from those of a uniform distribution and count as uniform."""


def says_nothing(hidden: np.ndarray, read: np.ndarray) -> bool:
    """Return whether `hidden` [N, D] are of a model that has lost its weights: the same after different
    tokens.

    Args:
        read: [T] token ids. The rows are those at the last N. If all are one token a row may be any, also
            zero, as that of a padding token alone is.
    """
    if not len(hidden) or (hidden != hidden[0]).any():
        return False
    last = read[-len(hidden) :]
    return bool((last != last[0]).any() or (not hidden.any() and (read != read[0]).any()))


def is_uniform(logprobs: np.ndarray, rows: int) -> bool:
    """Return whether `logprobs`, of at least two tokens, are of a model that has lost its weights: all `rows`
    of its head are equally likely.
    """
    return logprobs.size > 1 and bool((np.abs(logprobs + np.log(rows)) <= SAME).all())
