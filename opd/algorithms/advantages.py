"""Group-relative advantages: the rewards of `G` responses to one prompt become per-token advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from opd.config.rl import (
    AdvantageConfig,
    DrGRPOAdvantage,
    GRPOAdvantage,
    RLOOAdvantage,
)
from opd.errors import ConfigError, RewardError, TrainingError
from opd.imports import GROUP, calling, check_signature, import_attribute
from opd.protocols import AdvantageEstimator
from opd.rewards.values import LARGEST
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
    return OwnAdvantage(config.path)


class OwnAdvantage:
    """The user's own estimator at `package.module:name`, its results checked; a class is instantiated without
    arguments. Raises `ConfigError` if it cannot be loaded or called with one group.
    """

    def __init__(self, path: str, where: str = "advantage.path") -> None:
        self._what = f"{where} {path}"
        found = import_attribute(path, where, ConfigError)
        if isinstance(found, type):
            with calling(self._what, ConfigError):
                found = found()
        if not callable(found):
            raise ConfigError(
                f"{where} {path!r} is not callable; give a function of a SampleGroup, or a class"
            )
        check_signature(found, path, where, ConfigError, GROUP)
        self._estimate: Callable[[SampleGroup], Any] = found

    def __call__(self, group: SampleGroup) -> list[np.ndarray]:
        """`[R]` float32 per sample. Raises `TrainingError` for anything but finite numbers, one a token."""
        wanted = len(group.samples)
        with calling(self._what, TrainingError):
            returned = self._estimate(group)
        with calling(f"{self._what}: group {group.uid}: checking what it returned", TrainingError):
            found = [np.asarray(values, np.float64) for values in islice(returned, wanted + 1)]
        if len(found) != wanted:
            count = len(found) if len(found) < wanted else "more"
            raise TrainingError(
                f"{self._what} returned {count} entries for the {wanted} samples of group {group.uid}; return"
                " one array a sample."
            )
        for sample, values in zip(group.samples, found, strict=True):
            if values.shape != np.shape(sample.response_ids) or not np.isfinite(values).all():
                raise TrainingError(
                    f"{self._what} returned {list(values.shape)} for sample {sample.uid}; return one finite"
                    f" number for each of its {len(sample.response_ids)} response tokens."
                )
            if (np.abs(values) > LARGEST).any():
                raise TrainingError(
                    f"{self._what} returned {np.abs(values).max():g} for sample {sample.uid} (domain"
                    f" {group.domain}); scale advantages to {LARGEST:g} at most."
                )
        return [values.astype(np.float32) for values in found]
