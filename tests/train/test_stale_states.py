"""Full-vocabulary KL on tokens that an older student wrote: exact at every state, which are that student's.

A language of two tokens a sequence, over which everything is enumerated: state 0 is the empty prefix, state
1 + a the prefix `a`. A policy is its logits `[1 + V, V]`.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opd.kernels.head import Head
from opd.kernels.ops import linear_kl

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(2, 6)


def policy(seed: int, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + vocabulary, vocabulary, generator=generator, dtype=torch.float64)


def sequences(writer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every sequence `writer` can write: states [V * V, 2], tokens [V * V, 2], probability [V * V]."""
    size = writer.shape[1]
    tokens = torch.cartesian_prod(torch.arange(size), torch.arange(size))
    states = torch.stack([torch.zeros(len(tokens), dtype=torch.int64), 1 + tokens[:, 0]], dim=1)
    logprobs = writer.log_softmax(-1)[states, tokens]
    return states, tokens, logprobs.sum(1).exp()


def gradient(student: Tensor, teacher: Tensor, writer: Tensor) -> Tensor:
    """[1 + V, V]: the mean over what `writer` writes of the gradient of the loss, by the training's operator.

    A state's hidden vector is one-hot, so that the head's columns are the logits of the states.
    """
    states, _, chance = sequences(writer)
    rows = torch.eye(len(student), dtype=torch.float64)[states.flatten()]
    weight = student.T.clone().requires_grad_()
    values = linear_kl(rows, Head(weight), rows, Head(teacher.T.clone()), chunk=7)
    loss = (values * chance.repeat_interleave(2)).sum()
    return torch.autograd.grad(loss, weight)[0].T


def visits(writer: Tensor) -> Tensor:
    """[1 + V]: how often `writer` comes to each state, a sequence."""
    return torch.cat([torch.ones(1, dtype=torch.float64), writer[0].softmax(-1)])


def closed_form(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || t) [1 + V] at every state, and its gradient in the student's logits [1 + V, V]."""
    logprobs, other = student.log_softmax(-1), teacher.log_softmax(-1)
    ratio = logprobs - other
    kl = (logprobs.exp() * ratio).sum(-1)
    return kl, logprobs.exp() * (ratio - kl[:, None])


@given(seeds, sizes)
def test_at_each_state_the_gradient_is_that_of_the_student_as_it_is(seed, vocabulary):
    """Whoever wrote: only how often a state is seen is the writer's."""
    student, teacher, writer = (policy(seed + i, vocabulary) for i in range(3))
    expected = visits(writer)[:, None] * closed_form(student, teacher)[1]
    torch.testing.assert_close(gradient(student, teacher, writer), expected, rtol=1e-9, atol=1e-12)


@given(seeds, sizes)
def test_a_sampled_estimate_without_weights_is_not(seed, vocabulary):
    """k1 as an advantage on the writer's tokens misses what the writer would write otherwise."""
    student, teacher, writer = (policy(seed + i, vocabulary) for i in range(3))
    states, tokens, chance = sequences(writer)
    logits = student.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)[states, tokens]
    ratio = (logprobs - teacher.log_softmax(-1)[states, tokens]).detach()
    found = torch.autograd.grad((chance[:, None] * ratio * logprobs).sum(), logits)[0]
    expected = visits(writer)[:, None] * closed_form(student, teacher)[1]
    assert (found - expected).norm() > 1e-3 * expected.norm()


@given(seeds, sizes)
def test_a_student_that_is_its_teacher_stays_so(seed, vocabulary):
    """The aim is the same however old the writer is."""
    teacher, writer = policy(seed, vocabulary), policy(seed + 1, vocabulary)
    assert gradient(teacher, teacher, writer).abs().max() <= 1e-12


@given(seeds, sizes, st.floats(0.0, 1.0))
def test_what_is_minimised_differs_by_the_distance_of_the_states_at_most(seed, vocabulary, age):
    """At one student: the sum over states of |d_old - d_new| times the largest KL."""
    student, teacher, noise = (policy(seed + i, vocabulary) for i in range(3))
    writer = student + age * noise
    kl, gradients = closed_form(student, teacher)
    apart = (visits(writer) - visits(student)).abs().sum()
    stale, fresh = (visits(who) @ kl for who in (writer, student))
    assert (stale - fresh).abs() <= apart * kl.max() + 1e-12
    found = gradient(student, teacher, writer) - gradient(student, teacher, student)
    assert found.norm() <= apart * gradients.norm(dim=-1).max() + 1e-9
    if age == 0:
        assert not found.any()
