"""Long sequences through decoder layers piece by piece, forward and backward, in bounded memory.

A layer's forward runs with an `attend` that keeps the keys and values of the pieces before. Its backward
computes the keys and values again, then goes through the pieces from the last to the first, each one computed
again and differentiated at once, with the gradient of the keys and values it saw added up for the pieces
before it.

Memory of `T` tokens: `T x D` for each layer's input, `T x 4 Hkv d` for one layer's keys, values and their
gradients, and one piece's activations. [T, T] and [T, intermediate size] never exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from opd.models.attention import Attend, AttentionCall, PackedAttention
from opd.models.block_attention import Scores, attend, attend_backward
from opd.models.layer_pieces import LayerCall, LayerPieces


@dataclass(frozen=True, slots=True)
class Piece:
    """The packed tokens `start ... stop - 1`: several whole sequences, or a part of one."""

    start: int
    stop: int
    bounds: tuple[int, ...]
    """Of its sequences, counted from `start`; where it is part of one, `(0, stop - start)`."""
    sequence: tuple[int, int] | None = None
    """The packed tokens of the sequence it is a part of; `None` for whole sequences."""

    @property
    def span(self) -> slice:
        """Its packed tokens."""
        return slice(self.start, self.stop)


def pieces_of(cu_seqlens: Sequence[int], chunk: int) -> list[Piece]:
    """Cut packed sequences into pieces of at most `chunk` tokens; only those longer than that are cut."""
    pieces: list[Piece] = []
    begin, bounds = 0, [0]

    def whole() -> None:
        if bounds[-1] > 0:
            pieces.append(Piece(begin, begin + bounds[-1], tuple(bounds)))

    for start, stop in pairwise(cu_seqlens):
        if stop - begin > chunk:
            whole()
            begin, bounds = start, [0]
        if stop - start > chunk:
            for first in range(start, stop, chunk):
                last = min(first + chunk, stop)
                pieces.append(Piece(first, last, (0, last - first), (start, stop)))
            begin = stop
        else:
            bounds.append(stop - begin)
    whole()
    return pieces


class _Cache:
    """Keys and values of one layer and one long sequence, and their gradients in a backward."""

    def __init__(self, sequence: tuple[int, int]) -> None:
        self.start, self.stop = sequence
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.gradients: tuple[Tensor, ...] | None = None

    def put(self, piece: Piece, key: Tensor, value: Tensor) -> slice:
        """Keep the keys and values of `piece`; returns their place."""
        place = slice(piece.start - self.start, piece.stop - self.start)
        if self.keys is None or self.values is None:
            length = self.stop - self.start
            self.keys, self.values = (x.new_empty(x.shape[0], length, x.shape[2]) for x in (key, value))
        self.keys[:, place], self.values[:, place] = key, value
        return place

    def until(self, place: slice) -> tuple[Tensor, Tensor]:
        """Keys and values from the start of the sequence to the end of `place`."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, : place.stop], self.values[:, : place.stop]

    def gradients_until(self, place: slice) -> tuple[Tensor, ...]:
        if self.gradients is None:
            assert self.keys is not None
            assert self.values is not None
            dtype = torch.promote_types(self.keys.dtype, torch.float32)
            self.gradients = tuple(torch.zeros_like(x, dtype=dtype) for x in (self.keys, self.values))
        return tuple(gradient[:, : place.stop] for gradient in self.gradients)


class _PieceAttention(torch.autograd.Function):
    """The queries of a piece on its own keys and those before it.

    Its backward adds the gradient of the keys before it to the cache, and returns for its own keys what this
    piece and all after it gave: those came first.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, cache: _Cache, piece: Piece, scores: Scores
    ) -> Tensor:
        place = cache.put(piece, key, value)
        output, logsumexp = attend(query, *cache.until(place), scores)
        ctx.save_for_backward(query, output, logsumexp)
        ctx.cache, ctx.place, ctx.scores = cache, place, scores
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, output, logsumexp = ctx.saved_tensors
        key, value = ctx.cache.until(ctx.place)
        sums = ctx.cache.gradients_until(ctx.place)
        of_query = attend_backward(query, key, value, (output, logsumexp, upstream), sums, ctx.scores)
        own = (x[:, ctx.place].to(like.dtype) for x, like in zip(sums, (key, value), strict=True))
        return of_query, *own, None, None, None


@dataclass(slots=True)
class _PieceAttend:
    """The `attend` of one piece of a long sequence."""

    cache: _Cache
    piece: Piece

    def __call__(self, call: AttentionCall) -> Tensor:
        scores = Scores(call.scaling, call.softcap, call.sliding_window)
        inputs = (call.query[0], call.key[0], call.value[0])
        return _PieceAttention.apply(*inputs, self.cache, self.piece, scores).transpose(0, 1)[None]


class ChunkedLayers(LayerPieces):
    """Runs decoder layers over packed sequences in pieces of at most `chunk` tokens."""

    def __init__(self, cu_seqlens: Sequence[int], chunk: int) -> None:
        self.pieces = pieces_of(cu_seqlens, chunk)
        super().__init__(cu_seqlens[-1], [piece.span for piece in self.pieces])

    def attentions(self, hidden: Tensor, call: LayerCall) -> Iterator[tuple[slice, Attend]]:
        """Those of one sequence share a cache, which goes with the last."""
        del hidden, call
        cache: _Cache | None = None
        for piece in self.pieces:
            if piece.sequence is None:
                cache = None
                yield piece.span, PackedAttention(list(piece.bounds))
                continue
            if cache is None or (cache.start, cache.stop) != piece.sequence:
                cache = _Cache(piece.sequence)
            yield piece.span, _PieceAttend(cache, piece)

    def attending_backward(self, hidden: Tensor, upstream: Tensor, call: LayerCall) -> Tensor:
        gradient = torch.empty_like(hidden)
        caches: dict[tuple[int, int], _Cache] = {}
        for piece in reversed(self.pieces):
            attention: Attend = PackedAttention(list(piece.bounds))
            if piece.sequence is not None:
                if piece.sequence not in caches:
                    caches = {piece.sequence: self._filled(hidden, call, piece.sequence)}
                attention = _PieceAttend(caches[piece.sequence], piece)
            gradient[:, piece.span] = self.differentiate(hidden, upstream, call, piece.span, attention)
        return gradient

    @torch.no_grad()
    def _filled(self, hidden: Tensor, call: LayerCall, sequence: tuple[int, int]) -> _Cache:
        """The keys and values of all pieces of `sequence` but the last, which computes its own."""
        cache = _Cache(sequence)
        for piece in [piece for piece in self.pieces if piece.sequence == sequence][:-1]:
            found = self.keys(hidden[:, piece.span], call, piece.span)
            if found:
                cache.put(piece, *found)
        return cache
