"""Importance corrections between the policy that drew the tokens and the one that learns from them.

A rejected token leaves the loss *and* its normaliser: with weight 0 but still counted it would shrink the
gradient of all the others. What is kept counts with its weight.

Tokens that are too many policy versions old leave the loss before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opd.config.rl import CorrectionConfig, IcePop, MaskedIS, SequenceMaskedTIS, TruncatedIS
from opd.types import Sample

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`: beyond every useful bound, and finite."""


def corrected(
    config: CorrectionConfig | None, rollout: np.ndarray, recomputed: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """What `config` makes of a sample drawn with log-probabilities `rollout` `[R]`: the loss mask `[R]`
    without rejected tokens, over which to normalise; the weights `[R]` float32, 0 where that is False; and
    how many tokens have a weight that was truncated.

    `recomputed` are the trainer's log-probabilities of the same tokens at the start of the step, `mask` is
    the loss mask. Without `config` every token counts as it is.
    """
    if config is None:
        return mask, mask.astype(np.float32), 0
    log_ratio = np.where(mask, recomputed.astype(np.float64) - rollout, 0.0)
    keep, weight, bounded = _one(config, log_ratio, mask)
    return keep, np.where(keep, weight, 0.0).astype(np.float32), int(np.count_nonzero(bounded & keep))


@dataclass(slots=True)
class CorrectionSums:
    """What the metrics need of samples that need not be kept."""

    tokens: float = 0.0
    kept: float = 0.0
    truncated: float = 0.0
    weights: float = 0.0
    """Sum of the weights of the kept tokens."""
    squares: float = 0.0
    """Sum of their squares."""

    def add(self, mask: np.ndarray, kept: np.ndarray, weights: np.ndarray, truncated: int) -> None:
        """Add a sample with loss mask `mask` and what `corrected` has made of it."""
        self.tokens += int(np.count_nonzero(mask))
        self.kept += int(np.count_nonzero(kept))
        self.truncated += truncated
        self.weights += float(weights.sum(dtype=np.float64))
        self.squares += float(np.square(weights, dtype=np.float64).sum())

    def include(self, other: CorrectionSums) -> None:
        """Add the samples of `other`."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def metrics(self) -> dict[str, float]:
        """`correction/rejected`, `/truncated` (shares of the tokens), `/weight_mean` of the kept ones and
        `/ess`, the effective sample size `(sum w)^2 / (N sum w^2)` of all; empty without tokens.
        """
        if not self.tokens:
            return {}
        return {
            "correction/rejected": 1.0 - self.kept / self.tokens,
            "correction/truncated": self.truncated / self.tokens,
            "correction/weight_mean": self.weights / max(self.kept, 1),
            "correction/ess": self.weights**2 / (self.tokens * self.squares) if self.squares else 0.0,
        }


def _one(
    config: CorrectionConfig, log_ratio: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(kept, weight, truncated) of one response, `[R]` each."""
    ratio = _ratio(log_ratio)
    match config:
        case TruncatedIS():
            weight = np.clip(ratio, config.lower, config.upper)
            return mask, weight, weight != ratio
        case MaskedIS(level="sequence"):
            ratio = np.broadcast_to(_ratio(log_ratio.sum()), ratio.shape)
            return mask & _inside(config, ratio), ratio, np.zeros_like(mask)
        case MaskedIS() | IcePop():
            return mask & _inside(config, ratio), ratio, np.zeros_like(mask)
        case SequenceMaskedTIS():
            typical = _ratio(log_ratio.sum() / max(np.count_nonzero(mask), 1))
            weight = np.minimum(ratio, config.truncate)
            return mask & _inside(config, typical), weight, weight != ratio


def _ratio(log_ratio: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _inside(config: MaskedIS | IcePop | SequenceMaskedTIS, ratio: np.ndarray) -> np.ndarray:
    return (config.lower <= ratio) & (ratio <= config.upper)


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
