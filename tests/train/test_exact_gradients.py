"""Every estimator a recipe can choose has exactly the expected gradient its name promises."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from whole_step import opd_advantages

from opd.config.rl import PolicyLossConfig
from opd.train.losses import (
    clipped_policy_loss,
    k1,
    k2,
    k3,
    reference_penalty,
    sampled_k2,
)

seeds = st.integers(0, 2**32 - 1)
vocabularies = st.integers(2, 24)


def k1_policy_gradient(state, *, baseline="none", coef=1.0):
    """The loss of every action through the advantage and the clipped policy loss, as a trainer runs them."""
    size = len(state.teacher)
    (advantages,) = opd_advantages(
        [np.zeros(size)],
        [state.logprobs.detach().numpy()],
        [state.teacher.numpy()],
        [np.ones(size, dtype=bool)],
        coef=coef,
        baseline=baseline,
        discount=0.0,
        teachers=["t"],
    )
    logprobs = state.logprobs
    return clipped_policy_loss(logprobs, logprobs.detach(), torch.from_numpy(advantages), PolicyLossConfig())[
        0
    ]


@given(seeds, vocabularies)
def test_full_vocabulary_autograd_is_the_closed_form(position, seed, vocabulary):
    state = position.random(seed, vocabulary)
    loss = (state.logprobs.exp() * (state.logprobs - state.teacher)).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, state.logits)[0], state.reverse_gradient)


@given(seeds, vocabularies)
def test_k1_as_advantage_has_the_reverse_gradient(position, seed, vocabulary):
    state = position.random(seed, vocabulary)
    gradient = state.expected_gradient(k1_policy_gradient(state))
    torch.testing.assert_close(gradient, state.reverse_gradient, rtol=1e-9, atol=1e-12)


@given(seeds, vocabularies)
def test_reference_k1_as_advantage_has_the_reverse_gradient(position, seed, vocabulary):
    state = position.random(seed, vocabulary)
    (advantages,) = opd_advantages(
        [np.zeros(vocabulary)],
        [state.logprobs.detach().numpy()],
        [state.teacher.numpy()],
        [np.ones(vocabulary, dtype=bool)],
        coef=0.3,
        teachers=["reference"],
    )
    gradient = state.expected_gradient(-torch.from_numpy(advantages) * state.logprobs)
    torch.testing.assert_close(gradient, 0.3 * state.reverse_gradient, rtol=1e-9, atol=1e-12)


@given(seeds, vocabularies)
def test_k2_has_the_reverse_gradient(position, seed, vocabulary):
    state = position.random(seed, vocabulary)
    for losses in (
        k2(state.logprobs, state.teacher),
        sampled_k2(state.logprobs, state.teacher),
        reference_penalty(state.logprobs, state.teacher, "k2"),
    ):
        torch.testing.assert_close(
            state.expected_gradient(losses), state.reverse_gradient, rtol=1e-9, atol=1e-12
        )


@given(seeds, vocabularies)
def test_k3_has_the_forward_gradient(position, seed, vocabulary):
    state = position.random(seed, vocabulary)
    for losses in (k3(state.logprobs, state.teacher), reference_penalty(state.logprobs, state.teacher, "k3")):
        torch.testing.assert_close(
            state.expected_gradient(losses), state.forward_gradient, rtol=1e-9, atol=1e-12
        )


@given(seeds, vocabularies, st.data())
def test_hybrid_topk_has_the_reverse_gradient_and_the_kl_as_its_mean(position, seed, vocabulary, data):
    state = position.random(seed, vocabulary)
    losses = state.topk_losses(data.draw(st.integers(1, vocabulary)), "hybrid")
    torch.testing.assert_close((state.probs * losses.detach()).sum(), state.kl, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(state.expected_gradient(losses), state.reverse_gradient, rtol=1e-8, atol=1e-10)


@given(seeds, vocabularies)
def test_values_of_k1_and_k3_are_unbiased_and_k3_is_never_negative(position, seed, vocabulary):
    state = position.random(seed, vocabulary)
    third = k3(state.logprobs, state.teacher).detach()
    torch.testing.assert_close((state.probs * k1(state.logprobs, state.teacher)).sum(), state.kl)
    torch.testing.assert_close((state.probs * third).sum(), state.kl, rtol=1e-6, atol=1e-12)
    assert (third >= -1e-12).all()


@given(seeds, st.integers(2, 5))
def test_batch_mean_baseline_scales_the_expected_gradient_by_one_minus_one_over_n(position, seed, vocabulary):
    """Two tokens drawn from one state: all V^2 pairs are enumerated."""
    state = position.random(seed, vocabulary)
    total = torch.zeros_like(state.probs)
    logp, teacher = state.logprobs.detach().numpy(), state.teacher.numpy()
    for first in range(vocabulary):
        for second in range(vocabulary):
            pair = [first, second]
            advantages = opd_advantages(
                [np.zeros(1), np.zeros(1)],
                [logp[[a]] for a in pair],
                [teacher[[a]] for a in pair],
                [np.ones(1, dtype=bool)] * 2,
                coef=1.0,
                baseline="batch_mean",
                discount=0.0,
                teachers=["t", "t"],
            )
            loss = -(torch.from_numpy(np.concatenate(advantages)) * state.logprobs[pair]).mean()
            chance = state.probs[first] * state.probs[second]
            total += chance * torch.autograd.grad(loss, state.logits)[0]
    torch.testing.assert_close(total, 0.5 * state.reverse_gradient, rtol=1e-9, atol=1e-12)


@given(seeds, vocabularies, st.data())
def test_student_equal_to_teacher_has_no_value_and_no_gradient_for_any_sample(
    position, seed, vocabulary, data
):
    """Stronger than in expectation: the loss and the gradient of every single action are 0."""
    state = position.random(seed, vocabulary, distance=0.0)
    k = data.draw(st.integers(1, vocabulary))
    for losses in (
        k1_policy_gradient(state),
        k1_policy_gradient(state, baseline="batch_mean"),
        sampled_k2(state.logprobs, state.teacher),
        k3(state.logprobs, state.teacher),
        state.topk_losses(k, "tail"),
        state.topk_losses(k, "hybrid"),
    ):
        assert losses.abs().max() < 1e-12
        assert state.per_action_gradients(losses).abs().max() < 1e-12


def test_gradient_noise_is_least_with_a_centred_coefficient(position):
    """V = 2000, KL near 0.26: full vocabulary 0 < KL baseline < k1 < coefficient r + 1."""
    state = position.random(0, 2000, spread=2.0, distance=0.72)
    assert state.kl.item() == pytest.approx(0.26, abs=0.03)
    probs, ratio = state.probs, state.log_ratio
    norms = 1.0 - 2.0 * probs + probs.square().sum()  # |e_a - p|^2

    def variance(coefficient):
        return (probs * coefficient.square() * norms).sum() - state.reverse_gradient.square().sum()

    centred, plain, uncentred = variance(ratio - state.kl), variance(ratio), variance(ratio + 1.0)
    assert 0.0 < centred < plain < 0.5 * uncentred


@given(seeds, vocabularies)
def test_averaging_teachers_is_the_geometric_pool_with_its_floor(position, seed, vocabulary):
    """sum_i w_i KL(p || t_i) = KL(p || geometric mean) - log Z; the averaged k1 has the same gradient."""
    state = position.random(seed, vocabulary)
    other = position.random(seed + 1, vocabulary).teacher
    pooled = 0.7 * state.teacher + 0.3 * other
    floor = -pooled.logsumexp(-1)
    logp = state.logprobs.detach()
    average = 0.7 * state.kl + 0.3 * (state.probs * (logp - other)).sum()
    geometric = (state.probs * (logp - pooled.log_softmax(-1))).sum()
    torch.testing.assert_close(average, geometric + floor)
    assert floor >= -1e-12
    averaged = 0.7 * (logp - state.teacher) + 0.3 * (logp - other)
    gradient = state.expected_gradient(averaged * state.logprobs)
    target = state.expected_gradient(sampled_k2(state.logprobs, pooled.log_softmax(-1)))
    torch.testing.assert_close(gradient, target, rtol=1e-9, atol=1e-12)
