"""Check if opd can compute an architecture, on an empty model before weights are read.

Families are not listed by name. The decoder is built on the meta device and run on a few tokens, which costs
no memory and no arithmetic. Every layer has to attend once, through the attention interface of transformers,
with the arguments that the decoder got. Faults that only numbers show (tokens mixed or hidden elsewhere) are
found once the weights are loaded.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

from opd.errors import ModelError, reason_of
from opd.kernels.head import Head
from opd.models.attention import (
    ATTENTION_NAME,
    AttentionCall,
    PackedAttention,
    install_attention,
    refuse_pieces,
)
from opd.models.hf_folder import positions_of
from opd.models.hf_weights import disable_padding, quiet_loading
from opd.models.long_sequence import ChunkedLayers, decoder_of, layers_of, replace_forward
from opd.models.recurrence import UNMIXED, MixerCall, measured_states, step_fault

if TYPE_CHECKING:
    from opd.models.causal_lm import CausalLM

ANOTHER = "choose a model of another architecture"
"""Advice for an unsupported architecture."""
_TOKENS = 5
PROBE_LOGIT = 40.0
"""Largest logit in probes, large enough to show a missing softcap at random weights."""
_DIVISORS = ("logits_scaling",)  # Granite, MiniCPM 3
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # Cohere, Falcon H1, Muse Spark
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")  # Gemma 2/3, RecurrentGemma
_MULTIPLY_BY_LOGITS_SCALING = ("hyperclovax",)
_NULL_SIGNS = ("NoneType", "empty() takes", "cannot access local variable")
"""Parts of what code says that computes with a null."""
_NO_NUMBERS = ("meta tensor", "view size is not compatible", "expected scalar type", "size of dim 1 (")
"""Parts of what code says that computes otherwise without numbers, in bfloat16, or on so few tokens."""
_causes: dict[tuple[type, str], tuple[str, str | None]] = {}
"""Configuration -> class and reason of refusal. A run checks the same ones repeatedly."""


def check_architecture(config: PreTrainedConfig, where: str | Path) -> None:
    """Check the causal language model of `config`, read from `where`, without weights.

    Raises `ModelError`, the same for every caller, if it cannot be run, trained or sampled here.
    """
    settings = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    key = type(config), repr(settings)
    if key not in _causes:
        try:
            found = _find_cause(config, where)
        except ModelError as error:
            _refuse_null(config, where, str(error))
            raise
        _refuse_null(config, where, found[1] or "")
        _causes[key] = found
    name, cause = _causes[key]
    if cause is not None:
        raise ModelError(f"{where} is of class {name}, which cannot be used here: {cause}.")


def _find_cause(config: PreTrainedConfig, where: str | Path) -> tuple[str, str | None]:
    module = empty_model(config, where, torch.bfloat16)  # bfloat16 multiplies experts without numbers
    return type(module).__name__, _refusal_cause(module) or _head_cause(module)


def _refuse_null(config: PreTrainedConfig, where: str | Path, told: str) -> None:
    """Raise `ModelError` for a setting that is null, if with a value there `told` is not said any more."""
    if not any(sign in told for sign in _NULL_SIGNS):
        return
    defaults: dict[str, Any] = {}
    with suppress(Exception):  # a configuration may need arguments
        defaults = type(config)().to_dict()
    nulls = [(name, defaults.get(name)) for name, value in config.to_dict().items() if value is None]
    for name, default, value in ((n, d, v) for n, d in nulls for v in ((1, 8) if d is None else (d,))):
        changed = copy.deepcopy(config)
        try:
            setattr(changed, name, value)
            now = _find_cause(changed, where)[1] or ""
        except ModelError as error:
            now = str(error)
        except Exception:  # the setting takes no such value
            continue
        if not now or (now != told and default is not None):
            file = Path(where) / "config.json" if Path(where).is_dir() else where
            raise ModelError(
                f"{file} has null or nothing as {name}, of which a model of type {config.model_type} needs a"
                " value; write the one that it was trained with."
            )


def empty_model(config: PreTrainedConfig, where: str | Path, dtype: torch.dtype | None = None) -> Any:
    """Build the causal language model of `config` on the meta device, with the angles of short sequences.

    Raises `ModelError` if transformers has none, or none with a replaceable attention.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        parts = [name for name in ("vision", "audio") if hasattr(config, f"{name}_config")]
        detail = f" ({' and '.join(parts)} beside text)" if parts else ""
        if not parts and getattr(config, "is_encoder_decoder", False):
            detail = " (an encoder and a decoder)"
        raise ModelError(
            f"{where} describes a model of type {config.model_type}{detail}, of which"
            f" transformers {transformers.__version__} has no causal language model; choose a text model, or"
            " the folder of its language part."
        )
    options = {} if dtype is None else {"dtype": dtype}
    try:
        with torch.device("meta"), quiet_loading():
            module: Any = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION_NAME, trust_remote_code=False, **options
            )
    except Exception as error:  # transformers raises whatever the family's constructor meets
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
            name = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "__name__", config.model_type)
            raise ModelError(
                f"{where} is of class {name}, which cannot be used here: it chooses its attention among its"
                f" own and takes none from outside; {ANOTHER}."
            ) from None
        raise ModelError(f"{where} does not describe a causal language model: {reason_of(error)}") from None
    disable_padding(module)
    install_attention(module)
    for part in module.modules():
        kind = getattr(part, "rope_type", None)  # types that read positions would read numbers
        if isinstance(kind, str | dict):
            part.rope_type = "default" if isinstance(kind, str) else dict.fromkeys(kind, "default")
    return module.eval()


@torch.no_grad()
def _refusal_cause(module: Any) -> str | None:
    """Return why `module` (on the meta device) cannot be used, with advice. `None` if nothing shows."""
    decoder, head = decoder_of(module), module.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return f"it has no linear output head; {ANOTHER}"
    if getattr(module.config.get_text_config(), "is_causal", None) is False:  # read where masks are made
        return f"its configuration says is_causal false, so it sees tokens to come; {ANOTHER}"
    counts = [count for _, count, size in expert_parts(module) if size]
    chosen = chosen_experts(module.config.get_text_config())
    if chosen is not None and counts and not 0 <= chosen[1] <= min(counts):
        return (
            f"its {chosen[0]} is {chosen[1]}, and a layer has {min(counts)} experts to choose from; mend its"
            " configuration"
        )
    recorder = Recorder(PackedAttention([0, _TOKENS]))
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    placed = "position_ids" in inspect.signature(decoder.forward).parameters
    positions = {"position_ids": ids} if placed else {}
    try:
        with quiet_loading():  # silence hints about faster kernels
            output = decoder(input_ids=ids, use_cache=False, attend=recorder, **positions)
    except ModelError as error:
        return str(error).rstrip(".")
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or any(sign in str(error) for sign in _NO_NUMBERS):
            return None  # its code reads numbers, and there are none yet
        return f"its sizes do not fit together ({reason_of(error).rstrip('.')}); mend its configuration"
    except Exception as error:  # transformers raises whatever its code meets
        return f"its own code cannot run packed sequences ({reason_of(error).rstrip('.')}); {ANOTHER}"
    if not hasattr(output, "last_hidden_state"):
        return f"its decoder gives no last hidden states without a head; {ANOTHER}"
    if output.last_hidden_state.shape[-1] != head.in_features:
        return f"its head does not read the hidden states as its decoder gives them; {ANOTHER}"
    cause = layers_cause(decoder, module.config.get_text_config(), recorder)
    if cause is None and (fault := step_fault(module)) is not None:
        return f"{fault}; {ANOTHER}"
    if cause is None and not placed:
        return (
            "its decoder takes no positions (position_ids) and counts them from the first of all tokens it is"
            f" given, which several sequences in one pass would share; {ANOTHER}"
        )
    return cause


_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


def chosen_experts(config: Any) -> tuple[str, int] | None:
    """Return how many experts a token is routed to by `config`, and the setting that says so. `None` if none
    does.
    """
    counts = ((name, getattr(config, name, None)) for name in _CHOSEN)
    return next(((name, value) for name, value in counts if isinstance(value, int)), None)


def expert_parts(module: Any) -> Iterator[tuple[nn.Module, int, int]]:
    """Yield each part of `module` that has one tensor for all experts, with their number and parameters."""
    for part in module.modules():
        count, parameters = getattr(part, "num_experts", None), list(part.parameters(recurse=False))
        if (
            isinstance(count, int)
            and parameters
            and all(tuple(one.shape[:1]) == (count,) for one in parameters)
        ):
            yield part, count, sum(one.numel() for one in parameters if one.ndim > 2)


def head_form(config: Any) -> tuple[float, float | None]:
    """Return (scale, softcap) of the head that a Hugging Face configuration describes.

    Only settings of its family count. A config.json may name others, which are ignored.
    """
    scale = 1.0
    for name in _FACTORS:
        scale *= _config_number(config, name) or 1.0
    for name in _DIVISORS:
        value = _config_number(config, name) or 1.0
        scale = scale * value if config.model_type in _MULTIPLY_BY_LOGITS_SCALING else scale / value
    softcaps = [value for name in _SOFTCAPS if (value := _config_number(config, name)) is not None]
    return scale, softcaps[0] if softcaps else None


def _config_number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None) if hasattr(type(config), name) else None
    return float(value) if isinstance(value, int | float) else None


@torch.no_grad()
def _head_cause(module: Any) -> str | None:
    """Return why the logits of `module` (on the meta device) differ from `head_form`. `None` if they agree,
    or if its code does more with them than can be tried without weights.
    """
    decoder, head = decoder_of(module), module.get_output_embeddings()
    scale, softcap = head_form(module.config.get_text_config())
    if softcap is not None and not softcap > 0:
        return f"its logits are divided by a softcap of {softcap:g}; write null in its place for none"
    if not head.in_features:
        return "its hidden states have no numbers (hidden_size 0); give the configuration of the weights"
    hidden = torch.linspace(-1, 1, head.in_features)[None].repeat(_TOKENS, 1)
    weight = torch.linspace(-1, 1, _TOKENS)[:, None].repeat(1, head.in_features) * hidden[:1].sign()
    weight *= PROBE_LOGIT / (abs(scale) * float((hidden @ weight.T).abs().max()))

    def multiply_head(states: Tensor, *_: Any, **__: Any) -> Tensor:
        return states @ weight.T

    def finish_decoder(*_: Any, **__: Any) -> Any:
        return BaseModelOutputWithPast(last_hidden_state=hidden[None])

    ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
    try:
        with replace_forward(decoder, finish_decoder), replace_forward(head, multiply_head):
            expected = module(input_ids=ids, use_cache=False).logits[0].float()
    except Exception:  # its code may raise anything; loaded weights show it
        return None
    ours = Head(weight, scale=scale, softcap=softcap).logits(hidden)
    if expected.shape == ours.shape and bool(((expected - ours).abs() <= 1e-3 * expected.abs().max()).all()):
        return None
    return (
        f"its head is not of a known form: its logits are not the weight's with scale {scale:g} and softcap"
        f" {softcap}; {ANOTHER}"
    )


class Recorder:
    """Forwards calls and records each layer's window."""

    def __init__(self, attend: PackedAttention, config: PreTrainedConfig | None = None) -> None:
        """`config`: of the model, to measure its states."""
        self.attend, self._config = attend, config
        self.windows: dict[int, int | None] = {}
        self.kv_numbers = 0
        """Count of numbers in all keys and values."""
        self.again: int | None = None
        """A layer that attended twice."""
        self.choosing: set[int] = set()
        """Layers whose queries see chosen keys."""
        self.mixed: set[int] = set()
        """Layers that carry a state."""
        self.states: list[Tensor] = []
        """All states of a sequence."""

    def __call__(self, call: AttentionCall) -> Tensor:
        if call.layer_index in self.windows:
            self.again = call.layer_index
        self.windows[call.layer_index] = call.sliding_window or call.chunk
        if call.key_layer is None:
            self.kv_numbers += call.key.numel() + call.value.numel()
        if call.choice is not None:
            self.choosing.add(call.layer_index)
            if call.choice.layer_index == call.layer_index:
                self.kv_numbers += call.choice.keys.numel()
        return self.attend(call)

    def mix(self, call: MixerCall) -> Tensor:
        if call.layer_index in self.mixed:
            self.again = call.layer_index
        self.mixed.add(call.layer_index)
        if self._config is not None:
            self.states += measured_states(call, self._config)
        return self.attend.mix(call)


@torch.no_grad()
def cached_layers(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Return how many layers of a model of `config` keep keys and values, and the bytes of the states that
    layers keep of a sequence if it computes in `dtype`. Needs layers that carry states.
    """
    module = empty_model(config, "the model", torch.bfloat16)  # bfloat16 multiplies experts without numbers
    recorder = Recorder(PackedAttention([0, _TOKENS]), module.config.get_text_config())
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    decoder_of(module)(input_ids=ids, position_ids=ids, use_cache=False, attend=recorder)
    width = {torch.bfloat16: dtype.itemsize}  # other states keep theirs
    sizes = [state.numel() * width.get(state.dtype, state.itemsize) for state in recorder.states]
    return len(recorder.windows), sum(sizes)


def layers_cause(decoder: Any, config: Any, recorder: Recorder) -> str | None:
    """Return why packed attention cannot replace the layers that `recorder` saw. `None` if it can."""
    stated = getattr(config, "layer_types", None)
    kinds = stated or ["full_attention"] * config.num_hidden_layers
    for layer, kind in enumerate(kinds):
        if kind in UNMIXED or (layer in recorder.mixed and not kind.startswith("hybrid")):
            continue
        if layer not in recorder.windows:
            layers = layers_of(decoder)
            parts = [type(part).__name__ for part in layers[layer].children()] if layer < len(layers) else []
            mixer = next((f" ({name})" for name in parts if not _NO_MIXER.search(name)), "")
            return (
                f"its layer {layer}{mixer} does not attend through the attention interface of transformers,"
                " as recurrences, convolutions and attention of a model's own (with ALiBi,"
                f" say) do not; {ANOTHER}"
            )
        # The pass is shorter than any real window, so its numbers cannot show a missing one.
        windowed = kind in ("sliding_attention", "hybrid_sliding", "chunked_attention")
        supported = windowed or kind == "full_attention" or (kind == "hybrid" and layer in recorder.mixed)
        supported = supported or (kind == "indexed_attention" and layer in recorder.choosing)
        if not supported or (windowed and recorder.windows[layer] is None):
            return (
                f"its layer {layer} is of kind {kind!r}, which packed attention does not support; {ANOTHER}"
            )
    if recorder.again is not None:
        return (
            f"its layer {recorder.again} attends more than once, and a layer's keys and values are kept once;"
            f" {ANOTHER}"
        )
    window, positions = getattr(config, "sliding_window", None), positions_of(config)
    if (
        window
        and not stated
        and set(recorder.windows.values()) == {None}
        and window < (positions or math.inf)
    ):
        return (
            f"its layers do not say the sliding_window {window} of its configuration to their attention, and"
            " generate of transformers keeps so many tokens all the same, so that longer ones differ; set"
            f" max_position_embeddings to {window}, or sliding_window to max_position_embeddings if it was"
            " trained without a window"
        )
    return None


_NO_MIXER = re.compile(r"(Norm|MLP|Mlp|Linear|Dropout|Experts|M[oO][eE](Block|Layer)?|FeedForward|Router)$")


@torch.no_grad()
def check_attention(model: CausalLM) -> None:
    """Compare a packed forward of two sequences with the architecture's own eager attention, one by one.

    It finds architectures that mix tokens outside the attention interface (recurrences, convolutions), attend
    in both directions, or bias their scores. Raises `ModelError` if the results differ, or if a sliding or
    chunked layer does not pass its window.
    """
    lengths = (5, 7)
    ids = torch.arange(sum(lengths), device=model.device) * 7 % model.vocab_size
    positions = torch.cat([torch.arange(length, device=model.device) for length in lengths])
    recorder = Recorder(PackedAttention([0, lengths[0], sum(lengths)]), model.config)
    try:
        packed = model.run(ids, positions, recorder)
        with _eager_attention(model):
            alone = [
                model.decoder(input_ids=part[None], use_cache=False).last_hidden_state[0]
                for part in ids.split(lengths)
            ]
    except ModelError as error:
        raise ModelError(f"{type(model.module).__name__} cannot be used here: {error}") from None
    except (RuntimeError, AttributeError, TypeError, LookupError) as error:
        raise ModelError(
            f"{type(model.module).__name__} cannot run a few tokens: {reason_of(error)}; check its"
            f" configuration, or {ANOTHER}."
        ) from error
    expected = torch.cat(alone)
    if not torch.isfinite(expected).all():
        dtype = str(expected.dtype).removeprefix("torch.")
        mend = "use bfloat16, whose range is that of float32" if dtype == "float16" else "check its weights"
        raise ModelError(
            f"{type(model.module).__name__} gives hidden states in {dtype} that are not finite (NaN or"
            f" infinity) by its own code; {mend}, or what its configuration multiplies and divides by."
        )
    apart = _largest_difference(model, packed, expected)
    if apart is not None:
        raise ModelError(
            f"{type(model.module).__name__} gives other hidden states for packed sequences than one by one"
            f" (difference {apart:.3g}): it mixes tokens, or hides some, elsewhere than in its attention;"
            f" {ANOTHER}."
        )
    model.kv_numbers = recorder.kv_numbers // sum(lengths)
    model.state_bytes = sum(state.nbytes for state in recorder.states)
    cause = layers_cause(model.decoder, model.config, recorder)
    if cause is not None:
        raise ModelError(f"{type(model.module).__name__} cannot be used here: {cause}.")


def _largest_difference(model: CausalLM, actual: Tensor, expected: Tensor) -> float | None:
    """Return the largest difference of two computations of hidden states `[T, D]`, or `None` if they agree.

    In 16 bits a rounding may send a token to other experts and change what follows, so half of the tokens
    have to agree. A fault of attention would change more.
    """
    exact = actual.dtype in (torch.float32, torch.float64)
    rows = (actual.float() - expected.float()).abs().amax(-1)
    same = rows <= (1e-3 if exact else 1e-1) * max(1.0, float(expected.abs().max()))
    routed = not exact and any(parameter.ndim == 3 for parameter in model.module.parameters())
    enough = float(same.float().mean()) >= 0.5 if routed else bool(same.all())
    return None if enough else float(rows.max())


@contextmanager
def _eager_attention(model: CausalLM) -> Iterator[None]:
    model.module.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.module.set_attn_implementation(ATTENTION_NAME)


def check_pieces(model: CausalLM) -> None:
    """Raise `ModelError` unless `model` gives the same hidden states in chunks. Checked once."""
    if model.pieces_checked:
        return
    refuse_pieces(model.config)
    ids = torch.arange(13, device=model.device) * 5 % model.vocab_size
    positions = torch.arange(13, device=model.device)
    try:
        with torch.no_grad():
            expected = model.run(ids, positions, PackedAttention([0, 13]))
            pieces = model.run_pieces(ids, positions, ChunkedLayers([0, 13], 5))
    except (RuntimeError, AttributeError, TypeError, IndexError) as error:
        raise ModelError(
            f"{type(model.module).__name__} cannot run a sequence in pieces: {reason_of(error)}; leave"
            " sequence_chunk out."
        ) from error
    apart = _largest_difference(model, pieces, expected)
    if apart is not None:
        raise ModelError(
            f"{type(model.module).__name__} gives other hidden states in pieces than whole (difference"
            f" {apart:.3g}); leave sequence_chunk out."
        )
    model.pieces_checked = True
