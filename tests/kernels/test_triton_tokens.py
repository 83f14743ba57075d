"""Triton's kernel of single tokens: by Triton's interpreter, and what its proof finds."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.kernels import divergences, verification

INTERPRETED = """
import contextlib, sys, torch
from opd.kernels import verification, triton_tokens
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
verification.ROWS = 4
verification.ROUNDING = 2.0**-7  # the interpreter cuts digits off where a GPU rounds
launches = triton_tokens.launch_statistics, triton_tokens.launch_gradient
print([verification.token_fault(*launches, size, torch.device("cpu")) for size in (1, 17, 2048, 2049, 5003)])
"""


def test_the_kernel_gives_what_float64_gives_in_the_interpreter():
    pytest.importorskip("triton", reason="pip install triton runs its kernels on a CPU")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.stdout == f"{[None] * 5}\n", done.stderr


def statistics(logits: Tensor, ids: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    return divergences.token_statistics_(logits, ids, entropy)


def gradient(logits: Tensor, ids: Tensor, coef: Tensor, entropy: Tensor | None, out: Tensor | None) -> None:
    divergences.token_gradient_(logits, ids, coef, entropy, rounded=out)


def no_entropy(logits: Tensor, ids: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    values, spread = statistics(logits, ids, entropy)
    return values, torch.zeros_like(spread)


def first_id(logits: Tensor, ids: Tensor, *rest: Any) -> None:
    gradient(logits, ids[:, :1].expand_as(ids), *rest)


def without_entropy(logits: Tensor, ids: Tensor, coef: Tensor, entropy: Any, out: Tensor | None) -> None:
    gradient(logits, ids, coef, None, out)


def cut_off(logits: Tensor, ids: Tensor, coef: Tensor, entropy: Any, out: Tensor | None) -> None:
    gradient(logits, ids, coef, entropy, None)
    if out is not None:
        bits = logits.clone().view(torch.int32) & -(1 << 18)
        out.copy_(bits.view(torch.float32).to(torch.bfloat16))


def numbers_for_nan(logits: Tensor, *rest: Any) -> None:
    gradient(logits, *rest)
    if rest[-1] is None:
        logits[logits.isnan().all(dim=1)] = 0.0


def raises(*given: Any) -> Any:
    raise RuntimeError("no such instruction")


FAULTS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str | None]] = {
    "right": (statistics, gradient, None),
    "no entropy": (no_entropy, gradient, "gives other values than float64"),
    "one id for two": (statistics, first_id, "gives another gradient than float64"),
    "no gradient of the entropy": (statistics, without_entropy, "gives another gradient than float64"),
    "digits cut off": (statistics, cut_off, "rounds its gradient wrongly"),
    "NaN hidden": (statistics, numbers_for_nan, "does not pass NaN on to its gradient"),
    "no compiler": (raises, gradient, "cannot be compiled or launched (RuntimeError('no such instruction'))"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_kernel_fails_its_proof(name: str):
    one, other, said = FAULTS[name]
    assert verification.token_fault(one, other, 300, torch.device("cpu")) == said
