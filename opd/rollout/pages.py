"""Keys and values in pages, for a kernel that reads only each request's own tokens.

Every layer has one pool of pages, of `N` tokens each. A slot owns pages in the order of its tokens, the same
in every layer. It takes a page when it needs one and returns all at its end. So memory follows the tokens
that requests hold, not the most they may come to hold. Page 0 has no owner. Slots without a request write
there, and unowned entries of the table point to it.

Shapes: `S` slots, `W` pages of a slot at most, `P` pages of the pool, `N` tokens of a page, `Hkv` key-value
heads, `d` head size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from opd.rollout.batch import RequestQueue, RunningBatch
from opd.rollout.kv_cache import Fill, KVCache, LayerCache, PromptKV, bucket_size

PAGE = 256
"""Tokens of a page. Flash attention takes multiples of it."""
LEAST_PAGES, PAGE_PARTS = 16, 2
"""Sizes to which the pool grows, in pages: 16, 24, 32, 48, 64, ..."""


def pages_of(tokens: np.ndarray) -> np.ndarray:
    """Number of pages for each number of tokens."""
    return -(-tokens // PAGE)


class PagedLayer(LayerCache):
    """One layer's pool: keys [P, N, Hkv, d] and values [P, N, Hkv, dv]."""

    def __init__(self, keys: Tensor, values: Tensor, table: Callable[[], Tensor]) -> None:
        """`table` returns the pages of all slots, [S, W] int32 on the device."""
        super().__init__(keys, values)
        self._table = table

    def put(self, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Write `key` and `value` [T, Hkv, d] to `places` [1, T] of the pool."""
        self.keys.flatten(0, 1).index_copy_(0, places[0], key)
        self.values.flatten(0, 1).index_copy_(0, places[0], value)

    def read_slots(self, first: int, stop: int, length: int) -> tuple[Tensor, Tensor]:
        """Copies [R, Hkv, L, d] of the slots from `first` to `stop`, up to `length` tokens."""
        count = int(pages_of(np.asarray(length)))
        pages = self._table()[first:stop, :count].flatten()

        def gather_pages(pool: Tensor) -> Tensor:
            rows = pool.index_select(0, pages).unflatten(0, (stop - first, count)).flatten(1, 2)
            return rows[:, :length].transpose(1, 2)

        return gather_pages(self.keys), gather_pages(self.values)


class PagedCache(KVCache):
    """A cache whose slots own pages, for a total of at most `positions` tokens."""

    def __init__(self, positions: int, device: torch.device) -> None:
        super().__init__(positions, static=True)
        self._device = device
        self.most_pages = positions // PAGE
        """Most pages that all requests may own."""
        self._pools: dict[int, PagedLayer] = {}
        self._pages = 0
        """Pages of the pool, without the first."""
        self._free: list[int] = []
        self._lay_table(0, 0)

    def _lay_table(self, slots: int, width: int) -> None:
        """Lay out a table for `slots` of `width` pages. Owned pages stay."""
        owned, old = (np.zeros(0, np.int64), None) if slots == 0 else (self._owned, self._table)
        pinned = self._device.type == "cuda"
        self._host = torch.zeros(slots, width, dtype=torch.int32, pin_memory=pinned)
        self._table = self._host.numpy()
        self._owned = np.zeros(slots, dtype=np.int64)
        if old is not None:
            self._table[: len(old), : old.shape[1]] = old
            self._owned[: len(owned)] = owned
        with torch.inference_mode(False):  # the table is also written outside of steps
            self.table = torch.zeros(slots, width, dtype=torch.int32, device=self._device)
        """[S, W] int32: the page of every slot's tokens `W * N ...`, 0 if it owns none."""
        self.slots, self.capacity, self.layout = slots, width * PAGE, object()

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for y in self._pools.values() for x in (y.keys, y.values))

    @property
    def position_capacity(self) -> int:
        """Tokens that fit in the present layout."""
        return self._pages * PAGE

    @property
    def free_pages(self) -> int:
        """Pages without an owner, including those by which the pool may still grow."""
        return self.most_pages - int(self._owned.sum())

    def reset(self, slots: int) -> None:
        """Drop everything, for `slots` requests. The pool stays."""
        self.clear()
        self._wanted = slots

    def clear(self) -> None:
        """Drop everything."""
        self.layers.clear()
        self.free_slots(0)

    def admissible_count(self, batch: RunningBatch, queue: RequestQueue) -> int:
        """Number of waiting requests that may be admitted, if all running may then take one more page."""

        def may_take(length: np.ndarray, most: np.ndarray) -> np.ndarray:
            return np.minimum(pages_of(length) + 1, pages_of(most))

        rows, coming = slice(0, batch.size), slice(queue.front, queue.front + batch.slots - batch.size)
        running = int(may_take(batch.length[rows], batch.most_tokens).sum())
        wanted = np.cumsum(may_take(queue.length[coming], queue.most_tokens[coming])) + running
        return max(int((wanted <= self.most_pages).sum()), int(batch.size == 0 and len(queue) > 0))

    def overdue_slots(self, batch: RunningBatch) -> list[int]:
        """The last slots, whose requests must wait because there are not enough pages for all."""
        wanted = np.cumsum(pages_of(batch.length[: batch.size]))
        return list(range(int((wanted <= self.most_pages).sum()), batch.size))

    def positions_for(self, lengths: np.ndarray, limit: int) -> int:
        """Tokens that fit once its slots hold `lengths` [B]."""
        del limit
        return max(self._pages, self._pool_size(pages_of(lengths))) * PAGE

    def _pool_size(self, wanted: np.ndarray) -> int:
        """Pages of a pool for slots that need `wanted` [B], plus one more each, so that it rarely grows."""
        needed = int(wanted.sum())
        most = max(needed, self.slots * self._table.shape[1])
        return min(bucket_size(needed + len(wanted), LEAST_PAGES, PAGE_PARTS), most, self.most_pages)

    def ensure_capacity(self, rows: int, tokens: int, limit: int, used: int) -> None:
        """Lay out `rows` slots, each with as many pages as `limit` tokens need."""
        del used
        slots, width = max(self._wanted, rows), int(pages_of(np.asarray(max(tokens, limit))))
        if slots > self.slots or width > self._table.shape[1]:
            self._lay_table(max(slots, self.slots), max(width, self._table.shape[1]))
            self._upload_table()

    def reserve_tokens(self, lengths: np.ndarray, limit: int, used: int) -> None:
        """As of `KVCache`. Enough pages must be free: see `overdue_slots`."""
        super().reserve_tokens(lengths, limit, used)
        self.assign_tokens(lengths)

    def assign_tokens(self, lengths: np.ndarray) -> None:
        """Give the first slots the pages for `lengths` [B] tokens, and take back any beyond."""
        wanted, owned = pages_of(lengths), self._owned[: len(lengths)]
        changed = np.flatnonzero(wanted != owned)
        for slot in changed[owned[changed] > wanted[changed]]:
            self._free_pages(int(slot), int(wanted[slot]))
        if int((wanted - owned).sum()) > len(self._free):
            pages = self._pool_size(wanted)
            for layer in self._pools.values():  # one by one, because old and new exist at the same time
                for kind in ("keys", "values"):
                    old = getattr(layer, kind)
                    new = old.new_zeros(pages + 1, *old.shape[1:])
                    new[: len(old)] = old
                    setattr(layer, kind, new)
            self._free += range(pages, self._pages, -1)
            self._pages, self.layout = pages, object()
        for slot in np.flatnonzero(wanted > owned):
            for column in range(int(owned[slot]), int(wanted[slot])):
                self._table[slot, column] = self._free.pop()
            self._owned[slot] = wanted[slot]
        if changed.size:
            self._upload_table()

    def free_slots(self, first: int) -> None:
        ended = np.flatnonzero(self._owned[first:]) + first
        for slot in ended:
            self._free_pages(int(slot), 0)
        if ended.size:  # a step computes a few extra slots, which must not write to another slot's pages
            self._upload_table()

    def _free_pages(self, slot: int, count: int) -> None:
        """Free the pages of a slot but for the first `count`."""
        self._free += self._table[slot, count : self._owned[slot]].tolist()
        self._table[slot, count:], self._owned[slot] = 0, count

    def _upload_table(self) -> None:
        self.table.copy_(self._host, non_blocking=True)

    def get_layer(self, index: int, key: Tensor, value: Tensor) -> LayerCache:
        """Return the pool of a layer. `key` and `value` [..., Hkv, T, d] set its shape the first time."""
        pool = self._pools.get(index)
        forms = [(x.dtype, x.device, x.shape[-3], x.shape[-1]) for x in (key, value)]
        if pool is None or [(x.dtype, x.device, *x.shape[2:]) for x in (pool.keys, pool.values)] != forms:
            keys, values = (
                x.new_zeros(self._pages + 1, PAGE, x.shape[-3], x.shape[-1]) for x in (key, value)
            )
            pool = self._pools[index] = PagedLayer(keys, values, lambda: self.table)
            self.layout = object()
        self.layers[index] = pool
        return pool

    def cache_index(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[1, T]: pool index of the tokens at `positions` [T] of the slots `rows` [T]."""
        return (self._table[rows, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE)[None]

    def make_fill(self, bounds: np.ndarray, source: np.ndarray, first: int) -> Fill:
        lengths = np.diff(bounds)[source]
        rows = np.repeat(np.arange(len(source)), lengths)
        positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        packed = torch.from_numpy(bounds[source[rows]] + positions)
        index = torch.from_numpy(self.cache_index(first + rows, positions))

        def fill(layer: LayerCache, key: Tensor, value: Tensor) -> None:
            nonlocal packed, index
            packed = packed.to(key.device, non_blocking=True)
            index = index.to(key.device, non_blocking=True)
            layer.put(index, *(x.transpose(0, 1).index_select(0, packed) for x in (key, value)))

        return fill

    def sort_slots(self, batch: RunningBatch) -> None:
        """Do nothing: a step reads only each request's own tokens, whatever its neighbours hold."""

    def move_slots(self, source: np.ndarray, target: np.ndarray, length: np.ndarray) -> None:
        """Move the pages of the slots `source` [M] to the slots `target` [M], which may be a permutation."""
        del length
        pages, owned = self._table[source], self._owned[source]
        for slot in np.setdiff1d(target, source):
            self._free_pages(int(slot), 0)
        for rows in (source, target):
            self._table[rows], self._owned[rows] = 0, 0
        self._table[target], self._owned[target] = pages, owned
        self._upload_table()

    def read_slot(self, row: int, length: int) -> PromptKV:
        copies = ((i, x.read_slots(row, row + 1, length)) for i, x in self.layers.items())
        return PromptKV({i: (keys[0].contiguous(), values[0].contiguous()) for i, (keys, values) in copies})

    def write_prompt(self, rows: slice, prompt: PromptKV) -> None:
        """Put the same prompt into several slots, which own the pages for it."""
        slots = np.arange(rows.start, rows.stop)
        if not len(slots):
            return
        keys, _ = next(iter(prompt.layers.values()))
        positions = np.arange(keys.shape[1])
        places = self.cache_index(np.repeat(slots, len(positions)), np.tile(positions, len(slots)))
        index = torch.from_numpy(places).to(keys.device, non_blocking=True)
        for layer, pair in prompt.layers.items():
            pool = self.get_layer(layer, *pair)
            pool.put(index, *(x.transpose(0, 1).repeat(len(slots), 1, 1) for x in pair))
