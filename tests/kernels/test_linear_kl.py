"""`linear_kl` of both implementations against float64 enumeration: values, gradients, and what is never
held."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opd.kernels.head import Head
from opd.kernels.ops import linear_kl

KINDS = ("reverse", "forward", "jsd")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def true_divergence(student: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    """Divergence `[T]` of float64 logits `[T, V]` by its definition, one distribution at a time."""
    p, t = student.log_softmax(dim=1), teacher.log_softmax(dim=1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(dim=1)

    if kind == "reverse":
        return kl(p, t)
    if kind == "forward":
        return kl(t, p)
    # The mixture in log space: at extreme logits its probabilities underflow even in float64.
    mixture = torch.logaddexp(
        t + torch.tensor(beta).double().log(), p + torch.tensor(1 - beta).double().log()
    )
    return beta * kl(t, mixture) + (1 - beta) * kl(p, mixture)


@dataclass
class Problem:
    """A student, a teacher and everything a divergence depends on."""

    student_hidden: Tensor
    teacher_hidden: Tensor
    student_head: Head
    teacher_head: Head
    token_weight: Tensor
    upstream: Tensor
    temperature: float
    chunk: int
    beta: float
    kind: str
    leaves: list[Tensor] = field(default_factory=list)

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        """How hypothesis shows a failing problem: its settings instead of its tensors."""
        numbers = f"{self.kind}, beta={self.beta}, temperature={self.temperature}, chunk={self.chunk}"
        head = self.student_head
        form = f"scale={head.scale}, softcap={head.softcap}, bias={head.bias is not None}"
        shape = f"{list(self.student_hidden.shape)} x {list(head.weight.shape)} {head.weight.dtype}"
        printer.text(f"Problem({shape}, {form}, {numbers})")

    def exact(self) -> tuple[Tensor, list[Tensor], float]:
        """Values and gradients of `sum(upstream * values)` in float64, tokens of weight 0 left out.

        Last, how many times a gradient magnifies one relative rounding error of the logits: by their size,
        by what arrives from above, and by the factor between a logit and `h W^T`.
        """
        leaves = [leaf.detach().double().requires_grad_() for leaf in self.leaves]
        student = as_float64(self.student_head, leaves[1], leaves[2] if len(leaves) > 2 else None)
        teacher = as_float64(self.teacher_head, self.teacher_head.weight, self.teacher_head.bias)
        z_s = student.logits(leaves[0]) / self.temperature
        z_t = teacher.logits(self.teacher_hidden.double()) / self.temperature
        values = true_divergence(z_s, z_t, self.kind, self.beta) * (self.token_weight != 0)
        (values * self.upstream.double()).sum().backward()
        largest = max((float(z.detach().abs().max()) for z in (z_s, z_t) if z.numel()), default=0.0)
        arriving = float(self.upstream.abs().max()) if self.upstream.numel() else 0.0
        chain = abs(self.student_head.scale) / self.temperature
        magnified = max(1.0, largest / 8) * max(1.0, arriving) * max(1.0, chain)
        return values.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None], magnified


def as_float64(head: Head, weight: Tensor, bias: Tensor | None) -> Head:
    wide = None if bias is None else bias.double()
    return Head(weight.double(), wide, head.scale, head.softcap, head.vocab_size)


@st.composite
def problems(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES, similar: bool = False) -> Problem:
    """`similar`: the teacher is the student with a small change, so that the divergence is near zero."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tokens = draw(st.sampled_from([0, 1, 2, 5, 9]))
    vocabulary = draw(st.sampled_from([1, 2, 3, 17, 130]))
    width = draw(st.integers(1, 6))
    teacher_width = width if similar else draw(st.integers(1, 6))
    dtype = draw(st.sampled_from(dtypes))
    padding = draw(st.sampled_from([0, 3]))

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul_(scale).to(dtype)

    spread = draw(st.sampled_from([0.3, 1.0, 4.0]))
    hidden = normal(tokens, width, scale=spread)
    weight = normal(vocabulary + padding, width)
    bias = normal(vocabulary + padding) if draw(st.booleans()) else None
    form = {
        "scale": draw(st.sampled_from([1.0, 0.2, -1.5])),
        "softcap": draw(st.sampled_from([None, 1.5, 30.0])),
        "vocab_size": vocabulary,
    }
    if similar:
        noise = normal(tokens, width, scale=draw(st.sampled_from([0.0, 1e-4, 1e-3])))
        teacher_hidden, teacher_head = hidden + noise, Head(weight, bias, **form)
    else:
        teacher_hidden = normal(tokens, teacher_width, scale=spread)
        teacher_bias = normal(vocabulary) if draw(st.booleans()) else None
        softcap = draw(st.sampled_from([None, 2.0]))
        teacher_head = Head(normal(vocabulary, teacher_width), teacher_bias, softcap=softcap)
    token_weight = torch.rand(tokens, generator=generator) + 0.1
    token_weight[torch.rand(tokens, generator=generator) < draw(st.sampled_from([0.0, 0.4]))] = 0
    student_weight = torch.nn.Parameter(weight.clone())
    student_bias = None if bias is None else torch.nn.Parameter(bias.clone())
    student_hidden = hidden.clone().requires_grad_()
    return Problem(
        student_hidden,
        teacher_hidden,
        Head(student_weight, student_bias, **form),
        teacher_head,
        token_weight,
        upstream=torch.randn(tokens, generator=generator),
        temperature=draw(st.sampled_from([1.0, 0.5, 1.7])),
        chunk=draw(st.sampled_from([1, 2, 4, 64])),
        beta=draw(st.sampled_from([0.1, 0.5, 0.8])),
        kind=draw(st.sampled_from(KINDS)),
        leaves=[student_hidden, student_weight] + ([] if student_bias is None else [student_bias]),
    )


def run(problem: Problem) -> Tensor:
    return linear_kl(
        problem.student_hidden,
        problem.student_head,
        problem.teacher_hidden,
        problem.teacher_head,
        kind=problem.kind,
        beta=problem.beta,
        temperature=problem.temperature,
        weight=problem.token_weight,
        chunk=problem.chunk,
    )


def assert_close(got: Tensor, exact: Tensor, relative: float) -> None:
    """Within `relative` of the exact tensor's largest magnitude (at least 1)."""
    assert torch.isfinite(got).all()
    scale = max(1.0, float(exact.abs().max())) if exact.numel() else 1.0
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=relative * scale)


# bfloat16: the logits' gradient is rounded, then what its matmuls give, then the rescaled result.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-11}


@pytest.fixture(params=["chunked", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OPD_KERNELS", request.param)
    return request.param


def for_each_implementation(test):
    """Hypothesis draws one sequence of problems per implementation (function-scoped fixtures do not
    mix)."""

    @pytest.mark.parametrize("name", ["chunked", "reference"])
    def wrapped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPD_KERNELS", name)
        test()

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


@for_each_implementation
@settings(max_examples=150, deadline=None, derandomize=True)
@given(problem=problems())
def test_values_and_gradients_for_any_upstream_gradient(problem: Problem) -> None:
    exact, exact_gradients, magnified = problem.exact()
    values = run(problem)
    assert values.dtype == torch.float32
    assert (values >= -1e-6).all()
    assert (values[problem.token_weight == 0] == 0).all()
    assert_close(values, exact, 1e-5)
    (values * problem.upstream).sum().backward()
    for leaf, gradient in zip(problem.leaves, exact_gradients, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        assert_close(leaf.grad, gradient, max(1e-5 * magnified, ROUNDING[leaf.dtype]))


@for_each_implementation
@settings(max_examples=80, deadline=None, derandomize=True)
@given(problem=problems(), multiple=st.sampled_from([1.0, -0.3, 0.0, 1024.0]))
def test_gradients_for_a_multiple_of_the_declared_weight(problem: Problem, multiple: float) -> None:
    problem.upstream = problem.token_weight * multiple
    _, exact_gradients, magnified = problem.exact()
    (run(problem) * problem.upstream).sum().backward()
    for leaf, gradient in zip(problem.leaves, exact_gradients, strict=True):
        assert_close(leaf.grad, gradient, max(1e-5 * magnified, ROUNDING[leaf.dtype]))


@for_each_implementation
@settings(max_examples=80, deadline=None, derandomize=True)
@given(problem=problems(dtypes=(torch.float32, torch.bfloat16), similar=True))
def test_near_zero_values_keep_their_absolute_precision(problem: Problem) -> None:
    exact, _, _ = problem.exact()
    torch.testing.assert_close(run(problem).detach().double(), exact, rtol=1e-4, atol=1e-6)


@for_each_implementation
@settings(max_examples=60, deadline=None, derandomize=True)
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
    assert_close(student.grad, exact_student.grad, max(1e-5, ROUNDING[dtype]))


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


def small(dtype: torch.dtype = torch.float32, tokens: int = 7) -> tuple[Tensor, Head, Tensor, Head]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    student, teacher = normal(tokens, 4).requires_grad_(), normal(tokens, 3)
    return student, Head(normal(11, 4).requires_grad_()), teacher, Head(normal(11, 3))


def test_frozen_head_and_frozen_hidden_states(kernels: str) -> None:
    student, head, teacher, teacher_head = small()
    both = torch.autograd.grad(
        linear_kl(student, head, teacher, teacher_head).square().sum(), (student, head.weight)
    )
    frozen_head = Head(head.weight.detach())
    loss = linear_kl(student, frozen_head, teacher, teacher_head).square().sum()
    torch.testing.assert_close(torch.autograd.grad(loss, student)[0], both[0])
    loss = linear_kl(student.detach(), head, teacher, teacher_head).square().sum()
    torch.testing.assert_close(torch.autograd.grad(loss, head.weight)[0], both[1])
    assert not linear_kl(student.detach(), frozen_head, teacher, teacher_head).requires_grad


def test_a_second_backward_through_a_retained_graph_gives_the_same(kernels: str) -> None:
    student, head, teacher, teacher_head = small()
    loss = 0.5 * linear_kl(student, head, teacher, teacher_head, chunk=3).mean()
    first = torch.autograd.grad(loss, (student, head.weight), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss, (student, head.weight))
    for a, b, c in zip(first, second, kept, strict=True):
        torch.testing.assert_close(a, b)
        assert torch.equal(a, c)


def test_tokens_of_weight_zero_are_never_read(kernels: str) -> None:
    student, head, teacher, teacher_head = small()
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    clean = linear_kl(student, head, teacher, teacher_head, weight=weight)
    spoiled = student.detach().clone()
    spoiled[1], spoiled[4] = torch.nan, torch.inf
    spoiled.requires_grad_()
    values = linear_kl(spoiled, head, teacher, teacher_head, weight=weight)
    assert torch.equal(values, clean)
    values.sum().backward()
    assert spoiled.grad is not None
    assert torch.isfinite(spoiled.grad).all()
    assert (spoiled.grad[[1, 4]] == 0).all()


def test_all_weights_zero(kernels: str) -> None:
    student, head, teacher, teacher_head = small()
    values = linear_kl(student, head, teacher, teacher_head, weight=torch.zeros(7))
    values.sum().backward()
    assert values.abs().sum() == 0
    assert head.weight.grad is not None
    assert head.weight.grad.abs().sum() == 0


def test_empty_input(kernels: str) -> None:
    student, head, teacher, teacher_head = small(tokens=0)
    values = linear_kl(student, head, teacher, teacher_head)
    values.sum().backward()
    assert values.shape == (0,)
    assert student.grad is not None
    assert student.grad.shape == (0, 4)


def test_student_equal_to_teacher_has_no_divergence_and_no_gradient(kernels: str) -> None:
    student, head, _, _ = small()
    for kind in KINDS:
        values = linear_kl(student, head, student.detach(), Head(head.weight.detach()), kind=kind)
        gradients = torch.autograd.grad(values.sum(), (student, head.weight))
        assert float(values.detach().max()) <= 1e-7
        assert max(float(gradient.abs().max()) for gradient in gradients) <= 1e-6


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("proportional", [True, False])
def test_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch, proportional: bool) -> None:
    tokens, vocabulary, width, chunk = 64, 500, 4, 5
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    head = Head(torch.randn(vocabulary, width, generator=generator).requires_grad_())
    upstream = torch.ones(tokens) if proportional else torch.randn(tokens, generator=generator)

    def largest(name: str) -> int:
        monkeypatch.setenv("OPD_KERNELS", name)
        with LargestTensor() as seen:
            values = linear_kl(hidden, head, hidden.detach() + 1, Head(head.weight.detach()), chunk=chunk)
            (values * upstream).sum().backward()
        return seen.elements

    assert largest("chunked") == chunk * vocabulary
    assert largest("reference") == tokens * vocabulary


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [0.0, 1e-4, 1e-2, 1.0])
def test_precision_over_a_large_vocabulary(kind: str, spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    # The identity as hidden states makes the head's weight the logits.
    hidden = torch.eye(3)
    student = torch.randn(30011, 3, generator=generator)
    student[:, 0] = 0  # one uniform row: every rounding error has the same sign
    teacher = student + spread * torch.randn(30011, 3, generator=generator)
    values = linear_kl(hidden, Head(student), hidden, Head(teacher), kind=kind)
    exact = true_divergence(student.t().double(), teacher.t().double(), kind, 0.5)
    torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=2e-7)
