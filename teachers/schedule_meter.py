"""What a schedule of teachers counts: tokens, heads, bytes, and how long it waited for whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from opd.protocols import Teacher
from opd.teachers.resident_heads import Prefetching, ResidentHeads


@dataclass(slots=True)
class ScheduleCounters:
    """What the schedule did since the counters were last taken: one mini-batch in the merge."""

    head_loads: int = 0
    resident_heads_peak: int = 0
    prefetched_heads_peak: int = 0
    """Heads that were read ahead beside the resident ones."""
    teacher_tokens: int = 0
    """Response tokens whose hidden states a teacher computed."""
    cached_tokens: int = 0
    """Response tokens whose hidden states came from the cache."""
    bytes_read: int = 0
    """Bytes this process read from the stores of its teachers."""
    stall_seconds: float = 0.0
    """How long scoring and training waited for layers and heads."""
    weight_bytes_peak: int = 0
    """The most bytes of streamed teachers' weights that were in memory at once."""


class ScheduleMeter:
    """Counters of one schedule, with those its teachers and heads keep themselves.

    Args:
        teachers: By name.
        heads: The resident ones.
    """

    def __init__(self, teachers: Mapping[str, Teacher], heads: ResidentHeads) -> None:
        self._teachers, self._heads = teachers, heads
        self._waited: dict[str, float] = {}
        self._taken: dict[str, tuple[int, float]] = {}
        self.counters = ScheduleCounters()

    def waited(self, teacher: str, seconds: float) -> None:
        """The schedule waited so long for a teacher's scores."""
        self._waited[teacher] = self._waited.get(teacher, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Everything since it was last taken, as metrics."""
        taken, self.counters = self.counters, ScheduleCounters()
        heads = self._heads
        taken.head_loads, heads.loads = heads.loads, 0
        taken.resident_heads_peak, heads.resident_peak = heads.resident_peak, 0
        taken.prefetched_heads_peak, heads.prefetched_peak = heads.prefetched_peak, 0
        for name, teacher in self._teachers.items():
            if isinstance(teacher, Prefetching):
                now = (teacher.bytes_read, teacher.stall_seconds)
                before = self._taken.get(name, (0, 0.0))
                taken.bytes_read += now[0] - before[0]
                taken.stall_seconds += now[1] - before[1]
                taken.weight_bytes_peak = max(taken.weight_bytes_peak, teacher.take_weight_bytes_peak())
                self._taken[name] = now
        waited, self._waited = self._waited, {}
        seconds = {f"teacher/{name}/wait_seconds": value for name, value in waited.items()}
        return {name: float(value) for name, value in asdict(taken).items()} | seconds
