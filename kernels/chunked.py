"""Token-chunked operations for any device: exact results without ever holding `[T, V]`.

A chunk of tokens has its logits in memory, nothing more. The divergences compute their gradient in the
forward, while those logits are there; log-probabilities recompute them in the backward. README.md has the
derivations. Same names and arguments as `opd.kernels.reference`; call both through `opd.kernels.ops`, which
checks inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opd.kernels.chunked_logits import logits_kl, selective_log_softmax, topk_log_probs
from opd.kernels.chunked_logprobs import (
    geometric_floor,
    linear_logprobs,
    linear_logprobs_entropy,
    linear_topk,
)
from opd.kernels.head import Head, statistics_dtype
from opd.kernels.projection import (
    Gradients,
    Rows,
    blocks_with_slope,
    chunks,
    matmul_rows,
    take,
    write_logits,
)
from opd.kernels.rows import (
    ALL_COLUMNS,
    Columns,
    RowKernel,
    divergence_,
    first_halves,
    log_softmax_,
)

__all__ = [
    "geometric_floor",
    "linear_kl",
    "linear_logprobs",
    "linear_logprobs_entropy",
    "linear_mixture_kl",
    "linear_topk",
    "logits_kl",
    "score_kl",
    "selective_log_softmax",
    "topk_log_probs",
]

# How far, relatively, each token's upstream gradient may stray from a multiple of its declared weight.
PROPORTIONAL = 1e-6


@dataclass(frozen=True)
class _Divergence:
    """What is compared with the student, and how."""

    teacher: Callable[[Rows, Tensor], None]
    """Writes the teacher's tempered logits of a chunk of tokens into the `[M, V]` it is given."""
    kind: str
    beta: float
    temperature: float
    chunk: int
    dtype: torch.dtype
    row_kernel: RowKernel
    columns: Columns
    rounds: bool = False
    """Whether the row kernel takes `rounded`, room for the gradient in bfloat16."""


def _run(
    hidden: Tensor, head: Head, token_weight: Tensor, spec: _Divergence, needs: tuple[bool, bool, bool]
) -> tuple[Tensor, Gradients]:
    """Per-token divergence `[T]` and the gradient of `sum(token_weight * divergence)`, chunk by chunk."""
    values = torch.zeros(hidden.shape[0], dtype=spec.dtype, device=hidden.device)
    counted = token_weight != 0
    gradients = Gradients(hidden, head, needs, spec.dtype, single=int(counted.sum()) <= spec.chunk)
    shape = (matmul_rows(min(spec.chunk, len(hidden)), spec.chunk), head.vocabulary)
    student_buffer = torch.empty(shape, dtype=spec.dtype, device=hidden.device)
    teacher_buffer = torch.empty_like(student_buffer)
    for rows in chunks(hidden.shape[0], spec.chunk, counted):
        part, weights = take(hidden, rows, spec.chunk), take(token_weight, rows, spec.chunk)
        student, teacher = student_buffer[: len(part)], teacher_buffer[: len(part)]
        write_logits(part, head, spec.temperature, student)
        spec.teacher(rows, teacher)
        coef = weights * (head.scale / spec.temperature) if any(needs) else None
        if coef is not None and spec.rounds and gradients.narrow and head.softcap is None and not needs[2]:
            gradient = first_halves(student)
            chunk_values = spec.row_kernel(student, teacher, spec.kind, spec.beta, coef, rounded=gradient)
        else:
            gradient = student
            chunk_values = _row_values(student, teacher, coef, head, spec)
        values[rows] = chunk_values[: len(values[rows])]
        if any(needs):
            gradients.add(rows, part, gradient, spare=teacher_buffer)
    return values, gradients


def _row_values(
    student: Tensor, teacher: Tensor, coef: Tensor | None, head: Head, spec: _Divergence
) -> Tensor:
    """The row kernel over a chunk's logits `[M, V]`, with the softcap's slope where there is one; `[M]`."""
    if head.softcap is None or coef is None:
        return spec.row_kernel(student, teacher, spec.kind, spec.beta, coef)
    values = torch.empty(len(student), dtype=spec.dtype, device=student.device)
    for block, logits in blocks_with_slope(student, head, spec.temperature, True, spec.columns):
        values[block] = spec.row_kernel(logits, teacher[block], spec.kind, spec.beta, coef[block])
    return values


class _LinearDivergence(torch.autograd.Function):
    """Gradient in the forward for the declared token weights; the backward scales it where that is exact.

    It is exact if the upstream gradient is a multiple of the declared weights, or if only the hidden states
    need a gradient (each row scales by itself). Otherwise the chunks are run once more for the true one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_weight: Tensor,
        head: Head,
        spec: _Divergence,
    ) -> Tensor:
        needs = tuple(ctx.needs_input_grad[:3])
        values, gradients = _run(hidden, head, token_weight, spec, needs)
        if any(needs):
            ctx.save_for_backward(hidden, weight, bias, token_weight)
            ctx.head, ctx.spec, ctx.needs, ctx.gradients = head, spec, needs, gradients
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_weight = ctx.saved_tensors
        # Given away, so that autograd can keep the buffers instead of copying them; a second backward
        # through a retained graph finds none and recomputes.
        gradients, ctx.gradients = ctx.gradients, None
        upstream = torch.where(token_weight != 0, upstream, 0)
        if gradients is None or not _rescale(gradients, upstream, token_weight):
            # Released first: the recomputation needs the same memory again.
            gradients = None
            head = replace(ctx.head, weight=weight, bias=bias)
            _, gradients = _run(hidden, head, upstream, ctx.spec, ctx.needs)
        return (*gradients.as_inputs(hidden, ctx.head), None, None, None)


def _rescale(gradients: Gradients, upstream: Tensor, token_weight: Tensor) -> bool:
    """Turn the gradient for `token_weight` `[T]` into the one for `upstream` `[T]`; False if scaling
    cannot."""
    if len(upstream) == 0:
        return True
    ratio = torch.where(token_weight != 0, upstream / token_weight, 0)
    if gradients.weight is None and gradients.bias is None:
        if gradients.hidden is not None:
            gradients.hidden.mul_(ratio.unsqueeze(1))
        return bool(torch.isfinite(ratio).all())
    common = ratio[token_weight.abs().argmax()]
    expected = common * token_weight
    if not bool(((upstream - expected).abs() <= PROPORTIONAL * expected.abs()).all()):
        return False
    if float(common) != 1.0:
        for gradient in (gradients.hidden, gradients.weight, gradients.bias):
            if gradient is not None:
                gradient.mul_(common)
    return True


def _apply(hidden: Tensor, head: Head, weight: Tensor | None, spec: _Divergence) -> Tensor:
    if weight is None:
        weight = torch.ones(hidden.shape[0], device=hidden.device)
    declared, leaves = weight.detach().to(spec.dtype), (hidden, head.weight, head.bias)
    if not torch.is_grad_enabled():  # a function sees that an input asks for a gradient even then
        leaves = tuple(None if leaf is None else leaf.detach() for leaf in leaves)
    return _LinearDivergence.apply(*leaves, declared, head, spec)


def linear_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    *,
    kind: str,
    beta: float,
    temperature: float,
    weight: Tensor | None,
    chunk: int,
    row_kernel: RowKernel = divergence_,
    columns: Columns = ALL_COLUMNS,
    rounds: bool = False,
) -> Tensor:
    """See `opd.kernels.ops.linear_kl`; a compiled `row_kernel` may take the place of the PyTorch one.

    `columns`: what part of the vocabulary the heads hold, for a `row_kernel` made for the same part.
    `rounds`: the row kernel takes `rounded=` and writes the gradient in bfloat16 at once.
    """
    teacher_hidden = teacher_hidden.detach()

    def teacher(rows: Rows, out: Tensor) -> None:
        write_logits(take(teacher_hidden, rows, chunk), teacher_head, temperature, out)

    dtype = statistics_dtype(student_hidden, student_head.weight, teacher_hidden, teacher_head.weight)
    spec = _Divergence(teacher, kind, beta, temperature, chunk, dtype, row_kernel, columns, rounds)
    return _apply(student_hidden, student_head, weight, spec)


@torch.no_grad()
def score_kl(
    student_hidden: Tensor, student_head: Head, teacher_hidden: Tensor, teacher_head: Head, **options: Any
) -> Tensor:
    """See `opd.kernels.ops.score_kl`."""
    return linear_kl(student_hidden, student_head, teacher_hidden, teacher_head, weight=None, **options)


def linear_mixture_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hiddens: Sequence[Tensor],
    teacher_heads: Sequence[Head],
    weights: Sequence[float],
    *,
    temperature: float,
    weight: Tensor | None,
    chunk: int,
    row_kernel: RowKernel = divergence_,
    columns: Columns = ALL_COLUMNS,
    rounds: bool = False,
) -> Tensor:
    """See `opd.kernels.ops.linear_mixture_kl`: a reverse KL whose teacher logits are `log sum_i w_i
    t_i`."""
    hiddens = [hidden.detach() for hidden in teacher_hiddens]

    def teacher(rows: Rows, out: Tensor) -> None:
        one = torch.empty_like(out) if len(hiddens) > 1 else out
        for i, (hidden, head, share) in enumerate(zip(hiddens, teacher_heads, weights, strict=True)):
            write_logits(take(hidden, rows, chunk), head, temperature, one if i else out)
            for block in columns.blocks(out):
                logprobs = log_softmax_((one if i else out)[block], columns).add_(math.log(share))
                if i:
                    torch.logaddexp(out[block], logprobs, out=out[block])

    tensors = [student_hidden, student_head.weight, *hiddens, *(head.weight for head in teacher_heads)]
    dtype = statistics_dtype(*tensors)
    spec = _Divergence(teacher, "reverse", 0.5, temperature, chunk, dtype, row_kernel, columns, rounds)
    return _apply(student_hidden, student_head, weight, spec)
