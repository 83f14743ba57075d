"""Which groups a policy-gradient step can learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from opd.algorithms.advantages import finite_rewards
from opd.errors import ConfigError, TrainingError
from opd.imports import GROUP, calling, import_function, told
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


def keep_groups(
    groups: Sequence[SampleGroup],
    keep: str | None,
    *,
    zero_variance: bool,
    whole: Callable[[SampleGroup], AbstractContextManager[SampleGroup]] = nullcontext,
) -> list[SampleGroup]:
    """The groups to learn from: with different rewards unless `zero_variance` may stay, and those that the
    function at the dotted path `keep`, `keep(group) -> bool`, does not refuse; it is given the group with its
    tokens, which is what `whole` makes of it.

    Raises `ConfigError` if the function cannot be loaded, or returns something other than a truth value.
    """
    kept = list(groups) if zero_variance else drop_zero_variance(groups)[0]
    if keep is None:
        return kept
    found: Any = import_function(keep, "specialist.group_filter", ConfigError, GROUP)
    answers = []
    for group in kept:
        with whole(group) as given, calling(f"specialist.group_filter {keep}", TrainingError):
            answer = found(given)
            if not isinstance(answer, bool | np.bool_):
                raise ConfigError(
                    f"specialist.group_filter {keep} returned {told(answer, repr)}; return True to keep a"
                    " group, or False."
                )
            answers.append(answer)
    return [group for group, answer in zip(kept, answers, strict=True) if answer]


def zero_variance_fraction(groups: Sequence[SampleGroup]) -> float:
    """Share of `groups` whose rewards are all equal (`frac_reward_zero_std`); 0 for no groups."""
    return sum(not has_signal(group) for group in groups) / len(groups) if groups else 0.0
