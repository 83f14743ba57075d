"""Turn rewards and log-probabilities into per-token advantages.

**Shaping.** Weights, bounds, penalties and scale turn a reward function's result into the reward that
advantages use. Every rank has all rewards and lengths of a step, and shapes them alike. Counters hold the
running scale over the stage and survive a resume.

**Group-relative.** The rewards of `G` responses to one prompt become advantages. Groups without a signal for
a policy gradient are dropped before. Advantages may be whitened over the whole step.

**On-policy distillation as an advantage**, `adv' = adv - coef * (log p_student - log p_teacher)`. The
log-ratio of the sampled token, `r = log p - log t`, is the k1 estimate of KL(p || t). Times the score
function, `E[r * grad log p] = p * (r - KL)` is the reverse KL's exact gradient; differentiated as a loss it
would have an expected gradient of exactly 0. So `r` enters here, as a number, and never as a loss.

Apply it after any whitening or group normalisation: whitening the sum rescales `coef` and removes the term's
mean. The penalty for leaving a frozen reference policy is the same term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from opd.config.base import GROUP
from opd.config.rl import (
    AdvantageConfig,
    CustomAdvantage,
    DrGRPOAdvantage,
    GRPOAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RLOOAdvantage,
    ShapingConfig,
)
from opd.errors import ConfigError, RewardError, TeacherError, TrainingError
from opd.imports import check_signature, import_attribute, import_function
from opd.protocols import AdvantageEstimator
from opd.rollout.rewards import LARGEST
from opd.types import Sample, SampleGroup, Status
from opd.user_code import call_user_code, safe_text

RIGHT = 0.5
"""Rewards above this count as right answers."""


def changes_rewards(config: ShapingConfig) -> bool:
    """Return True if `shape` changes any reward."""
    return config != ShapingConfig(mask_truncated=config.mask_truncated)


def shape_rewards(
    groups: Sequence[SampleGroup],
    config: ShapingConfig,
    limit: Callable[[str], int],
    counters: MutableMapping[str, float],
) -> dict[str, float]:
    """Replace every sample's reward by the shaped one. Return metrics.

    Args:
        groups: All groups of a step, rewarded.
        limit: Maximum response tokens of a domain.
        counters: Running scale; survives a resume.

    Raises `RewardError` if a reward lacks a part that has a weight.
    """
    samples = [sample for group in groups for sample in group.samples]
    metrics: dict[str, float] = {}
    right = {sample.uid: _sample_reward(sample) > RIGHT for sample in samples}
    for sample in samples:
        sample.reward = weighted_reward(sample, config.weights)
    if config.clip is not None:
        clipped = 0
        for sample in samples:
            bounded = float(min(max(_sample_reward(sample), config.clip[0]), config.clip[1]))
            clipped += sample.reward != bounded
            sample.reward = bounded
        metrics["shaping/clipped"] = clipped / max(len(samples), 1)
    if config.truncated_reward is not None:
        for sample in samples:
            if sample.status is Status.TRUNCATED:
                sample.reward = float(min(_sample_reward(sample), config.truncated_reward))
    if config.overlong_buffer:
        shares = [
            overlong_share(s.trainable_tokens, limit(s.domain), config.overlong_buffer) for s in samples
        ]
        penalties = [share * config.overlong_penalty for share in shares]
        for sample, penalty in zip(samples, penalties, strict=True):
            sample.reward = _sample_reward(sample) - penalty
        metrics["shaping/overlong"] = float(np.mean(penalties))
    if config.length_coef:
        terms = [config.length_coef * value for group in groups for value in length_rewards(group, right)]
        for sample, term in zip(samples, terms, strict=True):
            sample.reward = _sample_reward(sample) + term
        metrics["shaping/length"] = float(np.mean(terms))
    if config.running_std:
        _divide_by_std(samples, counters)
    for group in groups:
        group.share_rewards()
    shaped = np.array([sample.reward for sample in samples], np.float64)
    metrics["shaping/mean"], metrics["shaping/std"] = float(shaped.mean()), float(shaped.std())
    if any(len(group.samples) > 1 for group in groups):
        metrics["frac_reward_zero_std"] = zero_variance_fraction(groups)
    return metrics


def weighted_reward(sample: Sample, weights: Mapping[str, float]) -> float:
    """Return the weighted sum of the reward's parts, or the reward itself without weights."""
    if not weights:
        return _sample_reward(sample)
    missing = [name for name in weights if name not in sample.reward_parts]
    if missing:
        parts = ", ".join(sample.reward_parts) or "none"
        raise RewardError(
            f"shaping.weights names the part {missing[0]!r}, which the reward of sample {sample.uid} (domain"
            f" {sample.domain}) lacks; its parts: {parts}. Return a dict with it, or leave the weight out."
        )
    return math.fsum(weight * sample.reward_parts[name] for name, weight in weights.items())


def overlong_share(length: int, limit: int, buffer: int) -> float:
    """Share of the penalty, in [0, 1]: 0 up to `limit - buffer` tokens, 1 at `limit` (DAPO, equation 13)."""
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def length_rewards(group: SampleGroup, right: Mapping[str, bool]) -> list[float]:
    """Return `0.5 - (length - shortest) / (longest - shortest)` for each sample of the group. The value is at
    most 0 for a sample that is not `right`, and 0 if all lengths are equal (Kimi k1.5, section 2.3.3).
    Lengths count generated tokens only, not an environment's answers.
    """
    lengths = [sample.trainable_tokens for sample in group.samples]
    low, high = min(lengths), max(lengths)
    if low == high:
        return [0.0] * len(lengths)
    values = [0.5 - (length - low) / (high - low) for length in lengths]
    return [v if right[s.uid] else min(v, 0.0) for v, s in zip(values, group.samples, strict=True)]


def _divide_by_std(samples: Sequence[Sample], counters: MutableMapping[str, float]) -> None:
    """Divide rewards by their domain's running standard deviation."""
    for domain in dict.fromkeys(sample.domain for sample in samples):
        of_domain = [sample for sample in samples if sample.domain == domain]
        rewards = np.array([sample.reward for sample in of_domain], np.float64)
        keys = [f"shaping/{domain}/{name}" for name in ("count", "mean", "squares")]
        count, mean, squares = (counters.get(key, 0.0) for key in keys)
        moments = Moments(int(count), mean, squares)
        moments.merge_from(Moments.from_values(rewards, np.ones(len(rewards), bool)))
        counters.update(zip(keys, (float(moments.count), moments.mean, moments.squares), strict=True))
        if moments.standard_deviation > 0:
            for sample, reward in zip(of_domain, rewards / moments.standard_deviation, strict=True):
                sample.reward = float(reward)


def _sample_reward(sample: Sample) -> float:
    assert sample.reward is not None
    return sample.reward


@dataclass(frozen=True, slots=True)
class GroupNormalisedEstimator:
    """`(reward - group mean) / (group standard deviation + eps)` (GRPO: DeepSeekMath 2402.03300, 4.1).

    The standard deviation is the sample one (divisor `G - 1`). Advantages are 0 if all rewards of the group
    are equal or the group has one sample.
    """

    eps: float = 1e-4

    def __call__(self, group: SampleGroup) -> list[np.ndarray]:
        """`[R]` float32 per sample. Raises `RewardError` if a sample has no finite reward."""
        rewards = finite_rewards(group)
        centred = rewards - rewards.mean()
        deviation = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
        return broadcast_values(centred / (deviation + self.eps), group)


@dataclass(frozen=True, slots=True)
class DrGRPO:
    """`reward - group mean`, undivided: easy and hard prompts weigh alike (Liu et al. 2025, 2503.20783)."""

    def __call__(self, group: SampleGroup) -> list[np.ndarray]:
        """`[R]` float32 per sample. Raises `RewardError` if a sample has no finite reward."""
        rewards = finite_rewards(group)
        return broadcast_values(rewards - rewards.mean(), group)


@dataclass(frozen=True, slots=True)
class RLOO:
    """`reward - mean of the other rewards` of the group (Ahmadian et al. 2024, 2402.14740).

    The baseline does not depend on the response it is subtracted from, so the estimate is unbiased. It is Dr.
    GRPO's times `G / (G - 1)`. A group of one has no others and gets an advantage of 0.
    """

    def __call__(self, group: SampleGroup) -> list[np.ndarray]:
        """`[R]` float32 per sample. Raises `RewardError` if a sample has no finite reward."""
        rewards = finite_rewards(group)
        others = max(len(rewards) - 1, 1)
        return broadcast_values((rewards - rewards.mean()) * (len(rewards) / others), group)


@dataclass(frozen=True, slots=True)
class Reinforce:
    """The reward itself (Williams 1992). Whitened over the step it is REINFORCE++ (Hu et al. 2025,
    2501.03262), with the mean over all prompts as its baseline.
    """

    def __call__(self, group: SampleGroup) -> list[np.ndarray]:
        """`[R]` float32 per sample. Raises `RewardError` if a sample has no finite reward."""
        return broadcast_values(finite_rewards(group), group)


ROUNDING = 1e-12
"""Relative difference of equal numbers from their mean by rounding (float64, very many numbers)."""


@dataclass(slots=True)
class Moments:
    """Count, mean and sum of squared deviations of some numbers.

    Numbers are added in one order. All ranks then get the same bits, whichever rank has a sample.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def from_values(cls, values: np.ndarray, mask: np.ndarray) -> Moments:
        """Moments of `values` `[R]` where `mask` `[R]` is True."""
        values = values[mask].astype(np.float64)
        if not len(values):
            return cls()
        mean = values.mean()
        return cls(len(values), float(mean), float(np.square(values - mean).sum()))

    def merge_from(self, other: Moments) -> None:
        """Add the numbers of `other` (Chan et al. 1983: no difference of large sums)."""
        total = self.count + other.count
        if not total:
            return
        apart = other.mean - self.mean
        self.squares += other.squares + apart**2 * self.count * other.count / total
        self.mean += apart * other.count / total
        self.count = total

    @property
    def standard_deviation(self) -> float:
        """The standard deviation (divisor `N`). It is 0 without numbers, and if they differ by rounding only,
        because the mean of equal numbers need not be that number.
        """
        deviation = (self.squares / max(self.count, 1)) ** 0.5
        return deviation if deviation > ROUNDING * abs(self.mean) else 0.0

    def whiten_advantages(self, advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return `[R]` float32, `(advantages - mean) / deviation` (at least 1e-8), 0 where `mask` is False.
        Over the added numbers the mean is 0 and the variance 1, or all are 0.
        """
        if not self.standard_deviation:
            return np.zeros(len(mask), np.float32)
        centred = advantages.astype(np.float64) - self.mean
        return np.where(mask, centred / max(self.standard_deviation, 1e-8), 0.0).astype(np.float32)


def finite_rewards(group: SampleGroup) -> np.ndarray:
    """`[G]` float64 rewards of `group`. Raises `RewardError` naming a sample without a finite reward."""
    for sample in group.samples:
        if sample.reward is None or not np.isfinite(sample.reward):
            raise RewardError(
                f"sample {sample.uid} of group {group.uid} (domain {group.domain}) has the reward"
                f" {sample.reward}; score every sample with a finite number before estimating advantages"
            )
    return group.rewards


def broadcast_values(values: np.ndarray, group: SampleGroup) -> list[np.ndarray]:
    """Expand one value per sample `[G]` to one per token `[R]` float32, 0 where `loss_mask` is False."""
    return [
        np.where(sample.loss_mask, value, 0.0).astype(np.float32)
        for sample, value in zip(group.samples, values, strict=True)
    ]


def build_advantage(config: AdvantageConfig) -> AdvantageEstimator:
    """Build the recipe's estimator. Raises `ConfigError` if a custom one cannot be loaded."""
    if isinstance(config, GRPOAdvantage):
        return GroupNormalisedEstimator(eps=config.eps)
    if isinstance(config, CustomAdvantage):
        return UserAdvantage(config.path)
    return BUILT_IN[type(config)]()


BUILT_IN: dict[type, Callable[[], AdvantageEstimator]] = {
    DrGRPOAdvantage: DrGRPO,
    RLOOAdvantage: RLOO,
    ReinforcePlusPlusAdvantage: Reinforce,
    ReinforcePlusPlusBaselineAdvantage: DrGRPO,
}
"""Estimators without settings. The step applies `whiten` (`Moments`)."""


class UserAdvantage:
    """The user's estimator at `package.module:name`, with checked results. A class is instantiated without
    arguments. Raises `ConfigError` if it cannot be loaded or called with one group.
    """

    def __init__(self, path: str, where: str = "advantage.path") -> None:
        self._label = f"{where} {path}"
        estimate = import_attribute(path, where, ConfigError)
        if isinstance(estimate, type):
            with call_user_code(self._label, ConfigError):
                estimate = estimate()
        if not callable(estimate):
            raise ConfigError(
                f"{where} {path!r} is not callable; give a function of a SampleGroup, or a class"
            )
        check_signature(estimate, path, where, ConfigError, GROUP)
        self._estimate: Callable[[SampleGroup], Any] = estimate

    def __call__(self, group: SampleGroup) -> list[np.ndarray]:
        """`[R]` float32 per sample. Raises `TrainingError` for anything but finite numbers, one a token."""
        wanted = len(group.samples)
        with call_user_code(self._label, TrainingError):
            returned = self._estimate(group)
        with call_user_code(f"{self._label}: group {group.uid}: checking what it returned", TrainingError):
            advantages = [np.asarray(values, np.float64) for values in islice(returned, wanted + 1)]
        if len(advantages) != wanted:
            count = len(advantages) if len(advantages) < wanted else "more"
            raise TrainingError(
                f"{self._label} returned {count} entries for the {wanted} samples of group {group.uid};"
                " return one array a sample."
            )
        for sample, values in zip(group.samples, advantages, strict=True):
            if values.shape != np.shape(sample.response_ids) or not np.isfinite(values).all():
                raise TrainingError(
                    f"{self._label} returned {list(values.shape)} for sample {sample.uid}; return one finite"
                    f" number for each of its {len(sample.response_ids)} response tokens."
                )
            if (np.abs(values) > LARGEST).any():
                raise TrainingError(
                    f"{self._label} returned {np.abs(values).max():g} for sample {sample.uid} (domain"
                    f" {group.domain}); scale advantages to {LARGEST:g} at most."
                )
        return [values.astype(np.float32) for values in advantages]


def has_signal(group: SampleGroup) -> bool:
    """Return True if the rewards of `group` differ. Only then is a group-relative advantage other than 0."""
    rewards = finite_rewards(group)
    return bool((rewards != rewards[0]).any()) if len(rewards) else False


def keep_groups(
    groups: Sequence[SampleGroup],
    keep: str | None,
    *,
    zero_variance: bool,
    with_tokens: Callable[[SampleGroup], AbstractContextManager[SampleGroup]] = nullcontext,
) -> list[SampleGroup]:
    """Return the groups to learn from. Groups with equal rewards stay only if `zero_variance`. The function
    at the dotted path `keep`, `keep(group) -> bool`, may refuse more; it gets `with_tokens(group)`.

    Dropping equal rewards is DAPO's dynamic filter (Yu et al. 2025, 2503.14476, section 3.2). It is for
    reward-driven samples only, because a distillation loss has a gradient whatever the rewards are. Raises
    `ConfigError` if the function cannot be loaded, or returns something other than a truth value.
    """
    groups = [group for group in groups if zero_variance or has_signal(group)]
    if keep is None:
        return groups
    user_filter: Any = import_function(keep, "specialist.group_filter", ConfigError, GROUP)
    answers = []
    for group in groups:
        with with_tokens(group) as full, call_user_code(f"specialist.group_filter {keep}", TrainingError):
            answer = user_filter(full)
            if not isinstance(answer, bool | np.bool_):
                raise ConfigError(
                    f"specialist.group_filter {keep} returned {safe_text(answer, repr)}; return True to"
                    " keep a group, or False."
                )
            answers.append(answer)
    return [group for group, answer in zip(groups, answers, strict=True) if answer]


def zero_variance_fraction(groups: Sequence[SampleGroup]) -> float:
    """Share of `groups` whose rewards are all equal (`frac_reward_zero_std`); 0 for no groups."""
    return sum(not has_signal(group) for group in groups) / len(groups) if groups else 0.0


def opd_returns(
    student: np.ndarray, teacher: np.ndarray, mask: np.ndarray, discount: float, where: str
) -> np.ndarray:
    """Return `[M]` float64, the OPD term of one sample at the tokens that `mask` `[R]` counts, without
    coefficient and baseline.

    `student` are the trainer's log-probabilities `[R]` at the sampling temperature, because the engine's
    would turn the objective into KL(engine || teacher). `discount` 0 credits a token with its own log-ratio
    only and ignores its effect on later states. `discount` 1 gives the gradient of the KL between whole
    responses. Raises `TeacherError`, with `where` as the sample's name, if log-probabilities are missing or
    not finite.
    """
    if not len(student) == len(teacher) == len(mask):
        raise TeacherError(
            f"{where}: {len(teacher)} teacher and {len(student)} student log-probabilities for"
            f" {len(mask)} response tokens; score exactly the response tokens"
        )
    # Of unmasked tokens only, because environment tokens are no steps of the policy.
    ratio = (student.astype(np.float64) - teacher.astype(np.float64))[mask]
    if not np.isfinite(ratio).all():
        token = int(np.flatnonzero(mask)[np.flatnonzero(~np.isfinite(ratio))[0]])
        raise TeacherError(
            f"{where}: log-probability of response token {token} is not finite (student {student[token]},"
            f" teacher {teacher[token]}); both models need the whole vocabulary and a finite temperature"
        )
    return discounted_returns(ratio, discount)


def with_opd_term(
    base: np.ndarray, returns: np.ndarray, mask: np.ndarray, coef: float, mean: float = 0.0
) -> np.ndarray:
    """Return `[R]` advantages of one sample, `base - coef * (returns - mean)` in the dtype of `base`, 0 where
    `mask` is False.

    The baseline `mean` is subtracted from the return and not from each token's log-ratio. A constant per
    token, summed over the rest of the response, would reward length.
    """
    adjusted = np.where(mask, base, 0.0)
    adjusted[mask] -= coef * (returns - mean)
    return adjusted.astype(base.dtype)


def teacher_means(returns: Iterable[tuple[str | None, float, int]]) -> dict[str | None, float]:
    """Return the mean of each teacher's returns over a step. `returns` has every sample's teacher, sum and
    count. As a baseline it scales the expected gradient by `1 - 1/N` for `N` independent tokens.
    """
    sums: dict[str | None, float] = {}
    counts: dict[str | None, int] = {}
    for teacher, total, count in returns:
        sums[teacher] = sums.get(teacher, 0.0) + total
        counts[teacher] = counts.get(teacher, 0) + count
    return {teacher: total / max(counts[teacher], 1) for teacher, total in sums.items()}


def discounted_returns(values: np.ndarray, discount: float) -> np.ndarray:
    """[R] `sum_j discount^j * values[i + j]`, float64, by doubling windows (`log2 R` vector operations)."""
    returns = values.astype(np.float64)
    window, factor = 1, float(discount)
    while window < len(returns) and factor > 0.0:
        returns[:-window] += factor * returns[window:]
        window, factor = 2 * window, factor * factor
    return returns
