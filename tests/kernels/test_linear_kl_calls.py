"""`linear_kl` as it is called: what is frozen, left out, empty or equal, and what is never held."""

from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from kl_problems import KINDS, true_divergence
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opd.config import FullVocabularyKL
from opd.kernels import chunked
from opd.kernels.divergences import DIVERGENCES, Divergence, divergence_
from opd.kernels.head import Head
from opd.kernels.ops import linear_kl

REVERSE = DIVERGENCES["reverse"]


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


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """New memory holds NaN until something is written to it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 2, 7])
def test_padding_and_tokens_left_out_get_a_gradient_of_zero(
    kernels: str, unwritten_is_nan: None, dtype: torch.dtype, tokens: int
) -> None:
    student, head, teacher, teacher_head = small(dtype, tokens)
    heads = Head(head.weight, vocab_size=9), Head(teacher_head.weight, vocab_size=9)
    for counted in (1.0, 0.0):
        weight = torch.full((tokens,), counted)
        values = linear_kl(student, heads[0], teacher, heads[1], weight=weight, chunk=3)
        at_hidden, at_weight = torch.autograd.grad(values.sum(), (student, head.weight))
        assert torch.isfinite(at_hidden).all()
        assert torch.isfinite(at_weight).all()
        assert (at_weight[9:] == 0).all()
        assert (at_weight.abs().sum() > 0) == (tokens > 0 and counted > 0)


def test_student_equal_to_teacher_has_no_divergence_and_no_gradient(kernels: str) -> None:
    student, head, _, _ = small()
    for kind in KINDS:
        values = linear_kl(student, head, student.detach(), Head(head.weight.detach()), kind=kind)
        gradients = torch.autograd.grad(values.sum(), (student, head.weight))
        assert float(values.detach().max()) <= 1e-7
        assert max(float(gradient.abs().max()) for gradient in gradients) <= 1e-6


def test_no_gradient_is_made_where_none_can_be_asked_for() -> None:
    wanted: list[bool] = []

    def kernel(student: Tensor, teacher: Tensor, kind: str, beta: float, coef: Tensor | None, /) -> Tensor:
        wanted.append(coef is not None)
        return divergence_(student, teacher, kind, beta, coef)

    student, head, teacher, teacher_head = small()
    options = {"kind": "reverse", "beta": 0.5, "temperature": 1.0, "row_kernel": kernel}
    with torch.no_grad():
        chunked.linear_kl(student, head, teacher, teacher_head, weight=None, chunk=4, **options)
    assert not any(wanted)
    chunked.linear_kl(student, head, teacher, teacher_head, weight=None, chunk=4, **options)
    assert wanted[-1]


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
def test_precision_over_a_large_vocabulary(kernels: str, kind: str, spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    # The identity as hidden states makes the head's weight the logits.
    hidden = torch.eye(3)
    student = torch.randn(30011, 3, generator=generator)
    student[:, 0] = 0  # one uniform row: every rounding error has the same sign
    teacher = student + spread * torch.randn(30011, 3, generator=generator)
    values = linear_kl(hidden, Head(student), hidden, Head(teacher), kind=kind)
    exact = true_divergence(student.t().double(), teacher.t().double(), kind, 0.5)
    # The plain reference sums differences of rounded log-probabilities near log V = 10.3: one unit in the
    # last place of that is 9.5e-7, and each library rounds in its own way.
    torch.testing.assert_close(
        values.double(), exact, rtol=1e-5, atol=2e-6 if kernels == "reference" else 2e-7
    )


def test_a_divergence_without_a_compiled_kernel_runs_everywhere(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One entry of `DIVERGENCES` is all that an implementation asks for."""

    def rows(*given) -> Tensor:
        value = REVERSE.rows(*given)
        given[0].mul_(3)
        return 3 * value

    monkeypatch.setitem(DIVERGENCES, "thrice", Divergence(lambda *given: 3 * REVERSE.formula(*given), rows))
    student, head, teacher, teacher_head = small()
    found = []
    for kind, factor in (("reverse", 3.0), ("thrice", 1.0)):
        values = linear_kl(student, head, teacher, teacher_head, kind=kind)
        gradients = torch.autograd.grad(values.sum(), (student, head.weight))
        found.append([factor * tensor for tensor in (values, *gradients)])
    torch.testing.assert_close(found[1], found[0])


def test_a_recipe_knows_every_divergence() -> None:
    assert get_args(FullVocabularyKL.model_fields["kind"].annotation) == tuple(DIVERGENCES)
