"""Heads spread over 2 and 4 processes against the whole head in one: values, gradients, refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opd.kernels import vocab_parallel

WORKER = Path(__file__).with_name("vocab_parallel_worker.py")
WORLD = 4
CASES_PER_FORM = 10 + 2 + 5


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each of the 4 ranks found; the cases of 2 ranks ran in two pairs of them."""
    store = tmp_path_factory.mktemp("gloo") / "store"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(WORLD), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


# In bfloat16 every rank rounds its part of the hidden states' gradient, and the sum is rounded once more.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "forms", "bound"), [("float64", 3, 1e-13), ("float32", 3, 5e-6), ("bfloat16", 1, 2**-6)]
)
@pytest.mark.parametrize("size", [2, 4])
def test_parts_give_what_the_whole_head_gives(
    results, size: int, dtype: str, forms: int, bound: float
) -> None:
    for rank, result in enumerate(results):
        cases = {
            name: value
            for name, value in result["differences"].items()
            if name.startswith(f"{size} ranks, {dtype}")
        }
        assert len(cases) == forms * CASES_PER_FORM, rank
        # Not <= through any(): a NaN must fail too.
        assert {name: value for name, value in cases.items() if not value <= bound} == {}, rank


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_holds_the_same_bits_twice(results, size: int) -> None:
    assert all(result["same"][str(size)] for result in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other cut", "cut them at the same tokens"),
        ("other vocabulary", "vocabulary has 103 tokens and the teacher's 102"),
        ("nan hidden", "FloatingPointError: the student hidden state of token 7"),
        ("nan head", "FloatingPointError: the divergence of token 0 is not finite"),
        ("too many parts", "a vocabulary of 1 tokens cannot be cut"),
    ],
)
def test_every_rank_refuses_with_the_same_sentence(results, name: str, words: str) -> None:
    for size in ("2", "4"):
        sentences = {result["refusals"][size][name] for result in results}
        assert len(sentences) == 1
        assert words in sentences.pop()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_of_16_bits_are_summed_in_32(monkeypatch, dtype: torch.dtype) -> None:
    def all_reduce(total: torch.Tensor, group: object) -> None:
        for other in (2.0**-10, -8.0, 2.0**-10):  # each would be lost beside the first
            total += other

    monkeypatch.setattr(vocab_parallel.dist, "all_reduce", all_reduce)
    hidden = torch.zeros(3, 2, dtype=dtype, requires_grad=True)
    vocab_parallel._OnAllRanks.apply(hidden, None).backward(torch.full_like(hidden, 8.0))
    assert hidden.grad is not None
    assert hidden.grad.dtype == dtype
    assert torch.equal(hidden.grad, torch.full_like(hidden, 2.0**-9))
