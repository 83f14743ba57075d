"""How far the engine that wrote the tokens is from the trainer that learns from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Arrays = np.ndarray | Sequence[np.ndarray]


def mismatch(rollout_logprobs: Arrays, recomputed_logprobs: Arrays, mask: Arrays) -> dict[str, float]:
    """Difference between the engine's and the trainer's log-probabilities of the same tokens.

    Arguments are [N] arrays, or lists of one `[R]` array a sample; only tokens where `mask` is True count.
    `mismatch/mean_abs` and `mismatch/max_abs` are in nats. `mismatch/ess` is the effective sample size of the
    importance weights `w = exp(recomputed - rollout)` as a fraction, `(sum w)^2 / (N sum w^2)`: 1 if both
    agree, towards `1/N` if a few tokens carry everything. Without tokens: 0, 0 and 1.
    """
    sums = MismatchSums()
    sums.add(_flat(rollout_logprobs), _flat(recomputed_logprobs), _flat(mask))
    return sums.metrics()


@dataclass(slots=True)
class MismatchSums:
    """What `mismatch` needs of tokens that come piece by piece and need not be kept."""

    tokens: int = 0
    magnitude: float = 0.0
    """Sum of |difference|."""
    largest: float = 0.0
    top: float = float("-inf")
    """The largest difference. ESS does not change when all weights are scaled: with the largest at 1 nothing
    overflows."""
    weights: float = 0.0
    """Sum of `exp(difference - top)`."""
    squares: float = 0.0
    """Sum of its square."""

    def add(self, rollout: np.ndarray, recomputed: np.ndarray, mask: np.ndarray) -> None:
        """Add [N] tokens, of which those count whose `mask` is True."""
        difference = (recomputed.astype(np.float64) - rollout)[mask.astype(bool)]
        if not len(difference):
            return
        magnitude, top = np.abs(difference), float(difference.max())
        weights = np.exp(difference - top)
        self.include(
            MismatchSums(
                len(difference),
                float(magnitude.sum()),
                float(magnitude.max()),
                top,
                float(weights.sum()),
                float(np.square(weights).sum()),
            )
        )

    def include(self, other: MismatchSums) -> None:
        """Add the tokens of `other`."""
        if not other.tokens:
            return
        top = max(self.top, other.top)
        mine = float(np.exp(self.top - top)) if self.tokens else 0.0
        theirs = float(np.exp(other.top - top))
        self.weights = self.weights * mine + other.weights * theirs
        self.squares = self.squares * mine**2 + other.squares * theirs**2
        self.tokens += other.tokens
        self.magnitude += other.magnitude
        self.largest, self.top = max(self.largest, other.largest), top

    def metrics(self) -> dict[str, float]:
        """What `mismatch` returns."""
        if not self.tokens:
            return {"mismatch/mean_abs": 0.0, "mismatch/max_abs": 0.0, "mismatch/ess": 1.0}
        return {
            "mismatch/mean_abs": self.magnitude / self.tokens,
            "mismatch/max_abs": self.largest,
            "mismatch/ess": self.weights**2 / (self.tokens * self.squares),
        }


def _flat(arrays: Arrays) -> np.ndarray:
    if isinstance(arrays, np.ndarray):
        return arrays
    return np.concatenate([np.asarray(array) for array in arrays]) if len(arrays) else np.zeros(0)
