"""From what a reward function says to what advantages are made of: weights, bounds, penalties, scale.

Every rank has all rewards and lengths of a step, and shapes them alike. What runs over the stage (the scale)
is in counters that survive a resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence

import numpy as np

from opd.config.rl import ShapingConfig
from opd.errors import RewardError
from opd.train.advantages import Moments, zero_variance_fraction
from opd.types import Sample, SampleGroup, Status

RIGHT = 0.5
"""A larger reward is that of a right answer."""


def changes_rewards(config: ShapingConfig) -> bool:
    """Whether `shape` has anything to do."""
    return config != ShapingConfig(mask_truncated=config.mask_truncated)


def shape(
    groups: Sequence[SampleGroup],
    config: ShapingConfig,
    limit: Callable[[str], int],
    counters: MutableMapping[str, float],
) -> dict[str, float]:
    """Put the shaped reward in the place of every sample's; returns metrics.

    Args:
        groups: All of a step, rewarded.
        config: Of the stage.
        limit: Most tokens of a response in a domain.
        counters: Survive a resume; the running scale is in them.

    Raises `RewardError` if a reward lacks a part that has a weight.
    """
    samples = [sample for group in groups for sample in group.samples]
    metrics: dict[str, float] = {}
    right = {sample.uid: _reward(sample) > RIGHT for sample in samples}
    for sample in samples:
        sample.reward = weighted(sample, config.weights)
    if config.clip is not None:
        bounded = [min(max(_reward(sample), config.clip[0]), config.clip[1]) for sample in samples]
        metrics["shaping/clipped"] = _set(samples, bounded)
    if config.truncated_reward is not None:
        cut = [sample for sample in samples if _truncated(sample)]
        _set(cut, [min(_reward(sample), config.truncated_reward) for sample in cut])
    if config.overlong_buffer:
        taken = [
            overlong(s.trainable_tokens, limit(s.domain), config.overlong_buffer) * config.overlong_penalty
            for s in samples
        ]
        _set(samples, [_reward(sample) - penalty for sample, penalty in zip(samples, taken, strict=True)])
        metrics["shaping/overlong"] = float(np.mean(taken))
    if config.length_coef:
        given = [config.length_coef * value for group in groups for value in shorter(group, right)]
        _set(samples, [_reward(sample) + value for sample, value in zip(samples, given, strict=True)])
        metrics["shaping/length"] = float(np.mean(given))
    if config.running_std:
        _scale(samples, counters)
    for group in groups:
        group.share_rewards()
    shaped = np.array([sample.reward for sample in samples], np.float64)
    metrics["shaping/mean"], metrics["shaping/std"] = float(shaped.mean()), float(shaped.std())
    if any(len(group.samples) > 1 for group in groups):
        metrics["frac_reward_zero_std"] = zero_variance_fraction(groups)
    return metrics


def weighted(sample: Sample, weights: Mapping[str, float]) -> float:
    """The weighted sum of the reward's parts; the reward itself without weights."""
    if not weights:
        return _reward(sample)
    missing = [name for name in weights if name not in sample.reward_parts]
    if missing:
        parts = ", ".join(sample.reward_parts) or "none"
        raise RewardError(
            f"shaping.weights names the part {missing[0]!r}, which the reward of sample {sample.uid} (domain"
            f" {sample.domain}) lacks; its parts: {parts}. Return a dict with it, or leave the weight out."
        )
    return math.fsum(weight * sample.reward_parts[name] for name, weight in weights.items())


def overlong(length: int, limit: int, buffer: int) -> float:
    """Share of the penalty, in [0, 1]: 0 up to `limit - buffer` tokens, 1 at `limit` (DAPO, equation 13)."""
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def shorter(group: SampleGroup, right: Mapping[str, bool]) -> list[float]:
    """For each of the group's samples `0.5 - (length - shortest) / (longest - shortest)`, at most 0 for one
    that is not `right`; 0 where all are of one length (Kimi k1.5, section 2.3.3). A length is what the model
    wrote: what an agent's environment answered is not its doing.
    """
    lengths = [sample.trainable_tokens for sample in group.samples]
    low, high = min(lengths), max(lengths)
    if low == high:
        return [0.0] * len(lengths)
    values = [0.5 - (length - low) / (high - low) for length in lengths]
    return [v if right[s.uid] else min(v, 0.0) for v, s in zip(values, group.samples, strict=True)]


def _scale(samples: Sequence[Sample], counters: MutableMapping[str, float]) -> None:
    """Divide by each domain's standard deviation so far."""
    for domain in dict.fromkeys(sample.domain for sample in samples):
        own = [sample for sample in samples if sample.domain == domain]
        new = np.array([sample.reward for sample in own], np.float64)
        keys = [f"shaping/{domain}/{name}" for name in ("count", "mean", "squares")]
        count, mean, squares = (counters.get(key, 0.0) for key in keys)
        seen = Moments(int(count), mean, squares)
        seen.include(Moments.of(new, np.ones(len(new), bool)))
        counters.update(zip(keys, (float(seen.count), seen.mean, seen.squares), strict=True))
        if seen.deviation > 0:
            _set(own, list(new / seen.deviation))


def _set(samples: Sequence[Sample], rewards: Sequence[float]) -> float:
    """Returns the share that changed."""
    changed = 0
    for sample, reward in zip(samples, rewards, strict=True):
        changed += sample.reward != reward
        sample.reward = float(reward)
    return changed / max(len(samples), 1)


def _reward(sample: Sample) -> float:
    assert sample.reward is not None
    return sample.reward


def _truncated(sample: Sample) -> bool:
    return sample.status is Status.TRUNCATED
