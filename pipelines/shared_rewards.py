"""Rewards of a batch, each computed by one rank."""

from __future__ import annotations

from collections.abc import Sequence

from opd.ranks import Ranks
from opd.rewards.runner import RewardRunner
from opd.types import Sample


def score_rewards(ranks: Ranks, rewards: RewardRunner, samples: Sequence[Sample]) -> None:
    """`rewards.score(samples)`, shared out to the ranks and told to all of them."""
    mine = ranks.mine(samples)
    rewards.score(mine)
    if ranks.alone:
        return
    found = [[sample.reward, sample.reward_parts] for sample in mine]
    everyone = ranks.dealt(ranks.gather_json(found, "the rewards of a batch"))
    for sample, (reward, parts) in zip(samples, everyone, strict=True):
        sample.reward, sample.reward_parts = reward, parts
