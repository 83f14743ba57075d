"""The KL and its gradient over one long sequence: what the memory peak grew by, and a sample of positions.

    python long_kl_worker.py TOKENS CHUNK

Prints JSON. `peak` is the growth of the resident peak over the inputs', in bytes; `errors` are the largest
differences of a sample's values and gradients from a float64 reference.
"""

import json
import sys
from pathlib import Path

import torch
from watched import own_bytes

from opd.kernels.head import Head
from opd.kernels.ops import linear_kl

WIDTH, VOCABULARY, SAMPLE = 8, 512, 512


def run(student: torch.Tensor, teacher: torch.Tensor, heads: tuple[Head, Head], chunk: int) -> torch.Tensor:
    """Per-token KL `[T]`; gradients of its mean go to `student` `[T, D]` and to the student's head."""
    weight = torch.full((len(student),), 1 / len(student))
    values = linear_kl(student, heads[0], teacher, heads[1], weight=weight, chunk=chunk)
    (values @ weight).backward()
    return values.detach()


def reference(
    student: torch.Tensor, teacher: torch.Tensor, heads: tuple[Head, Head], share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values `[N]` and gradients `[N, D]` in float64 of tokens that count `share` each."""
    hidden = student.detach().double().requires_grad_()
    own = (hidden @ heads[0].weight.detach().double().t()).log_softmax(dim=-1)
    other = (teacher.double() @ heads[1].weight.double().t()).log_softmax(dim=-1)
    values = (own.exp() * (own - other)).sum(dim=-1)
    (values.sum() * share).backward()
    assert hidden.grad is not None
    return values.detach(), hidden.grad


def main() -> None:
    tokens, chunk = map(int, sys.argv[1:])
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int) -> torch.Tensor:
        return torch.randn(rows, WIDTH, generator=generator)

    student, teacher = normal(tokens).requires_grad_(), normal(tokens)
    heads = (Head(normal(VOCABULARY).requires_grad_()), Head(normal(VOCABULARY)))
    # Loads the libraries and makes their work space.
    run(student.detach()[:2048].clone().requires_grad_(), teacher[:2048], heads, 256)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = own_bytes("VmRSS")
    values = run(student, teacher, heads, chunk)
    peak = own_bytes("VmHWM") - before
    rows = torch.randperm(tokens, generator=generator)[:SAMPLE]
    exact, gradient = reference(student[rows], teacher[rows], heads, 1 / tokens)
    assert student.grad is not None
    errors = [
        float((values[rows] - exact).abs().max() / exact.abs().max()),
        float((student.grad[rows] - gradient).abs().max() / gradient.abs().max()),
    ]
    print(json.dumps({"peak": peak, "errors": errors}))


if __name__ == "__main__":
    main()
