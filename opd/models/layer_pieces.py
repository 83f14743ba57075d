"""Decoder layers called on one piece of the tokens after another, in the place of their own forward.

Everything in a decoder layer but its attention treats tokens one by one, so the family's own layer is called
on pieces; how the queries of a piece see keys of other pieces is a subclass's. Between layers only the hidden
states [T, D] stay: the backward of a layer computes each piece again and differentiates it at once.
(Recomputation: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opd.errors import ModelError
from opd.models.attention import Attend, AttentionCall

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

    def keys(self, piece: Tensor, call: LayerCall, span: slice) -> tuple[Tensor, ...]:
        """Keys `[Hkv, t, d]` and values of a piece of the hidden states; nothing after them is computed.
        Empty if the layer has no attention.
        """
        known = _Keys()
        with suppress(_KeysKnownError):
            call.layer(piece, **self.cut(call.arguments, span, known))
        return known.found

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


class _KeysKnownError(Exception):
    """Ends a layer early: its keys and values were all that was wanted."""


class _Keys:
    """An `attend` that keeps keys and values, and ends the layer."""

    found: tuple[Tensor, ...] = ()

    def __call__(self, call: AttentionCall) -> Tensor:
        self.found = (call.key[0], call.value[0])
        raise _KeysKnownError


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
