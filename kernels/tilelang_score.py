"""Divergences from hidden states with fused kernels: no logits in memory, values and gradient apart.

`fused_kl` needs `5 * 4 * T * V / 128` bytes beyond its inputs on a GPU, a thirteenth of one model's logits in
bf16.
`logits_gradient` recomputes the product and writes the gradient at the student's logits once, in the inputs'
dtype, for the two library matmuls that make `dH` and `dW` of it. Training is faster with
`opd.kernels.chunked`, which computes every product once; these are for the least memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from opd.kernels.checks import check_divergence, check_pair
from opd.kernels.head import Head
from opd.kernels.tilelang_fused import tile_results, tile_statistics
from opd.kernels.tilelang_logits import SHAPES, Problem
from opd.kernels.tilelang_target import Target, build, target_of

CPU_DTYPES = (torch.float32, torch.float16)
# In float32 a GPU's matrix units would round the operands to 10 bits.
CUDA_DTYPES = (torch.bfloat16, torch.float16)


class Scores(NamedTuple):
    """Divergences, and what their gradient is made from."""

    values: Tensor
    """[T] float32."""
    totals: Tensor
    """[5, T] float32: both maxima, both sums of exponentials, the mean; student first."""


class _Side(NamedTuple):
    arrays: tuple[Tensor, Tensor, Tensor]
    scalars: tuple[float, float]
    capped: bool


def fused_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    *,
    kind: str = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Scores:
    """Per-token divergence `[T]` as `opd.kernels.ops.score_kl`, with the statistics its gradient needs.

    Raises `TypeError` for dtypes the machine's fused kernels do not take, `ValueError` for what does not fit
    together, `RuntimeError` where TileLang or a compiler is missing.
    """
    check_pair(student_hidden, student_head, teacher_hidden, teacher_head)
    check_divergence(kind, beta)
    target = target_of(student_hidden)
    student, teacher = (
        _side(student_hidden, student_head, temperature),
        _side(teacher_hidden, teacher_head, temperature),
    )
    tokens, columns = len(student_hidden), SHAPES[target.name].columns
    tiles = -(-student_head.vocabulary // columns)
    partial = student_hidden.new_empty((5, tiles, tokens), dtype=torch.float32)
    # KL(t || p) has the statistics of KL(p || t) with the roles exchanged.
    first, second = (teacher, student) if kind == "forward" else (student, teacher)
    if tokens:
        kernel = build(tile_statistics, target, _problem(first, second))
        kernel(*first.arrays, *second.arrays, partial, *first.scalars, *second.scalars)
    totals, values = _combine(partial)
    if kind == "forward":
        totals = totals[[1, 0, 3, 2, 4]]
    if kind == "jsd" and tokens:
        terms = torch.empty_like(partial[:2])
        kernel = build(tile_results, target, _problem(student, teacher), kind, False)
        unused = totals[0]
        kernel(
            *student.arrays, *teacher.arrays, totals, unused, terms, beta, *student.scalars, *teacher.scalars
        )
        from_student, from_teacher = terms.double().sum(dim=1) / totals[2:4]
        totals[4] = from_student
        values = beta * from_teacher + (1 - beta) * from_student
    return Scores(values.float().clamp_min_(0), totals)


def logits_gradient(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    totals: Tensor,
    coef: Tensor,
    *,
    kind: str = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """`coef * d divergence / d z` `[T, V]` at the tempered logits `z`, in the dtype of the hidden states.

    `totals` are those of `fused_kl` on the same inputs, `coef` `[T]` the loss gradient at each divergence. A
    softcap's slope is not in it.
    """
    target = target_of(student_hidden)
    student, teacher = (
        _side(student_hidden, student_head, temperature),
        _side(teacher_hidden, teacher_head, temperature),
    )
    shape = (len(student_hidden), student_head.vocabulary)
    gradient = torch.empty(shape, dtype=student_hidden.dtype, device=student_hidden.device)
    if len(student_hidden):
        kernel = build(tile_results, target, _problem(student, teacher), kind, True)
        arrays = (*student.arrays, *teacher.arrays, totals.contiguous(), coef.float().contiguous(), gradient)
        kernel(*arrays, beta, *student.scalars, *teacher.scalars)
    return gradient


def _combine(partial: Tensor) -> tuple[Tensor, Tensor]:
    """Totals `[5, T]` and `KL(first || second)` `[T]` from the tiles' statistics `[5, tiles, T]`.

    In float64, since the numbers are few.
    """
    max_p, max_q, sum_p, sum_q, mean = partial.double()
    if partial.shape[2] == 0:
        return partial.new_empty((5, 0)), partial.new_empty(0)
    total_max_p, total_max_q = max_p.amax(dim=0), max_q.amax(dim=0)
    x, y = max_p - total_max_p, max_q - total_max_q
    total_p, total_q = (sum_p * x.exp()).sum(dim=0), (sum_q * y.exp()).sum(dim=0)
    total_mean = ((mean + sum_p * (x - y)) * x.exp()).sum(dim=0) / total_p
    totals = torch.stack((total_max_p, total_max_q, total_p, total_q, total_mean)).float()
    return totals, total_mean - (total_p / total_q).log()


def check_width(width: int, target: Target) -> None:
    """A GPU copies 16 bytes at a time, and its pipeline needs more than one step along the width."""
    depth = SHAPES[target.name].depth
    if not target.is_cpu and (width <= depth or width % 8):
        raise ValueError(
            f"fused kernels on a GPU take hidden states wider than {depth}, in steps of 8, not of width "
            f"{width}; use OPD_KERNELS=chunked"
        )


def _side(hidden: Tensor, head: Head, temperature: float) -> _Side:
    """One model's arrays `[T, D]`, `[V, D]`, `[V]`, and the numbers of its logits."""
    allowed = CPU_DTYPES if hidden.device.type == "cpu" else CUDA_DTYPES
    weight = head.weight.detach()[: head.vocabulary]
    if hidden.dtype not in allowed or weight.dtype != hidden.dtype:
        names = " or ".join(map(str, allowed))
        raise TypeError(
            f"hidden states are {hidden.dtype} and the head is {weight.dtype}; give fused kernels {names}"
        )
    check_width(head.hidden_size, target_of(hidden))
    if head.bias is None:
        bias = torch.zeros(head.vocabulary, device=hidden.device)
    else:
        bias = head.bias.detach()[: head.vocabulary].float()
    factor = head.scale / (head.softcap or temperature)
    cap = (head.softcap or 0.0) / temperature
    return _Side(
        (hidden.detach().contiguous(), weight.contiguous(), bias), (factor, cap), head.softcap is not None
    )


def _problem(first: _Side, second: _Side) -> Problem:
    dtype = str(first.arrays[0].dtype).removeprefix("torch.")
    return Problem(dtype, first.arrays[0].shape[1], second.arrays[0].shape[1], first.capped, second.capped)
