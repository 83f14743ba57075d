"""Reward shaping against its formulas, written out by hand."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from opd.config.rl import ShapingConfig
from opd.errors import RewardError
from opd.train.advantages import changes_rewards, length_rewards, overlong_share, shape_rewards
from opd.types import Sample, SampleGroup, Status

LIMIT = 10


def sample(
    uid: str, reward: float, length: int = 4, domain: str = "a", parts: dict[str, float] | None = None
) -> Sample:
    return Sample(
        uid,
        "g",
        domain,
        np.zeros(2, np.int32),
        response_ids=np.zeros(length, np.int32),
        loss_mask=np.ones(length, bool),
        reward=reward,
        reward_parts=parts or {},
        status=Status.TRUNCATED if length == LIMIT else Status.COMPLETED,
    )


def shaped(*samples: Sample, counters: dict[str, float] | None = None, **config) -> list[float]:
    groups = [SampleGroup("g", samples[0].domain, list(samples))]
    shape_rewards(groups, ShapingConfig(**config), lambda domain: LIMIT, {} if counters is None else counters)
    return [float(one.reward or 0.0) for one in samples]


def test_masking_what_was_cut_changes_no_reward() -> None:
    assert not changes_rewards(ShapingConfig())
    assert not changes_rewards(ShapingConfig(mask_truncated=True))
    assert changes_rewards(ShapingConfig(mask_truncated=True, length_coef=0.1))


def test_parts_are_weighted_and_unnamed_ones_do_not_count() -> None:
    one = sample("1", 9.0, parts={"right": 1.0, "form": 0.5, "other": 7.0})
    assert shaped(one, weights={"right": 2.0, "form": -1.0}) == [1.5]


@pytest.mark.parametrize("parts", [{}, {"form": 1.0}])
def test_a_part_that_is_missing_is_named(parts: dict[str, float]) -> None:
    with pytest.raises(RewardError, match=r"'right', which the reward of sample 1 \(domain a\) lacks"):
        shaped(sample("1", 1.0, parts=parts), weights={"right": 1.0})


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 40))
def test_the_overlong_penalty_is_daps(length: int, limit: int, buffer: int) -> None:
    # Equation 13 with L_max = limit and L_cache = buffer.
    if length <= limit - buffer:
        expected = 0.0
    elif length <= limit:
        expected = ((limit - buffer) - length) / buffer
    else:
        expected = -1.0
    assert -overlong_share(length, limit, buffer) == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=2, max_size=8))
def test_the_reward_for_being_shorter_is_kimis(written: list[tuple[int, bool]]) -> None:
    samples = [sample(str(i), float(right), length) for i, (length, right) in enumerate(written)]
    found = length_rewards(
        SampleGroup("g", "a", samples), {str(i): right for i, (_, right) in enumerate(written)}
    )
    lengths = [length for length, _ in written]
    for (length, right), value in zip(written, found, strict=True):
        span = max(lengths) - min(lengths)
        given_right = 0.5 - (length - min(lengths)) / span if span else 0.0
        assert value == pytest.approx(given_right if right else min(0.0, given_right))


def test_what_an_environment_said_is_nobodys_length() -> None:
    agent = sample("1", 1.0, 9)
    agent.loss_mask[2:] = False
    assert shaped(agent, sample("2", 1.0, 2), overlong_buffer=4, length_coef=1.0) == [1.0, 1.0]


def test_everything_in_its_order() -> None:
    # Clip: 3 is 1. Truncated: 0.25. Overlong: -(10 - 6) / 4 * 0.5. Length: 0.5 or -0.5, twice.
    rewards = shaped(
        sample("1", 3.0, 2),
        sample("2", 3.0, LIMIT),
        sample("3", 0.0, 2),
        clip=(-1.0, 1.0),
        truncated_reward=0.25,
        overlong_buffer=4,
        overlong_penalty=0.5,
        length_coef=2.0,
    )
    assert rewards == pytest.approx([1.0 + 1.0, 0.25 - 0.5 - 1.0, 0.0])


def test_the_running_deviation_is_that_of_all_rewards_so_far_domain_by_domain() -> None:
    draw, counters = np.random.default_rng(0), {}
    seen: dict[str, list[float]] = {"a": [], "b": []}
    for step in range(5):
        rewards = {domain: list(draw.normal(3, 10, 6)) for domain in seen}
        groups = [
            SampleGroup(d, d, [sample(f"{d}{step}{i}", r, domain=d) for i, r in enumerate(rewards[d])])
            for d in seen
        ]
        shape_rewards(groups, ShapingConfig(running_std=True), lambda domain: LIMIT, counters)
        for group in groups:
            seen[group.domain] += rewards[group.domain]
            expected = np.array(rewards[group.domain]) / np.std(seen[group.domain])
            assert group.rewards == pytest.approx(expected, rel=1e-12)
        counters = json.loads(json.dumps(counters))  # as a checkpoint keeps them


def test_equal_rewards_are_not_divided_by_nothing() -> None:
    assert shaped(sample("1", 2.0), sample("2", 2.0), running_std=True) == [2.0, 2.0]


@given(st.floats(-1e9, 1e9), st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_equal_rewards_are_not_divided_by_what_rounding_makes_of_them(reward, counts) -> None:
    """The mean of three times 0.1 is not 0.1: divided by such a deviation they were 10^16."""
    counters: dict[str, float] = {}
    for count in counts:
        group = SampleGroup("g", "d", [sample(str(n), reward) for n in range(count)])
        shape_rewards([group], ShapingConfig(running_std=True), lambda domain: LIMIT, counters)
        assert list(group.rewards) == [reward] * count


@pytest.mark.parametrize(
    "config",
    [
        {"clip": (1.0, 1.0)},
        {"clip": (0.0, math.inf)},
        {"clip": (-1e12, 1.0)},
        {"overlong_penalty": 0.5},
        {"clip": (2.0, 1.0)},
        {"weights": {"right": 0.0}},
        {"weights": {"right": math.nan}},
        {"overlong_buffer": -1},
        {"length_coef": -0.5},
        {"truncated_reward": math.inf},
    ],
)
def test_nonsense_is_refused(config: dict) -> None:
    with pytest.raises(ValidationError):
        ShapingConfig(**config)
