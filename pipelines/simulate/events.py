"""Simulated time: events in order, and what each worker did with its time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count


class Clock:
    """Calls what is due, in order of time; events of one moment in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call `call` at `time`, which must not have passed."""
        if time < self.now:
            raise ValueError(f"an event at {time} was asked for at {self.now}")
        heapq.heappush(self._events, (time, next(self._serial), call))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


@dataclass(slots=True)
class Usage:
    """Seconds of one kind of worker: what is neither busy nor stalled was idle."""

    busy: float = 0.0
    stalled: float = 0.0
    """There was work, and it waited for bytes."""

    def idle(self, total: float) -> float:
        """The rest of `total` seconds."""
        return total - self.busy - self.stalled
