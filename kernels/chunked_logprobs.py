"""The chunked operations on log-probabilities: picked tokens, entropy, top-k, and the geometric floor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opd.kernels.head import Head, statistics_dtype
from opd.kernels.projection import Gradients, blocks_with_slope, chunks, matmul_rows, take, write_logits
from opd.kernels.rows import (
    ALL_COLUMNS,
    Columns,
    shift_,
    token_gradient_,
    token_statistics_,
)


class _Settings(NamedTuple):
    temperature: float
    chunk: int
    entropy: bool
    columns: Columns


def _buffer(tokens: int, chunk: int, head: Head, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for one chunk's logits `[M, V]`."""
    return torch.empty(
        matmul_rows(min(chunk, tokens), chunk), head.vocabulary, dtype=dtype, device=like.device
    )


class _LinearLogprobs(torch.autograd.Function):
    """Log-probabilities `[N, K]` and entropy `[N]`; the backward recomputes each chunk's logits.

    A token whose upstream gradients are all zero is not recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        head: Head,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        dtype, chunk, columns = statistics_dtype(hidden, weight), settings.chunk, settings.columns
        logprobs = torch.empty(ids.shape, dtype=dtype, device=hidden.device)
        entropy = torch.empty(len(ids), dtype=dtype, device=hidden.device)
        buffer = _buffer(len(hidden), chunk, head, hidden, dtype)
        for rows in chunks(len(hidden), chunk):
            part, part_ids, count = take(hidden, rows, chunk), take(ids, rows, chunk), len(ids[rows])
            logits = write_logits(part, head, settings.temperature, buffer[: len(part)])
            found = [
                token_statistics_(logits[block], part_ids[block], settings.entropy, columns)
                for block in columns.blocks(logits)
            ]
            logprobs[rows] = torch.cat([values for values, _ in found])[:count]
            entropy[rows] = torch.cat([values for _, values in found])[:count]
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.head, ctx.settings = head, settings
        ctx.set_materialize_grads(False)
        if not settings.entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, _, ids = ctx.saved_tensors
        head, settings, chunk = ctx.head, ctx.settings, ctx.settings.chunk
        dtype = statistics_dtype(hidden, weight)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(ids.shape, dtype=dtype, device=hidden.device)
        counted = (grad_logprobs != 0).any(dim=1)
        if not settings.entropy:
            grad_entropy = None
        if grad_entropy is not None:
            counted |= grad_entropy != 0
        single = int(counted.sum()) <= chunk
        gradients = Gradients(hidden, head, tuple(ctx.needs_input_grad[:3]), dtype, single)
        buffer = _buffer(len(hidden), chunk, head, hidden, dtype)
        chain = head.scale / settings.temperature
        for rows in chunks(len(hidden), chunk, counted):
            part, part_ids = take(hidden, rows, chunk), take(ids, rows, chunk)
            logits = write_logits(part, head, settings.temperature, buffer[: len(part)])
            part_grad = take(grad_logprobs, rows, chunk) * chain
            part_entropy = None if grad_entropy is None else take(grad_entropy, rows, chunk) * chain
            blocks = blocks_with_slope(logits, head, settings.temperature, True, settings.columns)
            for block, values in blocks:
                block_entropy = None if part_entropy is None else part_entropy[block]
                token_gradient_(values, part_ids[block], part_grad[block], block_entropy, settings.columns)
            gradients.add(rows, part, logits)
        return (*gradients.as_inputs(hidden, head), None, None, None)


def as_matrix(ids: Tensor) -> Tensor:
    """`[N]` -> `[N, 1]`, `[N, K]` as it is; int64."""
    return ids.long().unsqueeze(1) if ids.ndim == 1 else ids.long()


def linear_logprobs(
    hidden: Tensor,
    head: Head,
    ids: Tensor,
    *,
    temperature: float,
    chunk: int,
    columns: Columns = ALL_COLUMNS,
) -> Tensor:
    """See `opd.kernels.ops.linear_logprobs`; `columns`: what part of the vocabulary the head holds."""
    matrix, settings = as_matrix(ids), _Settings(temperature, chunk, False, columns)
    logprobs, _ = _LinearLogprobs.apply(hidden, head.weight, head.bias, matrix, head, settings)
    return logprobs.reshape(ids.shape)


def linear_logprobs_entropy(
    hidden: Tensor,
    head: Head,
    ids: Tensor,
    *,
    temperature: float,
    chunk: int,
    columns: Columns = ALL_COLUMNS,
) -> tuple[Tensor, Tensor]:
    """See `opd.kernels.ops.linear_logprobs_entropy`; `columns`: what part of the vocabulary the head
    holds."""
    matrix, settings = as_matrix(ids), _Settings(temperature, chunk, True, columns)
    logprobs, entropy = _LinearLogprobs.apply(hidden, head.weight, head.bias, matrix, head, settings)
    return logprobs.reshape(ids.shape), entropy


@torch.no_grad()
def linear_topk(
    hidden: Tensor,
    head: Head,
    k: int,
    *,
    temperature: float,
    chunk: int,
    columns: Columns = ALL_COLUMNS,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `opd.kernels.ops.linear_topk`; `columns`: what part of the vocabulary the head holds."""
    dtype = statistics_dtype(hidden, head.weight)
    tokens, device = len(hidden), hidden.device
    ids = torch.empty(tokens, k, dtype=torch.int64, device=device)
    logprobs = torch.empty(tokens, k, dtype=dtype, device=device)
    tail = torch.empty(tokens, dtype=dtype, device=device)
    buffer = _buffer(tokens, chunk, head, hidden, dtype)
    for rows in chunks(tokens, chunk):
        part = take(hidden, rows, chunk)
        logits = write_logits(part, head, temperature, buffer[: len(part)])
        found = [block_topk_(logits[block], k, columns) for block in columns.blocks(logits)]
        for result, parts in zip((ids, logprobs, tail), zip(*found, strict=True), strict=True):
            result[rows] = torch.cat(parts)[: len(result[rows])]
    return ids, logprobs, tail


def block_topk_(logits: Tensor, k: int, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and log-probabilities `[R, k]` and the rest's probability `[R]`; overwrites `logits`."""
    shift_(logits, columns)
    top, top_ids = columns.topk(logits, k)
    exp = logits.exp_()
    total = exp.sum(dim=1, keepdim=True)
    # Summed over the tail itself: 1 - sum(top) would lose a tail below 1e-7.
    total, tail = columns.sum(total, columns.clear_(exp, top_ids).sum(dim=1, keepdim=True))
    return top_ids, top - total.log(), (tail / total).squeeze(1)


@torch.no_grad()
def geometric_floor(
    teacher_hiddens: Sequence[Tensor],
    teacher_heads: Sequence[Head],
    weights: Sequence[float],
    *,
    temperature: float,
    chunk: int,
    columns: Columns = ALL_COLUMNS,
) -> Tensor:
    """See `opd.kernels.ops.geometric_floor`; `columns`: what part of the vocabulary the heads hold."""
    dtype = statistics_dtype(*teacher_hiddens, *(head.weight for head in teacher_heads))
    tokens = len(teacher_hiddens[0])
    floor = torch.empty(tokens, dtype=dtype, device=teacher_hiddens[0].device)
    pool = _buffer(tokens, chunk, teacher_heads[0], floor, dtype)
    one = torch.empty_like(pool)
    for rows in chunks(tokens, chunk):
        count = len(floor[rows])
        part = pool[: matmul_rows(count, chunk)].zero_()
        # Row scalars in float64: the floor is a small difference of numbers near log V.
        log_sums = torch.zeros(len(part), dtype=torch.float64, device=floor.device)
        for hidden, head, share in zip(teacher_hiddens, teacher_heads, weights, strict=True):
            logits = write_logits(take(hidden, rows, chunk), head, temperature, one[: len(part)])
            for block in columns.blocks(part):
                shift_(logits[block], columns)
                (total,) = columns.sum(logits[block].exp().sum(dim=1, keepdim=True).double())
                log_sums[block] += share * total.squeeze(1).log()
                part[block].add_(logits[block], alpha=share)
        for block in columns.blocks(part):
            largest = shift_(part[block], columns).squeeze(1).double()
            (total,) = columns.sum(part[block].exp_().sum(dim=1, keepdim=True).double())
            log_sums[block] -= total.squeeze(1).log() + largest
        floor[rows] = log_sums[:count].to(dtype)
    return floor.clamp_min_(0)
