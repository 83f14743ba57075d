"""Importance corrections between the policy that drew the tokens and the one that learns from them.

A rejected token leaves the loss *and* its normaliser: with weight 0 but still counted it would shrink the
gradient of all the others. What is kept counts with its weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opd.config.corrections import CorrectionConfig, IcePop, MaskedIS, SequenceMaskedTIS, TruncatedIS

Arrays = Sequence[np.ndarray]
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`: beyond every useful bound, and finite."""


@dataclass(frozen=True, slots=True)
class Correction:
    """What a correction makes of a step's samples, one array each."""

    masks: list[np.ndarray]
    """`[R]` bool: the loss mask without rejected tokens. Normalise over these."""
    weights: list[np.ndarray]
    """`[R]` float32, 0 where `masks` is False: multiply each token's loss weight by it."""
    metrics: dict[str, float]
    """`correction/rejected`, `/truncated` (shares of the tokens), `/weight_mean` of the kept ones and `/ess`,
    the effective sample size `(sum w)^2 / (N sum w^2)` of all; empty without tokens or correction."""


def correct(
    config: CorrectionConfig | None, rollout: Arrays, recomputed: Arrays, masks: Arrays
) -> Correction:
    """Weights and rejections for tokens drawn with log-probabilities `rollout`, one `[R]` array a sample.

    `recomputed` are the trainer's log-probabilities of the same tokens at the start of the step, `masks` the
    loss masks. Without `config` every token counts as it is.
    """
    if config is None:
        return Correction(list(masks), [mask.astype(np.float32) for mask in masks], {})
    kept, weights, truncated = [], [], 0
    for drawn, own, mask in zip(rollout, recomputed, masks, strict=True):
        log_ratio = np.where(mask, own.astype(np.float64) - drawn, 0.0)
        keep, weight, bounded = _one(config, log_ratio, mask)
        kept.append(keep)
        weights.append(np.where(keep, weight, 0.0).astype(np.float32))
        truncated += int(np.count_nonzero(bounded & keep))
    return Correction(kept, weights, _metrics(masks, kept, weights, truncated))


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


def _metrics(masks: Arrays, kept: Arrays, weights: Arrays, truncated: int) -> dict[str, float]:
    tokens = sum(int(np.count_nonzero(mask)) for mask in masks)
    if not tokens:
        return {}
    count = sum(int(np.count_nonzero(mask)) for mask in kept)
    total = sum(float(w.sum(dtype=np.float64)) for w in weights)
    squares = sum(float(np.square(w, dtype=np.float64).sum()) for w in weights)
    return correction_metrics(tokens, count, truncated, total, squares)


def correction_metrics(
    tokens: float, kept: float, truncated: float, weights: float, squares: float
) -> dict[str, float]:
    """`Correction.metrics` of `tokens` (more than 0), of which `kept` have weights with these sums."""
    return {
        "correction/rejected": 1.0 - kept / tokens,
        "correction/truncated": truncated / tokens,
        "correction/weight_mean": weights / max(kept, 1),
        "correction/ess": weights**2 / (tokens * squares) if squares else 0.0,
    }
