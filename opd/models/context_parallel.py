"""One packed sequence shared by several ranks: each computes its tokens, all see all keys and values.

The packed tokens are cut into 2 N blocks of equal size; rank `r` of `N` has blocks `r` and `2 N - 1 - r`, so
that all do as much causal attention (the zig-zag order of Llama 3's training, Grattafiori et al. 2024,
section 3.3.2, which gathers keys and values like this too). Each layer's keys and values are gathered, and
their gradient is summed back to the ranks they came from; everything else in a decoder treats tokens one by
one. Positions and the boundaries of packed sequences travel with the tokens.

Shapes: `T` packed tokens, `t` of this rank, `H` heads, `d` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from opd.models.attention import AttentionCall
from opd.models.block_attention import Scores
from opd.models.context_pieces import SharedPieces
from opd.models.long_sequence import WHOLE, LayerMemory, check_pieces, recomputed, run_pieces
from opd.models.segments import Segment, attend_segments, attend_segments_backward

if TYPE_CHECKING:
    from opd.models.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class TokenShare:
    """What a rank has of packed tokens."""

    input_ids: Tensor
    """[t] int64; padding, where there is some, is at the end of the last block and belongs to no sequence."""
    position_ids: Tensor
    """[t] int64."""
    places: Tensor
    """[t] int64: where each lies among the packed tokens; `T` and above is padding."""
    segments: tuple[Segment, ...]


class ContextParallel:
    """The ranks of `group`, which make every call with the same packed tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def share(self, input_ids: Tensor, position_ids: Tensor, bounds: Sequence[int]) -> TokenShare:
        """This rank's part of sequences packed end to end, `bounds` [B + 1]."""
        tokens = bounds[-1]
        block = max(1, -(-tokens // (2 * self.size)))
        ends = [*bounds, 2 * self.size * block]  # the padding is a sequence of its own
        own = [self.rank, 2 * self.size - 1 - self.rank]
        places = torch.cat([torch.arange(part * block, (part + 1) * block) for part in own])
        segments = [
            Segment(slice(first - start + at, last - start + at), slice(begin, last))
            for at, start in ((place * block, part * block) for place, part in enumerate(own))
            for begin, end in pairwise(ends)
            if (first := max(begin, start)) < (last := min(end, start + block))
        ]
        there = places.clamp(max=tokens - 1).to(input_ids.device)
        return TokenShare(input_ids[there], position_ids[there], places.to(there.device), tuple(segments))

    def gathered(self, mine: Tensor) -> Tensor:
        """`[H, 2 N b, d]` in the order of the packed tokens, from every rank's `[H, 2 b, d]`."""
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine.contiguous(), group=self.group)
        halves = [part.chunk(2, dim=1) for part in parts]
        return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim=1)

    def summed_back(self, whole: Tensor) -> Tensor:
        """`[H, 2 b, d]`: the sum over the ranks of their `[H, 2 N b, d]`, at this rank's tokens."""
        blocks = whole.chunk(2 * self.size, dim=1)
        pairs = zip(blocks[: self.size], reversed(blocks[self.size :]), strict=True)
        sent = [torch.cat(pair, dim=1) for pair in pairs]
        received = torch.empty_like(sent[0])
        dist.reduce_scatter(received, sent, group=self.group)
        return received

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over the ranks, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor


class ContextAttention:
    """The `attend` of a rank: its queries on everybody's keys. All ranks run the same layers in step."""

    def __init__(self, ranks: ContextParallel, segments: Sequence[Segment]) -> None:
        self._ranks, self._segments = ranks, tuple(segments)

    def __call__(self, call: AttentionCall) -> Tensor:
        """[1, t, H, dv]."""
        scores = Scores(call.scaling, call.softcap, call.sliding_window)
        inputs = (call.query[0], call.key[0], call.value[0])
        return _SharedAttention.apply(*inputs, self._ranks, self._segments, scores).transpose(0, 1)[None]


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ranks: ContextParallel,
        segments: tuple[Segment, ...],
        scores: Scores,
    ) -> Tensor:
        sizes = (key.shape[-1], value.shape[-1])
        keys, values = ranks.gathered(torch.cat([key, value], dim=-1)).split(sizes, dim=-1)
        output, logsumexp = attend_segments(query, keys, values, segments, scores)
        # The gathered keys are gathered again in the backward: kept, they would be T of every layer.
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.ranks, ctx.segments, ctx.scores = ranks, segments, scores
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        sizes = (key.shape[-1], value.shape[-1])
        gathered = ctx.ranks.gathered(torch.cat([key, value], dim=-1))
        keys, values = gathered.split(sizes, dim=-1)
        sums = torch.zeros_like(gathered, dtype=logsumexp.dtype)
        of_query = attend_segments_backward(
            (query, keys, values),
            (output, logsumexp, upstream),
            sums.split(sizes, dim=-1),
            ctx.segments,
            ctx.scores,
        )
        of_key, of_value = ctx.ranks.summed_back(sums).split(sizes, dim=-1)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


def shared_hidden(
    model: CausalLM, share: TokenShare, ranks: ContextParallel, memory: LayerMemory = WHOLE
) -> Tensor:
    """[t, D]: the last hidden states of this rank's tokens. Gradients of parameters are its tokens' part.

    Every rank calls it, and goes through the backward, equally often. More tokens of a rank than
    `memory.chunk` go through the layers in pieces. Raises `ModelError` if the architecture cannot do that.
    """
    ids, positions = share.input_ids, share.position_ids
    if memory.chunk is not None and memory.cuts(ids.numel()):
        check_pieces(model)
        return run_pieces(
            model, ids, positions, SharedPieces(ranks, share.segments, ids.numel(), memory.chunk)
        )
    attention = ContextAttention(ranks, share.segments)
    if memory.recompute and torch.is_grad_enabled():
        with recomputed(model.decoder.layers):
            return model.run(ids, positions, attention)
    return model.run(ids, positions, attention)
