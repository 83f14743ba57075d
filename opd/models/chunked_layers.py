"""Decoder layers run on a long sequence piece by piece, forward and backward, in bounded memory.

Everything in a decoder layer but its attention treats tokens one by one. So a layer is called on one piece
of the tokens at a time, with an `attend` that keeps the keys and values of the pieces before: the forward of
a family is not written a second time. Between layers only the hidden states [T, D] stay. The backward of a
layer computes its keys and values again, then goes through the pieces from the last to the first, each one
computed again and differentiated at once, with the gradient of the keys and values it saw added up for the
pieces before it. (Recomputation: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".)

Memory of `T` tokens: `T x D` for each layer's input, `T x 4 Hkv d` for one layer's keys, values and their
gradients, and one piece's activations. [T, T] and [T, intermediate size] never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from opd.errors import ModelError
from opd.models.attention import Attend, AttentionCall, PackedAttention
from opd.models.block_attention import Scores, attend, attend_backward

Layer = Callable[..., Tensor]
"""`layer(hidden [1, t, D], **arguments) -> [1, t, D]`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The packed tokens `start ... stop - 1`: several whole sequences, or a part of one."""

    start: int
    stop: int
    bounds: tuple[int, ...]
    """Of its sequences, counted from `start`; where it is part of one, `(0, stop - start)`."""
    sequence: tuple[int, int] | None = None
    """The packed tokens of the sequence it is a part of; `None` for whole sequences."""


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


class _KeysKnownError(Exception):
    """Ends a layer early: its keys and values were all that was wanted."""


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
    only_keys: bool = False

    def __call__(self, call: AttentionCall) -> Tensor:
        if self.only_keys:
            self.cache.put(self.piece, call.key[0], call.value[0])
            raise _KeysKnownError
        scores = Scores(call.scaling, call.softcap, call.sliding_window)
        inputs = (call.query[0], call.key[0], call.value[0])
        return _PieceAttention.apply(*inputs, self.cache, self.piece, scores).transpose(0, 1)[None]


class ChunkedLayers:
    """Runs decoder layers over packed sequences in pieces of at most `chunk` tokens."""

    def __init__(self, cu_seqlens: Sequence[int], chunk: int) -> None:
        self.tokens = cu_seqlens[-1]
        self.pieces = pieces_of(cu_seqlens, chunk)

    def __call__(self, call: AttentionCall) -> Tensor:
        """Stands where a decoder wants an `attend`; raises `ModelError` if a layer was not replaced."""
        raise ModelError(
            f"layer {call.layer_index} is not one of its decoder's `layers`; this architecture cannot run"
            " long sequences in pieces: leave sequence_chunk out."
        )

    @contextmanager
    def installed(self, layers: Sequence[nn.Module], norm: nn.Module | None) -> Iterator[None]:
        """While the block runs, `layers` and the final `norm` work piece by piece."""
        with ExitStack() as undo:
            for module in [*layers, *([] if norm is None else [norm])]:
                module.forward = self._stand_in(module.forward, attends=module is not norm)
                undo.callback(delattr, module, "forward")
            yield

    def _stand_in(self, layer: Layer, attends: bool) -> Layer:
        def forward(hidden_states: Tensor, **arguments: Any) -> Tensor:
            job = _Job(self, layer, arguments, attends)
            if not torch.is_grad_enabled():
                return self.prefill(hidden_states, arguments, layer, attends=attends)
            # Without it a layer behind frozen embeddings would have no input that asks for a gradient.
            anchor = torch.empty(0, requires_grad=True)
            return _Recomputed.apply(hidden_states, anchor, job)

        return forward

    @torch.no_grad()
    def prefill(
        self, hidden: Tensor, arguments: dict[str, Any], layer: Layer, *, attends: bool = True
    ) -> Tensor:
        """`layer` on `hidden` [1, T, D], which is overwritten with the result and returned."""
        for piece, attention in self._attentions(self.pieces):
            part = self.cut(arguments, piece, attention if attends else None)
            hidden[:, piece.start : piece.stop] = layer(hidden[:, piece.start : piece.stop], **part)
        return hidden

    def cut(self, arguments: dict[str, Any], piece: Piece, attention: Attend | None) -> dict[str, Any]:
        """The arguments of a layer for one piece: what has a row per token is cut to its rows."""
        own = {name: self._cut(value, piece) for name, value in arguments.items()}
        return own if attention is None else own | {"attend": attention}

    def _cut(self, value: Any, piece: Piece) -> Any:
        if isinstance(value, Tensor):
            per_token = value.ndim > 1 and value.shape[1] == self.tokens
            return value[:, piece.start : piece.stop] if per_token else value
        if isinstance(value, tuple | list):
            return type(value)(self._cut(part, piece) for part in value)
        return value

    def _attentions(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Attend]]:
        """Each piece with its `attend`; those of one sequence share a cache, which goes with the last."""
        cache: _Cache | None = None
        for piece in pieces:
            if piece.sequence is None:
                cache = None
                yield piece, PackedAttention(list(piece.bounds))
                continue
            if cache is None or (cache.start, cache.stop) != piece.sequence:
                cache = _Cache(piece.sequence)
            yield piece, _PieceAttend(cache, piece)


@dataclass(slots=True)
class _Job:
    """One layer's call in a forward pass that will be differentiated."""

    chunks: ChunkedLayers
    layer: Layer
    arguments: dict[str, Any]
    attends: bool

    def forward(self, hidden: Tensor) -> Tensor:
        """[1, T, D]; `hidden` stays as it is, the backward needs it."""
        return self.chunks.prefill(hidden.clone(), self.arguments, self.layer, attends=self.attends)

    def backward(self, hidden: Tensor, upstream: Tensor) -> Tensor:
        """The gradient in `hidden`; those in the layer's parameters are added to their `.grad`."""
        gradient = torch.empty_like(hidden)
        caches: dict[tuple[int, int], _Cache] = {}
        for piece in reversed(self.chunks.pieces):
            attention: Attend | None = None
            if self.attends:
                attention = PackedAttention(list(piece.bounds))
            if self.attends and piece.sequence is not None:
                if piece.sequence not in caches:
                    caches = {piece.sequence: self._keys(hidden, piece.sequence)}
                attention = _PieceAttend(caches[piece.sequence], piece)
            own = slice(piece.start, piece.stop)
            given = hidden[:, own].detach().requires_grad_()
            with torch.enable_grad():
                output = self.layer(given, **self.chunks.cut(self.arguments, piece, attention))
            torch.autograd.backward(output, upstream[:, own])
            assert given.grad is not None
            gradient[:, own] = given.grad
        return gradient

    @torch.no_grad()
    def _keys(self, hidden: Tensor, sequence: tuple[int, int]) -> _Cache:
        """The keys and values of all pieces of `sequence` but the last, which computes its own."""
        cache = _Cache(sequence)
        for piece in [piece for piece in self.chunks.pieces if piece.sequence == sequence][:-1]:
            attention = _PieceAttend(cache, piece, only_keys=True)
            try:
                part = self.chunks.cut(self.arguments, piece, attention)
                self.layer(hidden[:, piece.start : piece.stop], **part)
            except _KeysKnownError:
                continue
        return cache


class _Recomputed(torch.autograd.Function):
    """A layer of which only the input is kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, job: _Job) -> Tensor:
        del anchor
        ctx.save_for_backward(hidden)
        ctx.job = job
        return job.forward(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        return ctx.job.backward(hidden, upstream), None, None
