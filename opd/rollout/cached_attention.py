"""The two `attend` objects of the engine: prefill fills the cache, decode reads it.

Shapes: `B` running requests, `H` query heads, `Hkv` key-value heads, `d` head size, `L` cached positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opd.models.attention import AttentionCall, PackedAttention
from opd.rollout.kv_cache import KVCache, LayerCache, Window


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What differs between the attention layers of a model."""

    scaling: float
    softcap: float | None = None
    sliding_window: int | None = None


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
        """`lengths` [P]: packed sequences; `source` [R]: which of them each slot from `first_row` on holds.

        `key_order` [d]: order of a key's features in the cache, if the decoder wants another than the
        module's.
        """
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        self._packed = PackedAttention(bounds)
        self._cache = cache
        self._rows = slice(first_row, first_row + len(source))
        self._longest = int(lengths.max())
        self._key_order = key_order
        # Short sequences repeat their last token: the places beyond a sequence are never read before being
        # written.
        column = np.minimum(np.arange(self._longest), lengths[source, None] - 1)
        self._index = torch.from_numpy((bounds[source, None] + column).ravel())

    def __call__(self, call: AttentionCall) -> Tensor:
        cache = self._cache.layer(call.layer_index, call.key, call.value)
        index = self._index = self._index.to(call.key.device)
        key = call.key if self._key_order is None else call.key.index_select(-1, self._key_order)
        for packed, cached in ((key, cache.keys), (call.value, cache.values)):
            slots = packed[0].index_select(1, index).unflatten(1, (-1, self._longest))
            cached[self._rows, :, : self._longest] = slots.transpose(0, 1)
        return self._packed(call)


class DecodeAttention:
    """One new token for each of the first `B` slots: append its key and value, attend to the cache."""

    def __init__(self, cache: KVCache, positions: np.ndarray, device: torch.device) -> None:
        """`positions` [B] int64: where the new tokens go; slot `b` then holds `positions[b] + 1` tokens."""
        self._cache = cache
        self._rows = len(positions)
        self._longest = int(positions.max()) + 1
        self._equal = int(positions.min()) + 1 == self._longest
        self._window = cache.window(self._longest)
        self._positions = torch.from_numpy(positions).to(device)
        self._slots = None if self._equal else torch.arange(self._rows, device=device)
        self._biases: dict[tuple[int | None, int], Tensor | None] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """[1, B, H, d]: the hook of `opd.models.attention`."""
        cache = self._cache.layer(call.layer_index, call.key, call.value)
        attended = self.attend(
            cache,
            call.query[0].transpose(0, 1),
            call.key[0].transpose(0, 1),
            call.value[0].transpose(0, 1),
            AttentionForm(call.scaling, call.softcap, call.sliding_window),
        )
        return attended[None]

    def attend(
        self, cache: LayerCache, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm
    ) -> Tensor:
        """`query` [B, H, d], `key` and `value` [B, Hkv, d] of the new tokens -> [B, H, dv]."""
        window = cache.window(self._rows, self._window)
        if self._slots is None:
            window.keys.select(2, self._longest - 1).copy_(key)
            window.values.select(2, self._longest - 1).copy_(value)
        else:
            window.keys[self._slots, :, self._positions] = key
            window.values[self._slots, :, self._positions] = value
        return attend_cached(query, window, self._bias(form.sliding_window, window.keys), form)

    def _bias(self, sliding_window: int | None, keys: Tensor) -> Tensor | None:
        """[B * Hkv or 1, 1, L]: 0 where a slot sees a position, else -inf; `None` if all see everything."""
        case = (sliding_window, keys.shape[1])
        if case not in self._biases:
            self._biases[case] = self._make_bias(sliding_window, keys)
        return self._biases[case]

    def _make_bias(self, sliding_window: int | None, keys: Tensor) -> Tensor | None:
        if sliding_window is not None and sliding_window >= self._longest:
            sliding_window = None
        if self._equal and sliding_window is None and self._window == self._longest:
            return None
        column = torch.arange(self._window, device=keys.device)
        last = self._positions[:1, None] if self._equal else self._positions[:, None]
        hidden = column > last
        if sliding_window is not None:
            hidden |= column <= last - sliding_window
        bias = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device)
        bias = bias.masked_fill_(hidden, float("-inf"))
        return (bias if self._equal else bias.repeat_interleave(keys.shape[1], 0))[:, None]


def attend_cached(query: Tensor, window: Window, bias: Tensor | None, form: AttentionForm) -> Tensor:
    """Attention of one query per slot: `query` [B, H, d] to the cached [B, Hkv, L, d] -> [B, H, dv].

    Batched matrix products over `B * Hkv`: for one query on CPU 3 to 4 times faster than
    `scaled_dot_product_attention`, whose kernel is made for many.
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
    if scores.dtype in (torch.bfloat16, torch.float16):
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.bmm(weights, values).view(rows, heads, -1)
