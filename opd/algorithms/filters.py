"""Which groups a policy-gradient step can learn from."""

from __future__ import annotations

from collections.abc import Sequence

from opd.algorithms.advantages import finite_rewards
from opd.types import SampleGroup


def has_signal(group: SampleGroup) -> bool:
    """Whether the rewards of `group` differ: only then is a group-relative advantage other than 0."""
    rewards = finite_rewards(group)
    return bool((rewards != rewards[0]).any()) if len(rewards) else False


def drop_zero_variance(groups: Sequence[SampleGroup]) -> tuple[list[SampleGroup], list[SampleGroup]]:
    """Split `groups` into (kept, dropped): those with different rewards and those with all rewards equal.

    DAPO's dynamic filter (Yu et al. 2025, 2503.14476, section 3.2). For reward-driven samples only: a
    distillation loss has a gradient whatever the rewards are, so pure-distillation samples never pass here.
    """
    kept: list[SampleGroup] = []
    dropped: list[SampleGroup] = []
    for group in groups:
        (kept if has_signal(group) else dropped).append(group)
    return kept, dropped


def zero_variance_fraction(groups: Sequence[SampleGroup]) -> float:
    """Share of `groups` whose rewards are all equal (`frac_reward_zero_std`); 0 for no groups."""
    return sum(not has_signal(group) for group in groups) / len(groups) if groups else 0.0
