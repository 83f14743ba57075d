"""One packed sequence shared by several ranks: each computes its tokens, all see all keys and values.

The packed tokens are cut into 2 N blocks of equal size; rank `r` of `N` has blocks `r` and `2 N - 1 - r`, so
that all do as much causal attention (the zig-zag order of Llama 3's training, Grattafiori et al. 2024,
section 3.3.2, which gathers keys and values like this too). Each layer's keys and values are gathered, and
their gradient is summed back to the ranks they came from; everything else in a decoder treats tokens one by
one. Positions and the boundaries of packed sequences travel with the tokens.

Shapes: `T` packed tokens, `t` of this rank, `H` heads, `d` head size.

Long sequences shared by ranks, each of which runs its tokens through the layers piece by piece.

A layer first computes the keys and values of all of a rank's pieces, which are gathered; then its queries go
through piece by piece. The backward does the same again: each piece adds to the gradient of the gathered keys
and values, which is summed back to the ranks they came from and taken through the pieces once more. So every
rank communicates once a layer forward and twice backward, however many pieces it has, and projects to keys
and values once more than a rank alone.

Memory of `T` tokens, `t` of a rank: `t x D` for each layer's input; one layer's gathered keys, values and
their gradients; one piece's activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opd.errors import ModelError
from opd.models.attention import (
    Attend,
    AttentionCall,
    Scores,
    Segment,
    attend_segments,
    attend_segments_backward,
    cut_segments,
)
from opd.models.causal_lm import CausalLM, check_pieces
from opd.models.long_sequence import (
    WHOLE,
    LayerCall,
    LayerMemory,
    LayerPieces,
    recomputed,
)


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
        return model.run_pieces(
            ids, positions, SharedPieces(ranks, share.segments, ids.numel(), memory.chunk)
        )
    attention = ContextAttention(ranks, share.segments)
    if memory.recompute and torch.is_grad_enabled():
        with recomputed(model.decoder.layers):
            return model.run(ids, positions, attention)
    return model.run(ids, positions, attention)


class SharedPieces(LayerPieces):
    """Runs a rank's `tokens` in pieces of at most `chunk`; `segments` are what their queries see.

    All ranks call the same layers in step.
    """

    def __init__(self, ranks: ContextParallel, segments: Sequence[Segment], tokens: int, chunk: int) -> None:
        super().__init__(tokens, [slice(at, min(at + chunk, tokens)) for at in range(0, tokens, chunk)])
        self._ranks, self._segments = ranks, tuple(segments)

    def attentions(self, hidden: Tensor, call: LayerCall) -> Iterator[tuple[slice, Attend]]:
        gathered = self._gathered(hidden, call)
        for span in self.spans:
            yield span, _PieceAttend(gathered, cut_segments(self._segments, span))

    def attending_backward(self, hidden: Tensor, upstream: Tensor, call: LayerCall) -> Tensor:
        gathered = self._gathered(hidden, call)
        gradient = torch.empty_like(hidden)
        gathered.gradients = torch.zeros_like(gathered.whole, dtype=_statistics(gathered.whole))
        for span in self.spans:
            attention = _PieceAttend(gathered, cut_segments(self._segments, span))
            gradient[:, span] = self.differentiate(hidden, upstream, call, span, attention)
        of_keys = self._ranks.summed_back(gathered.gradients).split(gathered.sizes, dim=-1)
        for span in self.spans:
            given = hidden[:, span].detach().requires_grad_()
            with torch.enable_grad():
                found = self.keys(given, call, span)
            slopes = [slope[:, span].to(x.dtype) for slope, x in zip(of_keys, found, strict=True)]
            torch.autograd.backward(found, slopes)
            assert given.grad is not None
            gradient[:, span] += given.grad
        return gradient

    @torch.no_grad()
    def _gathered(self, hidden: Tensor, call: LayerCall) -> _Gathered:
        found = [self.keys(hidden[:, span], call, span) for span in self.spans]
        if not all(found):
            raise ModelError("a layer without attention cannot run in pieces; leave sequence_chunk out.")
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        whole = self._ranks.gathered(torch.cat([keys, values], dim=-1))
        return _Gathered(whole, (keys.shape[-1], values.shape[-1]))


@dataclass(slots=True)
class _Gathered:
    """Keys and values of all ranks in one layer, and their gradients in a backward."""

    whole: Tensor
    """[Hkv, T, d + dv]: keys, then values."""
    sizes: tuple[int, int]
    """`d` and `dv`."""
    gradients: Tensor | None = None
    """Of this rank's queries, of the form of `whole`, float32 at least."""


@dataclass(slots=True)
class _PieceAttend:
    """The `attend` of one piece: its queries on everybody's keys. Its own keys are among them already."""

    gathered: _Gathered
    segments: tuple[Segment, ...]

    def __call__(self, call: AttentionCall) -> Tensor:
        """[1, t, H, dv]."""
        scores = Scores(call.scaling, call.softcap, call.sliding_window)
        output = _PieceAttention.apply(call.query[0], self.gathered, self.segments, scores)
        return output.transpose(0, 1)[None]


class _PieceAttention(torch.autograd.Function):
    """Differentiable in the queries; the gradient in the keys and values is added to the gathered ones'."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, gathered: _Gathered, segments: tuple[Segment, ...], scores: Scores
    ) -> Tensor:
        keys, values = gathered.whole.split(gathered.sizes, dim=-1)
        output, logsumexp = attend_segments(query, keys, values, segments, scores)
        ctx.save_for_backward(query, output, logsumexp)
        ctx.gathered, ctx.segments, ctx.scores = gathered, segments, scores
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, output, logsumexp = ctx.saved_tensors
        gathered: _Gathered = ctx.gathered
        assert gathered.gradients is not None
        keys, values = gathered.whole.split(gathered.sizes, dim=-1)
        sums = gathered.gradients.split(gathered.sizes, dim=-1)
        ahead = (output, logsumexp, upstream)
        inputs = (query, keys, values)
        of_query = attend_segments_backward(inputs, ahead, sums, ctx.segments, ctx.scores)
        return of_query, None, None, None


def _statistics(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)
