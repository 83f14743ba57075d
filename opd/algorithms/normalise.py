"""Weights of a loss stream: how much each token of an optimiser step counts.

Every function takes the loss masks of the *whole* step (all micro-batches, all ranks) and returns `[R]`
float32 weights, so that `sum(weight * per_token_loss)` is the step's loss however the samples are packed: a
mean of micro-batch means would weigh tokens by the company they keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from opd.errors import ConfigError

Masks = Sequence[np.ndarray]


def token_weights(masks: Masks) -> list[np.ndarray]:
    """Every token weighs `1 / total tokens`; all 0 if there is no token."""
    scale = 1.0 / max(_count(masks), 1)
    return [_weigh(mask, scale) for mask in masks]


def sequence_weights(masks: Masks) -> list[np.ndarray]:
    """Every response that has a token weighs the same, spread evenly over its tokens."""
    counts = [int(np.count_nonzero(mask)) for mask in masks]
    sequences = sum(count > 0 for count in counts)
    return [
        _weigh(mask, 1.0 / (max(sequences, 1) * max(count, 1)))
        for mask, count in zip(masks, counts, strict=True)
    ]


def constant_weights(masks: Masks, max_new_tokens: int) -> list[np.ndarray]:
    """Every token weighs `1 / (max_new_tokens * responses)`, whatever the lengths are (Dr. GRPO, 2503.20783).

    These weights sum to the mean length over `max_new_tokens`, not to 1.
    """
    scale = 1.0 / (max_new_tokens * max(len(masks), 1))
    return [_weigh(mask, scale) for mask in masks]


def policy_weights(
    masks: Masks, aggregation: Literal["token", "sequence", "constant"], max_new_tokens: int
) -> list[np.ndarray]:
    """The weights that `PolicyLossConfig.aggregation` names."""
    if aggregation == "constant":
        return constant_weights(masks, max_new_tokens)
    return token_weights(masks) if aggregation == "token" else sequence_weights(masks)


def per_teacher_weights(
    masks: Masks, teachers: Sequence[str | None], teacher_shares: Mapping[str, float] | None = None
) -> list[np.ndarray]:
    """The tokens of each teacher sum to its share of the loss, however short its answers are.

    `teacher_shares` defaults to equal shares. Shares are normalised over the teachers that have a token in
    the step, so the weights sum to 1. Samples without a teacher weigh 0. Raises `ConfigError` for a teacher
    that has tokens but no positive share.
    """
    scales = per_teacher_scales(teacher_token_counts(masks, teachers), teacher_shares)
    return [
        _weigh(mask, scales.get(name, 0.0) if name is not None else 0.0)
        for mask, name in zip(masks, teachers, strict=True)
    ]


def per_teacher_scales(
    counts: Mapping[str, int], teacher_shares: Mapping[str, float] | None = None
) -> dict[str, float]:
    """What `per_teacher_weights` weighs a token of each teacher, from the teachers' tokens in the step."""
    shares = {name: _share(name, teacher_shares) for name in counts}
    total = sum(shares.values())
    return {name: shares[name] / (total * counts[name]) for name in counts}


def teacher_token_counts(masks: Masks, teachers: Sequence[str | None]) -> dict[str, int]:
    """Tokens of each teacher in the step, for teachers that have any, in order of first appearance."""
    counts: dict[str, int] = {}
    for mask, name in zip(masks, teachers, strict=True):
        tokens = int(np.count_nonzero(mask))
        if name is not None and tokens:
            counts[name] = counts.get(name, 0) + tokens
    return counts


def token_shares(masks: Masks, teachers: Sequence[str | None]) -> dict[str, float]:
    """Each teacher's share of the step's taught tokens; sums to 1, empty if there are none."""
    counts = teacher_token_counts(masks, teachers)
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items()}


def _share(name: str, teacher_shares: Mapping[str, float] | None) -> float:
    share = 1.0 if teacher_shares is None else teacher_shares.get(name, 0.0)
    if not share > 0:
        raise ConfigError(f"teacher {name!r} has tokens in the step but no positive share; give it one")
    return float(share)


def _count(masks: Masks) -> int:
    return sum(int(np.count_nonzero(mask)) for mask in masks)


def _weigh(mask: np.ndarray, scale: float) -> np.ndarray:
    return np.where(mask, scale, 0.0).astype(np.float32)
