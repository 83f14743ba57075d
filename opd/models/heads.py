"""The head of a Hugging Face causal LM as an `opd.kernels.head.Head`, and the probe that proves it right.

Checks made once when a model is loaded, so that an unsupported architecture stops early.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from opd.errors import ModelError
from opd.kernels.head import Head
from opd.models.attention import ATTENTION_NAME, AttentionCall, PackedAttention

if TYPE_CHECKING:
    from opd.models.causal_lm import CausalLM

_DIVISORS = ("logits_scaling",)  # Granite, MiniCPM 3
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # Cohere, Falcon H1, Muse Spark
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")  # Gemma 2/3, RecurrentGemma
_MULTIPLY_BY_LOGITS_SCALING = ("hyperclovax",)

PROBE_LOGIT = 40.0
"""Size of the largest logit in the probe: large enough that a missing softcap shows at random weights."""


def head_form(config: Any) -> tuple[float, float | None]:
    """(scale, softcap) of the head a Hugging Face configuration describes."""
    scale = 1.0
    for name in _FACTORS:
        scale *= _number(config, name) or 1.0
    for name in _DIVISORS:
        value = _number(config, name) or 1.0
        scale = scale * value if config.model_type in _MULTIPLY_BY_LOGITS_SCALING else scale / value
    softcaps = [value for name in _SOFTCAPS if (value := _number(config, name)) is not None]
    return scale, softcaps[0] if softcaps else None


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else None


def head_of(module: Any, config: Any, vocab_size: int | None = None) -> Head:
    """The head of `module`, sharing its parameters, over its first `vocab_size` tokens.

    Raises `ModelError` if the output embedding is missing, is not linear, or is smaller than `vocab_size`.
    """
    linear = module.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ModelError(
            f"{type(module).__name__} has no linear output head ({type(linear).__name__}); only causal"
            " language models with one linear head can be used."
        )
    if vocab_size is not None and vocab_size > linear.weight.shape[0]:
        raise ModelError(
            f"the head of {type(module).__name__} has {linear.weight.shape[0]} rows, fewer than the"
            f" {vocab_size} tokens asked for; use the tokenizer the model was made for."
        )
    scale, softcap = head_form(config)
    return Head(linear.weight, bias=linear.bias, scale=scale, softcap=softcap, vocab_size=vocab_size)


@torch.no_grad()
def check_head(model: CausalLM) -> None:
    """Compare `model.head()` with the model's own logits on a few tokens.

    The last hidden states are scaled up inside the probe so that the largest logit is about `PROBE_LOGIT`:
    a softcap that is missing or extra then shows even at random weights. Raises `ModelError` if they differ.
    """
    head = model.head()
    ids = torch.arange(8, device=model.device) % model.vocab_size
    positions = torch.arange(8, device=model.device)
    hidden = model.run(ids, positions, PackedAttention([0, 8]))
    linear = hidden.double() @ head.weight.double().T
    gain = PROBE_LOGIT / max(float(linear.abs().max()) * abs(head.scale), 1e-6)

    seen: list[Tensor] = []

    def amplify(_module: nn.Module, _args: tuple, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * gain
        seen.append(output.last_hidden_state)
        return output

    handle = model.decoder.register_forward_hook(amplify)
    try:
        own = model.module(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, attend=PackedAttention([0, 8])
        ).logits[0]
    finally:
        handle.remove()
    ours = head.logits(seen[0][0])
    tolerance = 1e-3 if own.dtype in (torch.float32, torch.float64) else 5e-2
    difference = float((ours - own.to(ours.dtype)).abs().max())
    if not difference <= tolerance * max(1.0, float(own.abs().max())):
        raise ModelError(
            f"the head of {type(model.module).__name__} is not of a known form: logits rebuilt from its"
            f" weight, bias, scale {head.scale:g} and softcap {head.softcap} differ from the model's own by"
            f" {difference:.3g}; this architecture cannot be trained exactly."
        )


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
