"""The clipped policy loss against a scalar reference, its gradient and its statistics."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opd.config.rl import PolicyLossConfig
from opd.train.losses import PolicyStats, clipped_policy_loss

floats = st.floats(-3.0, 3.0)
tokens = st.lists(st.tuples(floats, floats, st.floats(-2.0, 2.0), st.booleans()), min_size=1, max_size=12)
configs = st.builds(
    PolicyLossConfig,
    clip_low=st.floats(0.0, 0.875, width=16),  # none between 0 and the floor of settings
    clip_high=st.floats(0.0, 2.0, width=16),
    dual_clip=st.none() | st.floats(1.1, 5.0),
)


def columns(rows):
    new, old, advantage = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(3))
    return new.requires_grad_(), old, advantage, torch.tensor([row[3] for row in rows])


def reference(new, old, advantage, config):
    """The objective of one token as the papers write it: to be maximised."""
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    objective = min(ratio * advantage, clipped * advantage)
    if config.dual_clip is not None and advantage < 0:
        objective = max(objective, config.dual_clip * advantage)
    return objective


@given(tokens, configs)
def test_loss_is_the_papers_objective(rows, config):
    new, old, advantage, mask = columns(rows)
    loss, _ = clipped_policy_loss(new, old, advantage, config, mask)
    expected = [-reference(*row[:3], config) if row[3] else 0.0 for row in rows]
    torch.testing.assert_close(loss.detach(), torch.tensor(expected, dtype=torch.float64))


@given(tokens, configs)
def test_clipped_tokens_have_no_gradient_and_the_others_the_ratio_times_advantage(rows, config):
    new, old, advantage, mask = columns(rows)
    loss, stats = clipped_policy_loss(new, old, advantage, config, mask)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    ratio = (new - old).exp().detach()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    edge = torch.minimum((ratio - low).abs(), (ratio - high).abs()) < 1e-9  # subgradients: any is right
    dual = (advantage < 0) & (ratio > (config.dual_clip or math.inf))
    clipped = ((advantage < 0) & (ratio < low)) | ((advantage > 0) & (ratio > high)) | dual
    expected = torch.where(mask & ~clipped, -advantage * ratio, 0.0)
    torch.testing.assert_close(gradient[~edge], expected[~edge])
    held = int((clipped & mask).sum())
    assert stats.clipped_low + stats.clipped_high + stats.dual_clipped == held
    assert stats.metrics().get("policy/clip_ratio", 0.0) * stats.tokens == pytest.approx(held)


@given(tokens, configs)
def test_at_the_old_policy_it_is_the_plain_policy_gradient(rows, config):
    new, _, advantage, _ = columns(rows)
    loss, stats = clipped_policy_loss(new, new.detach(), advantage, config)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    torch.testing.assert_close(gradient, -advantage)
    assert stats.metrics()["policy/clip_ratio"] == 0.0
    assert stats.metrics()["policy/kl_old"] == 0.0


@given(tokens, st.integers(0, 12), configs)
def test_statistics_do_not_depend_on_the_split_into_micro_batches(rows, cut, config):
    new, old, advantage, mask = columns(rows)
    whole = clipped_policy_loss(new, old, advantage, config, mask)[1]
    parts = [
        clipped_policy_loss(*(x[part] for x in (new, old, advantage)), config, mask[part])[1]
        for part in (slice(0, cut), slice(cut, None))
    ]
    for name in ("tokens", "clipped_low", "clipped_high", "dual_clipped", "ratio_sum", "kl_sum"):
        assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(whole, name))
    assert min(part.ratio_min for part in parts) == whole.ratio_min
    assert max(part.ratio_max for part in parts) == whole.ratio_max


def test_statistics_leave_masked_tokens_out():
    new, old = torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3)
    stats = clipped_policy_loss(
        new, old, torch.ones(3), PolicyLossConfig(), torch.tensor([False, True, True])
    )[1]
    assert stats == PolicyStats(2, 0, 0, 0, 2.0, 1.0, 1.0, 0.0)
    stats = clipped_policy_loss(new, old, torch.ones(3), PolicyLossConfig())[1]
    assert stats.metrics()["policy/clip_high"] == pytest.approx(1 / 3)
    assert stats.metrics()["policy/ratio_max"] == pytest.approx(math.e)


def test_no_tokens():
    empty = torch.zeros(0)
    loss, stats = clipped_policy_loss(empty, empty, empty, PolicyLossConfig())
    assert loss.shape == (0,)
    assert stats == PolicyStats()
    assert stats.metrics() == {}


def test_no_gradient_reaches_advantages_or_old_logprobs():
    new, old, advantage = (torch.randn(4, requires_grad=True) for _ in range(3))
    loss, _ = clipped_policy_loss(new, old, advantage, PolicyLossConfig())
    loss.sum().backward()
    assert old.grad is None
    assert advantage.grad is None


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"old_logprobs \[3, 1\]"):
        clipped_policy_loss(torch.zeros(3), torch.zeros(3, 1), torch.zeros(3), PolicyLossConfig())
