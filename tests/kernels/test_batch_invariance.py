"""The same bits every time, and for a token whichever tokens share its batch."""

from collections.abc import Iterator

import pytest
import torch
from kl_problems import IMPLEMENTATIONS
from torch import Tensor

from opd.kernels import ops
from opd.kernels.head import Head
from opd.kernels.projection import matmul_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("reverse", "forward", "jsd", "skew_reverse", "skew_forward")
TOKENS, WIDTH, VOCABULARY = 300, 72, 4999


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[name for name in IMPLEMENTATIONS if name != "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_KERNELS", request.param)


@pytest.fixture(autouse=True)
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_KERNELS", "chunked")


class Batch:
    """Hidden states of a student and a teacher, their heads and token ids."""

    def __init__(
        self, dtype: torch.dtype, vocabulary: int = VOCABULARY, softcap: float | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.student, self.teacher = (normal(TOKENS, WIDTH).to(dtype) for _ in range(2))
        weights = [(normal(vocabulary, WIDTH) / WIDTH**0.5).to(dtype) for _ in range(2)]
        self.heads = [Head(weight, softcap=softcap) for weight in weights]
        self.ids = torch.randint(0, vocabulary, (TOKENS, 2), generator=generator)

    def kl(self, rows: Tensor, kind: str = "reverse", chunk: int = 128) -> tuple[Tensor, Tensor]:
        """Values `[R]` and the gradient of their sum at the hidden states `[R, D]`."""
        student = self.student[rows].requires_grad_()
        values = ops.linear_kl(
            student, self.heads[0], self.teacher[rows], self.heads[1], kind=kind, chunk=chunk
        )
        (gradient,) = torch.autograd.grad(values.sum(), student)
        return values.detach(), gradient

    def statistics(self, rows: Tensor, chunk: int = 128) -> tuple[Tensor, ...]:
        """Log-probabilities, entropy, top-k and the gradient at the hidden states."""
        student = self.student[rows].requires_grad_()
        options = {"chunk": chunk, "temperature": 0.9}
        logprobs, entropy = ops.linear_logprobs_entropy(student, self.heads[0], self.ids[rows], **options)
        (gradient,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), student)
        top = ops.linear_topk(self.student[rows], self.heads[0], 5, **options)
        return logprobs.detach(), entropy.detach(), gradient, *top


def selections() -> dict[str, Tensor]:
    """Some of the tokens, in some order."""
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    counts = (1, 2, 3, 17, 63, 64, 65, 129, 299)
    chosen = {f"{count} tokens": order[:count] for count in counts}
    return {**chosen, "one token": torch.tensor([211]), "all, shuffled": order}


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tokens_divergence_and_gradient_do_not_depend_on_its_batch(
    threads: int, kernels: None, kind: str, dtype: torch.dtype
) -> None:
    batch = Batch(dtype)
    everything = batch.kl(torch.arange(TOKENS), kind)
    for name, rows in selections().items():
        for got, whole in zip(batch.kl(rows, kind), everything, strict=True):
            assert torch.equal(got, whole[rows]), name


@pytest.mark.some(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_logprobs_entropy_and_topk_do_not_depend_on_its_batch(threads: int, dtype) -> None:
    batch = Batch(dtype)
    everything = batch.statistics(torch.arange(TOKENS))
    for name, rows in selections().items():
        for got, whole in zip(batch.statistics(rows), everything, strict=True):
            assert torch.equal(got, whole[rows]), name


@pytest.mark.some(1)
@pytest.mark.parametrize(("kind", "chunk"), [*((kind, 3) for kind in KINDS), ("reverse", 100)])
def test_other_chunks_a_softcap_and_a_vocabulary_of_one_row_per_block(
    threads: int, kernels: None, kind: str, chunk: int
) -> None:
    batch = Batch(torch.float32, vocabulary=140_001 if chunk == 100 else 301, softcap=2.0)
    rows = torch.arange(64)  # fills the matmul, so that a token stands in its last row too
    everything = batch.kl(rows, kind, chunk)
    for part in (rows[4:5], rows[[19, 3, 7]], rows.flip(0)):
        for got, whole in zip(batch.kl(part, kind, chunk), everything, strict=True):
            assert torch.equal(got, whole[part])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_left_out_change_nothing_for_the_others(threads: int, dtype) -> None:
    batch = Batch(dtype)
    student, teacher = batch.student, batch.teacher
    everything, _ = batch.kl(torch.arange(TOKENS))
    weight = (torch.rand(TOKENS, generator=torch.Generator().manual_seed(2)) < 0.3).float()
    values = ops.linear_kl(student, batch.heads[0], teacher, batch.heads[1], weight=weight, chunk=128)
    assert torch.equal(values, everything * weight)


def test_deterministic_mode_uses_one_shape(deterministic: None, threads: int) -> None:
    batch = Batch(torch.float64)
    everything = batch.kl(torch.arange(TOKENS), chunk=96)
    assert [matmul_rows(tokens, 96) for tokens in (0, 5, 96)] == [0, 96, 96]
    for name, rows in selections().items():
        for got, whole in zip(batch.kl(rows, chunk=96), everything, strict=True):
            assert torch.equal(got, whole[rows]), name


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_twice(threads: int, kernels: None, dtype: torch.dtype) -> None:
    batch = Batch(dtype)

    def gradients() -> list[Tensor]:
        leaves = [batch.student.clone().requires_grad_(), batch.heads[0].weight.clone().requires_grad_()]
        values = ops.linear_kl(leaves[0], Head(leaves[1]), batch.teacher, batch.heads[1], chunk=128)
        return [values.detach(), *torch.autograd.grad(values.sum(), leaves)]

    first = gradients()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))
