"""Teachers whose layers pass by: one loader, one computer, and a window of bytes between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from opd.pipelines.simulate.costs import LayerCost


@dataclass(frozen=True, slots=True)
class Pass:
    """One scoring pass over all teachers."""

    end: float
    """Seconds, on the clock its begin is on."""
    busy: float
    stalled: float


class TeacherPasses:
    """Passes one after another on the same ranks. The loader reads on into the window while nothing computes,
    as `LayerStream` does: the first layers of a pass may have come during what was before it.
    """

    def __init__(self, prefetch_bytes: float, *, ahead: bool = True) -> None:
        """`ahead`: the first layers are read before the pass begins. Without, every pass starts empty."""
        self._prefetch = prefetch_bytes
        self._ahead = ahead
        self._loader_free = 0.0
        self._held: deque[tuple[float, float]] = deque()
        """(bytes, when they are given back) of layers in the window."""

    def run(self, begin: float, layers: Sequence[LayerCost]) -> Pass:
        """Every layer of `layers` in order, from `begin` on."""
        if not self._ahead:
            self._loader_free = max(self._loader_free, begin)
        now, busy, stalled = begin, 0.0, 0.0
        for layer in layers:
            loaded = self._load(layer)
            waiting = max(0.0, loaded - now)
            now += waiting + layer.compute
            stalled += waiting
            busy += layer.compute
            self._held.append((layer.nbytes, now))
        return Pass(now, busy, stalled)

    def _load(self, layer: LayerCost) -> float:
        """When `layer` is there: after the layers before it, and once there is room for it."""
        start = self._loader_free
        held = sum(nbytes for nbytes, _ in self._held)
        # The layer in use and `prefetch` more: with nothing in the window there is always room.
        while self._held and held > self._prefetch:
            nbytes, back = self._held.popleft()
            held -= nbytes
            start = max(start, back)
        self._loader_free = start + layer.load
        return self._loader_free
