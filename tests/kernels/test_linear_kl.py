"""`linear_kl` of every implementation against float64 enumeration: values and gradients."""

import pytest
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from kl_problems import (
    DTYPES,
    KINDS,
    UNIT_ROUNDOFF,
    Problem,
    assert_gradients,
    assert_values,
    for_each_implementation,
    problems,
    run,
    true_divergence,
)
from torch import Tensor

from opd.kernels.divergences import DIVERGENCES, divergence_
from opd.kernels.head import Head
from opd.kernels.ops import linear_kl


@pytest.mark.some(1)
@for_each_implementation
@settings(max_examples=cases(150), deadline=None, derandomize=True)
@given(problem=problems())
def test_values_and_gradients_for_any_upstream_gradient(problem: Problem) -> None:
    exact, values = problem.exact(), run(problem)
    assert values.dtype == torch.float32
    assert (values >= -1e-6).all()
    assert (values[problem.token_weight == 0] == 0).all()
    assert_values(values, exact)
    (values * problem.upstream).sum().backward()
    assert_gradients([leaf.grad for leaf in problem.leaves], exact)
    assert all(leaf.grad.dtype == leaf.dtype for leaf in problem.leaves)


@pytest.mark.some(1)
@for_each_implementation
@settings(max_examples=cases(80), deadline=None, derandomize=True)
@given(problem=problems(), multiple=st.sampled_from([1.0, -0.3, 0.0, 1024.0]))
def test_gradients_for_a_multiple_of_the_declared_weight(problem: Problem, multiple: float) -> None:
    problem.upstream = problem.token_weight * multiple
    (run(problem) * problem.upstream).sum().backward()
    assert_gradients([leaf.grad for leaf in problem.leaves], problem.exact())


@pytest.mark.some(1)
@for_each_implementation
@settings(max_examples=cases(80), deadline=None, derandomize=True)
@given(problem=problems(dtypes=(torch.float32, torch.bfloat16), similar=True))
def test_near_zero_values_keep_their_absolute_precision(problem: Problem) -> None:
    values = problem.exact().values
    torch.testing.assert_close(run(problem).detach().double(), values, rtol=1e-5, atol=1e-6)


@pytest.mark.some(1)
@for_each_implementation
@settings(max_examples=cases(60), deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    beta=st.sampled_from([0.01, 0.5, 0.99]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
)
def test_extreme_logits_stay_finite_and_exact(kind: str, beta: float, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    # An identity head makes the hidden states the logits: exact in every dtype, up to +-1e4.
    choices = torch.tensor([-1e4, -3e3, -90.0, 0.0, 1.0, 90.0, 1e4])
    logits = choices[torch.randint(0, len(choices), (2, 6, 5), generator=generator)].to(dtype)
    student, teacher = logits[0].requires_grad_(), logits[1]
    head = Head(torch.eye(5, dtype=dtype))
    values = linear_kl(student, head, teacher, head, kind=kind, beta=beta, chunk=4)
    values.sum().backward()
    exact_student = student.detach().double().requires_grad_()
    exact = true_divergence(exact_student, teacher.double(), kind, beta)
    exact.sum().backward()
    torch.testing.assert_close(values.detach().double(), exact.detach(), rtol=1e-5, atol=1e-6)
    # Rounded before the product with the identity, after it, and when it is rescaled.
    largest = max(1.0, float(exact_student.grad.abs().max()))
    torch.testing.assert_close(
        student.grad.double(), exact_student.grad, rtol=3.1 * UNIT_ROUNDOFF[dtype], atol=1e-5 * largest
    )


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradcheck(kernels: str, kind: str, weighted: bool, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, bias = (normal(*shape).requires_grad_() for shape in ((5, 3), (8, 3), (8,)))
    teacher_hidden, teacher_head = normal(5, 4), Head(normal(7, 4))
    token_weight = torch.tensor([1.0, 0.0, 2.0, -0.5, 0.3]).double() if weighted else None

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        head = Head(weight, bias, scale=0.7, softcap=softcap, vocab_size=7)
        return linear_kl(
            hidden,
            head,
            teacher_hidden,
            teacher_head,
            kind=kind,
            beta=0.3,
            temperature=1.3,
            weight=token_weight,
            chunk=2,
        )

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_no_divergence_of_near_distributions_is_below_zero(kind):
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(64, 100, generator=generator)
    student = teacher + 1e-4 * torch.randn(64, 100, generator=generator)
    assert (divergence_(student, teacher, kind, 0.5, None) >= 0).all()
