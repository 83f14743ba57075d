"""Long sequences shared by ranks, each of which runs its tokens through the layers piece by piece.

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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opd.errors import ModelError
from opd.models.attention import Attend, AttentionCall
from opd.models.block_attention import Scores
from opd.models.layer_pieces import LayerCall, LayerPieces
from opd.models.segments import Segment, attend_segments, attend_segments_backward, cut_segments

if TYPE_CHECKING:
    from opd.models.context_parallel import ContextParallel


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
