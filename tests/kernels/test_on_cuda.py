"""The operations on a device: results, no wait for each chunk, and how many launches one takes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pretend_cuda
import pretend_kernels
import pytest
import torch
from torch import Tensor

from opd.kernels import checks, ops
from opd.kernels.divergences import DIVERGENCES
from opd.kernels.head import Head
from opd.kernels.projection import ROW_TILE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-8}
"""Norm of a gradient's error over the gradient's."""
FORMS = [{}, {"softcap": 5.0}, {"scale": 0.3}, {"vocab_size": 90}]
VOCABULARY = 97


@pytest.fixture(params=["chunked", "triton"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose row kernels: those of PyTorch, or what `auto` takes where there is Triton."""
    device = request.getfixturevalue("gpu" if "gpu" in request.fixturenames else "pretended")
    if request.param == "triton" and isinstance(device, pretend_cuda.Gpu):
        pretend_kernels.install_triton(monkeypatch)
    monkeypatch.setenv("OPD_KERNELS", "auto" if request.param == "triton" else "chunked")
    return request.param


class Problem:
    """Student and teacher on the CPU."""

    def __init__(self, tokens: int, dtype: torch.dtype = torch.float32, bias: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(dtype)

        self.hidden, self.weight = normal(tokens, 16), normal(VOCABULARY, 16, scale=0.4)
        self.bias = normal(VOCABULARY) if bias else None
        self.other, self.other_weight = normal(tokens, 12), normal(VOCABULARY, 12, scale=0.4)
        self.counts = torch.rand(tokens, generator=generator)
        self.ids = torch.randint(90, (tokens,), generator=generator)

    def on(self, place: Callable[[Tensor], Tensor]) -> Problem:
        """The same elsewhere, with leaves of its own."""
        made = Problem.__new__(Problem)
        for name, value in vars(self).items():
            leaf = name in ("hidden", "weight", "bias") and value is not None
            moved = None if value is None else place(value)
            setattr(made, name, moved.requires_grad_() if leaf and moved is not None else moved)
        return made

    def divergence(self, **options) -> Tensor:
        """`linear_kl`, forward and backward."""
        form = {key: options.pop(key) for key in ("softcap", "scale", "vocab_size") if key in options}
        teacher = Head(self.other_weight, vocab_size=form.get("vocab_size"))
        values = ops.linear_kl(
            self.hidden,
            Head(self.weight, self.bias, **form),
            self.other,
            teacher,
            weight=self.counts,
            **options,
        )
        (values * self.counts).sum().backward()
        return values

    def logprobs(self, **options) -> Tensor:
        """`linear_logprobs_entropy`, forward and backward."""
        values, entropy = ops.linear_logprobs_entropy(
            self.hidden, Head(self.weight, self.bias), self.ids, **options
        )
        ((values + entropy) * self.counts).sum().backward()
        return values

    def leaves(self) -> list[Tensor]:
        """Those with a gradient."""
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None]


def wide(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value.clone()


@pytest.mark.some(10)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("chunk", [128])
def test_divergences_and_their_gradients(gpu, rows, dtype, kind, form, chunk):
    problem = Problem(200, dtype, bias=not form)
    problem.counts[::3] = 0
    here, exact = problem.on(gpu.put), problem.on(wide)
    found = here.divergence(kind=kind, temperature=0.7, chunk=chunk, beta=0.3, **form)
    assert found.device == gpu.device
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPD_KERNELS", "reference")
        true = exact.divergence(kind=kind, temperature=0.7, chunk=chunk, beta=0.3, **form)
    torch.testing.assert_close(gpu.get(found).double(), true.detach(), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(here.leaves(), exact.leaves(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == dtype
        assert (gpu.get(ours.grad).double() - theirs.grad).norm() < ROUNDING[dtype] * theirs.grad.norm()


@pytest.mark.some(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probabilities_and_scores_without_a_gradient(gpu, rows, dtype):
    problem = Problem(70, dtype)
    here, exact = problem.on(gpu.put), problem.on(wide)
    found, true = here.logprobs(chunk=32), exact.logprobs()
    torch.testing.assert_close(gpu.get(found).double(), true.detach(), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(here.leaves(), exact.leaves(), strict=True):
        assert (gpu.get(ours.grad).double() - theirs.grad).norm() < ROUNDING[dtype] * theirs.grad.norm()
    with torch.no_grad():
        for run in (
            lambda p: ops.linear_topk(p.hidden, Head(p.weight), 5, chunk=32)[1],
            lambda p: ops.linear_kl(p.hidden, Head(p.weight), p.other, Head(p.other_weight), chunk=32),
            lambda p: ops.linear_mixture_kl(
                p.hidden,
                Head(p.weight),
                [p.other, p.hidden],
                [Head(p.other_weight), Head(p.weight)],
                [0.3, 0.7],
            ),
            lambda p: ops.geometric_floor(
                [p.other, p.hidden], [Head(p.other_weight), Head(p.weight)], [0.3, 0.7], chunk=32
            ),
        ):
            torch.testing.assert_close(gpu.get(run(here)).double(), run(exact), rtol=1e-4, atol=1e-5)


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["divergence", "logprobs"])
@pytest.mark.parametrize("some", [False, True])
def test_no_chunk_waits_for_the_device(gpu, rows, dtype, which, some):
    """What is waited for: the inputs' and the result's finiteness, which tokens count, and the upstream."""
    seen = []
    for chunks in (2, 8):
        problem = Problem(chunks * ROW_TILE, dtype)
        if some:
            problem.counts[::2] = 0
        chunk = ROW_TILE // 2 if some else ROW_TILE
        getattr(problem.on(gpu.put), which)(chunk=chunk)  # a kernel proves itself at its first use
        here = problem.on(gpu.put)
        with gpu.counted() as counts:
            getattr(here, which)(chunk=chunk)
        seen.append(counts)
    assert len(seen[0].waits) == len(seen[1].waits) <= 7, f"{seen[0]}\n{seen[1]}"


@pytest.mark.parametrize("of", ["ids", "hidden", "weight"])
def test_checks_that_are_read_together_wait_once_and_tell_the_first(pretended, of):
    problem = Problem(8, torch.float32)
    head = Head(problem.weight)
    if of == "ids":
        problem.ids[3] = head.vocabulary
    elif of == "hidden":
        problem.hidden.data[5, 1] = float("nan")
    else:
        head.weight.data[2, 0] = float("inf")

    def call(p) -> None:
        with torch.no_grad():
            ops.linear_logprobs(p.hidden, Head(p.weight), p.ids)
            ops.linear_kl(p.hidden, Head(p.weight), p.other, Head(p.other_weight))

    with pytest.raises((ValueError, FloatingPointError)) as alone:
        call(problem)
    here = problem.on(pretended.put)
    expected = pytest.raises(type(alone.value), match=re.escape(str(alone.value)))
    with expected, checks.deferred_checks(), pretended.counted() as seen:
        call(here)
    assert len(seen.waits) <= 1, seen  # which tokens count: `linear_kl` is not told


LAUNCHES = {
    ("divergence", "chunked", torch.float32): 29,
    ("divergence", "chunked", torch.bfloat16): 30,
    ("divergence", "triton", torch.float32): 9,
    ("divergence", "triton", torch.bfloat16): 9,
    ("logprobs", "chunked", torch.float32): 40,
    ("logprobs", "chunked", torch.bfloat16): 41,
    ("logprobs", "triton", torch.float32): 20,
    ("logprobs", "triton", torch.bfloat16): 20,
}
"""Of a chunk, forward and backward."""


@pytest.mark.parametrize(("which", "rows", "dtype"), LAUNCHES, indirect=["rows"])
def test_launches_of_a_chunk(pretended, which, rows, dtype):
    seen = []
    for chunks in (2, 8):
        here = Problem(chunks * ROW_TILE, dtype).on(pretended.put)
        with pretended.counted() as counts:
            getattr(here, which)(chunk=ROW_TILE)
        seen.append(counts.launches)
    assert (seen[1] - seen[0]).total() <= 6 * LAUNCHES[which, rows, dtype], seen[1] - seen[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_of_16_bits_is_not_widened(gpu, dtype):
    problem = Problem(8, dtype)
    here = problem.on(gpu.put)
    with torch.no_grad(), gpu.counted() as counts:
        logits = Head(here.weight).logits(here.hidden)
    assert logits.dtype == torch.float32
    if isinstance(gpu, pretend_cuda.Gpu):
        assert counts.launches == {"mm": 1}
    expected = problem.hidden.float() @ problem.weight.float().t()
    torch.testing.assert_close(gpu.get(logits), expected)


def test_tensors_of_two_devices_are_refused(pretended):
    """The pretended device itself: what it must not let pass."""
    gpu = pretended
    here = gpu.put(torch.ones(3))
    for call in (
        lambda: here + torch.ones(3),
        lambda: torch.cat([here, torch.ones(1)]),
        lambda: here + torch.ones(3, device="cuda:0"),
        lambda: torch.nn.functional.linear(here, torch.ones(3, 3)),
    ):
        with pytest.raises(RuntimeError, match="was given tensors of"):
            call()
    assert (here + torch.tensor(1.0)).device == gpu.device
    assert torch.zeros(2, device="cuda").device == gpu.device
    with gpu.counted() as seen:
        float(here.sum())
        here[here > 0]
        here[torch.tensor([1])]
        here.tolist()
        torch.ones(3).to(here.device)
        torch.ones(3).to(here.device, non_blocking=True)
    assert len(seen.waits) == 5, seen
