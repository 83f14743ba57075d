"""The two forwards of the engine: prefill of full prompts, and decode of one token per running request.

Prefill fills the cache, decode reads it. If the model is small, a Hugging Face module forward of one token
per request spends most of its time outside arithmetic. For plain families the lean decoder computes the same
from fused weights. Other families use the module itself.

Shapes: `B` running requests, `R` slots to prefill, `P` distinct sequences among them, `T` packed tokens, `D`
hidden size, `H` query heads, `Hkv` key-value heads, `d` head size, `L` cached positions, `F` MLP width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from opd.errors import ModelError
from opd.kernels.head import Head
from opd.kernels.projection import DecodeWeight, wide_product
from opd.models.attention import AttentionCall, PackedAttention, ScoreForm, key_layer, softmax_with_sinks
from opd.models.causal_lm import Attend, CausalLM, WeightsDigest, held_bytes, tensors_of
from opd.models.key_choice import KeyChoice
from opd.models.recurrence import UNMIXED, MixerCall
from opd.rollout.batch import Band, RunningBatch, bands_of
from opd.rollout.expert_recorder import ExpertRecorder
from opd.rollout.kv_cache import KVCache, LayerCache, PromptKV, Window
from opd.rollout.sampling import mask_rows, sample_tokens
from opd.rollout.slot_states import SlotGroup, SlotStates, group_slots


class PrefillAttention:
    """Packed causal attention that also writes keys and values into every slot that shares a sequence."""

    def __init__(
        self,
        cache: KVCache,
        lengths: np.ndarray,
        source: np.ndarray,
        first_row: int,
        key_order: Tensor | None = None,
    ) -> None:
        """`lengths` [P]: packed sequences. `source` [R]: index of the sequence that each slot from
        `first_row` on holds. `key_order` [d]: order of a key's features in the cache, if the decoder's
        differs from the module's.
        """
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        self._packed = PackedAttention(bounds)
        self._cache = cache
        self._source, self._first_row = source, first_row
        self._groups: list[SlotGroup] | None = None
        self._fill = cache.make_fill(bounds, source, first_row)
        self._key_order = key_order

    def __call__(self, call: AttentionCall) -> Tensor:
        cache = self._cache.get_layer(call.kept_at, call.key, call.value)
        key = call.key if self._key_order is None else call.key.index_select(-1, self._key_order)
        self._fill(cache, key[0], call.value[0])
        choice = call.choice
        if choice is not None and choice.layer_index == call.layer_index:
            keys = choice.keys[None, None]
            self._fill(self._cache.get_layer(choice.kept_at, keys, keys[..., :0]), keys[0], keys[0, ..., :0])
        return self._packed(call)

    def mix(self, call: MixerCall) -> Tensor:
        """[T, D]: mix each sequence from its first token on, and keep its states in its slots."""
        if self._groups is None:
            slots: list[list[int]] = [[] for _ in self._packed.bounds[1:]]
            for slot, number in enumerate(self._source.tolist(), self._first_row):
                slots[number].append(slot)
            self._groups = group_slots(self._packed.bounds, slots, call.hidden.device)
        assert self._cache.states is not None
        return self._cache.states.mix(call, self._groups, begins=True)


@dataclass(frozen=True, slots=True)
class Span:
    """The host's knowledge of the slots of a decode step. A captured step keeps it, so there it holds only
    how much is read.
    """

    rows: int
    window: int
    """Most cached positions that are read."""
    longest: int
    """Tokens of the fullest slot with its new one, at most `window`. Equal to `window` if only the device
    knows the positions."""
    equal: bool = False
    """True if all slots hold the same number of tokens."""
    bands: tuple[Band, ...] = ()
    """The slices that are read, `longest` positions of each slot. Empty: `window` positions of all slots."""

    @classmethod
    def for_positions(cls, positions: np.ndarray, cache: KVCache) -> Span:
        """Build the span of new tokens at `positions` [B]."""
        longest, equal = int(positions.max()) + 1, int(positions.min()) == int(positions.max())
        bands = [] if equal else bands_of(positions + 1, cache.position_bytes)
        read = tuple(replace(band, longest=cache.window_length(band.longest)) for band in bands)
        return cls(
            len(positions), cache.window_length(longest), longest, equal, read if len(read) > 1 else ()
        )

    @property
    def band_slices(self) -> tuple[Band, ...]:
        """Slots that are read in one slice, and the positions of each."""
        return self.bands or (Band(0, self.rows, self.window),)

    @property
    def position_count(self) -> int:
        """Number of positions read in a layer."""
        return sum(band.position_count for band in self.band_slices)


class CachedAttention(ABC):
    """Attention of `T` new tokens to the cached ones and to each other."""

    def __init__(self, cache: KVCache, positions: Tensor) -> None:
        """`positions` [T] int64, on the device: position of each new token in its slot."""
        self._cache, self.positions = cache, positions

    def __call__(self, call: AttentionCall) -> Tensor:
        """[1, T, H, d]: the hook of `opd.models.attention`."""
        call = call.at(lambda: self.positions)
        cache = self._cache.get_layer(call.kept_at, call.key, call.value)
        query, key, value = (x.transpose(0, 1) for x in call.packed_inputs)
        form = replace(call, chunk=None, choice=None).score_form
        form = replace(form, chunk=call.chunk, choice=call.choice)
        return self.attend(cache, query, key, value, form)[None]

    def choice_cache(self, choice: KeyChoice) -> LayerCache:
        """Return where the index keys of `choice` are kept."""
        keys = choice.keys[None, None]
        return self._cache.get_layer(choice.kept_at, keys, keys[..., :0])

    def mix(self, call: MixerCall) -> Tensor:
        """[T, D]: let the sequences of slots go on from their states."""
        if self._groups is None:
            bounds = self.added_bounds()
            slots = [[self.first_slot + number] for number in range(len(bounds) - 1)]
            self._groups = group_slots(bounds, slots, call.hidden.device)
        assert self._cache.states is not None
        return self._cache.states.mix(call, self._groups)

    first_slot = 0
    _groups: list[SlotGroup] | None = None

    def added_bounds(self) -> list[int]:
        """[R + 1]: bounds of the new tokens of the slots from `first_slot` on; by default one of each."""
        return list(range(len(self.positions) + 1))

    @abstractmethod
    def attend(self, cache: LayerCache, query: Tensor, key: Tensor, value: Tensor, form: ScoreForm) -> Tensor:
        """`query` [T, H, d], `key` and `value` [T, Hkv, d] -> [T, H, dv]."""


class DecodeAttention(CachedAttention):
    """One new token for each of the first `B` slots: append its key and value, attend to the cache."""

    def __init__(self, cache: KVCache, positions: Tensor, span: Span) -> None:
        """`positions` [B] int64, on the device: of the new tokens. Slot `b` then holds `positions[b] + 1`."""
        super().__init__(cache, positions)
        self._span = span
        self._slots = None if span.equal else torch.arange(span.rows, device=positions.device)
        self._biases: dict[tuple[int | None, int | None, int, int], Tensor | None] = {}

    def attend(self, cache: LayerCache, query: Tensor, key: Tensor, value: Tensor, form: ScoreForm) -> Tensor:
        """`query` [B, H, d], `key` and `value` [B, Hkv, d] of the new tokens -> [B, H, dv]."""
        self._write(cache, key, value)
        choice, outputs, chosen_from = form.choice, [], cache
        if choice is not None:
            chosen_from = self.choice_cache(choice)
            self._write(chosen_from, choice.keys[:, None], choice.keys[:, None, :0])
        for band in self._span.band_slices:
            window = cache.window_slice(band.first, band.stop, band.longest)
            case = (form.window, form.chunk, window.keys.shape[1], band.first)
            if case not in self._biases:
                self._biases[case] = self._make_bias(form, band.first, window.keys)
            bias = self._biases[case]
            if choice is not None and band.longest > choice.topk:
                held = chosen_from.window_slice(band.first, band.stop, band.longest).keys[:, 0]
                bias = self._chosen_bias(choice, band, held, window.keys)
            outputs.append(attend_cached(query[band.first : band.stop], window, bias, form))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _write(self, cache: LayerCache, key: Tensor, value: Tensor) -> None:
        if self._slots is None:
            rows, last = self._span.rows, self._span.longest - 1
            cache.keys[:rows].select(2, last).copy_(key)
            cache.values[:rows].select(2, last).copy_(value)
        else:
            cache.keys[self._slots, :, self.positions] = key
            cache.values[self._slots, :, self.positions] = value

    def _chosen_bias(self, choice: KeyChoice, band: Band, held: Tensor, keys: Tensor) -> Tensor:
        """[B * Hkv, 1, L] for `keys` [B, Hkv, L, d] of the slots of `band`: 0 for those that `choice` takes
        by the index keys `held` [B, L, d], else -inf.
        """
        rows = torch.arange(band.first, band.stop, device=keys.device)
        visible = torch.arange(keys.shape[2], device=keys.device) <= self.positions[rows, None, None]
        hidden = ~choice.choose(rows, held, visible)
        bias = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device)
        return bias.masked_fill_(hidden, float("-inf")).repeat_interleave(keys.shape[1], 0)

    def _make_bias(self, form: ScoreForm, first: int, keys: Tensor) -> Tensor | None:
        """[B * Hkv or 1, 1, L] for `keys` [B, Hkv, L, d] of the slots from `first` on: 0 if a slot sees a
        position, else -inf. `None` if all slots see everything.
        """
        span, length = self._span, keys.shape[2]
        sliding_window, chunk = (
            None if most is None or most >= span.longest else most for most in (form.window, form.chunk)
        )
        if span.equal and sliding_window is chunk is None and length == span.longest:
            return None
        column = torch.arange(length, device=keys.device)
        last = self.positions[first : first + (1 if span.equal else len(keys)), None]
        hidden = column > last
        if sliding_window is not None:
            hidden |= column <= last - sliding_window
        if chunk is not None:
            hidden |= column < last - last % chunk
        bias = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device)
        bias = bias.masked_fill_(hidden, float("-inf"))
        return (bias if span.equal else bias.repeat_interleave(keys.shape[1], 0))[:, None]


def attend_cached(query: Tensor, window: Window, bias: Tensor | None, form: ScoreForm) -> Tensor:
    """Attention of one query per slot: `query` [B, H, d] to the cached [B, Hkv, L, d] -> [B, H, dv].

    Batched matrix products over `B * Hkv`. For one query on CPU they are 3 to 4 times faster than
    `scaled_dot_product_attention`, whose kernel is made for many queries.
    """
    rows, heads, size = query.shape
    keys, values = window.transposed_keys, window.flat_values
    grouped = query.reshape(len(keys), -1, size)
    if bias is None or form.softcap is not None:
        scores = torch.baddbmm(grouped.new_empty(()), grouped, keys, beta=0, alpha=form.scaling)
        if form.softcap is not None:
            scores = torch.tanh(scores / form.softcap) * form.softcap
            scores = scores if bias is None else scores + bias
    else:
        scores = torch.baddbmm(bias, grouped, keys, alpha=form.scaling)
    sinks = form.sinks
    if sinks is not None:  # [B * Hkv, G, 1], as the scores
        sinks = sinks.expand(rows, -1).reshape(*grouped.shape[:2], 1)
    weights = softmax_with_sinks(scores, sinks).to(values.dtype)
    return torch.bmm(weights, values).view(rows, heads, -1)


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend only on the position, so one table serves every step."""


@dataclass(slots=True)
class LeanLayer:
    """One decoder layer's weights."""

    input_norm: Tensor
    """[D]."""
    qkv: DecodeWeight
    """[(H + 2 Hkv) d, D]."""
    qkv_bias: Tensor | None
    """[(H + 2 Hkv) d]."""
    qk_norms: tuple[Tensor, Tensor] | None
    """[d] each: query and key norms (Qwen3)."""
    output: DecodeWeight
    """[D, H d]."""
    mlp_norm: Tensor
    """[D]."""
    gate_up: DecodeWeight
    """[2 F, D]."""
    down: DecodeWeight
    """[D, F]."""
    form: ScoreForm

    @classmethod
    def from_layer(cls, layer: Any, config: Any, order: Tensor) -> LeanLayer:
        """Copy the weights of a Hugging Face decoder layer. `order` [d] rearranges the features of a head."""
        attention, mlp = layer.self_attn, layer.mlp
        size = len(order)

        def reorder_heads(x: Tensor) -> Tensor:
            return x.detach().unflatten(0, (-1, size))[:, order].flatten(0, 1)

        query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
        bias = None
        if query.bias is not None:
            bias = torch.cat([reorder_heads(query.bias), reorder_heads(key.bias), value.bias.detach()])
        normed = config.model_type == "qwen3"
        # Mistral's window is in the config, the Qwens' in the layer. Llama and Granite have none.
        window = config.sliding_window if config.model_type == "mistral" else None
        return cls(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=DecodeWeight(
                torch.cat([reorder_heads(query.weight), reorder_heads(key.weight), value.weight.detach()])
            ),
            qkv_bias=bias,
            qk_norms=(reorder_heads(attention.q_norm.weight), reorder_heads(attention.k_norm.weight))
            if normed
            else None,
            output=DecodeWeight(attention.o_proj.weight.detach()),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=DecodeWeight(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()),
            down=DecodeWeight(mlp.down_proj.weight.detach()),
            form=ScoreForm(float(attention.scaling), window=getattr(attention, "sliding_window", window)),
        )

    def move_to(self, old: LeanLayer) -> None:
        """Move into the memory of `old`, as far as the weights are copies of the model's."""
        for name in ("qkv", "gate_up", "qkv_bias"):
            if getattr(self, name) is not None:
                getattr(old, name).copy_(getattr(self, name))
                setattr(self, name, getattr(old, name))
        if self.qk_norms is not None and old.qk_norms is not None:
            for old_norm, norm in zip(old.qk_norms, self.qk_norms, strict=True):
                old_norm.copy_(norm)
            self.qk_norms = old.qk_norms

    def weight_tensors(self) -> list[Tensor]:
        """Its weights, in their memory layout."""
        weights = [x.laid_out for x in (self.qkv, self.output, self.gate_up, self.down)]
        others = (self.input_norm, self.qkv_bias, *(self.qk_norms or ()), self.mlp_norm)
        return weights + [x for x in others if x is not None]


class LeanDecoder:
    """Decode steps for the families of `FAMILIES`. Call `refresh_weights` after every change of weights."""

    def __init__(self, model: CausalLM) -> None:
        """Raises `ValueError` if `supports_model` is false for the model."""
        if not supports_model(model.config, model.layers):
            raise ValueError(f"the lean decoder does not know this form of {model.config.model_type}")
        self._model = model
        self._base: Any = model.decoder
        config = model.config
        attention = self._base.layers[0].self_attn
        self._size = int(attention.head_dim)
        self._heads = attention.q_proj.out_features // self._size
        self._shared = attention.k_proj.out_features // self._size
        self._eps = float(config.rms_norm_eps)
        # Features i and i + d/2 of a head rotate together. Adjacent, they are one complex number, and the
        # rotation is one product. Scores do not change if queries and keys are rearranged alike.
        half = torch.arange(self._size // 2, device=model.device)
        self.key_order = torch.stack([half, half + self._size // 2], dim=1).flatten()
        """[d]: order of the features of a key in the cache."""
        self._layers: list[LeanLayer] = []
        granite = config.model_type == "granite"
        self._embedding_scale = float(config.embedding_multiplier) if granite else 1.0
        self._residual_scale = float(config.residual_multiplier) if granite else 1.0
        self._layers: list[LeanLayer] = []
        self._rotary = torch.empty(0)
        self.refresh_weights()
        self.extend_rotary(256)

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Read the model's weights, on a GPU into the memory that captured steps read."""
        self._embedding = self._base.embed_tokens.weight.detach()
        self._final_norm = self._base.norm.weight.detach()
        old, self._layers = self._layers, []
        moves = self._embedding.device.type == "cpu"
        for layer in self._base.layers:
            if moves:
                del old[:1]  # frees memory for the new copies, so the system need not clear other pages
            self._layers.append(LeanLayer.from_layer(layer, self._model.config, self.key_order))
            if old and not moves:
                self._layers[-1].move_to(old.pop(0))

    def extend_rotary(self, tokens: int) -> None:
        """Extend the rotary table to `tokens` positions."""
        if tokens <= len(self._rotary):
            return
        # [length, d / 2] complex64: `cos + i sin` of each angle, by the model's own rotary embedding.
        length, half, device = max(256, 2 * (tokens - 1)), self._size // 2, self._embedding.device
        exact = torch.zeros(1, dtype=torch.float32, device=device)
        cos, sin = self._base.rotary_emb(exact, torch.arange(length, device=device)[None])
        self._rotary = torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())

    def drop_weights(self) -> None:
        """Drop every copy and view of the weights, until `refresh_weights`."""
        self._layers.clear()
        self._embedding = self._final_norm = torch.empty(0)

    def step_tensors(self) -> list[Tensor]:
        """All tensors that a step reads."""
        tensors = [self._embedding, self._final_norm, self._rotary]
        return tensors + [x for layer in self._layers for x in layer.weight_tensors()]

    def step(self, ids: Tensor, cache: KVCache, attention: CachedAttention) -> Tensor:
        """[T, D] last hidden states (after the final norm) of new tokens, `ids` [T] int64."""
        rotary = self._rotary.index_select(0, attention.positions)[:, None]
        heads, rotated, scale = self._heads, self._heads + self._shared, self._residual_scale
        hidden = self._embedding.index_select(0, ids)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        for index, layer in enumerate(self._layers):
            normed = self._rms_norm(hidden, layer.input_norm)
            qkv = layer.qkv.project_rows(normed, layer.qkv_bias).view(len(hidden), -1, self._size)
            query, key, value = qkv[:, :heads], qkv[:, heads:rotated], qkv[:, rotated:]
            if layer.qk_norms is not None:
                query.copy_(self._rms_norm(query, layer.qk_norms[0]))
                key.copy_(self._rms_norm(key, layer.qk_norms[1]))
            # Queries and keys are rotated in place, adjacent features as one complex number.
            pairs = qkv[:, :rotated].view(len(hidden), rotated, self._size // 2, 2)
            if pairs.dtype == torch.float32:
                torch.view_as_complex(pairs).mul_(rotary)
            else:
                pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * rotary))
            attended = attention.attend(cache.layers[index], query, key, value, layer.form)
            hidden = layer.output.add_product(hidden, attended.flatten(1), scale)
            normed = self._rms_norm(hidden, layer.mlp_norm)
            gate, up = layer.gate_up.project_rows(normed).chunk(2, dim=-1)
            hidden = layer.down.add_product(hidden, functional.silu(gate).mul_(up), scale)
        return self._rms_norm(hidden, self._final_norm)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._eps)


def supports_model(config: Any, layers: Iterable[Any]) -> bool:
    """Return True if `LeanDecoder` computes exactly the model of `config`, whose decoder has `layers`."""
    if config.model_type not in FAMILIES or getattr(config, "hidden_act", None) != "silu":
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in STATIC_ROPE or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return False
    return all(
        projection.bias is None
        for layer in layers
        for projection in (
            layer.self_attn.o_proj,
            layer.mlp.gate_proj,
            layer.mlp.up_proj,
            layer.mlp.down_proj,
        )
    )


PREFILL_TOKENS, PREFILL_TOKENS_DEVICE = 4096, 16_384
"""Packed tokens of one prefill forward, on a CPU and on CUDA. A longer single sequence gets a forward of its
own. With fewer tokens CUDA waits for launches."""


def prefill_tokens(device: torch.device) -> int:
    """Packed tokens of one prefill forward on `device`."""
    return PREFILL_TOKENS_DEVICE if device.type == "cuda" else PREFILL_TOKENS


@dataclass(slots=True)
class SharedPrompt:
    """A computed prompt whose next requests still wait for a slot."""

    tokens: bytes
    kv: PromptKV
    hidden: Tensor
    """[D] last hidden state of its last token."""
    choices: np.ndarray | None = None
    """[C, L, K]: its expert choices, if they are recorded."""


class Runner:
    """Runs the model against the cache. Every method runs under its `guard`."""

    guard: Callable[[], AbstractContextManager[object]] = torch.inference_mode
    """Context that disables gradients."""
    recorder: ExpertRecorder | None = None
    """Records the expert choices of every pass, if they are wanted."""
    most_kept = 0
    """Most tokens of a sampling mask; 0 records none."""

    def __init__(
        self,
        model: CausalLM,
        vocab_size: int | None = None,
        *,
        lean: bool | None = None,
        positions: int | None = None,
    ) -> None:
        """`vocab_size`: tokens that may be sampled, by default all. `lean`: use the lean decoder; `None` uses
        it if it knows the model. `positions`: the most that slots times tokens of the cache may be.
        """
        self.model = model
        self._vocab_size = vocab_size
        self.positions = positions
        self.cache = self._new_cache()
        self.prefilled_tokens = 0
        """Tokens that went through a prefill forward. A prompt shared by several requests counts once."""
        self.positions_read = self.positions_held = 0
        """Cached positions per layer: those decode steps have read so far, and those their requests held."""
        use_lean = supports_model(model.config, model.layers) if lean is None else lean
        self.lean = LeanDecoder(model) if use_lean else None
        self._shared_prompt: SharedPrompt | None = None
        self.head: Head | None = self._decode_head()
        """`None` while asleep."""

    def refresh_weights(self) -> None:
        """Take over new weights. Nothing computed with the old ones is used again."""
        self.clear_cache()
        if self.lean is not None:
            self.lean.refresh_weights()
        self.head = self._decode_head()

    def sleep(self) -> None:
        """Free the memory of the weights, also the model's own, until they are loaded and
        `refresh_weights` is called.
        """
        if self.lean is not None:
            self.lean.drop_weights()
        self.head = None
        self.model.free_weights()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], digest: WeightsDigest) -> None:
        """Copy new `weights` in place. `digest` receives the resulting weights. Raises `ModelError` if they
        have another form.
        """
        self.model.load_weights(weights, digest)

    def model_digest(self) -> str:
        """Digest of the weights that compute keys and values."""
        return self.model.digest()

    def drain(self) -> None:
        """Do nothing: no other rank needs passes of this one."""

    def stop_passes(self) -> None:
        """Do nothing: no other rank waits for this one."""

    def resident(self) -> dict[str, int]:
        """Bytes of weights, with the copies that decode makes of them, and of keys and values now."""
        weights = self.model.nbytes
        if self.head is not None:
            model = [tensor for kind in tensors_of(self.model.module) for tensor in kind]
            laid_out = [self.head.weight, *([] if self.lean is None else self.lean.step_tensors())]
            weights += held_bytes((*model, *laid_out)) - held_bytes(model)
        return {"engine_weights": weights, "engine_kv": self.cache.nbytes}

    def _decode_head(self) -> Head:
        """The model's head, in float32 if `Head.logits` would convert 16-bit weights at every step."""
        head = self.model.head(self._vocab_size)
        if head.weight.dtype not in (torch.float16, torch.bfloat16) or wide_product(head.weight, head.weight):
            return head
        return replace(head, weight=head.weight.detach()[: head.vocabulary].float(), vocab_size=None)

    def clear_cache(self) -> None:
        """Drop every cached key and value."""
        self.cache.clear()
        self._shared_prompt = None

    def release_cache(self) -> None:
        self.cache = self._new_cache()
        self._shared_prompt = None

    def _new_cache(self) -> KVCache:
        return KVCache(self.positions, states=self._new_states())

    def _new_states(self) -> SlotStates | None:
        return SlotStates(self.model.config) if self.model.is_recurrent else None

    def reset_cache(self, slots: int) -> None:
        """Lay the cache out for a new call."""
        self.cache.reset(slots)
        self._shared_prompt = None

    def decode(self, batch: RunningBatch, rows: int) -> Tensor:
        """[rows, D]: feed the newest token of each of the first `rows` slots."""
        positions = batch.length[:rows] - 1
        span = Span.for_positions(positions, self.cache)
        self._count_reads(span.position_count, positions)
        if self.lean is not None:
            self.lean.extend_rotary(span.longest)
        hidden = self.forward(self.to_device(batch.last_tokens(rows)), self.to_device(positions), span)
        if self.recorder is not None:
            self.recorder.note_decoded(None, rows)
        return hidden

    def _count_reads(self, read: int, positions: np.ndarray) -> None:
        """Count the positions that a step reads for new tokens at `positions` [B]."""
        self.positions_read += read
        self.positions_held += int(positions.sum()) + len(positions)

    def draw_tokens(
        self, hidden: Tensor, batch: RunningBatch
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Token ids [B] int64, log-probabilities [B] float32 and sampling masks [B] object, drawn from the
        `hidden` states [B, D].
        """
        logits = self.logits(hidden)
        uniforms = torch.from_numpy(batch.next_uniforms()).to(logits.device)
        plan = batch.sampling_plan(logits.device)
        ids, logprobs, masks = sample_tokens(logits, uniforms, plan, self.most_kept)
        rows = None if masks is None else mask_rows(masks.cpu().numpy(), logits.shape[1])
        return ids.cpu().numpy(), logprobs.cpu().numpy(), rows

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, V] logits of the result of `run_pass`."""
        assert self.head is not None  # no decode while asleep
        return self.head.logits(hidden)

    def run_pass(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: Attend,
        rows: Tensor | slice,
    ) -> Tensor:
        """Run the model on the packed tokens `ids` [T] at `positions` [T]. Returns the hidden states [R, D]
        of `rows`, which predict the next tokens.
        """
        with nullcontext() if self.recorder is None else self.recorder.record(len(ids)):
            return self.model.run(ids, positions, attention)[rows]

    def forward(self, ids: Tensor, positions: Tensor, span: Span) -> Tensor:
        """[B, D] of one new token for each of the first slots: `ids` and `positions` [B] int64 on the device.

        A captured step runs this, so the host's only input is `span`.
        """
        return self.forward_added(ids, DecodeAttention(self.cache, positions, span))

    def forward_added(
        self, ids: Tensor, attention: CachedAttention, rows: Tensor | slice = slice(None)
    ) -> Tensor:
        """[R, D] of the `rows` of new tokens, `ids` [T] int64, that follow the cached ones."""
        if self.lean is not None:
            return self.lean.step(ids, self.cache, attention)[rows]
        return self.run_pass(ids, attention.positions, attention, rows)

    def prefill(self, batch: RunningBatch, start: int, stop: int, upcoming: bytes | None) -> Tensor:
        """[R, D]: compute all known tokens of the slots `start ... stop - 1`, one row per slot.

        `upcoming`: the tokens of the next waiting request. If they equal the last slot's, it gets the result.
        """
        sequences = [batch.known_tokens(row) for row in range(start, stop)]
        names = [sequence.tobytes() for sequence in sequences]
        hidden, first, shared = [], 0, self._shared_prompt
        choices = None if shared is None else shared.choices
        if shared is not None:
            while first < len(names) and names[first] == shared.tokens:
                first += 1
            self.cache.write_prompt(slice(start, start + first), shared.kv)
            hidden.append(shared.hidden.expand(first, -1))
            if self.recorder is not None and first:
                bounds, slots = np.array([0, len(sequences[0])]), np.zeros(first, np.int64)
                self.recorder.note_prefilled(batch, start, bounds, slots, choices=shared.choices)
        while first < len(sequences):
            # One pass: the distinct sequences from `first` on, up to a number of tokens.
            distinct: dict[bytes, int] = {}
            source: list[int] = []
            packed: list[np.ndarray] = []
            tokens = 0
            for name, sequence in zip(names[first:], sequences[first:], strict=True):
                if name not in distinct:
                    if packed and tokens + len(sequence) > prefill_tokens(self.model.device):
                        break
                    distinct[name] = len(packed)
                    packed.append(sequence)
                    tokens += len(sequence)
                source.append(distinct[name])
            lengths, sources = np.array([len(ids) for ids in packed], np.int64), np.array(source, np.int64)
            order = None if self.lean is None else self.lean.key_order
            attention = PrefillAttention(self.cache, lengths, sources, start + first, order)
            ids = self.to_device(np.concatenate(packed))
            positions = self.to_device(np.concatenate([np.arange(length) for length in lengths]))
            rows = self.to_device((np.cumsum(lengths) - 1)[sources])
            hidden.append(self.run_pass(ids, positions, attention, rows))
            if self.recorder is not None:
                bounds = np.concatenate([[0], np.cumsum(lengths)])
                choices = self.recorder.note_prefilled(batch, start + first, bounds, sources)
                choices = choices[bounds[sources[-1]] : bounds[sources[-1] + 1]]
            self.prefilled_tokens += tokens
            first += len(source)
            self._check_layers()
        states = torch.cat(hidden)
        self._shared_prompt = None
        if upcoming == names[-1]:
            kv = self.cache.read_slot(stop - 1, len(sequences[-1]))
            self._shared_prompt = SharedPrompt(names[-1], kv, states[-1], choices)
        return states

    def _check_layers(self) -> None:
        """Raise `ModelError` if a layer that sees other tokens has kept nothing of its own."""
        config = self.model.config
        kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
        wanted = {key_layer(config, index) for index, kind in enumerate(kinds) if kind not in UNMIXED}
        states = self.cache.states
        held = {index for index in self.cache.layers if index >= 0}  # index keys lie below
        held |= set() if states is None else states.layers.keys()
        if held != wanted:
            raise ModelError(
                f"{len(held)} of the {len(wanted)} layers of {config.model_type} have keys and values of"
                " their own; the embedded engine needs all of them to."
            )

    def to_device(self, values: np.ndarray) -> Tensor:
        """Copy to int64 on the model's device."""
        return torch.from_numpy(values.astype(np.int64)).to(self.model.device, non_blocking=True)
