"""Tokens that the student did not sample, or that are scored at another temperature."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opd.train.losses import sampled_k2

seeds = st.integers(0, 2**32 - 1)


def relative_error(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


def behaviour(state, position, seed):
    """[V] log-probabilities of a policy near the student's."""
    noise = position.random(seed + 1, len(state.teacher), spread=0.25).teacher
    return (state.logits.detach() + noise).log_softmax(-1)


@given(seeds, st.integers(2, 24))
def test_importance_weights_make_sampled_forms_exact(position, seed, vocabulary):
    state = position.random(seed, vocabulary)
    mu = behaviour(state, position, seed)
    weights = (state.logprobs - mu).detach().exp()
    for losses in (
        sampled_k2(state.logprobs, state.teacher, importance=weights),
        weights * state.log_ratio * state.logprobs,  # k1 as an advantage
    ):
        found = state.expected_gradient(losses, behaviour=mu.exp())
        torch.testing.assert_close(found, state.reverse_gradient, rtol=1e-8, atol=1e-10)


def test_without_weights_sampled_forms_are_biased(position):
    state = position.random(0, 500)
    mu = behaviour(state, position, 0)
    found = state.expected_gradient(sampled_k2(state.logprobs, state.teacher), behaviour=mu.exp())
    assert relative_error(found, state.reverse_gradient) > 0.05


def test_the_engines_logprob_optimises_the_engines_divergence(position):
    """r = log mu - log t on samples of mu: the gradient of KL(mu || t), not of KL(p || t)."""
    state = position.random(0, 500)
    mu = behaviour(state, position, 0)
    engine = type(state)(mu.clone().requires_grad_(), state.teacher)
    found = engine.expected_gradient((mu - state.teacher) * engine.logprobs)
    torch.testing.assert_close(found, engine.reverse_gradient, rtol=1e-9, atol=1e-12)
    assert relative_error(found, state.reverse_gradient) > 0.05


def test_scoring_at_another_temperature_pushes_identical_models_apart(position):
    same = position.random(0, 200, distance=0.0)
    sampled = type(same)(same.logits, (same.logits.detach() / 0.7).log_softmax(-1))
    student = (same.logits / 0.7).log_softmax(-1)
    chance = student.exp().detach()

    def push(teacher):
        losses = (student.detach() - teacher) * student
        return torch.autograd.grad((chance * losses).sum(), same.logits, retain_graph=True)[0].norm()

    assert push(sampled.teacher) < 1e-12
    assert push(same.teacher) > 1e-2


@pytest.mark.parametrize(("bound", "least"), [(0.5, 0.3), (1.0, 0.05)])
def test_clipping_the_log_ratio_biases_the_gradient(position, bound, least):
    state = position.random(0, 2000, spread=2.0, distance=0.72)
    found = state.expected_gradient(state.log_ratio.clamp(-bound, bound) * state.logprobs)
    assert relative_error(found, state.reverse_gradient) > least
