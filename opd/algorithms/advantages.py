"""Group-relative advantages: the rewards of `G` responses to one prompt become per-token advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from opd.config.rl import (
    AdvantageConfig,
    CustomAdvantage,
    DrGRPOAdvantage,
    GRPOAdvantage,
    RLOOAdvantage,
)
from opd.errors import ConfigError, RewardError
from opd.imports import import_attribute
from opd.protocols import AdvantageEstimator
from opd.types import SampleGroup


@dataclass(frozen=True, slots=True)
class GroupNormalised:
    """`(reward - group mean) / (group standard deviation + eps)` (GRPO: DeepSeekMath 2402.03300, 4.1).

    The standard deviation is the sample one (divisor `G - 1`). A group whose rewards are all equal, and a
    group of one, gets advantages of 0.
    """

    eps: float = 1e-4

    def __call__(self, group: SampleGroup) -> list[np.ndarray]:
        """`[R]` float32 per sample. Raises `RewardError` if a sample has no finite reward."""
        rewards = finite_rewards(group)
        centred = rewards - rewards.mean()
        deviation = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
        return broadcast(centred / (deviation + self.eps), group)


@dataclass(frozen=True, slots=True)
class DrGRPO:
    """`reward - group mean`, undivided: easy and hard prompts weigh alike (Liu et al. 2025, 2503.20783)."""

    def __call__(self, group: SampleGroup) -> list[np.ndarray]:
        """`[R]` float32 per sample. Raises `RewardError` if a sample has no finite reward."""
        rewards = finite_rewards(group)
        return broadcast(rewards - rewards.mean(), group)


@dataclass(frozen=True, slots=True)
class RLOO:
    """`reward - mean of the other rewards` of the group (Ahmadian et al. 2024, 2402.14740).

    The baseline does not depend on the response it is subtracted from, so the estimate is unbiased; it is
    Dr. GRPO's times `G / (G - 1)`. A group of one has no others and gets an advantage of 0.
    """

    def __call__(self, group: SampleGroup) -> list[np.ndarray]:
        """`[R]` float32 per sample. Raises `RewardError` if a sample has no finite reward."""
        rewards = finite_rewards(group)
        others = max(len(rewards) - 1, 1)
        return broadcast((rewards - rewards.mean()) * (len(rewards) / others), group)


def finite_rewards(group: SampleGroup) -> np.ndarray:
    """[G] float64 rewards of `group`. Raises `RewardError` naming the sample without a finite one."""
    for sample in group.samples:
        if sample.reward is None or not np.isfinite(sample.reward):
            raise RewardError(
                f"sample {sample.uid} of group {group.uid} (domain {group.domain}) has the reward"
                f" {sample.reward}; score every sample with a finite number before estimating advantages"
            )
    return group.rewards


def broadcast(values: np.ndarray, group: SampleGroup) -> list[np.ndarray]:
    """One value a sample ([G]) to one a token ([R] float32 each), 0 where `loss_mask` is False."""
    return [
        np.where(sample.loss_mask, value, 0.0).astype(np.float32)
        for sample, value in zip(group.samples, values, strict=True)
    ]


def build_advantage(config: AdvantageConfig) -> AdvantageEstimator:
    """The estimator a recipe asks for. Raises `ConfigError` if a custom one cannot be loaded."""
    if isinstance(config, GRPOAdvantage):
        return GroupNormalised(eps=config.eps)
    if isinstance(config, DrGRPOAdvantage):
        return DrGRPO()
    if isinstance(config, RLOOAdvantage):
        return RLOO()
    return _load_custom(config)


def _load_custom(config: CustomAdvantage) -> AdvantageEstimator:
    """The object at `package.module:name`; a class is instantiated without arguments."""
    found = import_attribute(config.path, "advantage.path", ConfigError)
    if isinstance(found, type):
        found = found()
    if not callable(found):
        raise ConfigError(
            f"advantage.path {config.path!r} is not callable; give a function of a SampleGroup, or a class"
        )
    return cast(AdvantageEstimator, found)
