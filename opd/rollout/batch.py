"""The running requests as arrays by slot: no Python work per request in a decode step.

The `size` running requests always occupy slots `0 ... size - 1`. A request that ends leaves a hole, which the
last running ones fill (`remove`); new requests are appended (`admit`).
"""

from __future__ import annotations

import numpy as np

from opd.rollout.noise import NoiseTable
from opd.rollout.requests import RequestQueue
from opd.types import Status


class RunningBatch:
    """`S` slots. Every public array is `[S]` int64 by slot unless said otherwise; only `[:size]` means
    something.
    """

    def __init__(self, slots: int, stop_width: int, capacity: int) -> None:
        """`capacity`: the most tokens a request may come to hold."""
        self.slots = slots
        self.size = 0
        self.uids: list[str] = []
        # One array for all integer fields, so that moving requests is one operation.
        self._integers = np.zeros((slots, 4 + stop_width), dtype=np.int64)
        self._reals = np.zeros((slots, 2), dtype=np.float64)
        self.length, self.position, self.limit, self.top_k = self._integers.T[:4]
        """Known tokens; response position of the next token; `max_new_tokens`; top-k."""
        self.stops = self._integers[:, 4:]
        """[S, W]."""
        self.temperature, self.top_p = self._reals.T
        """float64."""
        self.tokens = np.zeros((slots, capacity), dtype=np.int32)
        """[S, capacity] int32: prompt and response so far."""
        self.noise = NoiseTable(slots)
        self._rows = np.arange(slots)

    def admit(self, queue: RequestQueue) -> int:
        """Fill the free slots from the queue; returns how many requests came in."""
        number = min(self.slots - self.size, len(queue))
        if number == 0:
            return 0
        rows, taken = slice(self.size, self.size + number), slice(queue.taken, queue.taken + number)
        for name in ("length", "position", "limit", "top_k", "stops", "temperature", "top_p"):
            getattr(self, name)[rows] = getattr(queue, name)[taken]
        for row, ids in enumerate(queue.tokens[taken], start=self.size):
            self.tokens[row, : len(ids)] = ids
        self.noise.assign(rows, queue.seeds[taken], queue.keys[taken])
        self.uids += queue.uids[taken]
        queue.taken += number
        self.size += number
        return number

    def known(self, row: int) -> np.ndarray:
        """[length] int32: prompt and response of one slot."""
        return self.tokens[row, : self.length[row]]

    def last_tokens(self, count: int) -> np.ndarray:
        """[count] int32: the newest token of each of the first slots."""
        return self.tokens[self._rows[:count], self.length[:count] - 1]

    def append(self, ids: np.ndarray) -> dict[int, Status]:
        """Add one token [size] to every running request; returns the slots that ended, and how."""
        rows = slice(0, self.size)
        self.tokens[self._rows[rows], self.length[rows]] = ids
        self.length[rows] += 1
        self.position[rows] += 1
        stopped = (self.stops[rows] == ids[:, None]).any(axis=1)
        ended = np.flatnonzero(stopped | (self.position[rows] >= self.limit[rows]))
        return {int(row): Status.COMPLETED if stopped[row] else Status.TRUNCATED for row in ended}

    def remove(self, ended: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Free the slots `ended`; returns (source, target): which slots moved where to close the holes."""
        running = np.ones(self.size, dtype=bool)
        running[ended] = False
        remaining = self.size - len(ended)
        source = np.flatnonzero(running[remaining:]) + remaining
        target = np.flatnonzero(~running[:remaining])
        if source.size:
            self._integers[target] = self._integers[source]
            self._reals[target] = self._reals[source]
            self.tokens[target] = self.tokens[source]
            self.noise.move(source, target)
            for old, new in zip(source, target, strict=True):
                self.uids[new] = self.uids[old]
        del self.uids[remaining:]
        self.size = remaining
        return source, target
