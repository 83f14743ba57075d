"""Ring attention: several ranks share one packed sequence, and no rank ever has all keys and values.

The packed tokens are split into 2 N blocks of equal size. Rank `r` of `N` has blocks `r` and `2 N - 1 - r`,
so that all do as much causal attention (the zig-zag order of Llama 3's training, Grattafiori et al. 2024,
section 3.3.2). In each layer the ranks' keys and values go around the ring. Every rank adds the part that its
queries see to their earlier results (Liu et al. 2023, "Ring Attention with Blockwise Transformers"), while
the next ones travel. In the backward they go around once more, with the gradient that every rank adds to,
until it is back at its owner. Everything else in a decoder treats tokens one by one. Positions and the
boundaries of packed sequences travel with the tokens.

A long local share runs through the layers in chunks. A layer first projects all of a rank's chunks to
queries, keys and values and attends with them. Then the chunks go through the rest of it. The backward does
the same again: each chunk is differentiated down to its attention, the keys go around with their gradients,
and each chunk is differentiated from its projections on. So a rank's keys go around once a layer forward and
three times backward (the second forward, keys, gradients), for any number of chunks.

Memory of `t = T / N` tokens of a rank: `t x D` for each layer's input; one layer's queries and output; two
ranks' keys, values and their gradients; one chunk's activations. No tensor has `T` tokens.

Shapes: `T` packed tokens, `t` of this rank, `H` heads, `Hkv` key-value heads, `d` head size.
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
from opd.models.attention import Attend, AttentionCall, ScoreForm, nothing_seen, sinks_gradient
from opd.models.causal_lm import CausalLM, check_pieces
from opd.models.long_sequence import WHOLE, ChunkRunner, LayerCall, LayerMemory
from opd.models.routing import RoutedTokens
from opd.models.tiled_attention import see_more, seen_backward


@dataclass(frozen=True, slots=True)
class QuerySegment:
    """Queries of one rank in one sequence, and their visible keys."""

    queries: slice
    """Range in the rank's tokens."""
    keys: slice
    """Range in all packed tokens, from the start of the sequence to the last query."""

    @property
    def first_index(self) -> int:
        """Index of its first query among the packed tokens."""
        return self.keys.stop - (self.queries.stop - self.queries.start)

    def visible_keys(self, window: int | None) -> range:
        """Return the packed tokens of `keys` inside a window."""
        start = self.keys.start if window is None else max(self.keys.start, self.first_index - window + 1)
        return range(start, self.keys.stop)


@dataclass(frozen=True, slots=True)
class TokenShare:
    """A rank's share of packed tokens."""

    input_ids: Tensor
    """[t] int64. Padding is at the end of the last block and belongs to no sequence."""
    position_ids: Tensor
    """[t] int64."""
    places: Tensor
    """[t] int64: index of each token among the packed tokens. `T` and above is padding."""
    segments: tuple[QuerySegment, ...]


class ContextParallel:
    """The ranks of `group`, which make every call with the same packed tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def local_share(self, input_ids: Tensor, position_ids: Tensor, bounds: Sequence[int]) -> TokenShare:
        """Return this rank's share of sequences packed end to end, `bounds` [B + 1]."""
        tokens = bounds[-1]
        block = max(1, -(-tokens // (2 * self.size)))
        ends = [*bounds, 2 * self.size * block]  # the padding is a sequence of its own
        parts = [self.rank, 2 * self.size - 1 - self.rank]
        places = torch.cat([torch.arange(part * block, (part + 1) * block) for part in parts])
        segments = [
            QuerySegment(slice(first - start + at, last - start + at), slice(lower, last))
            for at, start in ((index * block, part * block) for index, part in enumerate(parts))
            for lower, upper in pairwise(ends)
            if (first := max(lower, start)) < (last := min(upper, start + block))
        ]
        indices = places.clamp(max=tokens - 1).to(input_ids.device)
        return TokenShare(
            input_ids[indices], position_ids[indices], places.to(indices.device), tuple(segments)
        )

    def ring_tensors(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank's `[Hkv, t, d]`, this rank's first, each with its owner. The next one travels
        while the caller works with one.
        """
        for turn in range(self.size):
            last = turn + 1 == self.size
            coming, works = (mine, []) if last else self._pass_on(mine)
            yield (self.rank - turn) % self.size, mine
            for work in works:
                work.wait()
            mine = coming

    def shift_ring(self, mine: Tensor) -> Tensor:
        """Send `mine` to the next rank. Return the previous rank's, of the same form."""
        if self.size == 1:
            return mine
        coming, works = self._pass_on(mine)
        for work in works:
            work.wait()
        return coming

    def _pass_on(self, mine: Tensor) -> tuple[Tensor, list[dist.Work]]:
        coming = torch.empty_like(mine)
        successor, predecessor = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        send = dist.P2POp(dist.isend, mine, group=self.group, group_peer=successor)
        receive = dist.P2POp(dist.irecv, coming, group=self.group, group_peer=predecessor)
        return coming, dist.batch_isend_irecv([send, receive])

    def sum_ranks(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor


@dataclass(frozen=True, slots=True)
class Ring:
    """Attention of a rank's queries on the keys and values of all ranks. All ranks make the same calls."""

    ranks: ContextParallel
    segments: tuple[QuerySegment, ...]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scores: ScoreForm) -> tuple[Tensor, Tensor]:
        """Return the output [H, t, dv] in the dtype of `value`, and the rows' log-sum-exp [H, t], float32 at
        least. `query` [H, t, d], `key` [Hkv, t, d] and `value` [Hkv, t, dv] are this rank's. No gradient.
        """
        state = nothing_seen(query, value, scores.sinks)
        for owner, pair in self.ranks.ring_tensors(torch.cat([key, value], dim=-1)):
            keys, values = pair.split((key.shape[-1], value.shape[-1]), dim=-1)
            for queries, visible, first in self._visible_pairs(owner, pair, scores):
                part = (query[:, queries], keys[:, visible], values[:, visible])
                see_more(part, scores, (state[0][:, queries], state[1][:, queries]), first)
        return state[0].to(value.dtype), state[1]

    def backward(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        ahead: tuple[Tensor, Tensor, Tensor],
        scores: ScoreForm,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients in `inputs`, this rank's query, key and value, from all ranks' queries.

        `ahead` is the output, the log-sum-exp and the incoming gradient [H, t, dv].
        """
        query, key, value = inputs
        sizes = (key.shape[-1], value.shape[-1])
        of_query = torch.zeros_like(query, dtype=ahead[1].dtype)
        joined = torch.cat([key, value], dim=-1)
        sums = torch.zeros_like(joined, dtype=of_query.dtype)
        for owner, pair in self.ranks.ring_tensors(joined):
            (keys, values), slopes = pair.split(sizes, dim=-1), sums.split(sizes, dim=-1)
            for queries, visible, first in self._visible_pairs(owner, pair, scores):
                part = (query[:, queries], keys[:, visible], values[:, visible])
                gradients = (of_query[:, queries], slopes[0][:, visible], slopes[1][:, visible])
                behind = (ahead[0][:, queries], ahead[1][:, queries], ahead[2][:, queries])
                seen_backward(part, behind, gradients, scores, first)
            sums = self.ranks.shift_ring(sums)
        gradients = (of_query, *sums.split(sizes, dim=-1))
        results = [x.to(like.dtype) for x, like in zip(gradients, inputs, strict=True)]
        return results[0], results[1], results[2]

    def _visible_pairs(
        self, owner: int, pair: Tensor, scores: ScoreForm
    ) -> Iterator[tuple[slice, slice, int]]:
        """Yield this rank's queries, the indices of the keys in `pair` [Hkv, t, n] of rank `owner` that they
        see, and the index of the first query, counted from the first of those keys.
        """
        block = pair.shape[1] // 2
        for segment in self.segments:
            visible = segment.visible_keys(scores.window)
            for at, part in ((0, owner), (block, 2 * self.ranks.size - 1 - owner)):
                low, high = max(visible.start, part * block), min(visible.stop, (part + 1) * block)
                if low < high:
                    shift = at - part * block
                    yield segment.queries, slice(low + shift, high + shift), segment.first_index - low


class ContextAttention:
    """The `attend` of a rank: its queries on all ranks' keys. All ranks run the same layers in step."""

    def __init__(self, ranks: ContextParallel, segments: Sequence[QuerySegment]) -> None:
        self._ring = Ring(ranks, tuple(segments))

    def __call__(self, call: AttentionCall) -> Tensor:
        """[1, t, H, dv]."""
        inputs = (*call.packed_inputs, call.sinks)
        return _RingAttention.apply(*inputs, self._ring, call.score_form).transpose(0, 1)[None]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        ring: Ring,
        scores: ScoreForm,
    ) -> Tensor:
        del sinks  # the input for autograd
        output, logsumexp = ring.forward(query, key, value, scores)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.ring, ctx.scores = ring, scores
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        ahead = (output, logsumexp, upstream)
        of_inputs = ctx.ring.backward((query, key, value), ahead, ctx.scores)
        return (*of_inputs, sinks_gradient(ctx.scores.sinks, ahead), None, None)


def shared_hidden(
    model: CausalLM,
    share: TokenShare,
    ranks: ContextParallel,
    memory: LayerMemory = WHOLE,
    routed: RoutedTokens | None = None,
) -> Tensor:
    """Return `[t, D]`, the last hidden states of this rank's tokens. Gradients of parameters are the part of
    its tokens. Every rank calls it, and runs the backward, equally often. More tokens of a rank than
    `memory.chunk` go through the layers in chunks. Its `routed` tokens go to the experts that it names.
    Raises `ModelError` if the architecture cannot do that.
    """
    ids, positions = share.input_ids, share.position_ids
    if memory.chunk is not None and memory.runs_chunked(ids.numel()):
        check_pieces(model)
        pieces = SharedChunkRunner(ranks, share.segments, ids.numel(), memory.chunk)
        with model.replaying(routed), model.layers_as_compiled():
            return model.run_pieces(ids, positions, pieces)
    with model.replaying(routed), model.layers_as_compiled(recompute=memory.recompute):
        return model.run(ids, positions, ContextAttention(ranks, share.segments))


class SharedChunkRunner(ChunkRunner):
    """Runs a rank's `tokens` in chunks of at most `chunk`. `segments` are the visible keys of their queries.

    All ranks call the same layers in step.
    """

    def __init__(
        self, ranks: ContextParallel, segments: Sequence[QuerySegment], tokens: int, chunk: int
    ) -> None:
        super().__init__(tokens, [slice(at, min(at + chunk, tokens)) for at in range(0, tokens, chunk)])
        self._ring = Ring(ranks, tuple(segments))

    def chunk_attentions(self, hidden: Tensor, call: LayerCall) -> Iterator[tuple[slice, Attend]]:
        inputs, scores = self._project_tokens(hidden, call)
        output, _ = self._ring.forward(*inputs, scores)
        for span in self.spans:
            yield span, _KnownAttention(output[:, span])

    def attending_backward(self, hidden: Tensor, upstream: Tensor, call: LayerCall) -> Tensor:
        inputs, scores = self._project_tokens(hidden, call)
        output, logsumexp = self._ring.forward(*inputs, scores)
        gradient, of_output = torch.empty_like(hidden), torch.empty_like(output)
        for span in self.spans:
            attention = _KnownAttention(output[:, span], of_output[:, span])
            gradient[:, span] = self.differentiate_chunk(hidden, upstream, call, span, attention)
        ahead = (output, logsumexp, of_output)
        slopes = self._ring.backward(inputs, ahead, scores)
        of_sinks = sinks_gradient(scores.sinks, ahead)
        for span in self.spans:
            leaf = hidden[:, span].detach().requires_grad_()
            with torch.enable_grad():
                projected = self.project_chunk(leaf, call, span)
                assert projected is not None
                roots, their_slopes = list(projected.packed_inputs), [slope[:, span] for slope in slopes]
                if of_sinks is not None and projected.sinks is not None and projected.sinks.requires_grad:
                    roots.append(projected.sinks)
                    their_slopes.append(of_sinks)
                    of_sinks = None  # once for all tokens
                torch.autograd.backward(roots, their_slopes)
            assert leaf.grad is not None
            gradient[:, span] += leaf.grad
        return gradient

    @torch.no_grad()
    def _project_tokens(
        self, hidden: Tensor, call: LayerCall
    ) -> tuple[tuple[Tensor, Tensor, Tensor], ScoreForm]:
        """Return queries, keys and values of all of this rank's tokens, and the layer's score parameters."""
        projected = [self.project_chunk(hidden[:, span], call, span) for span in self.spans]
        calls = [one for one in projected if one is not None]
        if len(calls) < len(projected):
            raise ModelError("a layer without attention cannot run in pieces; leave sequence_chunk out.")
        query, key, value = (
            torch.cat(parts, dim=1) for parts in zip(*(one.packed_inputs for one in calls), strict=True)
        )
        return (query, key, value), calls[0].score_form


@dataclass(slots=True)
class _KnownAttention:
    """The `attend` of a chunk whose output `[H, t, dv]` is known. It writes the incoming gradient to
    `of_output`. Queries, keys and values get none here.
    """

    output: Tensor
    of_output: Tensor | None = None

    def __call__(self, call: AttentionCall) -> Tensor:
        """[1, t, H, dv]."""
        return _KnownOutput.apply(call.query, self.output, self.of_output).transpose(0, 1)[None]


class _KnownOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, output: Tensor, of_output: Tensor | None) -> Tensor:
        del query  # the input for autograd
        ctx.of_output = of_output
        return output.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        ctx.of_output.copy_(upstream)
        return None, None, None
