"""Keys and values of the running requests by slot, and as named tensors that can be saved and restored.

Each attention layer owns two tensors `[S, Hkv, L, d]`: `S` slots, `L` token positions. The running requests
always fill the first slots, so a decode step reads a plain slice and nothing is gathered. Memory is reused
between calls and only grows, up to a budget of positions: slots times capacity.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from opd.errors import RolloutError, reason_of
from opd.models.recurrence import States
from opd.rollout.batch import PARTS, RequestQueue, RunningBatch, better_order
from opd.rollout.slot_states import SlotStates
from opd.untrusted import machine_memory, read_document

SPARE = 16


def spare_positions(tokens: int) -> int:
    """Positions to reserve beyond `tokens`. They are few, because a step reads them too."""
    return max(SPARE, tokens // 8)


def bucket_size(number: int, least: int, parts: int) -> int:
    """Return the smallest of few sizes that is not below `number`: at least `least`, with `parts` sizes
    between each power of two and the next.
    """
    if number <= least:
        return least
    step = max(1, (1 << (number - 1).bit_length() - 1) // parts)
    return -(-number // step) * step


def kv_budget(mebibytes: int | None, device: torch.device) -> int:
    """Bytes that keys and values may take. `None`: half of the memory of `device`."""
    if mebibytes is not None:
        return mebibytes << 20
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 2
    return machine_memory() // 2


def fit_states(budget: int, slots: int, state_bytes: int) -> tuple[int, int]:
    """Return how many of `slots` may run, and the bytes of their states: half of `budget` at most."""
    if state_bytes:
        slots = max(1, min(slots, budget // 2 // state_bytes))
    return slots, min(budget // 2, slots * state_bytes)


LEAST_WINDOW, WINDOW_PARTS = 64, 2
"""Positions that a captured decode step reads: 64, 96, 128, 192, 256, ..."""


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a layer's cache that one slice reads, as views."""

    keys: Tensor
    """[B, Hkv, L, d]."""
    transposed_keys: Tensor
    """[B * Hkv, d, L]: to multiply queries with."""
    flat_values: Tensor
    """[B * Hkv, L, dv]."""


class LayerCache:
    """One layer's keys [S, Hkv, L, d] and values [S, Hkv, L, dv]: views of memory that outlives the call."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self._windows: dict[tuple[int, int, int], Window] = {}

    def window_slice(self, first: int, stop: int, length: int) -> Window:
        """Return the slots from `first` to `stop` and `length` positions. It is cached, because most steps
        need the same one as the step before.
        """
        shape = (first, stop, length)
        if shape not in self._windows:
            if len(self._windows) >= 2 * PARTS:
                self._windows.clear()
            # Merging slots and heads stays a view, because slots are cut from [S, Hkv, L, d].
            keys, values = (x[first:stop, :, :length] for x in (self.keys, self.values))
            merged = keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)
            self._windows[shape] = Window(keys, *merged)
        return self._windows[shape]

    def put(self, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Write `key` and `value` [T, Hkv, d] to the cache's `places`, as of `KVCache.cache_index`."""
        self.keys[places[0], :, places[1]] = key
        self.values[places[0], :, places[1]] = value

    def read_slots(self, first: int, stop: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [R, Hkv, length, d] of the slots from `first` to `stop`."""
        return self.keys[first:stop, :, :length], self.values[first:stop, :, :length]


Fill = Callable[[LayerCache, Tensor, Tensor], None]
"""`fill(layer, key, value)` writes [Hkv, T, d] of packed sequences into slots, layer after layer."""


@dataclass(slots=True)
class PromptKV:
    """A prompt's keys and values in every layer, held for requests that still wait for a slot."""

    layers: dict[int, tuple[Tensor, Tensor]]
    """Per layer [Hkv, C, d] and [Hkv, C, dv]."""
    states: dict[int, States] = field(default_factory=dict)
    """Those after the last token, per layer that carries some."""

    @property
    def state_bytes(self) -> int:
        return sum(x.nbytes for one in self.states.values() for x in one.values())

    @property
    def nbytes(self) -> int:
        return self.state_bytes + sum(x.nbytes for pair in self.layers.values() for x in pair)


class KVCache:
    """Preallocated cache for `slots` requests of up to `capacity` tokens each."""

    def __init__(
        self, positions: int | None = None, *, static: bool = False, states: SlotStates | None = None
    ) -> None:
        """`positions`: most that `slots` times `capacity` may be. `static`: few lengths are read and the
        layout outlives a call, so that captured decode steps stay valid. `states`: of recurrent layers.
        """
        self.states = states
        self.slots = 0
        self.capacity = 0
        self.layout = object()
        """Replaced whenever memory moves."""
        self._positions, self._static = positions, static
        self._wanted = 0
        self.layers: dict[int, LayerCache] = {}
        """The layers written so far, by index."""
        self._buffers: dict[tuple[int, str], Tensor] = {}

    @property
    def nbytes(self) -> int:
        states = 0 if self.states is None else self.states.nbytes
        return states + sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def position_capacity(self) -> int:
        """Tokens that fit in the present layout."""
        return self.slots * self.capacity

    def positions_for(self, lengths: np.ndarray, limit: int) -> int:
        """Tokens that fit once its slots hold `lengths` [B], and may come to hold `limit`."""
        slots, capacity = self.planned_layout(len(lengths), int(lengths.max()), limit)
        return slots * capacity

    def admissible_count(self, batch: RunningBatch, queue: RequestQueue) -> int:
        """Number of waiting requests that may be admitted, if all may grow to their limits in equal slots."""
        number = min(batch.slots - batch.size, len(queue))
        if self._positions is None or not number:
            return number
        coming = np.maximum.accumulate(queue.most_tokens[queue.front :][:number]).clip(
            batch.most_tokens.max(initial=0)
        )
        return int((coming * np.arange(batch.size + 1, batch.size + number + 1) <= self._positions).sum())

    def overdue_slots(self, batch: RunningBatch) -> list[int]:
        """Slots whose requests must wait for lack of space. There are none, see `admissible_count`."""
        del batch
        return []

    def reset(self, slots: int) -> None:
        """Drop everything and lay memory out for `slots` requests. `ensure_capacity` sets the capacity."""
        self.clear()
        if not self._static or slots > self._wanted:
            self.slots, self.capacity, self._wanted = 0, 0, slots

    def clear(self) -> None:
        """Drop everything. The layout stays."""
        self.layers.clear()
        if self.states is not None:
            self.states.clear()

    def reserve_slots(self, slots: int) -> None:
        """Reserve `slots` requests from the next `ensure_capacity` on."""
        self._wanted = max(self._wanted, slots)

    def ensure_capacity(self, rows: int, tokens: int, limit: int, used: int) -> None:
        """Reserve `rows` slots of `tokens` tokens, with a margin up to `limit` tokens, for as many wanted
        slots as fit. The contents of the first `used` slots are kept.
        """
        slots, capacity = self.planned_layout(rows, tokens, limit)
        if (slots, capacity) == (self.slots, self.capacity):
            return
        self.slots, self.capacity, self.layout = slots, capacity, object()
        for index, old in self.layers.items():
            copies = []
            for kind, contents in (("keys", old.keys[:used]), ("values", old.values[:used])):
                buffer, fresh = self._allocate_buffer(index, kind, contents)
                contents = contents[:, :, :capacity]
                rows, length = len(contents), contents.shape[2]
                # In the same memory both layouts overlap.
                buffer[:rows, :, :length] = contents if fresh else contents.clone()
                if fresh:
                    buffer[:rows, :, length:] = 0
                    buffer[rows:] = 0
                copies.append(buffer)
            self.layers[index] = LayerCache(*copies)

    def reserve_tokens(self, lengths: np.ndarray, limit: int, used: int) -> None:
        """Reserve `lengths` [B] tokens for the first slots, at most `limit` later. Keeps the first `used`."""
        self.ensure_capacity(len(lengths), int(lengths.max()), limit, used)

    def assign_tokens(self, lengths: np.ndarray) -> None:
        """Note that the first slots hold `lengths` [B] tokens: the same total as before, in another order."""

    def free_slots(self, first: int) -> None:
        """Free the slots from `first` on."""

    def cache_index(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[2, T]: index of the tokens at `positions` [T] of the slots `rows` [T]; see `LayerCache.put`."""
        return np.stack([rows, positions])

    def make_fill(self, bounds: np.ndarray, source: np.ndarray, first: int) -> Fill:
        """Return a `Fill` that writes sequences into the slots from `first` on. `source` [R] are indices of
        the sequences packed with `bounds` [P + 1].
        """
        lengths = np.diff(bounds)
        longest = int(lengths.max())
        # Short sequences repeat their last token, because positions beyond a sequence are written before they
        # are read.
        column = np.minimum(np.arange(longest), lengths[source, None] - 1)
        packed = torch.from_numpy((bounds[source, None] + column).ravel())
        rows = slice(first, first + len(source))

        def fill(layer: LayerCache, key: Tensor, value: Tensor) -> None:
            nonlocal packed
            packed = packed.to(key.device, non_blocking=True)
            for tokens, cached in ((key, layer.keys), (value, layer.values)):
                slots = tokens.index_select(1, packed).unflatten(1, (-1, longest))
                cached[rows, :, :longest] = slots.transpose(0, 1)

        return fill

    def planned_layout(self, rows: int, tokens: int, limit: int) -> tuple[int, int]:
        """Slots and capacity that `ensure_capacity` lays out."""
        if tokens <= self.capacity and rows <= self.slots:
            return self.slots, self.capacity
        roomy = self._capacity_for(tokens, limit)
        slots, capacity = max(self._wanted, rows), roomy if tokens > self.capacity else self.capacity
        if self._positions is not None and slots * capacity > self._positions:
            slots = max(rows, self._positions // min(capacity, roomy))
            capacity = max(tokens, min(capacity, roomy, self._positions // slots))
        return slots, capacity

    def _capacity_for(self, tokens: int, limit: int) -> int:
        """The capacity for requests of `tokens` tokens that grow."""
        if self._static:
            return bucket_size(tokens, LEAST_WINDOW, WINDOW_PARTS)
        return max(tokens, min(tokens + spare_positions(tokens), limit))

    def get_layer(self, index: int, key: Tensor, value: Tensor) -> LayerCache:
        """Return the cache of a layer. `key` and `value` [..., Hkv, T, d] set its shape the first time."""
        if index not in self.layers:
            buffers = []
            for kind, like in (("keys", key), ("values", value)):
                buffer, fresh = self._allocate_buffer(index, kind, like)
                buffers.append(buffer.zero_() if fresh else buffer)
            self.layers[index] = LayerCache(*buffers)
        return self.layers[index]

    def sort_slots(self, batch: RunningBatch) -> None:
        """Move requests of about the same length next to each other, if steps then read enough less. All
        their tokens but the newest are cached.
        """
        if self._static or not self.layers or not batch.size:
            return
        lengths = batch.length[: batch.size] - 1
        source, target = better_order(lengths, self.position_bytes)
        if source.size:
            self.move_slots(source, target, lengths[source])
            batch.move_slots(source, target)

    @property
    def position_bytes(self) -> int:
        """Bytes of the keys and values of one token in a layer, once a layer was written."""
        layer = next(iter(self.layers.values()), None)
        pair = () if layer is None else (layer.keys, layer.values)
        return sum(x.shape[1] * x.shape[3] * x.element_size() for x in pair)

    def window_length(self, tokens: int) -> int:
        """Number of positions a step should read when its longest request holds `tokens`.

        All of the capacity unless that is far more. Reading across the gap behind each slot's tokens is
        several times faster than skipping it, which defeats the processor's prefetching.
        """
        if self._static:
            return min(self._capacity_for(tokens, tokens), self.capacity)
        return self.capacity if self.capacity - tokens <= spare_positions(tokens) else tokens

    def move_slots(self, source: np.ndarray, target: np.ndarray, length: np.ndarray) -> None:
        """Copy the first `length` [M] positions of the slots `source` [M] to the slots `target` [M], which
        may be the same in another order.
        """
        if self.states is not None:
            self.states.move_slots(source, target)
        if not self.layers:
            return
        tensors = [x for cache in self.layers.values() for x in (cache.keys, cache.values)]
        device, longest = tensors[0].device, int(length.max())
        if device.type == "cpu":  # only the held positions, and no copy on the way if no slots overlap
            moves = list(zip(source.tolist(), target.tolist(), length.tolist(), strict=True))
            overlap = bool(np.isin(source, target).any())
            for x in tensors:
                parts = [x[old, :, :tokens] for old, _, tokens in moves]
                parts = [part.clone() for part in parts] if overlap else parts
                for part, (_, new, tokens) in zip(parts, moves, strict=True):
                    x[new, :, :tokens] = part
            return
        # Sent once, because with an index on the host every layer would wait for the device.
        rows = torch.from_numpy(np.stack([source, target])).to(device, non_blocking=True)
        for x in tensors:
            x[rows[1], :, :longest] = x[rows[0], :, :longest]

    def read_slot(self, row: int, length: int) -> PromptKV:
        layers = {
            index: (cache.keys[row, :, :length].clone(), cache.values[row, :, :length].clone())
            for index, cache in self.layers.items()
        }
        return PromptKV(layers, {} if self.states is None else self.states.read_slot(row))

    def write_prompt(self, rows: slice, prompt: PromptKV) -> None:
        """Put the same prompt into several slots."""
        if self.states is not None:
            self.states.write_slots(range(rows.start, rows.stop), prompt.states)
        for index, (keys, values) in prompt.layers.items():
            cache = self.get_layer(index, keys, values)
            cache.keys[rows, :, : keys.shape[1]] = keys
            cache.values[rows, :, : values.shape[1]] = values

    def _allocate_buffer(self, index: int, kind: str, like: Tensor) -> tuple[Tensor, bool]:
        """[S, Hkv, L, d] for keys or values like `like`, and True if it is new memory. New memory must be
        made finite, because masked positions are multiplied by 0, which does not remove a NaN.
        """
        shape = (self.slots, like.shape[-3], self.capacity, like.shape[-1])
        numbers = int(np.prod(shape))
        buffer = self._buffers.get((index, kind))
        fresh = (
            buffer is None
            or buffer.numel() < numbers
            or buffer.dtype != like.dtype
            or buffer.device != like.device
        )
        if buffer is None or fresh:
            buffer = torch.empty(numbers, dtype=like.dtype, device=like.device)
            self._buffers[index, kind], self.layout = buffer, object()
        return buffer[:numbers].view(shape), fresh


@dataclass(frozen=True, slots=True)
class Origin:
    """The weights and decoder that computed keys and values."""

    digest: str
    """Digest of the weights."""
    version: int
    """Policy version."""
    lean: bool
    """True if the lean decoder computed them. It orders the features of keys in its own way."""

    def __str__(self) -> str:
        decoder = "lean" if self.lean else "general"
        return f"weights {self.digest[:12]} (version {self.version}, {decoder} decoder)"


def pack_kv(sequence_kv: Iterable[tuple[np.ndarray, PromptKV]], origin: Origin) -> dict[str, Tensor]:
    """Pack into `tokens` [T] int32, `lengths` [B] int64, `origin` (JSON as uint8) and per layer
    `layer.I.keys` and `layer.I.values` [Hkv, T, d], or `state.I.NAME` [B, ...], all on the CPU. Equal
    sequences are stored once.
    """
    distinct = {tokens.astype(np.int32).tobytes(): kv for tokens, kv in sequence_kv}
    sequences = [np.frombuffer(tokens, dtype=np.int32) for tokens in distinct]
    tensors = {
        "tokens": torch.from_numpy(np.concatenate(sequences)),
        "lengths": torch.tensor([len(tokens) for tokens in sequences]),
        "origin": torch.frombuffer(bytearray(json.dumps(asdict(origin)).encode()), dtype=torch.uint8),
    }
    prompts = list(distinct.values())
    for index in prompts[0].layers:
        for part, name in enumerate(("keys", "values")):
            joined = torch.cat([prompt.layers[index][part] for prompt in prompts], dim=1)
            tensors[f"layer.{index}.{name}"] = joined.cpu()
    for index, states in prompts[0].states.items():
        for name in states:
            joined = torch.stack([prompt.states[index][name] for prompt in prompts])
            tensors[f"state.{index}.{name}"] = joined.cpu()
    return tensors


def unpack_kv(tensors: Mapping[str, Tensor], device: torch.device) -> tuple[dict[bytes, PromptKV], Origin]:
    """Return the sequences by the bytes of their tokens, on `device`, and their origin.

    Raises `RolloutError` if `tensors` are not a result of `pack_kv`.
    """
    try:
        origin = Origin(**read_document(bytes(tensors["origin"].numpy()), 1 << 16))
        tokens, lengths = tensors["tokens"].numpy(), tensors["lengths"].tolist()
        layers = sorted({int(name.split(".")[1]) for name in tensors if name.startswith("layer.")})
        pairs = {
            index: [
                tensors[f"layer.{index}.{part}"].to(device).split(lengths, dim=1)
                for part in ("keys", "values")
            ]
            for index in layers
        }
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        names = [tokens[a:b].tobytes() for a, b in pairwise(bounds)]
        states: list[dict[int, States]] = [{} for _ in names]
        for name in tensors:
            if name.startswith("state."):
                _, index, kind, number = name.split(".")
                if kind not in ("conv", "recurrent") or len(tensors[name]) != len(names):
                    raise ValueError(f"no states are {name}")
                for row, one in enumerate(tensors[name].to(device)):
                    states[row].setdefault(int(index), {})[f"{kind}.{int(number)}"] = one
    except (KeyError, ValueError, TypeError, RuntimeError, IndexError) as error:
        raise RolloutError(
            f"the saved keys and values are not readable ({reason_of(error)}); let the engine prefill."
        ) from error
    saved = {
        name: PromptKV(
            {index: (keys[row], values[row]) for index, (keys, values) in pairs.items()}, states[row]
        )
        for row, name in enumerate(names)
    }
    return saved, origin


def put_back(
    saved: Mapping[bytes, PromptKV], cache: KVCache, batch: RunningBatch, start: int, routed: bool = False
) -> list[int]:
    """Restore saved keys and values to the slots from `start` on, up to the first slot that has none. Returns
    the number of tokens restored to each. `routed`: stop also before a slot whose expert choices are wanted.
    """
    lengths: list[int] = []
    for slot in range(start, batch.size):
        tokens = batch.known_tokens(slot)[:-1]
        kv = saved.get(tokens.tobytes())
        if kv is None or (routed and batch.routed[slot] < len(tokens)):
            break
        cache.write_prompt(slice(slot, slot + 1), kv)
        lengths.append(len(tokens))
    return lengths
