"""A decoder's forward and backward in less memory: layers computed again, long sequences in pieces.

Shapes: `T` packed tokens, `D` hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opd.errors import ModelError
from opd.models.attention import PackedAttention
from opd.models.chunked_layers import ChunkedLayers
from opd.models.layer_pieces import Layer, LayerPieces

if TYPE_CHECKING:
    from opd.models.causal_lm import CausalLM

FINAL_NORMS = ("norm", "final_layernorm", "ln_f")
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


def hidden_in_pieces(
    model: CausalLM, input_ids: Tensor, position_ids: Tensor, bounds: Sequence[int], chunk: int
) -> Tensor:
    """[T, D] of sequences packed end to end (`bounds` [B + 1]); see `chunked_layers` for what it keeps.

    Without a gradient (a prefill) that is one [T, D], which every layer overwrites.

    Raises `ModelError` if the architecture's layers cannot be called piece by piece.
    """
    check_pieces(model)
    return run_pieces(model, input_ids, position_ids, ChunkedLayers(bounds, chunk))


def run_pieces(model: CausalLM, input_ids: Tensor, position_ids: Tensor, pieces: LayerPieces) -> Tensor:
    """`model.run`, in these `pieces`."""
    with pieces.installed(model.decoder.layers, final_norm(model.decoder)):
        return model.run(input_ids, position_ids, pieces)


@contextmanager
def recomputed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """While the block runs, `layers` keep only their input; the backward computes the rest again."""
    with ExitStack() as undo:
        for layer in layers:
            layer.forward = _checkpointed(layer.forward)
            undo.callback(delattr, layer, "forward")
        yield


def check_pieces(model: CausalLM) -> None:
    """`ModelError` unless `model` gives the same hidden states in pieces as whole; tried once."""
    if model.pieces_checked:
        return
    ids = torch.arange(13, device=model.device) * 5 % model.vocab_size
    positions = torch.arange(13, device=model.device)
    try:
        with torch.no_grad():
            whole = model.run(ids, positions, PackedAttention([0, 13])).float()
            pieces = run_pieces(model, ids, positions, ChunkedLayers([0, 13], 5)).float()
    except (RuntimeError, AttributeError, TypeError, IndexError) as error:
        raise ModelError(
            f"{type(model.module).__name__} cannot run a sequence in pieces: {error}; leave"
            " sequence_chunk out."
        ) from error
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 1e-1
    difference = float((whole - pieces).abs().max())
    if not difference <= tolerance * max(1.0, float(whole.abs().max())):
        raise ModelError(
            f"{type(model.module).__name__} gives other hidden states in pieces than whole (difference"
            f" {difference:.3g}); leave sequence_chunk out."
        )
    model.pieces_checked = True


def _checkpointed(layer: Layer) -> Layer:
    def forward(hidden_states: Tensor, **arguments: Any) -> Tensor:
        output = checkpoint(layer, hidden_states, use_reentrant=False, preserve_rng_state=False, **arguments)
        assert isinstance(output, Tensor)
        return output

    return forward
