"""Which matmuls round to bfloat16, how much that costs in precision, and the replaceable row kernel."""

import pytest
import torch
from torch import Tensor

from opd.kernels import chunked, ops, projection, triton_rows
from opd.kernels.divergences import divergence_
from opd.kernels.head import Head

TOKENS, WIDTH, VOCABULARY = 40, 48, 2500


@pytest.fixture(autouse=True)
def chunked_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_KERNELS", "chunked")


@pytest.fixture(params=[True, False], ids=["bf16 units", "no bf16 units"])
def bf16_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A processor that multiplies bfloat16 fast, and one that does not."""
    monkeypatch.setattr(projection, "widens", lambda dtype: not request.param)
    return request.param


class Problem:
    """A student and a teacher near it; the head's options are given."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **form) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype)

        hidden, weight = normal(TOKENS, WIDTH), normal(VOCABULARY, WIDTH) * 3 / WIDTH**0.5
        self.hidden, self.weight = cast(hidden).requires_grad_(), cast(weight).requires_grad_()
        self.teacher = cast(hidden + 0.2 * normal(TOKENS, WIDTH))
        self.bias = cast(normal(VOCABULARY)).requires_grad_()
        self.leaves = [self.hidden, self.weight, self.bias]
        self.heads = Head(self.weight, self.bias, **form), Head(cast(weight))

    def loss(self, chunk: int) -> Tensor:
        values = ops.linear_kl(self.hidden, self.heads[0], self.teacher, self.heads[1], chunk=chunk)
        return values.mean()

    def exact(self) -> tuple[Tensor, list[Tensor]]:
        """Loss and gradients in float64."""
        leaves = [leaf.detach().double().requires_grad_() for leaf in self.leaves]
        student = self.heads[0]
        head = Head(leaves[1], leaves[2], student.scale, student.softcap)
        p = head.logits(leaves[0]).log_softmax(dim=1)
        t = (self.teacher.double() @ self.heads[1].weight.detach().double().t()).log_softmax(dim=1)
        loss = (p.exp() * (p - t)).sum(dim=1).mean()
        return loss.detach(), list(torch.autograd.grad(loss, leaves))

    def check(self, chunk: int, value: float, gradient: float) -> None:
        """Relative error of the loss and relative distance of each gradient."""
        loss, (exact, exact_gradients) = self.loss(chunk), self.exact()
        assert abs(float(loss.detach()) - float(exact)) <= value * float(exact)
        gradients = torch.autograd.grad(loss, self.leaves)
        for leaf, got, expected in zip(self.leaves, gradients, exact_gradients, strict=True):
            assert got.dtype == leaf.dtype
            assert float((got.double() - expected).norm()) <= gradient * float(expected.norm())


@pytest.mark.parametrize("chunk", [64, 16], ids=["one chunk", "three chunks"])
@pytest.mark.parametrize("form", [{}, {"scale": 0.6, "softcap": 9.0}], ids=["plain", "softcap"])
def test_bf16_logits_are_exact_and_gradients_as_good_as_bf16(bf16_units: bool, chunk: int, form) -> None:
    Problem(**form).check(chunk, value=1e-5, gradient=2**-7)


@pytest.mark.parametrize("chunk", [64, 16])
def test_allowed_bf16_logits_err_by_their_rounding_only(bf16_units: bool, chunk: int) -> None:
    problem = Problem(allow_bf16_logits=True, scale=0.6)
    # With the units this rounds; without, the same call is exact.
    problem.check(chunk, value=2e-2 if bf16_units else 1e-5, gradient=5e-2 if bf16_units else 2**-7)
    head, hidden = problem.heads[0], problem.hidden
    out = torch.empty(TOKENS, VOCABULARY)
    projection.write_logits(hidden, head, 1.0, out)
    exact = Head(problem.weight, problem.bias, scale=0.6).logits(hidden).detach()
    error = float((out - exact).abs().max())
    assert (error > 1e-3) == bf16_units
    assert error <= 2**-8 * float(exact.abs().max()) + 1e-5


def test_the_reference_rounds_the_same_logits(bf16_units: bool) -> None:
    problem = Problem(allow_bf16_logits=True)
    logits = problem.heads[0].logits(problem.hidden).detach()
    exact = Head(problem.weight, problem.bias).logits(problem.hidden).detach()
    assert logits.dtype == torch.float32
    assert 1e-3 < float((logits - exact).abs().max()) <= 2**-8 * float(exact.abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_allowing_bf16_logits_changes_nothing_for_other_dtypes(dtype: torch.dtype) -> None:
    losses = [Problem(dtype=dtype, allow_bf16_logits=allowed).loss(16) for allowed in (False, True)]
    assert torch.equal(losses[0], losses[1])


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("wanted", [True, False])
def test_another_row_kernel_takes_the_place_of_the_pytorch_one(softcap: float | None, wanted: bool) -> None:
    problem = Problem(dtype=torch.float32, softcap=softcap)
    seen: list[tuple[int, bool]] = []

    def kernel(student: Tensor, teacher: Tensor, kind: str, beta: float, coef: Tensor | None, /) -> Tensor:
        assert student.is_contiguous()
        assert teacher.is_contiguous()
        assert student.dtype == teacher.dtype == torch.float32
        seen.append((len(student), coef is not None))
        return divergence_(student, teacher, kind, beta, coef)

    def run(**options) -> list[Tensor]:
        hidden = problem.hidden.detach().requires_grad_(wanted)
        weight = problem.weight.detach().requires_grad_(wanted)
        head = Head(weight, problem.bias.detach(), softcap=softcap)
        values = chunked.linear_kl(
            hidden,
            head,
            problem.teacher,
            problem.heads[1],
            kind="jsd",
            beta=0.3,
            temperature=1.2,
            weight=None,
            chunk=16,
            **options,
        )
        gradients = torch.autograd.grad(values.sum(), (hidden, weight)) if wanted else ()
        return [values.detach(), *gradients]

    for a, b in zip(run(), run(row_kernel=kernel), strict=True):
        assert torch.equal(a, b)
    assert {gradient for _, gradient in seen} == {wanted}
    assert sum(rows for rows, _ in seen) == 48  # 40 tokens, the last chunk filled up to 16


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", [{}, {"softcap": 5.0}, {"bias": torch.linspace(-1, 1, 77)}])
def test_a_kernel_that_rounds_its_gradient_changes_no_bit(kind: str, dtype: torch.dtype, form: dict) -> None:
    generator = torch.Generator().manual_seed(0)
    found = []
    hidden, weight = (torch.randn(n, 24, generator=generator).to(dtype) for n in (50, 77))
    other, other_weight = (torch.randn(n, 16, generator=generator).to(dtype) for n in (50, 77))
    token_weight = torch.rand(50, generator=generator)
    for linear_kl in (chunked.linear_kl, triton_rows.OPERATIONS["linear_kl"]):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        head = Head(leaves[1], **form)
        options = {"kind": kind, "beta": 0.3, "temperature": 0.7, "weight": token_weight, "chunk": 32}
        values = linear_kl(leaves[0], head, other, Head(other_weight), **options)
        (values * token_weight).sum().backward()
        found.append([values.detach(), *(leaf.grad for leaf in leaves)])
    for plain, rounding in zip(*found, strict=True):
        assert torch.equal(plain, rounding)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; on one: pytest tests/kernels/test_matmul_precision.py -m gpu",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("chunk", [64, 16])
@pytest.mark.parametrize("allowed", [False, True])
def test_on_a_gpu(dtype: torch.dtype, chunk: int, allowed: bool) -> None:
    gradient = 1e-4 if dtype == torch.float32 else 2**-7
    Problem("cuda", dtype, allow_bf16_logits=allowed).check(chunk, value=1e-5, gradient=gradient)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_either_library_of_matmuls_gives_the_same(
    bias: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight, other = normal(70, 40), normal(2500, 40) / 6, normal(70, 40)
    leaves = [hidden, weight, *([normal(2500)] if bias else [])]
    found = []
    calls, linear = [], projection.onednn_linear
    for faster in (False, True):
        monkeypatch.setattr(projection, "onednn_is_faster", lambda answer=faster: answer)
        used: list[int] = []
        monkeypatch.setattr(
            projection, "onednn_linear", lambda *given, used=used: used.append(1) or linear(*given)
        )
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        head = Head(own[1], bias=own[2] if bias else None, softcap=softcap, scale=0.7, vocab_size=2400)
        values = ops.linear_kl(own[0], head, other, Head(weight, vocab_size=2400), temperature=1.3, chunk=64)
        found.append([values, *torch.autograd.grad(values.sum(), own)])
        calls.append(bool(used))
    for library, onednn in zip(*found, strict=True):
        torch.testing.assert_close(onednn, library, rtol=1e-5, atol=1e-5)
        assert onednn.dtype == torch.float32
    assert calls == [False, True]
