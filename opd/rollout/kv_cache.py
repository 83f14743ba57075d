"""Keys and values of the running requests, by slot.

Each attention layer owns two tensors `[S, Hkv, L, d]`: `S` slots, `L` token positions. The running requests
always fill the first slots, so a decode step reads a plain slice and nothing is gathered. Memory is kept
between calls and only grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SPARE = 16


def spare(tokens: int) -> int:
    """Positions to reserve beyond `tokens`: few, because a step reads them too."""
    return max(SPARE, tokens // 8)


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a layer's cache a decode step works on; all views."""

    keys: Tensor
    """[B, Hkv, L, d]: to write new keys into."""
    values: Tensor
    """[B, Hkv, L, dv]."""
    transposed_keys: Tensor
    """[B * Hkv, d, L]: to multiply queries with."""
    flat_values: Tensor
    """[B * Hkv, L, dv]."""


class LayerCache:
    """One layer's keys [S, Hkv, L, d] and values [S, Hkv, L, dv]: views of memory that outlives the call."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self._window: Window | None = None
        self._window_shape = (0, 0)

    def window(self, rows: int, length: int) -> Window:
        """The first `rows` slots and `length` positions. Most steps ask for the same as the one before."""
        if self._window is None or self._window_shape != (rows, length):
            # Merging slots and heads stays a view because slots are cut from the front of [S, Hkv, L, d].
            keys, values = (x[:rows, :, :length] for x in (self.keys, self.values))
            self._window = Window(keys, values, keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1))
            self._window_shape = (rows, length)
        return self._window


@dataclass(slots=True)
class PromptKV:
    """A prompt's keys and values in every layer, kept for requests that still wait for a slot."""

    layers: dict[int, tuple[Tensor, Tensor]]
    """Per layer [Hkv, C, d] and [Hkv, C, dv]."""


class KVCache:
    """Preallocated cache for `slots` requests of up to `capacity` tokens each."""

    def __init__(self) -> None:
        self.slots = 0
        self.capacity = 0
        self._layers: dict[int, LayerCache] = {}
        self._buffers: dict[tuple[int, str], Tensor] = {}

    @property
    def layers(self) -> list[int]:
        """Indices of the layers written so far."""
        return sorted(self._layers)

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def reset(self, slots: int) -> None:
        """Forget everything and lay the memory out for `slots` requests; `ensure` gives it a length."""
        self.slots, self.capacity = slots, 0
        self._layers.clear()

    def clear(self) -> None:
        """Forget everything; the layout stays."""
        self._layers.clear()

    def ensure(self, tokens: int, limit: int, used: int) -> None:
        """Make room for `tokens` tokens per slot, with some to spare up to `limit`; `used` slots are kept."""
        if tokens <= self.capacity:
            return
        self.capacity = max(tokens, min(tokens + spare(tokens), limit))
        for index, old in self._layers.items():
            # Old and new layout share memory, hence the copies.
            kept = [x[:used].clone() for x in (old.keys, old.values)]
            grown = LayerCache(self._view(index, "keys", kept[0]), self._view(index, "values", kept[1]))
            for new, content in zip((grown.keys, grown.values), kept, strict=True):
                new[:used, :, : content.shape[2]] = content
            self._layers[index] = grown

    def layer(self, index: int, key: Tensor, value: Tensor) -> LayerCache:
        """The cache of a layer; `key` and `value` [..., Hkv, T, d] say its shape the first time."""
        cache = self._layers.get(index)
        if cache is None:
            cache = LayerCache(self._view(index, "keys", key), self._view(index, "values", value))
            self._layers[index] = cache
        return cache

    def existing(self, index: int) -> LayerCache:
        """The cache of a layer that was written before."""
        return self._layers[index]

    def window(self, tokens: int) -> int:
        """How many positions a step should read when its longest request holds `tokens`.

        All of the capacity unless that is far more: reading on across the gap behind each slot's tokens is
        several times faster than skipping it, which defeats the processor's prefetching.
        """
        return self.capacity if self.capacity - tokens <= spare(tokens) else tokens

    def move(self, source: np.ndarray, target: np.ndarray, length: int) -> None:
        """Copy the first `length` positions of the slots `source` to the slots `target`."""
        for cache in self._layers.values():
            for x in (cache.keys, cache.values):
                x[target, :, :length] = x[source, :, :length]

    def read(self, row: int, length: int) -> PromptKV:
        """A copy of one slot."""
        layers = {
            index: (cache.keys[row, :, :length].clone(), cache.values[row, :, :length].clone())
            for index, cache in self._layers.items()
        }
        return PromptKV(layers)

    def write(self, rows: slice, prompt: PromptKV) -> None:
        """Put the same prompt into several slots."""
        for index, (keys, values) in prompt.layers.items():
            cache = self.layer(index, keys, values)
            cache.keys[rows, :, : keys.shape[1]] = keys
            cache.values[rows, :, : values.shape[1]] = values

    def _view(self, index: int, kind: str, like: Tensor) -> Tensor:
        shape = (self.slots, like.shape[-3], self.capacity, like.shape[-1])
        numbers = int(np.prod(shape))
        buffer = self._buffers.get((index, kind))
        if (
            buffer is None
            or buffer.numel() < numbers
            or buffer.dtype != like.dtype
            or buffer.device != like.device
        ):
            # Zeros, not empty: masked positions are multiplied by 0, which does not remove a NaN.
            buffer = torch.zeros(numbers, dtype=like.dtype, device=like.device)
            self._buffers[index, kind] = buffer
        return buffer[:numbers].view(shape)
