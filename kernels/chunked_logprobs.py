"""The chunked operations on log-probabilities: selected tokens, entropy, top-k, and the geometric floor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opd.kernels.head import Head, statistics_dtype
from opd.kernels.projection import Gradients, blocks_with_slope, chunks, write_logits
from opd.kernels.rows import row_blocks, shift_, token_gradient_, token_statistics_


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
        settings: tuple[float, int, bool],
    ) -> tuple[Tensor, Tensor]:
        temperature, chunk, with_entropy = settings
        dtype = statistics_dtype(hidden, weight)
        logprobs = torch.empty(ids.shape, dtype=dtype, device=hidden.device)
        entropy = torch.empty(len(ids), dtype=dtype, device=hidden.device)
        buffer = torch.empty(min(chunk, len(hidden)), head.vocabulary, dtype=dtype, device=hidden.device)
        for rows in chunks(len(hidden), chunk):
            part = hidden[rows]
            logits = write_logits(part, head, temperature, buffer[: len(part)])
            for block, values, _ in blocks_with_slope(logits, head, temperature, gradient=False):
                statistics = token_statistics_(values, ids[rows][block], with_entropy)
                logprobs[rows][block], entropy[rows][block] = statistics
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.head, ctx.settings = head, settings
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, _, ids = ctx.saved_tensors
        head, (temperature, chunk, with_entropy) = ctx.head, ctx.settings
        dtype = statistics_dtype(hidden, weight)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(ids.shape, dtype=dtype, device=hidden.device)
        counted = (grad_logprobs != 0).any(dim=1)
        if not with_entropy:
            grad_entropy = None
        if grad_entropy is not None:
            counted |= grad_entropy != 0
        gradients = Gradients(hidden, head, tuple(ctx.needs_input_grad[:3]), dtype)
        buffer = torch.empty(min(chunk, len(hidden)), head.vocabulary, dtype=dtype, device=hidden.device)
        chain = head.scale / temperature
        for rows in chunks(len(hidden), chunk, counted):
            part = hidden[rows]
            logits = write_logits(part, head, temperature, buffer[: len(part)])
            part_ids, part_grad = ids[rows], grad_logprobs[rows] * chain
            part_entropy = None if grad_entropy is None else grad_entropy[rows] * chain
            for block, values, _ in blocks_with_slope(logits, head, temperature, gradient=True):
                block_entropy = None if part_entropy is None else part_entropy[block]
                token_gradient_(values, part_ids[block], part_grad[block], block_entropy)
            gradients.add(rows, part, logits)
        return (*gradients.as_inputs(hidden, head), None, None, None)


def _as_matrix(ids: Tensor) -> Tensor:
    """`[N]` -> `[N, 1]`, `[N, K]` as it is; int64."""
    return ids.long().unsqueeze(1) if ids.ndim == 1 else ids.long()


def linear_logprobs(hidden: Tensor, head: Head, ids: Tensor, *, temperature: float, chunk: int) -> Tensor:
    """See `opd.kernels.ops.linear_logprobs`."""
    matrix = _as_matrix(ids)
    logprobs, _ = _LinearLogprobs.apply(
        hidden, head.weight, head.bias, matrix, head, (temperature, chunk, False)
    )
    return logprobs.reshape(ids.shape)


def linear_logprobs_entropy(
    hidden: Tensor, head: Head, ids: Tensor, *, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """See `opd.kernels.ops.linear_logprobs_entropy`."""
    matrix = _as_matrix(ids)
    logprobs, entropy = _LinearLogprobs.apply(
        hidden, head.weight, head.bias, matrix, head, (temperature, chunk, True)
    )
    return logprobs.reshape(ids.shape), entropy


@torch.no_grad()
def linear_topk(
    hidden: Tensor, head: Head, k: int, *, temperature: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `opd.kernels.ops.linear_topk`."""
    dtype = statistics_dtype(hidden, head.weight)
    tokens, device = len(hidden), hidden.device
    ids = torch.empty(tokens, k, dtype=torch.int64, device=device)
    logprobs = torch.empty(tokens, k, dtype=dtype, device=device)
    tail = torch.empty(tokens, dtype=dtype, device=device)
    buffer = torch.empty(min(chunk, tokens), head.vocabulary, dtype=dtype, device=device)
    for rows in chunks(tokens, chunk):
        part = hidden[rows]
        logits = write_logits(part, head, temperature, buffer[: len(part)])
        for block in row_blocks(logits):
            values = logits[block]
            shift_(values)
            top, top_ids = values.topk(k, dim=1)
            total = values.exp_().sum(dim=1, keepdim=True)
            ids[rows][block] = top_ids
            logprobs[rows][block] = top - total.log()
            # Summed over the tail itself: 1 - sum(top) would lose a tail below 1e-7.
            tail[rows][block] = values.scatter_(1, top_ids, 0).sum(dim=1).div_(total.squeeze(1))
    return ids, logprobs, tail


@torch.no_grad()
def geometric_floor(
    teacher_hiddens: Sequence[Tensor],
    teacher_heads: Sequence[Head],
    weights: Sequence[float],
    *,
    temperature: float,
    chunk: int,
) -> Tensor:
    """See `opd.kernels.ops.geometric_floor`."""
    dtype = statistics_dtype(*teacher_hiddens, *(head.weight for head in teacher_heads))
    tokens, vocabulary = len(teacher_hiddens[0]), teacher_heads[0].vocabulary
    floor = torch.empty(tokens, dtype=dtype, device=teacher_hiddens[0].device)
    pool = torch.empty(min(chunk, tokens), vocabulary, dtype=dtype, device=floor.device)
    one = torch.empty_like(pool)
    for rows in chunks(tokens, chunk):
        part = pool[: len(floor[rows])].zero_()
        # Row scalars in float64: the floor is a small difference of numbers near log V.
        log_sums = torch.zeros(len(part), dtype=torch.float64, device=floor.device)
        for hidden, head, share in zip(teacher_hiddens, teacher_heads, weights, strict=True):
            logits = write_logits(hidden[rows], head, temperature, one[: len(part)])
            for block in row_blocks(part):
                shift_(logits[block])
                log_sums[block] += share * logits[block].exp().sum(dim=1).double().log()
                part[block].add_(logits[block], alpha=share)
        for block in row_blocks(part):
            largest = shift_(part[block]).squeeze(1).double()
            log_pool = part[block].exp_().sum(dim=1).double().log() + largest
            floor[rows][block] = log_sums[block] - log_pool
    return floor.clamp_min_(0)


class _SelectiveLogSoftmax(torch.autograd.Function):
    """Keeps only the logits it was given: the backward forms the softmax block by block."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        dtype = statistics_dtype(logits)
        values = torch.empty(ids.shape, dtype=dtype, device=logits.device)
        for block in row_blocks(logits):
            values[block], _ = token_statistics_(
                logits[block].to(dtype, copy=True), ids[block], entropy=False
            )
        ctx.save_for_backward(logits, ids)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        logits, ids = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for block in row_blocks(logits):
            part = logits[block].to(upstream.dtype, copy=True)
            token_gradient_(part, ids[block], upstream[block], None)
            gradient[block] = part
        return gradient, None


def selective_log_softmax(logits: Tensor, ids: Tensor) -> Tensor:
    """See `opd.kernels.ops.selective_log_softmax`."""
    matrix = _as_matrix(ids)
    return _SelectiveLogSoftmax.apply(logits, matrix).reshape(ids.shape)
