"""Attention over packed sequences, plugged into any Hugging Face decoder as the implementation "opd".

A Hugging Face base model whose configuration says `_attn_implementation = "opd"` builds no attention mask and
hands every layer's queries, keys and values to the `attend` object that was passed to its forward:

    base_model(input_ids=ids, position_ids=positions, attend=PackedAttention(cu_seqlens))

Shapes: `T` packed tokens, `H` query heads, `Hkv` key-value heads, `d` head size, `B` sequences, `L` longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from opd.errors import ModelError
from opd.models.block_attention import Scores, block_attention
from opd.models.packing import Bucket, buckets_of, pad

ATTENTION_NAME = "opd"


@dataclass(slots=True)
class AttentionCall:
    """What one attention layer asks for. Rotary embeddings are already applied."""

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


_MASKED = 1024
"""Sequences up to this length get an explicit [L, L] mask where they need one."""
Attend = Callable[[AttentionCall], Tensor]
"""Computes one layer's attention: `attend(call) -> [1, T, H, d]`."""

# Arguments that change the scores or the softmax in ways `AttentionCall` does not describe.
_UNSUPPORTED = ("s_aux", "position_bias", "head_mask")


def opd_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function Hugging Face attention modules call; delegates to `options["attend"]`.

    Raises `ModelError` if no `attend` was passed, or if the layer needs something it cannot do.
    """
    attend = options.get("attend")
    if attend is None:
        raise ModelError(
            f"{type(module).__name__} got no `attend` argument: call the model through CausalLM.run or"
            " .hidden; if that was done, this architecture does not pass arguments on and cannot be used."
        )
    if attention_mask is not None or any(options.get(name) is not None for name in _UNSUPPORTED):
        raise ModelError(
            f"{type(module).__name__} uses an attention mask, sink or bias that packed attention does not"
            " support; choose a model of another architecture."
        )
    scaling = options.get("scaling")
    call = AttentionCall(
        layer_index=int(getattr(module, "layer_idx", 0)),
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=options.get("softcap"),
        sliding_window=options.get("sliding_window"),
    )
    return attend(call), None


AttentionInterface.register(ATTENTION_NAME, opd_attention)


class PackedAttention:
    """Causal self-attention inside each of several sequences packed end to end; none across boundaries.

    `cu_seqlens` is [B + 1]: sequence `b` is the tokens `cu_seqlens[b]:cu_seqlens[b + 1]`. Equal lengths are
    a view; otherwise the rows are gathered into a few right-padded buckets `[B, H, L, d]` whose index is
    computed once and shared by every layer. Padding comes after the last real token, so the causal order
    alone hides it.
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
        self._lengths = [length for length in lengths if length]
        self._equal = len(set(self._lengths)) == 1
        self._index: tuple[list[Bucket], Tensor] | None = None

    def __call__(self, call: AttentionCall) -> Tensor:
        """[1, T, H, d]. Raises `ModelError` if the call holds another number of tokens than `cu_seqlens`."""
        tokens = call.query.shape[2]
        if tokens != self.tokens:
            raise ModelError(f"cu_seqlens describes {self.tokens} tokens but the model was given {tokens}.")
        if tokens == 0:
            return call.query.transpose(1, 2)
        packed = self._equal_lengths(call) if self._equal else self._bucketed(call)
        return packed.unsqueeze(0)

    def _equal_lengths(self, call: AttentionCall) -> Tensor:
        shape = (-1, self._lengths[0])
        query, key, value = (
            x[0].unflatten(1, shape).transpose(0, 1) for x in (call.query, call.key, call.value)
        )
        return causal_attention(query, key, value, call).transpose(1, 2).flatten(0, 1)

    def _bucketed(self, call: AttentionCall) -> Tensor:
        device = call.query.device
        if self._index is None or self._index[1].device != device:
            self._index = buckets_of(self._lengths, device)
        buckets, places = self._index
        outputs = []
        for bucket in buckets:
            query, key, value = (pad(x[0], bucket) for x in (call.query, call.key, call.value))
            outputs.append(causal_attention(query, key, value, call).transpose(1, 2).flatten(0, 1))
        padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return padded.index_select(0, places)


def kernels_share_heads(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused kernels take one key head for several query heads. Those of CUDA do in half precision
    alone: float32 would be computed with scores [B, H, L, L].
    """
    return device.type != "cuda" or dtype in (torch.float16, torch.bfloat16)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Causal attention of `B` sequences of length `L` with the scaling, softcap and window of `call`.

    `query` [B, H, L, d], `key` and `value` [B, Hkv, L, d] -> [B, H, L, d]. A window shorter than `L` or a
    softcap, which the fused kernels do not know, takes an explicit [L, L] mask for short sequences and goes
    block by block for long ones.
    """
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    window = call.sliding_window
    if window is not None and window >= length:
        window = None
    if window is None and call.softcap is None:
        shared = groups > 1 and kernels_share_heads(query.device, query.dtype)
        if groups > 1 and not shared:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=call.scaling, enable_gqa=shared
        )
    if length > _MASKED:
        scores = Scores(call.scaling, call.softcap, window)
        triples = zip(query, key, value, strict=True)
        return torch.stack([block_attention(*triple, scores) for triple in triples])
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    visible = window_mask(length, window, query.device)
    if call.softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=call.scaling)
    scores = (query @ key.transpose(-1, -2)) * call.scaling
    scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    statistics = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, dim=-1, dtype=statistics).to(value.dtype) @ value


def window_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """[L, L] bool: True where row `i` sees column `j`."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
