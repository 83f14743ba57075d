"""Exact causal attention block by block: memory for one block of scores, whatever the lengths are.

The softmax is accumulated over blocks of keys with a running maximum and sum (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"; Rabe and Staats 2021, "Self-attention Does Not Need O(n^2)
Memory"); the backward recomputes each block from the rows' log-sum-exp (Dao et al. 2022, FlashAttention,
appendix B.4). Blocks that a causal order or a window hides are never computed, so a window makes the time
linear. Plain PyTorch: it knows softcaps and windows, and queries that are the end of a longer sequence.

Shapes: `H` query heads, `Hkv` key-value heads, `G = H / Hkv`, `C` queries, `S` keys, `d` head size. The
queries are the last `C` of the `S` positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_HIDDEN = -1e30
"""Score of a pair that does not see each other; finite, so that a block without a visible one is harmless."""
_SCORES = 1 << 18
"""Scores of a block on a CPU, about: what its cache holds."""
_SCORES_GPU = 1 << 25


@dataclass(frozen=True, slots=True)
class Scores:
    """How the scores of a pair are computed."""

    scaling: float
    softcap: float | None = None
    window: int | None = None
    """Position `i` sees positions `j` with `i - window < j <= i`."""


@dataclass(frozen=True, slots=True)
class _Block:
    queries: slice
    keys: slice
    first: int
    """Position of the first query among the keys."""
    masked: bool
    """Whether some pair in it does not see each other."""


def block_attention(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """`query` [H, C, d], `key` [Hkv, S, d], `value` [Hkv, S, dv] -> [H, C, dv], differentiable in all three.

    Statistics are float32 at least, results have the dtype of `value`.
    """
    return _BlockAttention.apply(query, key, value, scores)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        output, logsumexp = attend(query, key, value, scores)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.scores = scores
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        gradients = tuple(torch.zeros_like(x, dtype=logsumexp.dtype) for x in (key, value))
        of_query = attend_backward(query, key, value, (output, logsumexp, upstream), gradients, ctx.scores)
        return of_query, gradients[0].to(key.dtype), gradients[1].to(value.dtype), None


def attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """`block_attention` and the rows' log-sum-exp [H, C] (float32 at least), without a gradient."""
    heads, count = query.shape[:2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    output = value.new_empty(heads, count, value.shape[-1])
    logsumexp = query.new_empty(heads, count, dtype=dtype)
    for queries, blocks in _blocks(query, key, scores):
        rows = _rows(query, queries, key, dtype)
        highest = rows.new_full((*rows.shape[:2], 1), _HIDDEN)
        total = torch.zeros_like(highest)
        sums = rows.new_zeros(*rows.shape[:2], value.shape[-1])
        for block in blocks:
            weights = _scores(rows, key[:, block.keys].to(dtype), block, scores)
            above = torch.maximum(highest, weights.amax(-1, keepdim=True))
            weights.sub_(above).exp_()
            rescale = (highest - above).exp_()
            total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
            sums.mul_(rescale).baddbmm_(weights, value[:, block.keys].to(dtype))
            highest = above
        output[:, queries] = (sums / total).view(heads, -1, value.shape[-1]).to(output.dtype)
        logsumexp[:, queries] = (highest + total.log()).view(heads, -1)
    return output, logsumexp


def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ahead: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, ...],
    scores: Scores,
) -> Tensor:
    """Gradient of `attend` in `query`; those in `key` and `value` are added to `gradients`, of their shapes.

    `ahead` is the output [H, C, dv], the log-sum-exp [H, C] and the gradient [H, C, dv] that arrives.
    """
    output, logsumexp, upstream = ahead
    dtype = logsumexp.dtype
    of_query = torch.empty_like(query)
    for queries, blocks in _blocks(query, key, scores):
        rows, slope = (_rows(x, queries, key, dtype) for x in (query, upstream))
        inner = (slope * _rows(output, queries, key, dtype)).sum(-1, keepdim=True)
        level = _rows(logsumexp[..., None], queries, key, dtype)
        of_rows = torch.zeros_like(rows)
        for block in blocks:
            keys, values = (x[:, block.keys].to(dtype) for x in (key, value))
            capped = _scores(rows, keys, block, scores)
            weights = (capped - level).exp_()
            gradients[1][:, block.keys].baddbmm_(weights.transpose(1, 2), slope)
            change = (slope @ values.transpose(1, 2)).sub_(inner).mul_(weights)
            if scores.softcap is not None:  # a hidden pair's score is no tanh, but its weight is 0
                change.mul_(1 - (capped / scores.softcap).clamp_(-1, 1).square_())
            change.mul_(scores.scaling)
            of_rows.baddbmm_(change, keys)
            gradients[0][:, block.keys].baddbmm_(change.transpose(1, 2), rows)
        of_query[:, queries] = of_rows.view(query.shape[0], -1, query.shape[-1]).to(query.dtype)
    return of_query


def _rows(packed: Tensor, queries: slice, key: Tensor, dtype: torch.dtype) -> Tensor:
    """`packed` [H, C, n] -> [Hkv, G * B, n]: the queries of a block, with those that share keys together."""
    part = packed[:, queries].to(dtype)
    return part.reshape(key.shape[0], -1, packed.shape[-1])


def _scores(rows: Tensor, keys: Tensor, block: _Block, scores: Scores) -> Tensor:
    """[Hkv, G * Bq, Bk] scores of a block, hidden pairs at `_HIDDEN`."""
    found = (rows @ keys.transpose(1, 2)).mul_(scores.scaling)
    if scores.softcap is not None:
        found.div_(scores.softcap).tanh_().mul_(scores.softcap)
    if block.masked:
        count, size = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
        ahead = torch.arange(block.keys.start, block.keys.stop, device=keys.device)
        distance = torch.arange(block.first, block.first + count, device=keys.device)[:, None] - ahead
        hidden = distance < 0
        if scores.window is not None:
            hidden |= distance >= scores.window
        found.view(rows.shape[0], -1, count, size).masked_fill_(hidden, _HIDDEN)
    return found


def _blocks(query: Tensor, key: Tensor, scores: Scores) -> Iterator[tuple[slice, list[_Block]]]:
    """Blocks of queries, each with the blocks of keys that one of them sees."""
    heads, count, size = query.shape[0], query.shape[1], key.shape[1]
    offset = size - count
    scored = _SCORES if query.device.type == "cpu" else _SCORES_GPU
    side = max(32, 1 << int((scored / heads) ** 0.5).bit_length() - 1)
    if scores.window is not None:  # larger blocks would be mostly hidden
        side = min(side, max(64, 1 << (scores.window - 1).bit_length()))
    for start in range(0, count, side):
        stop = min(start + side, count)
        first, last = offset + start, offset + stop - 1
        lowest = 0 if scores.window is None else max(0, first - scores.window + 1)
        blocks = []
        for begin in range(lowest, last + 1, side):
            end = min(begin + side, last + 1)
            masked = end - 1 > first or (scores.window is not None and last - begin >= scores.window)
            blocks.append(_Block(slice(start, stop), slice(begin, end), first, masked))
        yield slice(start, stop), blocks
