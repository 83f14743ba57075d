"""When engine and learner were at work, and for how many processor seconds: for `async_gain.py`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from opd.pipelines.stages.loop import PhaseTimer
from opd.rollout.torch_engine import TorchEngine
from opd.types import Chunk

GAP = 0.004
"""Seconds between two intervals of one kind that are drawn as one."""


@dataclass(slots=True)
class Interval:
    """One stretch of work."""

    kind: str
    """`decode`, or a phase of the learner's step."""
    begin: float
    end: float
    processor: float
    """Seconds of the thread's processor time."""


@dataclass(slots=True)
class Recorder:
    """Intervals of everything between `record`'s begin and end."""

    engine: list[Interval] = field(default_factory=list)
    learner: list[Interval] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Requests decoded together, of each decode step."""

    @contextmanager
    def record(self) -> Iterator[None]:
        """Time every decode step of the embedded engine and every phase of the learner."""
        decode, phase = TorchEngine.next_chunk, PhaseTimer.__call__

        def timed_decode(engine: TorchEngine) -> Chunk | None:
            began, processor = time.perf_counter(), time.thread_time()
            step = decode(engine)
            if step is None:
                return None
            used = time.thread_time() - processor
            self.engine.append(Interval("decode", began, time.perf_counter(), used))
            self.rows.append(len(step.uids))
            return step

        @contextmanager
        def timed_phase(timer: PhaseTimer, name: str) -> Iterator[None]:
            began, processor = time.perf_counter(), time.thread_time()
            with phase(timer, name):
                yield
            used = time.thread_time() - processor
            self.learner.append(Interval(name, began, time.perf_counter(), used))

        TorchEngine.next_chunk = timed_decode
        PhaseTimer.__call__ = timed_phase
        try:
            yield
        finally:
            TorchEngine.next_chunk, PhaseTimer.__call__ = decode, phase

    def step_bounds(self) -> list[float]:
        """When each step of the learner began, and when the last one ended."""
        begins = [interval.begin for interval in self.learner if interval.kind == "rollout"]
        return [*begins, self.learner[-1].end]

    def shares(self, begin: float, end: float) -> dict[str, float]:
        """Of the time from `begin` to `end`: engine and learner at work, and on the processor meanwhile."""
        engine = [i for i in self.engine if begin <= i.begin < end]
        learner = [i for i in self.learner if i.kind != "rollout" and begin <= i.begin < end]
        whole = end - begin
        return {
            "engine_busy": sum(i.end - i.begin for i in engine) / whole,
            "engine_processor": sum(i.processor for i in engine) / whole,
            "trainer_busy": sum(i.end - i.begin for i in learner) / whole,
            "trainer_processor": sum(i.processor for i in learner) / whole,
        }

    def strips(self, begin: float, end: float) -> dict[str, list[tuple[str, float, float]]]:
        """(kind, begin, end) of engine and learner, from `begin` on, for a timeline."""
        return {
            "engine": _joined([i for i in self.engine if i.end > begin and i.begin < end], begin, end),
            "trainer": _joined(
                [i for i in self.learner if i.kind != "rollout" and i.end > begin and i.begin < end],
                begin,
                end,
            ),
        }


def _joined(intervals: list[Interval], begin: float, end: float) -> list[tuple[str, float, float]]:
    found: list[tuple[str, float, float]] = []
    for one in intervals:
        first, last = max(one.begin, begin) - begin, min(one.end, end) - begin
        if found and found[-1][0] == one.kind and first - found[-1][2] < GAP:
            found[-1] = (one.kind, found[-1][1], last)
        else:
            found.append((one.kind, first, last))
    return [(kind, round(first, 4), round(last, 4)) for kind, first, last in found]
