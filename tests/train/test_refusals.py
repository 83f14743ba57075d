"""Forms that cannot be asked for, each with what it would do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from opd.config.rl import DistillLossConfig, ReferenceKLConfig
from opd.errors import ConfigError
from opd.train.losses import SampledTokens, k1, k2, k3, reference_penalty, sampled_k2, topk_reverse_kl

seeds = st.integers(0, 2**32 - 1)
vocabularies = st.integers(2, 24)


def relative_error(gradient, exact):
    return ((gradient - exact).norm() / exact.norm()).item()


@given(seeds, vocabularies)
def test_k1_as_a_loss_has_no_gradient(position, seed, vocabulary):
    """The teacher has no effect at all, although the value is an unbiased KL."""
    state = position.random(seed, vocabulary)
    differentiated = state.logprobs - state.teacher
    torch.testing.assert_close((state.probs * differentiated.detach()).sum(), state.kl)
    assert state.expected_gradient(differentiated).abs().max() < 1e-12


def test_k1_cannot_be_differentiated(position):
    state = position.random(0, 5)
    assert not k1(state.logprobs, state.teacher).requires_grad
    with pytest.raises(ConfigError, match=r"k1 as a loss .* use k2 or k3"):
        reference_penalty(state.logprobs, state.teacher, "k1")


@given(seeds, vocabularies, st.data())
def test_a_kl_value_as_the_advantage_of_its_position_has_no_gradient(position, seed, vocabulary, data):
    """It is the same number for every action: a baseline, whichever support it is summed over."""
    state = position.random(seed, vocabulary)
    support = state.support(data.draw(st.integers(1, vocabulary)))
    value = (state.probs * state.log_ratio)[support].sum()
    gradient = state.expected_gradient(value * state.logprobs)
    assert gradient.abs().max() < 1e-12


def test_k3_as_a_loss_is_not_the_reverse_kl(position):
    state = position.random(0, 2000, spread=2.0, distance=0.72)
    third = (-state.log_ratio).exp() - 1 + state.log_ratio
    differentiated = (state.teacher - state.logprobs).exp() - 1 + state.logprobs - state.teacher
    gradient = state.expected_gradient(differentiated)
    torch.testing.assert_close(gradient, state.forward_gradient, rtol=1e-9, atol=1e-12)
    assert relative_error(gradient, state.reverse_gradient) > 0.1
    as_advantage = state.expected_gradient(third * state.logprobs)
    assert relative_error(as_advantage, state.reverse_gradient) > 0.5


def test_absolute_k1_as_a_loss_is_biased(position):
    state = position.random(0, 2000, spread=2.0, distance=0.72)
    gradient = state.expected_gradient((state.logprobs - state.teacher).abs())
    assert relative_error(gradient, state.reverse_gradient) > 0.3


@pytest.mark.parametrize(
    ("estimator", "placement"), [("k1", "loss"), ("k2", "advantage"), ("k3", "advantage")]
)
def test_recipes_refuse_reference_penalties_with_a_wrong_gradient(estimator, placement):
    with pytest.raises(ValidationError, match="zero or wrong gradient"):
        ReferenceKLConfig(coef=0.1, estimator=estimator, placement=placement)


@pytest.mark.parametrize("kind", ["k3", "k1_loss", "abs", "topk_advantage"])
def test_recipes_have_no_name_for_the_other_forms(kind):
    with pytest.raises(ValidationError):
        TypeAdapter(DistillLossConfig).validate_python({"type": kind})


@pytest.mark.parametrize("loss", [k1, k2, k3, sampled_k2], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("theirs", [(1,), (4, 1), (4,), ()])
def test_losses_of_one_token_each_never_broadcast(loss, theirs):
    """3 tokens and one reference would be a loss of other tokens."""
    with pytest.raises(ValueError, match=r"different shapes \(.*\[3\], .*\); give one entry per token"):
        loss(torch.zeros(3), torch.zeros(theirs))


def test_what_goes_with_the_tokens_of_a_loss_never_broadcasts():
    three, one = torch.zeros(3), torch.zeros(1)
    with pytest.raises(ValueError, match=r"importance \[1\]"):
        sampled_k2(three, three, importance=one)
    for changes in ({"outside": one.bool()}, {"importance": one}, {"teacher_logprobs": one}):
        given = {"student_logprobs": three, "teacher_logprobs": three, "outside": three.bool()}
        sampled = SampledTokens(**given | changes)
        with pytest.raises(ValueError, match=rf"{next(iter(changes))} \[1\]"):
            topk_reverse_kl(torch.zeros(3, 2), torch.zeros(3, 2), form="hybrid", sampled=sampled)
