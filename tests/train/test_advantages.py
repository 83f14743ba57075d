"""Estimators and whitening against their formulas, custom estimators, and the zero-variance filter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.config.rl import (
    CustomAdvantage,
    DrGRPOAdvantage,
    GRPOAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RLOOAdvantage,
)
from opd.errors import ConfigError, RewardError
from opd.train.advantages import (
    RLOO,
    DrGRPO,
    GroupNormalisedEstimator,
    Moments,
    Reinforce,
    build_advantage,
    has_signal,
    keep_groups,
    zero_variance_fraction,
)

rewards = st.lists(st.floats(-5.0, 5.0), min_size=2, max_size=9)


def first_tokens(advantages):
    return np.array([a[0] for a in advantages], dtype=np.float64)


@given(rewards)
def test_grpo_is_the_whitened_reward(group, values):
    found = first_tokens(GroupNormalisedEstimator(eps=1e-4)(group(values)))
    array = np.array(values)
    np.testing.assert_allclose(
        found, (array - array.mean()) / (array.std(ddof=1) + 1e-4), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(found.sum(), 0.0, atol=1e-5)


@given(rewards, st.floats(0.1, 10.0), st.floats(-3.0, 3.0))
def test_grpo_does_not_depend_on_the_scale_of_the_reward_and_dr_grpo_follows_it(group, values, scale, shift):
    moved = [scale * value + shift for value in values]
    plain, scaled = (first_tokens(DrGRPO()(group(x))) for x in (values, moved))
    np.testing.assert_allclose(scaled, scale * plain, atol=1e-4)
    if np.std(values) > 0.1:
        exact = GroupNormalisedEstimator(eps=1e-12)
        np.testing.assert_allclose(
            first_tokens(exact(group(moved))), first_tokens(exact(group(values))), atol=1e-4
        )


@given(rewards)
def test_rloo_leaves_one_out_and_is_dr_grpo_rescaled(group, values):
    found = first_tokens(RLOO()(group(values)))
    others = [np.mean(values[:i] + values[i + 1 :]) for i in range(len(values))]
    np.testing.assert_allclose(found, np.array(values) - others, atol=1e-5)
    ratio = len(values) / (len(values) - 1)
    np.testing.assert_allclose(found, ratio * first_tokens(DrGRPO()(group(values))), atol=1e-5)


def of_step(groups, config):
    """[N] float64: what the tokens of a step count with, samples in the order of their groups."""
    estimator = build_advantage(config)
    pairs = [pair for g in groups for pair in zip(g.samples, estimator(g), strict=True)]
    moments = Moments()
    for sample, values in pairs:
        moments.merge_from(Moments.from_values(values, sample.loss_mask))
    if config.whiten:
        pairs = [(sample, moments.whiten_advantages(values, sample.loss_mask)) for sample, values in pairs]
    assert all(not values[~sample.loss_mask].any() for sample, values in pairs)
    return np.concatenate([values[sample.loss_mask] for sample, values in pairs]).astype(np.float64)


steps = st.lists(
    st.lists(st.tuples(st.floats(-5.0, 5.0), st.integers(0, 6)), min_size=1, max_size=5), max_size=4
)


@pytest.mark.parametrize("baseline", [False, True])
@given(steps)
def test_reinforce_plus_plus_is_the_reward_whitened_over_the_tokens_of_the_step(group, baseline, step):
    """2501.03262: (A - mean) / std over the batch, of the reward, or of the reward less its group's mean."""
    config = ReinforcePlusPlusBaselineAdvantage() if baseline else ReinforcePlusPlusAdvantage()
    groups = [group([reward for reward, _ in rows], [length for _, length in rows]) for rows in step]
    raw = []
    for one in groups:
        mean = np.mean([sample.reward for sample in one.samples]) if baseline else 0.0
        raw += [s.reward - mean for s in one.samples for counts in s.loss_mask if counts]
    if not raw:
        return
    expected = np.array(raw)
    found = of_step(groups, config)
    if expected.std() > 1e-3:
        np.testing.assert_allclose(found, (expected - expected.mean()) / expected.std(), atol=2e-3)
        np.testing.assert_allclose([found.mean(), found.var()], [0.0, 1.0], atol=1e-5)
    plain = of_step(groups, config.model_copy(update={"whiten": False}))
    np.testing.assert_allclose(plain, expected, rtol=1e-6, atol=1e-6)


@given(st.floats(-1e9, 1e9, width=32), st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_equal_rewards_are_worth_nothing_once_whitened(group, reward, lengths):
    assert not of_step([group([reward], [n]) for n in lengths], ReinforcePlusPlusAdvantage()).any()
    groups = [group([reward] * 3, [n] * 3) for n in lengths]
    assert not of_step(groups, ReinforcePlusPlusBaselineAdvantage()).any()
    for config in (GRPOAdvantage(whiten=True), RLOOAdvantage(whiten=True), DrGRPOAdvantage(whiten=True)):
        assert not of_step(groups, config).any()


@given(st.lists(st.floats(-100.0, 100.0), min_size=1, max_size=20), st.data())
def test_moments_do_not_ask_how_the_tokens_are_cut(values, data):
    array = np.array(values) + 1e6  # where the mean of squares less the squared mean would lose everything
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    found = Moments()
    for part in np.split(array, cuts):
        found.merge_from(Moments.from_values(part, np.ones(len(part), bool)))
    assert found.count == len(values)
    assert found.mean == pytest.approx(array.mean(), rel=1e-12)
    assert found.squares == pytest.approx(array.var() * len(values), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("estimator", [GroupNormalisedEstimator(), DrGRPO(), RLOO(), Reinforce()])
def test_advantages_are_per_token_float32_and_zero_outside_the_mask(group, estimator):
    found = estimator(group([1.0, 0.0, 0.0], lengths=[4, 1, 0]))
    assert [a.shape for a in found] == [(4,), (1,), (0,)]
    assert all(a.dtype == np.float32 for a in found)
    assert found[0][1] == 0.0
    assert found[0][0] == found[0][2] == found[0][3] > 0


@pytest.mark.parametrize("estimator", [GroupNormalisedEstimator(), DrGRPO(), RLOO()])
@pytest.mark.parametrize("values", [[1.0], [0.5, 0.5, 0.5], [0.0, 0.0]])
def test_a_group_without_differences_has_no_advantage(group, estimator, values):
    assert not first_tokens(estimator(group(values))).any()


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_an_unscored_sample_is_named(group, reward):
    with pytest.raises(RewardError, match="sample g/1 of group g"):
        GroupNormalisedEstimator()(group([1.0, reward]))


def test_build_advantage_follows_the_recipe(group):
    assert build_advantage(GRPOAdvantage(eps=0.5)) == GroupNormalisedEstimator(eps=0.5)
    assert build_advantage(DrGRPOAdvantage()) == DrGRPO()
    assert build_advantage(RLOOAdvantage()) == RLOO()
    assert build_advantage(ReinforcePlusPlusAdvantage()) == Reinforce()
    assert build_advantage(ReinforcePlusPlusBaselineAdvantage()) == DrGRPO()
    own = build_advantage(CustomAdvantage(path="opd.train.advantages:RLOO"))
    rewarded = group([0.0, 1.0, 3.0])
    for found, expected in zip(own(rewarded), RLOO()(rewarded), strict=True):
        assert np.array_equal(found, expected)
    function = build_advantage(CustomAdvantage(path="opd.train.advantages:finite_rewards"))
    assert callable(function)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_colon", "not of the form `package.module:name`"),
        ("no_such_package_here:x", "cannot be loaded"),
        ("opd.train.advantages:absent", "cannot be loaded"),
        ("opd.train.losses:MAX_LOG_RATIO", "is not callable"),
    ],
)
def test_a_custom_estimator_that_cannot_be_loaded_is_a_config_error(path, message):
    with pytest.raises(ConfigError, match=message):
        build_advantage(CustomAdvantage(path=path))


def test_filter_keeps_the_groups_that_carry_signal(group):
    groups = [group([1.0, 1.0]), group([0.0, 1.0]), group([0.0, 0.0]), group([0.3]), group([])]
    kept = keep_groups(groups, None, zero_variance=False)
    assert [id(g) for g in kept] == [id(groups[1])]
    assert zero_variance_fraction(groups) == pytest.approx(0.8)
    assert zero_variance_fraction([]) == 0.0
    with pytest.raises(RewardError):
        keep_groups([group([None, 1.0])], None, zero_variance=False)


@given(rewards)
def test_filtered_groups_are_those_whose_grpo_advantages_vanish(group, values):
    if not has_signal(group(values)):
        assert not first_tokens(GroupNormalisedEstimator()(group(values))).any()
    elif np.ptp(values) > 1e-3:
        assert first_tokens(GroupNormalisedEstimator()(group(values))).any()
