"""The operations on given logits, a cache-sized block of rows at a time: see `opd.kernels.ops`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opd.kernels.chunked_logprobs import as_matrix, block_topk_
from opd.kernels.head import statistics_dtype
from opd.kernels.rows import (
    ALL_COLUMNS,
    RowKernel,
    divergence_,
    row_blocks,
    tempered_copy,
    token_gradient_,
    token_statistics_,
)


class _LogitsDivergence(torch.autograd.Function):
    """Rows are independent, so scaling the stored gradient row by row is exact for every upstream
    gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        divergence: tuple[str, float],
        temperature: float,
        row_kernel: RowKernel,
    ) -> Tensor:
        dtype = statistics_dtype(student, teacher)
        tokens, vocabulary = student.shape
        values = torch.empty(tokens, dtype=dtype, device=student.device)
        wanted = ctx.needs_input_grad[0]
        shape = student.shape if wanted else (0, vocabulary)
        gradient = torch.empty(shape, dtype=dtype, device=student.device)
        for block in row_blocks(student):
            z_s, z_t = (tempered_copy(logits[block], temperature, dtype) for logits in (student, teacher))
            coef = torch.full_like(z_s[:, 0], 1 / temperature) if wanted else None
            count = block.stop - block.start
            values[block] = row_kernel(z_s, z_t, *divergence, coef)[:count]
            if wanted:
                gradient[block] = z_s[:count]
        ctx.save_for_backward(gradient)
        ctx.dtype = student.dtype
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream.unsqueeze(1)).to(ctx.dtype), None, None, None, None


def logits_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    kind: str,
    beta: float,
    temperature: float,
    row_kernel: RowKernel = divergence_,
) -> Tensor:
    """See `opd.kernels.ops.logits_kl`."""
    student = student_logits if torch.is_grad_enabled() else student_logits.detach()
    return _LogitsDivergence.apply(student, teacher_logits.detach(), (kind, beta), temperature, row_kernel)


class _SelectiveLogSoftmax(torch.autograd.Function):
    """Keeps only the logits it was given: the backward forms the softmax block by block."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        dtype = statistics_dtype(logits)
        values = torch.empty(ids.shape, dtype=dtype, device=logits.device)
        for block in row_blocks(logits):
            part, part_ids = tempered_copy(logits[block], 1.0, dtype), ids[block]
            found, _ = token_statistics_(part, part_ids.expand(len(part), -1), entropy=False)
            values[block] = found[: len(part_ids)]
        ctx.save_for_backward(logits, ids)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        logits, ids = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for block in row_blocks(logits):
            part, count = tempered_copy(logits[block], 1.0, upstream.dtype), len(ids[block])
            part_ids, part_upstream = (x[block].expand(len(part), -1) for x in (ids, upstream))
            token_gradient_(part, part_ids, part_upstream, None)
            gradient[block] = part[:count]
        return gradient, None


def selective_log_softmax(logits: Tensor, ids: Tensor) -> Tensor:
    """See `opd.kernels.ops.selective_log_softmax`."""
    matrix = as_matrix(ids)
    return _SelectiveLogSoftmax.apply(logits, matrix).reshape(ids.shape)


@torch.no_grad()
def topk_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `opd.kernels.ops.topk_log_probs`."""
    dtype = statistics_dtype(logits)
    ids = torch.empty(len(logits), k, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(logits), k, dtype=dtype, device=logits.device)
    tail = torch.empty(len(logits), dtype=dtype, device=logits.device)
    for block in row_blocks(logits):
        found = block_topk_(tempered_copy(logits[block], 1.0, dtype), k, ALL_COLUMNS)
        for result, part in zip((ids, logprobs, tail), found, strict=True):
            result[block] = part[: len(result[block])]
    return ids, logprobs, tail
