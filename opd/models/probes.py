"""Checks made once when a model is loaded, so that an unsupported architecture stops early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opd.errors import ModelError
from opd.models.attention import ATTENTION_NAME, AttentionCall, PackedAttention

if TYPE_CHECKING:
    from opd.models.causal_lm import CausalLM


@torch.no_grad()
def check_attention(model: CausalLM) -> None:
    """Compare a packed forward of two sequences with the architecture's own eager attention, one by one.

    Catches architectures that mix tokens outside the attention interface (recurrences, convolutions), attend
    in both directions, or bias their scores. Raises `ModelError` if they differ, or if a layer that is
    declared as sliding or chunked does not say its window.
    """
    lengths = (5, 7)
    ids = torch.arange(sum(lengths), device=model.device) * 7 % model.vocab_size
    positions = torch.cat([torch.arange(length, device=model.device) for length in lengths])
    recorder = _Recorder(PackedAttention([0, lengths[0], sum(lengths)]))
    try:
        packed = model.run(ids, positions, recorder)
        with _eager(model):
            alone = [
                model.decoder(input_ids=part[None], use_cache=False).last_hidden_state[0]
                for part in ids.split(lengths)
            ]
    except (RuntimeError, AttributeError, TypeError, IndexError) as error:
        raise ModelError(
            f"{type(model.module).__name__} cannot run a few tokens: {error}; check its configuration, or"
            " choose a model of another architecture."
        ) from error
    expected = torch.cat(alone).float()
    difference = float((packed.float() - expected).abs().max())
    tolerance = 1e-3 if packed.dtype in (torch.float32, torch.float64) else 1e-1
    if not difference <= tolerance * max(1.0, float(expected.abs().max())):
        raise ModelError(
            f"{type(model.module).__name__} gives other hidden states for packed sequences than one by one"
            f" (difference {difference:.3g}); this architecture cannot be used."
        )
    _check_windows(model, recorder.windows)


class _Recorder:
    """Passes calls on and notes each layer's window."""

    def __init__(self, attend: PackedAttention) -> None:
        self.attend = attend
        self.windows: dict[int, int | None] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        self.windows[call.layer_index] = call.sliding_window
        return self.attend(call)


def _check_windows(model: CausalLM, windows: dict[int, int | None]) -> None:
    # The probe is shorter than any real window, so its numbers cannot show a window that was not passed on.
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    for layer, kind in enumerate(kinds):
        known = kind == "full_attention" or (kind == "sliding_attention" and windows.get(layer) is not None)
        if layer not in windows or not known:
            raise ModelError(
                f"layer {layer} of {type(model.module).__name__} is of kind {kind!r}, which packed attention"
                " does not support; choose a model of another architecture."
            )


@contextmanager
def _eager(model: CausalLM) -> Iterator[None]:
    model.module.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.module.set_attn_implementation(ATTENTION_NAME)
