"""The heads in memory: those of one route, and at most one that is being read ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from opd.kernels.head import Head
from opd.protocols import Teacher


@runtime_checkable
class Prefetching(Protocol):
    """What a teacher offers beyond `Teacher` when it can read ahead in the background."""

    collective: bool
    """Whether every rank of a group must call `score` equally often, and in one order of teachers."""
    bytes_read: int
    stall_seconds: float

    def prefetch(self) -> None:
        """Begin to read what the next `score` needs. A second call changes nothing."""
        ...

    def prefetch_head(self) -> None:
        """Begin to read what the next `load_head` needs. A second call changes nothing."""
        ...

    def discard_head(self) -> None:
        """Forget what `prefetch_head` has read."""
        ...

    def take_weight_bytes_peak(self) -> int:
        """The most bytes of weights, of all teachers that share its memory, since this was last asked."""
        ...


class ResidentHeads:
    """Loads each head when its route comes, drops it when the route has passed."""

    def __init__(self, teachers: Mapping[str, Teacher]) -> None:
        self._teachers = teachers
        self._heads: dict[str, Head] = {}
        self._ahead: str | None = None
        self.loads = 0
        self.resident_peak = 0
        self.prefetched_peak = 0

    def bring(self, names: Sequence[str], following: Sequence[str]) -> dict[str, Head]:
        """The heads of `names`; one of `following`, the next route's, is read ahead meanwhile."""
        # Heads of other routes go first, so that the peak never counts two routes.
        self._heads = {name: head for name, head in self._heads.items() if name in names}
        if self._ahead is not None and self._ahead not in (*names, *following):
            self._discard()
        for name in names:
            if name not in self._heads:
                self._heads[name] = self._teachers[name].load_head()
                self.loads += 1
                if name == self._ahead:
                    self._ahead = None
        self.resident_peak = max(self.resident_peak, len(self._heads))
        self.read_ahead(following)
        return {name: self._heads[name] for name in names}

    def read_ahead(self, names: Sequence[str]) -> None:
        """Begin to read the first head of `names` that is not in memory, if its teacher can."""
        missing = next((name for name in names if name not in self._heads), None)
        if missing is None or self._ahead is not None:
            return
        teacher = self._teachers[missing]
        if isinstance(teacher, Prefetching):
            teacher.prefetch_head()
            self._ahead = missing
            self.prefetched_peak = max(self.prefetched_peak, 1)

    def release(self) -> None:
        """Drop all of them."""
        self._heads.clear()
        self._discard()

    def _discard(self) -> None:
        if self._ahead is not None:
            teacher = self._teachers[self._ahead]
            assert isinstance(teacher, Prefetching)
            teacher.discard_head()
            self._ahead = None
