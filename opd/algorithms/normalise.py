"""Weights of a loss stream: how much each token of an optimiser step counts.

Every function takes the token counts of the *whole* step (all micro-batches, all ranks) and returns what a
token of each sample weighs, so that `sum(weight * per_token_loss)` is the step's loss however the samples are
packed: a mean of micro-batch means would weigh tokens by the company they keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from opd.errors import ConfigError

Aggregation = Literal["token", "sequence", "constant"]


def policy_scales(counts: Sequence[int], aggregation: Aggregation, max_new_tokens: int = 1) -> list[float]:
    """What a token of each sample weighs, from how many tokens of each the loss counts.

    `token`: `1 / total tokens`. `sequence`: every response that has a token weighs the same, spread evenly
    over its tokens. `constant`: `1 / (max_new_tokens * responses)`, whatever the lengths are (Dr. GRPO,
    2503.20783); these weights sum to the mean length over `max_new_tokens`, not to 1.
    """
    if aggregation == "constant":
        return [1.0 / (max_new_tokens * max(len(counts), 1))] * len(counts)
    if aggregation == "token":
        return [1.0 / max(sum(counts), 1)] * len(counts)
    sequences = sum(count > 0 for count in counts)
    return [1.0 / (max(sequences, 1) * max(count, 1)) for count in counts]


def per_teacher_scales(
    counts: Sequence[int],
    teachers: Sequence[str | None],
    teacher_shares: Mapping[str, float] | None = None,
) -> list[float]:
    """What a token of each sample weighs, so that the tokens of each teacher sum to its share of the loss,
    however short its answers are; `counts`: how many tokens of each sample the loss counts.

    `teacher_shares` defaults to equal shares. Shares are normalised over the teachers that have a token in
    the step, so the weights sum to 1. Samples without a teacher weigh 0. Raises `ConfigError` for a teacher
    that has tokens but no positive share.
    """
    tokens: dict[str, int] = {}
    for count, name in zip(counts, teachers, strict=True):
        if name is not None and count:
            tokens[name] = tokens.get(name, 0) + count
    shares = {name: _share(name, teacher_shares) for name in tokens}
    total = sum(shares.values())
    scales = {name: shares[name] / (total * tokens[name]) for name in tokens}
    return [scales.get(name, 0.0) if name is not None else 0.0 for name in teachers]


def _share(name: str, teacher_shares: Mapping[str, float] | None) -> float:
    share = 1.0 if teacher_shares is None else teacher_shares.get(name, 0.0)
    if not share > 0:
        raise ConfigError(f"teacher {name!r} has tokens in the step but no positive share; give it one")
    return float(share)


def weigh(mask: np.ndarray, scale: float) -> np.ndarray:
    """[R] float32: `scale` where `mask` `[R]` is True."""
    return np.where(mask, scale, 0.0).astype(np.float32)
