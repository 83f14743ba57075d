"""Attention over packed sequences for any Hugging Face decoder, as the implementation "opd".

A Hugging Face base model with `_attn_implementation = "opd"` builds no attention mask. It passes every
layer's queries, keys and values to the `attend` object given to its forward:

    base_model(input_ids=ids, position_ids=positions, attend=PackedAttention(cu_seqlens))

Shapes: `T` packed tokens, `H` query heads, `Hkv` key-value heads, `d` head size, `B` sequences, `L` longest.

Packed sequences become a few right-padded buckets, by the gather index of packed attention. Exact causal
attention runs block by block, with memory for one block of scores at any length.

The softmax is accumulated over blocks of keys with a running maximum and sum (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"; Rabe and Staats 2021, "Self-attention Does Not Need O(n^2)
Memory"). The backward recomputes each block from the rows' log-sum-exp (Dao et al. 2022, FlashAttention,
appendix B.4). Blocks that a causal order or a window hides are skipped, so a window makes the time linear. It
is plain PyTorch and supports softcaps, windows, queries at the end of a longer sequence, and keys that come
in chunks.

Shapes: `H` query heads, `Hkv` key-value heads, `G = H / Hkv`, `C` queries, `S` keys, `d` head size. The
queries are the last `C` of the `S` positions, unless a call says where the first of them lies.
"""

from __future__ import annotations

import dis
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from types import MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from opd.errors import ModelError
from opd.models.key_choice import NO_MASK, KeyChoice, install_indexers
from opd.models.recurrence import MixerCall, install_mixers

ATTENTION_NAME = "opd"
WHOLE_ONLY = "so they take no sequence in pieces; leave batch.sequence_chunk out"


@dataclass(slots=True)
class AttentionCall:
    """The arguments of one attention layer. Rotary embeddings are already applied."""

    layer_index: int
    query: Tensor
    """[1, H, T, d]."""
    key: Tensor
    """[1, Hkv, T, d]; `Hkv` divides `H`."""
    value: Tensor
    """[1, Hkv, T, d]."""
    scaling: float
    """Factor of the dot products."""
    softcap: float | None = None
    """Scores become `softcap * tanh(scores / softcap)` (Gemma 2)."""
    sliding_window: int | None = None
    """Position `i` sees positions `j` with `i - sliding_window < j <= i`."""
    sinks: Tensor | None = None
    """[H]: a learnt score per head that takes part in the softmax and adds no value (GPT-OSS)."""
    chunk: int | None = None
    """Position `i` sees positions from the last multiple of `chunk` on (Llama 4)."""
    growth: tuple[float, float] | None = None
    """(floor, scale): the query at position `p` is due to be multiplied by
    `1 + scale * log(1 + (p + 1) // floor)` (Llama 4)."""
    choice: KeyChoice | None = None
    """Chooses the keys that each query sees."""
    key_layer: int | None = None
    """The layer that made the keys and values, if it is an earlier one (Gemma 3n and 4)."""

    @property
    def kept_at(self) -> int:
        """The layer whose keys and values these are."""
        return self.layer_index if self.key_layer is None else self.key_layer

    @property
    def packed_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query [H, T, d], key and value [Hkv, T, d]."""
        return self.query[0], self.key[0], self.value[0]

    @property
    def score_form(self) -> ScoreForm:
        """Parameters of the scores. Raises `ModelError` if they depend on positions otherwise."""
        if self.chunk is not None or self.growth is not None or self.choice is not None:
            raise ModelError(
                "its layers choose keys, or attend by positions (in chunks, say),"
                f" {WHOLE_ONLY}, and set train.context_parallel to 1."
            )
        return ScoreForm(self.scaling, self.softcap, self.sliding_window, self.sinks)

    def at(self, positions: Callable[[], Tensor]) -> AttentionCall:
        """Return the call with its queries as they are due at `positions()` [T]."""
        if self.growth is None:
            return self
        factors = growth_at(positions(), *self.growth)
        return replace(self, query=(self.query * factors).to(self.query.dtype), growth=None)


def growth_at(positions: Tensor, floor: float, scale: float) -> Tensor:
    """[T, 1]: factors of queries at `positions` [T]; see `AttentionCall.growth`."""
    return (torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * scale + 1.0)[:, None]


def key_layer(config: Any, layer: int) -> int:
    """Return the layer whose keys and values layer `layer` of a text model of `config` attends to."""
    modes, kinds = getattr(config, "kv_sharing_modes", None) or (), getattr(config, "layer_types", None)
    if layer >= len(modes) or modes[layer] != "reuse" or not kinds:
        return layer
    return next((i for i, mode in enumerate(modes) if mode == "store" and kinds[i] == kinds[layer]), layer)


def refuse_pieces(config: Any, *, shared: bool = False) -> None:
    """Raise `ModelError` if layers of a text model of `config` cannot take a sequence in pieces, or if it is
    only `shared` by ranks, not that.
    """
    kinds = {*(getattr(config, "layer_types", None) or ())} & {"chunked_attention", "indexed_attention"}
    if kinds or ("reuse" in (getattr(config, "kv_sharing_modes", None) or ()) and not shared):
        what = f"are of kind {min(kinds)!r}" if kinds else "attend to keys of earlier ones"
        more = ", and set train.context_parallel to 1" if kinds else ""
        raise ModelError(f"layers of a {config.model_type} model {what}, {WHOLE_ONLY}{more}.")


_MASKED = 1024
"""Maximum length with an explicit [L, L] mask."""
T = TypeVar("T")
Attend = Callable[[AttentionCall], Tensor]
"""Computes one layer's attention: `attend(call) -> [1, T, H, d]`."""
Triple = tuple[Tensor, Tensor, Tensor]
"""Query, key and value; or output, log-sum-exp and the gradient that arrives."""
See = Callable[[Triple, "ScoreForm", tuple[Tensor, Tensor], int], None]
SeenBackward = Callable[[Triple, Triple, Sequence[Tensor], "ScoreForm", int], None]

_UNSUPPORTED = {
    "position_bias": "a bias of scores by distance",
    "head_mask": "a mask of heads",
}
"""Arguments that change scores or softmax in ways that `AttentionCall` does not describe."""


def opd_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Called by Hugging Face attention modules. Delegates to `options["attend"]`.

    Raises `ModelError` without `attend`, or if the layer needs an unsupported feature.
    """
    attend = options.get("attend") or _GIVEN.get()
    if attend is None:
        raise ModelError(
            f"its {type(module).__name__} is not handed on what its decoder is given (attend), so sequences"
            " cannot be kept apart; choose a model of another architecture."
        )
    if attention_mask is NO_MASK:
        attention_mask = None
    odd = [effect for name, effect in _UNSUPPORTED.items() if options.get(name) is not None]
    odd += ["a mask of its own"] if attention_mask is not None else []
    if odd:
        raise ModelError(
            f"its {type(module).__name__} uses {odd[0]}, which packed attention does not support; choose a"
            " model of another architecture."
        )
    if getattr(module, "is_causal", True) is False:
        raise ModelError(
            f"its {type(module).__name__} sees tokens to come, as an encoder's does; choose a model of"
            " another architecture."
        )
    scaling = options.get("scaling")
    for effect, number in (("multiplies scores by", scaling), ("caps scores at", options.get("softcap"))):
        if number is not None and not 0 < number < math.inf:
            raise ModelError(
                f"its {type(module).__name__} {effect} {number:g}, which no trained model does; mend its"
                " configuration."
            )
    layer = 0 if torch.compiler.is_compiling() else int(getattr(module, "layer_idx", 0))
    growth: tuple[float, float] | None = None
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        growth = float(module.floor_scale), float(module.attn_scale)  # type: ignore[arg-type]
        counted = torch.arange(query.shape[2], device=query.device)  # as if all tokens were one sequence's
        query = query if len(counted) < growth[0] else (query / growth_at(counted, *growth)).to(query.dtype)
    call = AttentionCall(
        layer_index=layer,
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=options.get("softcap"),
        sliding_window=options.get("sliding_window"),
        sinks=options.get("s_aux"),
        chunk=_chunk_of(module),
        growth=growth,
        choice=choice if isinstance(choice := options.get("indices"), KeyChoice) else None,
        key_layer=key_layer(module.config, layer) if getattr(module, "is_kv_shared_layer", False) else None,
    )
    return attend(call), None


_GIVEN: ContextVar[Attend | None] = ContextVar("attend", default=None)
"""What the layer that runs was given, if it does not hand it on."""


def install_attention(module: torch.nn.Module) -> bool:
    """Let layers of `module` that take options and hand none on keep the `attend` among them for their
    attention, and install its indexers and mixers. Return whether it has any.
    """
    for part in module.modules():
        if drops_options(type(part)):
            part.forward = MethodType(_keep_attend, part)
    install_indexers(module)
    return install_mixers(module)


@lru_cache(maxsize=1024)
def drops_options(kind: type) -> bool:
    """Return True if the forward of modules of class `kind` takes options by any name and no call in it gets
    them.
    """
    forward = inspect.unwrap(kind.forward)
    takes = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(forward).parameters.values())
    return takes and all(one.opname != "CALL_FUNCTION_EX" for one in dis.get_instructions(forward))


def _keep_attend(part: Any, *arguments: Any, **options: Any) -> Any:
    """Stand for the `forward` of `part`, as a method, so that a copy of the module calls the copy."""
    if "attend" not in options:
        return type(part).forward(part, *arguments, **options)
    before = _GIVEN.set(options["attend"])
    try:
        return type(part).forward(part, *arguments, **options)
    finally:
        _GIVEN.reset(before)


def _chunk_of(module: Any) -> int | None:
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if "chunked_attention" not in kinds or kinds[module.layer_idx] != "chunked_attention":
        return None
    return getattr(config, "attention_chunk_size", None)


AttentionInterface.register(ATTENTION_NAME, opd_attention)


class PackedAttention:
    """Causal self-attention inside each of several sequences packed end to end; none across boundaries.

    `cu_seqlens` is [B + 1]: sequence `b` is the tokens `cu_seqlens[b]:cu_seqlens[b + 1]`. Equal lengths are a
    view. Otherwise rows are gathered into a few right-padded buckets `[B, H, L, d]`; all layers share one
    index. Padding follows the last real token, so the causal order hides it.
    """

    def __init__(self, cu_seqlens: Tensor | np.ndarray | Sequence[int]) -> None:
        bounds = cu_seqlens if isinstance(cu_seqlens, Sequence) else cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(bounds)]
        if not lengths or bounds[0] != 0 or min(lengths) < 0:
            raise ModelError(
                f"cu_seqlens must start at 0, never decrease and have at least two entries, not {bounds[:8]}."
            )
        self.bounds: list[int] = list(bounds)
        self.tokens = bounds[-1]
        self.lengths = [length for length in lengths if length]
        """Lengths of the sequences that are not empty."""
        self._equal = len(set(self.lengths)) == 1
        self._cache: dict[Any, Any] = {}

    def __call__(self, call: AttentionCall, *, exact: bool = False) -> Tensor:
        """`[1, T, H, d]`: on a GPU from one kernel if one fits (`fused_attention.py`). Otherwise, or if it is
        to be `exact`, by PyTorch's attention of equal lengths, for all dtypes, sizes and devices.

        Raises `ModelError` if the call has another number of tokens than `cu_seqlens`.
        """
        tokens = call.query.shape[2]
        if tokens != self.tokens:
            raise ModelError(f"cu_seqlens describes {self.tokens} tokens but the model was given {tokens}.")
        if tokens == 0:
            return call.query.transpose(1, 2)
        device = call.query.device
        call = call.at(lambda: self.cached_value(("positions", device), lambda: self._positions(device)))
        if (chunk := call.chunk) is not None:
            call = replace(call, chunk=None)
            if max(self.lengths) > chunk:  # each chunk is as a sequence
                return self.cached_value(("chunk", chunk), lambda: self._cut(chunk))(call, exact=exact)
        choice, call = call.choice, replace(call, choice=None)
        if choice is not None and max(self.lengths) <= choice.topk:
            choice = None
        if choice is None and call.query.is_cuda and not exact:  # imported here because it compiles
            from opd.models.fused_attention import run_fused

            output = run_fused(self, call)
            if output is not None:
                return output
        inputs, form = (call.query, call.key, call.value), call.score_form
        if self._equal and choice is None:
            shape = (-1, self.lengths[0])
            query, key, value = (x[0].unflatten(1, shape).transpose(0, 1) for x in inputs)
            return causal_attention(query, key, value, form).transpose(1, 2).flatten(0, 1).unsqueeze(0)
        buckets, places = self.cached_value(("buckets", device), lambda: buckets_of(self.lengths, device))
        outputs = []
        for bucket in buckets:
            query, key, value = (pad_bucket(x[0], bucket) for x in inputs)
            if choice is None or bucket.shape[1] <= choice.topk:
                attended = causal_attention(query, key, value, form)
            else:
                attended = _chosen_attention(query, key, value, form, _chosen_keys(choice, bucket))
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return padded.index_select(0, places).unsqueeze(0)

    def mix(self, call: MixerCall) -> Tensor:
        """[T, D]: a layer that carries a state, on each sequence by itself. Padding follows the last real
        token, so nothing that counts sees it.
        """
        device = call.hidden.device
        if not self.tokens:
            return call.hidden
        buckets, places = self.cached_value(("buckets", device), lambda: buckets_of(self.lengths, device))
        padded = [
            call.run(call.hidden.index_select(0, bucket.source).unflatten(0, bucket.shape)).flatten(0, 1)
            for bucket in buckets
        ]
        return torch.cat(padded).index_select(0, places)

    def _positions(self, device: torch.device) -> Tensor:
        return torch.cat([torch.arange(length, device=device) for length in self.lengths])

    def _cut(self, chunk: int) -> PackedAttention:
        """Return the packing of the chunks of all sequences."""
        starts = [at for start, end in pairwise(self.bounds) for at in range(start, end, chunk)]
        return PackedAttention([*starts, self.tokens])

    def cached_value(self, key: Any, make: Callable[[], T]) -> T:
        """The cached result of `make` for `key`. All layers share values that depend on the packing alone."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]


def kernels_share_heads(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the fused kernels take one key head for several query heads. On CUDA only half precision
    does: float32 would compute scores [B, H, L, L].
    """
    return device.type != "cuda" or dtype in (torch.float16, torch.bfloat16)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, form: ScoreForm) -> Tensor:
    """Causal attention of `B` sequences of length `L` with the scores of `form`.

    `query` [B, H, L, d], `key` and `value` [B, Hkv, L, d] -> [B, H, L, d]. The fused kernels support no
    softcap, no sinks and no window shorter than `L`. These use an explicit [L, L] mask for short sequences
    and blocks for long ones.
    """
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    if form.window is not None and form.window >= length:
        form = replace(form, window=None)
    if form.window is None and form.is_plain:
        shared = groups > 1 and kernels_share_heads(query.device, query.dtype)
        if groups > 1 and not shared:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=form.scaling, enable_gqa=shared
        )
    if length > _MASKED:
        triples = zip(query, key, value, strict=True)
        return torch.stack([block_attention(*triple, form) for triple in triples])
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    position = torch.arange(length, device=query.device)
    distance = position[:, None] - position[None, :]
    visible = distance >= 0
    if form.window is not None:
        visible &= distance < form.window
    return masked_attention(query, key, value, form, visible)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, form: ScoreForm, visible: Tensor, shared: bool = False
) -> Tensor:
    """Attend from `query` [B, H, Q, d] to `key` and `value` [B, H, L, d] where `visible` (bool, broadcast to
    [B, H, Q, L]). Return [B, H, Q, d] with the scaling, softcap and sinks of `form`. With `shared`, keys have
    fewer heads and the kernel reuses them for several queries'; only if `form` is plain.
    """
    if form.is_plain:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=form.scaling, enable_gqa=shared
        )
    scores = (query @ key.transpose(-1, -2)) * form.scaling
    if form.softcap is not None:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    sinks = None if form.sinks is None else form.sinks[:, None, None]
    return softmax_with_sinks(scores, sinks).to(value.dtype) @ value


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of `scores` [..., Q, L] over `L`, in float32 at least. `sinks`, a score for each row
    that broadcasts to [..., Q, 1], is in its sum and in no result, so a row sums to less than 1.
    """
    statistics = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=statistics)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1, dtype=statistics)[..., :-1]


SHORT = 32
"""Maximum length of the shared bucket. For shorter sequences a kernel call costs more than padding."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length, padded on the right to the longest of them."""

    shape: tuple[int, int]
    """(B, L)."""
    source: Tensor
    """[B * L] int64: the packed row at each position. Padding repeats the first row of its sequence, so it is
    finite and in the same sequence."""


def buckets_of(lengths: list[int], device: torch.device) -> tuple[list[Bucket], Tensor]:
    """Group sequences (positive `lengths`, in packing order) so that padding at most doubles long ones.

    Returns the buckets and `places` `[T]` int64, the index of each packed row in all buckets end to end.
    """
    size = np.asarray(lengths, dtype=np.int64)
    start = np.cumsum(size) - size
    remaining = np.argsort(-size, kind="stable")
    buckets: list[Bucket] = []
    places = np.empty(int(size.sum()), dtype=np.int64)
    offset = 0
    while remaining.size:
        longest = int(size[remaining[0]])
        inside = size[remaining] * 2 > longest if longest > SHORT else np.ones(remaining.size, dtype=bool)
        members, remaining = np.sort(remaining[inside]), remaining[~inside]
        column = np.arange(longest)
        real = column < size[members, None]
        source = (start[members, None] + np.where(real, column, 0)).ravel()
        filled = np.flatnonzero(real.ravel())
        places[source[filled]] = offset + filled
        offset += source.size
        buckets.append(
            Bucket((len(members), longest), torch.from_numpy(source).to(device, non_blocking=True))
        )
    return buckets, torch.from_numpy(places).to(device, non_blocking=True)


def _chosen_keys(choice: KeyChoice, bucket: Bucket) -> Tensor:
    """[B, 1, L, L] bool: the keys that each query of `bucket` sees."""
    case = bucket.source.data_ptr()
    if case not in choice.chosen:
        (count, length), keys = bucket.shape, choice.keys.index_select(0, bucket.source)
        causal = keys.new_ones(length, length, dtype=torch.bool).tril().expand(count, length, length)
        choice.chosen[case] = choice.choose(bucket.source, keys.unflatten(0, bucket.shape), causal)[:, None]
    return choice.chosen[case]


def _chosen_attention(query: Tensor, key: Tensor, value: Tensor, form: ScoreForm, visible: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return masked_attention(query, key, value, form, visible)


def pad_bucket(packed: Tensor, bucket: Bucket) -> Tensor:
    """Gather `packed` [H, T, d] into [B, H, L, d], along the contiguous memory layout."""
    rows = packed.transpose(0, 1)
    if rows.is_contiguous():
        return rows.index_select(0, bucket.source).unflatten(0, bucket.shape).transpose(1, 2)
    return packed.index_select(1, bucket.source).unflatten(1, bucket.shape).transpose(0, 1)


_HIDDEN = -1e30
"""Score of a hidden pair. It is finite, so a block without a visible pair is harmless."""
_SCORES = 1 << 18
"""Approximate scores per block on a CPU, for its cache."""
_SCORES_GPU = 1 << 25


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """Parameters of the scores of a pair."""

    scaling: float
    softcap: float | None = None
    window: int | None = None
    """Position `i` sees positions `j` with `i - window < j <= i`."""
    sinks: Tensor | None = None
    """[H]: a score per head beside those of the pairs, without a value."""
    choice: KeyChoice | None = None
    """Of cached keys: chooses those that each query sees."""
    chunk: int | None = None
    """Of cached keys: position `i` sees positions from the last multiple of `chunk` on."""

    @property
    def is_plain(self) -> bool:
        """Return True if PyTorch's attention computes it: without a softcap and sinks."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class _Block:
    queries: slice
    keys: slice
    first: int
    """Position of the first query among the keys."""
    masked: bool
    """True if the block has a hidden pair."""


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: ScoreForm,
    see: See | None = None,
    backward: SeenBackward | None = None,
) -> Tensor:
    """`query` [H, C, d], `key` [Hkv, S, d], `value` [Hkv, S, dv] -> [H, C, dv], differentiable in all three
    and in the sinks of `scores`.

    Statistics are float32 at least, results have the dtype of `value`. `see` and `backward` stand where
    `attend_more` and `attend_backward` do.
    """
    steps = see or attend_more, backward or attend_backward
    return _BlockAttention.apply(query, key, value, scores.sinks, scores, *steps)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scores: ScoreForm,
        see: See,
        backward: SeenBackward,
    ) -> Tensor:
        state = nothing_seen(query, value, sinks)
        see((query, key, value), scores, state, key.shape[1] - query.shape[1])
        output = state[0].to(value.dtype)
        ctx.save_for_backward(query, key, value, output, state[1])
        ctx.scores, ctx.seen_backward = scores, backward
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        inputs = (query, key, value)
        gradients = [torch.zeros_like(x, dtype=logsumexp.dtype) for x in inputs]
        first = key.shape[1] - query.shape[1]
        ahead = (output, logsumexp, upstream)
        ctx.seen_backward(inputs, ahead, gradients, ctx.scores, first)
        of_inputs = [x.to(like.dtype) for x, like in zip(gradients, inputs, strict=True)]
        return (*of_inputs, sinks_gradient(ctx.scores.sinks, ahead), None, None, None)


def nothing_seen(query: Tensor, value: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output [H, C, dv] and log-sum-exp [H, C] of queries that have seen no key yet, float32 at least. The
    sum starts with `sinks` [H], if there are any.
    """
    shape, dtype = query.shape[:2], torch.promote_types(query.dtype, torch.float32)
    output = value.new_zeros(*shape, value.shape[-1], dtype=dtype)
    if sinks is None:
        return output, query.new_full(shape, _HIDDEN, dtype=dtype)
    return output, sinks.detach().to(dtype)[:, None].repeat(1, shape[1])


def sinks_gradient(sinks: Tensor | None, ahead: Triple) -> Tensor | None:
    """Return the gradient in `sinks` [H] of queries with output [H, C, dv], log-sum-exp [H, C], the sinks'
    among it, and incoming gradient [H, C, dv]. A sink is a key whose value is 0.
    """
    if sinks is None:
        return None
    output, logsumexp, upstream = ahead
    weights = (sinks.detach().to(logsumexp.dtype)[:, None] - logsumexp).exp_()
    inner = (upstream.to(weights.dtype) * output.to(weights.dtype)).sum(-1)
    return weights.mul_(inner).sum(-1).neg_().to(sinks.dtype)


def attend_more(inputs: Triple, scores: ScoreForm, state: tuple[Tensor, Tensor], first: int) -> None:
    """Let queries see more keys, `inputs` being query, key and value: `state`, the queries' output and
    log-sum-exp so far, is updated in place.

    The softmax over several parts of the keys is the mean of those over each, weighted by their sums. `first`
    is where the first query lies among these keys; from `S` on it comes after them all.
    """
    query, key, value = inputs
    output, logsumexp = state
    dtype = logsumexp.dtype
    for queries, blocks in _query_blocks(query, key, scores, first):
        rows = _block_rows(query, queries, key, dtype)
        highest = _block_rows(logsumexp[..., None], queries, key, dtype)
        total = (highest > _HIDDEN).to(dtype)
        sums = _block_rows(output, queries, key, dtype)
        for block in blocks:
            weights = _block_scores(rows, key[:, block.keys].to(dtype), block, scores)
            above = torch.maximum(highest, weights.amax(-1, keepdim=True))
            weights.sub_(above).exp_()
            rescale = (highest - above).exp_()
            total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
            sums.mul_(rescale).baddbmm_(weights, value[:, block.keys].to(dtype))
            highest = above
        output[:, queries] = (sums / total).view(len(output), -1, value.shape[-1]).to(output.dtype)
        logsumexp[:, queries] = (highest + total.log()).view(len(logsumexp), -1)


def attend_backward(
    inputs: Triple, ahead: Triple, gradients: Sequence[Tensor], scores: ScoreForm, first: int
) -> None:
    """Add the gradients of `attend_more` in its query, key and value (`inputs`) to `gradients`, one of each.

    `ahead` is the output [H, C, dv], the log-sum-exp [H, C] and the incoming gradient [H, C, dv]. If keys
    came in chunks, output and log-sum-exp are those of all keys. `first` as in `attend_more`.
    """
    query, key, value = inputs
    output, logsumexp, upstream = ahead
    dtype = logsumexp.dtype
    for queries, blocks in _query_blocks(query, key, scores, first):
        rows, slope = (_block_rows(x, queries, key, dtype) for x in (query, upstream))
        inner = (slope * _block_rows(output, queries, key, dtype)).sum(-1, keepdim=True)
        level = _block_rows(logsumexp[..., None], queries, key, dtype)
        of_rows = torch.zeros_like(rows)
        for block in blocks:
            keys, values = (x[:, block.keys].to(dtype) for x in (key, value))
            capped = _block_scores(rows, keys, block, scores)
            weights = (capped - level).exp_()
            gradients[2][:, block.keys].baddbmm_(weights.transpose(1, 2), slope)
            change = (slope @ values.transpose(1, 2)).sub_(inner).mul_(weights)
            if scores.softcap is not None:  # a hidden pair's score is no tanh, but its weight is 0
                change.mul_(1 - (capped / scores.softcap).clamp_(-1, 1).square_())
            change.mul_(scores.scaling)
            of_rows.baddbmm_(change, keys)
            gradients[1][:, block.keys].baddbmm_(change.transpose(1, 2), rows)
        gradients[0][:, queries] += of_rows.view(len(query), -1, query.shape[-1])


def _block_rows(packed: Tensor, queries: slice, key: Tensor, dtype: torch.dtype) -> Tensor:
    """Reshape a block of queries of `packed` [H, C, n] to [Hkv, G * B, n], with heads that share keys
    together.
    """
    part = packed[:, queries].to(dtype)
    return part.reshape(key.shape[0], -1, packed.shape[-1])


def _block_scores(rows: Tensor, keys: Tensor, block: _Block, scores: ScoreForm) -> Tensor:
    """Return `[Hkv, G * Bq, Bk]` scores of a block, hidden pairs at `_HIDDEN`."""
    values = (rows @ keys.transpose(1, 2)).mul_(scores.scaling)
    if scores.softcap is not None:
        values.div_(scores.softcap).tanh_().mul_(scores.softcap)
    if block.masked:
        count, size = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
        ahead = torch.arange(block.keys.start, block.keys.stop, device=keys.device)
        distance = torch.arange(block.first, block.first + count, device=keys.device)[:, None] - ahead
        hidden = distance < 0
        if scores.window is not None:
            hidden |= distance >= scores.window
        values.view(rows.shape[0], -1, count, size).masked_fill_(hidden, _HIDDEN)
    return values


def _query_blocks(
    query: Tensor, key: Tensor, scores: ScoreForm, first: int
) -> Iterator[tuple[slice, list[_Block]]]:
    """Yield blocks of queries, each with the blocks of keys that any of them sees. Skip those without."""
    heads, count, size = query.shape[0], query.shape[1], key.shape[1]
    scored = _SCORES if query.device.type == "cpu" else _SCORES_GPU
    side = max(32, 1 << int((scored / heads) ** 0.5).bit_length() - 1)
    if scores.window is not None:  # larger blocks would be mostly hidden
        side = min(side, max(64, 1 << (scores.window - 1).bit_length()))
    for start in range(0, count, side):
        stop = min(start + side, count)
        begins, last = first + start, first + stop - 1
        lowest = 0 if scores.window is None else max(0, begins - scores.window + 1)
        blocks = []
        for key_start in range(lowest, min(last + 1, size), side):
            end = min(key_start + side, last + 1, size)
            masked = end - 1 > begins or (scores.window is not None and last - key_start >= scores.window)
            blocks.append(_Block(slice(start, stop), slice(key_start, end), begins, masked))
        if blocks:
            yield slice(start, stop), blocks
