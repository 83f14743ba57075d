"""Memory of what teachers read: its sum, its place in a bounded buffer, and the pages that heads pass on."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def own_pages(nbytes: int) -> Tensor:
    """Return [nbytes] uint8 of pages that go back to the system with the last tensor on them.

    One thread after another reads heads. Memory that `malloc` gives a thread stays with that arena's threads
    after it is freed: several heads' worth for ten teachers.
    """
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


class HeadPages:
    """Pages for heads. Usually at most two exist: one in use, and one that is read ahead.

    The system clears each new page before it gives it away, which takes several times as long as reading a
    head into existing pages. So the pages of a freed head wait for the next one, while one other head exists.
    When that is freed too, so are they. A head is freed when no tensor is left on its memory, in any thread.
    Safe between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may run inside
        self._used = 0
        self._spare: mmap.mmap | None = None

    def allocate_pages(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8, of any content. Raises `OSError` if the system has no memory for it."""
        size, pages = max(nbytes, 1), None
        with self._lock:
            if self._spare is not None and len(self._spare) == size:
                pages, self._spare = self._spare, None
        if pages is None:
            pages = mmap.mmap(-1, size)
        view = memoryview(pages)  # lives as long as the tensor's memory
        tensor = torch.frombuffer(view, dtype=torch.uint8)
        with self._lock:
            self._used += 1
        weakref.finalize(view, self._reclaim_pages, pages).atexit = False
        return tensor[:nbytes]

    def _reclaim_pages(self, pages: mmap.mmap) -> None:
        with self._lock:
            self._used -= 1
            self._spare = pages if self._used == 1 else None


class ByteMeter:
    """Counts bytes up and down from any thread, and remembers the peak."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may run inside `track_bytes`
        self.current_bytes = 0
        """Bytes held now."""
        self._peak = 0

    def add_bytes(self, nbytes: int) -> None:
        """Count `nbytes` more."""
        with self._lock:
            self.current_bytes += nbytes
            self._peak = max(self._peak, self.current_bytes)

    def remove_bytes(self, nbytes: int) -> None:
        """Count `nbytes` less."""
        with self._lock:
            self.current_bytes -= nbytes

    @contextmanager
    def track_bytes(self, nbytes: int) -> Iterator[None]:
        """Count `nbytes` more inside the block."""
        self.add_bytes(nbytes)
        try:
            yield
        finally:
            self.remove_bytes(nbytes)

    def drain_peak(self) -> int:
        """Return the most bytes held at once since the last call."""
        with self._lock:
            peak, self._peak = self._peak, self.current_bytes
            return peak


ALIGNMENT = 256
"""Bytes. CUDA allocations have it, and it is a multiple of every dtype's and SIMD load's alignment."""


def align_size(nbytes: int) -> int:
    """Return `nbytes` rounded up to `ALIGNMENT`, at least one."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


class ByteRing:
    """Tracks free space in a buffer of `capacity` bytes, without owning memory.

    Every allocation is contiguous, so the end of the buffer may stay unused for a round. Space is used again
    in the order of allocation: one given back early counts only when all older ones are back too. An
    allocation of at most `capacity` bytes always fits into an empty ring.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = align_size(capacity)
        self._live: OrderedDict[int, int] = OrderedDict()  # start -> stop, oldest first
        self._back: set[int] = set()

    def __len__(self) -> int:
        """Number of allocations whose space cannot be used yet."""
        return len(self._live)

    def allocate_bytes(self, nbytes: int) -> int | None:
        """Return the offset for `nbytes`, or `None` while there is no space for them."""
        size = align_size(nbytes)
        start = self._free_offset(size)
        if start is not None:
            self._live[start] = start + size
        return start

    def free_bytes(self, start: int) -> None:
        """Free the allocation that begins at `start`. `KeyError` if there is none."""
        if start not in self._live or start in self._back:
            raise KeyError(start)
        self._back.add(start)
        while self._live and (oldest := next(iter(self._live))) in self._back:
            del self._live[oldest]
            self._back.discard(oldest)

    def _free_offset(self, size: int) -> int | None:
        if not self._live:
            return 0 if size <= self.capacity else None
        oldest = next(iter(self._live))
        newest, end = next(reversed(self._live.items()))
        if newest < oldest:  # wrapped: free space lies between the newest and the oldest
            return end if oldest - end >= size else None
        if self.capacity - end >= size:
            return end
        return 0 if oldest >= size else None
