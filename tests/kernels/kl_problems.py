"""What the tests of `linear_kl` share: random problems, their exact answers, and how far rounding may go."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from opd.kernels import tilelang_target
from opd.kernels.divergences import DIVERGENCES
from opd.kernels.head import Head
from opd.kernels.ops import linear_kl

KINDS = tuple(DIVERGENCES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNIT_ROUNDOFF = {torch.float64: 2**-53, torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}

NO_TILELANG = tilelang_target.missing("cpu")
IMPLEMENTATIONS = (
    "chunked",
    "reference",
    pytest.param("tilelang", marks=pytest.mark.skipif(NO_TILELANG is not None, reason=str(NO_TILELANG))),
)


def for_each_implementation(test: Callable[[], None]) -> Callable[..., None]:
    """Hypothesis draws one sequence of problems per implementation (function-scoped fixtures do not
    mix)."""

    @pytest.mark.parametrize("name", IMPLEMENTATIONS)
    def wrapped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPD_KERNELS", name)
        test()

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


def true_divergence(student: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    """Divergence `[T]` of float64 logits `[T, V]` by its definition, one distribution at a time."""
    p, t = student.log_softmax(dim=1), teacher.log_softmax(dim=1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(dim=1)

    if kind == "reverse":
        return kl(p, t)
    if kind == "forward":
        return kl(t, p)
    if kind != "jsd":  # one that was added later: its own formula, in float64
        return DIVERGENCES[kind].formula(p, t, beta)
    # The mixture in log space: at extreme logits its probabilities underflow even in float64.
    mixture = torch.logaddexp(
        t + torch.tensor(beta).double().log(), p + torch.tensor(1 - beta).double().log()
    )
    return beta * kl(t, mixture) + (1 - beta) * kl(p, mixture)


@dataclass
class Exact:
    """The answer in float64, and what float32 may make of it."""

    values: Tensor
    gradients: list[Tensor]
    rounding: list[Tensor]
    """See `Problem._rounding`."""
    magnified: float
    """How many times a gradient magnifies one relative rounding error of the logits: by their size, by what
    arrives from above, and by the factor between a logit and `h W^T`."""
    size: float
    """The largest logit over 8, at least 1: what a value's absolute error grows with."""


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

    def exact(self) -> Exact:
        """Values and gradients of `sum(upstream * values)` in float64, tokens of weight 0 left out."""
        leaves = [leaf.detach().double().requires_grad_() for leaf in self.leaves]
        bias = leaves[2] if len(leaves) > 2 else None
        student = as_float64(self.student_head, leaves[1], bias)
        teacher = as_float64(self.teacher_head, self.teacher_head.weight, self.teacher_head.bias)
        # The product by itself: the identity as a head gives it the scale and the softcap.
        product = leaves[0] @ leaves[1][: student.vocabulary].t()
        product = product if bias is None else product + bias[: student.vocabulary]
        product.retain_grad()
        identity = torch.eye(student.vocabulary, dtype=torch.float64)
        z_s = Head(identity, None, student.scale, student.softcap).logits(product) / self.temperature
        z_t = teacher.logits(self.teacher_hidden.double()) / self.temperature
        values = true_divergence(z_s, z_t, self.kind, self.beta) * (self.token_weight != 0)
        (values * self.upstream.double()).sum().backward()
        largest = max((float(z.detach().abs().max()) for z in (z_s, z_t) if z.numel()), default=0.0)
        arriving = float(self.upstream.abs().max()) if self.upstream.numel() else 0.0
        chain = abs(student.scale) / self.temperature
        magnified = max(1.0, largest / 8) * max(1.0, arriving) * max(1.0, chain)
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        return Exact(
            values.detach(),
            gradients,
            self._rounding(product.grad, gradients),
            magnified,
            max(1.0, largest / 8),
        )

    def _rounding(self, grad_product: Tensor | None, gradients: list[Tensor]) -> list[Tensor]:
        """How far each entry of each gradient may be off by rounding to the inputs' dtype.

        With a unit roundoff `u`, the gradient `g` at the product errs by `u |g|`, which the two matmuls turn
        into `u |g| |W|` and `u |g|^T |h|`; what they give is rounded, and rounded again when it is rescaled
        to what arrives from above: `2 u` of its magnitude, or of the smallest normal number.
        """
        assert grad_product is not None
        hidden, weight, grad_product = self.leaves[0].detach(), self.leaves[1].detach(), grad_product.abs()
        spread = torch.zeros(weight.shape, dtype=torch.float64)
        spread[: grad_product.shape[1]] = grad_product.t() @ hidden.double().abs()
        spreads = [grad_product @ weight[: grad_product.shape[1]].double().abs(), spread, torch.tensor(0.0)]
        unit = UNIT_ROUNDOFF[hidden.dtype]
        smallest = torch.finfo(hidden.dtype).tiny
        return [
            unit * (1 + 4 * unit) * (at_product + 2 * gradient.abs()) + smallest
            for at_product, gradient in zip(spreads, gradients, strict=False)
        ]


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


def assert_values(got: Tensor, exact: Exact) -> None:
    """Each value within 1e-5 of itself, or within the logits' own rounding."""
    torch.testing.assert_close(got.detach().double(), exact.values, rtol=1e-5, atol=1e-6 * exact.size)


def assert_gradients(got: list[Tensor | None], exact: Exact) -> None:
    """Each entry within the rounding of its dtype and float32's share of the largest entry."""
    for gradient, expected, rounding in zip(got, exact.gradients, exact.rounding, strict=True):
        assert gradient is not None
        assert torch.isfinite(gradient).all()
        largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        error = (gradient.double() - expected).abs()
        assert bool((error <= rounding + 1e-5 * exact.magnified * largest).all()), float(error.max())
