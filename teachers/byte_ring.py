"""Space for byte strings that are taken and given back first in, first out, inside one buffer."""

from __future__ import annotations

from collections import OrderedDict

ALIGNMENT = 256
"""Bytes; what CUDA allocations have, and a multiple of what every dtype and SIMD load asks for."""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to `ALIGNMENT`, at least one."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


class ByteRing:
    """Keeps the books of a buffer of `capacity` bytes; owns no memory.

    Every piece is contiguous, so what is left at the end of the buffer may stay unused for a round. Space is
    used again in the order in which it was taken: a piece given back early counts only when all older ones
    are back too. A piece of at most `capacity` bytes always fits into an empty ring.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = aligned(capacity)
        self._live: OrderedDict[int, int] = OrderedDict()  # start -> stop, oldest first
        self._back: set[int] = set()

    def __len__(self) -> int:
        """Pieces whose space cannot be used yet."""
        return len(self._live)

    def take(self, nbytes: int) -> int | None:
        """Where `nbytes` may be written; `None` while there is no room for them."""
        size = aligned(nbytes)
        start = self._place(size)
        if start is not None:
            self._live[start] = start + size
        return start

    def give_back(self, start: int) -> None:
        """The piece that begins at `start` is no longer needed. `KeyError` if there is none."""
        if start not in self._live or start in self._back:
            raise KeyError(start)
        self._back.add(start)
        while self._live and (oldest := next(iter(self._live))) in self._back:
            del self._live[oldest]
            self._back.discard(oldest)

    def _place(self, size: int) -> int | None:
        if not self._live:
            return 0 if size <= self.capacity else None
        oldest = next(iter(self._live))
        newest, end = next(reversed(self._live.items()))
        if newest < oldest:  # wrapped: free space lies between the newest and the oldest
            return end if oldest - end >= size else None
        if self.capacity - end >= size:
            return end
        return 0 if oldest >= size else None
