"""A decoder's forward and backward in less memory: layers computed again, long sequences in pieces.

Everything in a decoder layer but its attention treats tokens one by one, so the family's own layer is called
on pieces of the tokens; how the queries of a piece see keys of other pieces is a subclass's. Between layers
only the hidden states [T, D] stay: the backward of a layer computes each piece again and differentiates it at
once. (Recomputation: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".)

In a long sequence a layer's forward runs with an `attend` that keeps the keys and values of the pieces
before. Its backward computes them again, then goes through the pieces from the last to the first, each one
computed again and differentiated at once, with the gradient of the keys and values it saw added up for the
pieces before it.

Memory of `T` tokens: `T x D` for each layer's input, `T x 4 Hkv d` for one layer's keys, values and their
gradients, and one piece's activations. [T, T] and [T, intermediate size] never exist. On a GPU the layers'
inputs wait in the host's memory where they would take much of the device's.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from opd.errors import ModelError
from opd.foreign import free_memory
from opd.models.attention import Attend, AttentionCall, PackedAttention, ScoreForm
from opd.models.tiled_attention import see_keys, seen_backward

log = logging.getLogger(__name__)

Layer = Callable[..., Tensor]
"""`layer(hidden [1, t, D], **arguments) -> [1, t, D]`."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A layer, or the norm after the last one, as a decoder calls it on all tokens."""

    layer: Layer
    arguments: dict[str, Any]
    attends: bool = True


class LayerPieces(ABC):
    """Runs decoder layers over `tokens` tokens in pieces: the tokens `piece.start ... piece.stop - 1`."""

    def __init__(self, tokens: int, spans: Sequence[slice]) -> None:
        self.tokens = tokens
        self.spans = list(spans)
        self._layers = 0
        self._on_host: bool | None = None
        """Whether inputs wait there; asked once, at the first layer."""

    @abstractmethod
    def attentions(self, hidden: Tensor, call: LayerCall) -> Iterator[tuple[slice, Attend]]:
        """Each piece with its `attend`, in an order in which they can be run. `hidden` [1, T, D] is what the
        layer is given; pieces that were run may be overwritten."""

    @abstractmethod
    def attending_backward(self, hidden: Tensor, upstream: Tensor, call: LayerCall) -> Tensor:
        """`backward` of a layer that attends."""

    def __call__(self, call: AttentionCall) -> Tensor:
        """Stands where a decoder wants an `attend`; raises `ModelError` if a layer was not replaced."""
        raise ModelError(
            f"layer {call.layer_index} is not one of its decoder's `layers`; this architecture cannot run"
            " long sequences in pieces: leave sequence_chunk out."
        )

    @contextmanager
    def installed(self, layers: Sequence[nn.Module], norm: nn.Module | None) -> Iterator[None]:
        """While the block runs, `layers` and the final `norm` work piece by piece."""
        self._layers = len(layers)
        with ExitStack() as undo:
            for module in [*layers, *([] if norm is None else [norm])]:
                module.forward = self._stand_in(module.forward, attends=module is not norm)
                undo.callback(delattr, module, "forward")
            yield

    def _stand_in(self, layer: Layer, attends: bool) -> Layer:
        def forward(hidden_states: Tensor, **arguments: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return self.prefill(hidden_states, arguments, layer, attends=attends)
            # Without it a layer behind frozen embeddings would have no input that asks for a gradient.
            anchor = torch.empty(0, requires_grad=True)
            if self._on_host is None:
                self._on_host = hidden_states.is_cuda and host_is_wanted(
                    self._layers * hidden_states.nbytes, hidden_states.device
                )
            with kept_on_host() if self._on_host else nullcontext():
                return _Recomputed.apply(hidden_states, anchor, self, LayerCall(layer, arguments, attends))

        return forward

    @torch.no_grad()
    def prefill(
        self, hidden: Tensor, arguments: dict[str, Any], layer: Layer, *, attends: bool = True
    ) -> Tensor:
        """`layer` on `hidden` [1, T, D], which is overwritten with the result and returned."""
        call = LayerCall(layer, arguments, attends)
        apart: Iterator[tuple[slice, Attend | None]] = ((span, None) for span in self.spans)
        for span, attention in self.attentions(hidden, call) if attends else apart:
            hidden[:, span] = layer(hidden[:, span], **self.cut(arguments, span, attention))
        return hidden

    def backward(self, hidden: Tensor, upstream: Tensor, call: LayerCall) -> Tensor:
        """The gradient in `hidden` [1, T, D]; those in the layer's parameters are added to their `.grad`."""
        if call.attends:
            return self.attending_backward(hidden, upstream, call)
        gradient = torch.empty_like(hidden)
        for span in self.spans:
            gradient[:, span] = self.differentiate(hidden, upstream, call, span)
        return gradient

    def differentiate(
        self, hidden: Tensor, upstream: Tensor, call: LayerCall, span: slice, attention: Attend | None = None
    ) -> Tensor:
        """The gradient in one piece of `hidden`, which is computed again for it."""
        given = hidden[:, span].detach().requires_grad_()
        with torch.enable_grad():
            output = call.layer(given, **self.cut(call.arguments, span, attention))
        torch.autograd.backward(output, upstream[:, span])
        assert given.grad is not None
        return given.grad

    def projected(self, piece: Tensor, call: LayerCall, span: slice) -> AttentionCall | None:
        """What a layer attends with for a piece of the hidden states; nothing after that is computed. `None`
        if the layer has no attention.
        """
        projected = _Projected()
        with suppress(_ProjectedError):
            call.layer(piece, **self.cut(call.arguments, span, projected))
        return projected.found

    def cut(self, arguments: dict[str, Any], span: slice, attention: Attend | None) -> dict[str, Any]:
        """The arguments of a layer for one piece: what has a row per token is cut to its rows."""
        own = {name: self._cut(value, span) for name, value in arguments.items()}
        return own if attention is None else own | {"attend": attention}

    def _cut(self, value: Any, span: slice) -> Any:
        if isinstance(value, Tensor):
            per_token = value.ndim > 1 and value.shape[1] == self.tokens
            return value[:, span] if per_token else value
        if isinstance(value, tuple | list):
            return type(value)(self._cut(part, span) for part in value)
        return value


HOST_SHARE = 4
"""Layers' inputs wait on the host if they take more than one part in so many of a device's free memory."""


def host_is_wanted(needed: int, device: torch.device) -> bool:
    """Whether `needed` bytes of layers' inputs shall wait in the host's memory, which all devices share."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + cached
    host = free_memory() // torch.cuda.device_count()
    wanted = needed * HOST_SHARE > free and 2 * needed <= host  # pinned memory comes in powers of two
    if wanted:
        _say_host()
    return wanted


@lru_cache(maxsize=1)
def _say_host() -> None:
    log.info("the layers' inputs of long sequences wait in the host's memory: the device has little to spare")


def kept_on_host() -> AbstractContextManager[None]:
    """While it is entered, what is saved for a backward waits in pinned memory of the host, or on the device
    where that is not to be had. Both copies are made in the order of the stream; the host waits for neither.
    """

    def put(tensor: Tensor) -> tuple[torch.device, Tensor]:
        try:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        except RuntimeError:
            return tensor.device, tensor
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def take(kept: tuple[torch.device, Tensor]) -> Tensor:
        return kept[1].to(kept[0], non_blocking=True)

    return saved_tensors_hooks(put, take)


class _ProjectedError(Exception):
    """Ends a layer early: what it attends with was all that was wanted."""


class _Projected:
    """An `attend` that keeps what it is called with, and ends the layer."""

    found: AttentionCall | None = None

    def __call__(self, call: AttentionCall) -> Tensor:
        self.found = call
        raise _ProjectedError


class _Recomputed(torch.autograd.Function):
    """A layer of which only the input is kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, pieces: LayerPieces, call: LayerCall) -> Tensor:
        del anchor
        ctx.save_for_backward(hidden)
        ctx.pieces, ctx.call = pieces, call
        return pieces.prefill(hidden.clone(), call.arguments, call.layer, attends=call.attends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        return ctx.pieces.backward(hidden, upstream, ctx.call), None, None, None


@dataclass(frozen=True, slots=True)
class SequencePiece:
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


def pieces_of(cu_seqlens: Sequence[int], chunk: int) -> list[SequencePiece]:
    """Cut packed sequences into pieces of at most `chunk` tokens; only those longer than that are cut."""
    pieces: list[SequencePiece] = []
    begin, bounds = 0, [0]

    def whole() -> None:
        if bounds[-1] > 0:
            pieces.append(SequencePiece(begin, begin + bounds[-1], tuple(bounds)))

    for start, stop in pairwise(cu_seqlens):
        if stop - begin > chunk:
            whole()
            begin, bounds = start, [0]
        if stop - start > chunk:
            for first in range(start, stop, chunk):
                last = min(first + chunk, stop)
                pieces.append(SequencePiece(first, last, (0, last - first), (start, stop)))
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

    def put(self, piece: SequencePiece, key: Tensor, value: Tensor) -> slice:
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
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: _Cache,
        piece: SequencePiece,
        scores: ScoreForm,
    ) -> Tensor:
        place = cache.put(piece, key, value)
        output, logsumexp = see_keys(query, *cache.until(place), scores)
        ctx.save_for_backward(query, output, logsumexp)
        ctx.cache, ctx.place, ctx.scores = cache, place, scores
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, output, logsumexp = ctx.saved_tensors
        key, value = ctx.cache.until(ctx.place)
        sums = ctx.cache.gradients_until(ctx.place)
        of_query = torch.zeros_like(query, dtype=logsumexp.dtype)
        gradients = (of_query, *sums)
        inputs, ahead = (query, key, value), (output, logsumexp, upstream)
        seen_backward(inputs, ahead, gradients, ctx.scores, key.shape[1] - query.shape[1])
        own = (x[:, ctx.place].to(like.dtype) for x, like in zip(sums, (key, value), strict=True))
        return of_query.to(query.dtype), *own, None, None, None


@dataclass(slots=True)
class _PieceAttend:
    """The `attend` of one piece of a long sequence."""

    cache: _Cache
    piece: SequencePiece

    def __call__(self, call: AttentionCall) -> Tensor:
        return _PieceAttention.apply(*call.packed, self.cache, self.piece, call.scores).transpose(0, 1)[None]


class ChunkedLayers(LayerPieces):
    """Runs decoder layers over packed sequences in pieces of at most `chunk` tokens."""

    def __init__(self, cu_seqlens: Sequence[int], chunk: int) -> None:
        self.pieces = pieces_of(cu_seqlens, chunk)
        super().__init__(cu_seqlens[-1], [piece.span for piece in self.pieces])
        # Shared by all layers, as are the indices that they make.
        self._whole = {p: PackedAttention(list(p.bounds)) for p in self.pieces if p.sequence is None}

    def attentions(self, hidden: Tensor, call: LayerCall) -> Iterator[tuple[slice, Attend]]:
        """Those of one sequence share a cache, which goes with the last."""
        del hidden, call
        cache: _Cache | None = None
        for piece in self.pieces:
            if piece.sequence is None:
                cache = None
                yield piece.span, self._whole[piece]
                continue
            if cache is None or (cache.start, cache.stop) != piece.sequence:
                cache = _Cache(piece.sequence)
            yield piece.span, _PieceAttend(cache, piece)

    def attending_backward(self, hidden: Tensor, upstream: Tensor, call: LayerCall) -> Tensor:
        gradient = torch.empty_like(hidden)
        caches: dict[tuple[int, int], _Cache] = {}
        for piece in reversed(self.pieces):
            attention: Attend | None = self._whole.get(piece)
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
            found = self.projected(hidden[:, piece.span], call, piece.span)
            if found is not None:
                cache.put(piece, found.key[0], found.value[0])
        return cache


FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm", "layer_norm")
"""What families call the norm after the last layer."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What a forward pass keeps for its backward."""

    recompute: bool = False
    """Only the input of each layer; the rest is computed again."""
    chunk: int | None = None
    """More packed tokens than this go through each layer in pieces of so many, and are computed again."""

    def cuts(self, tokens: int) -> bool:
        """Whether so many packed tokens are run in pieces."""
        return self.chunk is not None and tokens > self.chunk


WHOLE = LayerMemory()
"""Everything is kept."""


def final_norm(decoder: Any) -> nn.Module | None:
    """The module behind the last layer; `None` if it has none of the usual names."""
    found = [getattr(decoder, name) for name in FINAL_NORMS if hasattr(decoder, name)]
    return found[0] if found else None


def layers_of(decoder: Any) -> list[nn.Module]:
    """The decoder's layers, whatever it calls them; none if it has no list of them, or several."""
    lists = [part for part in decoder.children() if isinstance(part, nn.ModuleList)]
    return list(lists[0]) if len(lists) == 1 else []


@contextmanager
def recomputed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """While the block runs, `layers` keep only their input; the backward computes the rest again."""
    with ExitStack() as undo:
        for layer in layers:
            layer.forward = _checkpointed(layer.forward)
            undo.callback(delattr, layer, "forward")
        yield


def _checkpointed(layer: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden_states: Tensor, *others: Any, **arguments: Any) -> Any:
        return checkpoint(
            layer, hidden_states, *others, use_reentrant=False, preserve_rng_state=False, **arguments
        )

    return forward
