"""Samples ordered by teacher: each teacher runs once, each head is in memory once per mini-batch.

DeepSeek-V4 (report, section 5.2.2) orders the samples of a mini-batch by teacher index, keeps only last
hidden states between scoring and training, and rebuilds logits from them with one resident head at a time.
The order never changes the step: a gradient is a sum over samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.protocols import Teacher
from opd.teachers.routing import Route, Router
from opd.train.distill_terms import TeacherView
from opd.types import HiddenStates, MicroBatch, RolloutBatch, Sample


@dataclass(slots=True)
class ScheduleCounters:
    """What the schedule did since the counters were last taken: one mini-batch in the merge."""

    head_loads: int = 0
    resident_heads_peak: int = 0
    teacher_tokens: int = 0
    """Response tokens scored."""


class TeacherSchedule:
    """Scores samples teacher by teacher and hands their targets to the loss.

    With one teacher per sample at most one head is resident. A sample that belongs to a mixture needs all
    heads of its mixture at once, and no more.
    """

    def __init__(self, teachers: Mapping[str, Teacher], router: Router) -> None:
        self._teachers = dict(teachers)
        self._router = router
        self._routes: dict[str, Route] = {}
        self._rows: dict[tuple[str, str], Tensor] = {}
        self._heads: dict[str, Head] = {}
        self.counters = ScheduleCounters()

    def assign(self, samples: Sequence[Sample]) -> None:
        """Write each sample's route into `sample.teacher`."""
        for sample in samples:
            route = self._router.route(sample.domain, sample.group_uid)
            self._routes[route.name] = route
            sample.teacher = route.name

    def score(self, samples: Sequence[Sample]) -> None:
        """Run each teacher once over its samples and keep the hidden states until `release`.

        Raises `TeacherError` if a teacher returns the wrong number of rows or a number that is not finite.
        """
        for name, teacher in self._teachers.items():
            mine = [s for s in samples if name in self._routes[s.teacher or ""].teachers]
            if not mine:
                continue
            targets = teacher.score(mine)
            counts = [len(s.response_ids) for s in mine]
            if not isinstance(targets, HiddenStates) or len(targets.rows) != sum(counts):
                raise TeacherError(
                    f"teacher {name} returned {type(targets).__name__} for {sum(counts)} response tokens,"
                    " but one hidden state per token is needed; check its back end."
                )
            if not torch.isfinite(targets.rows).all():
                raise TeacherError(
                    f"teacher {name} returned hidden states that are not finite; check its weights and dtype."
                )
            self.counters.teacher_tokens += sum(counts)
            for sample, rows in zip(mine, targets.rows.split(counts), strict=True):
                self._rows[name, sample.uid] = rows

    def sort(self, batch: RolloutBatch) -> RolloutBatch:
        """`batch` ordered by teacher, otherwise in its own order."""
        # By the teachers' own order, not by which route was met first: a resumed run must sort the same way.
        rank = {name: i for i, name in enumerate(self._teachers)}
        places = {
            name: tuple(rank[teacher] for teacher in route.teachers) for name, route in self._routes.items()
        }
        order = sorted(range(len(batch.samples)), key=lambda i: places[batch.samples[i].teacher or ""])
        return RolloutBatch([batch.samples[i] for i in order], [batch.terms[i] for i in order])

    def __call__(self, micro: MicroBatch) -> list[TeacherView]:
        """The teachers of a micro-batch whose samples share one route."""
        return self.views(micro.samples)

    def views(self, samples: Sequence[Sample]) -> list[TeacherView]:
        """The teachers of `samples`, which share one route; their heads become the resident ones."""
        route = self._routes[samples[0].teacher or ""]
        self._make_resident(route)
        return [
            TeacherView(name, weight, self.hidden(name, samples), self._heads[name])
            for name, weight in zip(route.teachers, route.weights, strict=True)
        ]

    def hidden(self, teacher: str, samples: Sequence[Sample]) -> Tensor:
        """[N, Dt]: the hidden states of `samples` under `teacher`, end to end."""
        try:
            return torch.cat([self._rows[teacher, sample.uid] for sample in samples])
        except KeyError as missing:
            raise TeacherError(
                f"sample {missing.args[0][1]} was not scored by teacher {teacher}; call score() on it first."
            ) from None

    def _make_resident(self, route: Route) -> None:
        # Heads of other routes go first, so that the peak never counts two routes.
        self._heads = {name: head for name, head in self._heads.items() if name in route.teachers}
        for name in route.teachers:
            if name not in self._heads:
                self._heads[name] = self._teachers[name].load_head()
                self.counters.head_loads += 1
        self.counters.resident_heads_peak = max(self.counters.resident_heads_peak, len(self._heads))

    def release(self) -> None:
        """Drop the hidden states and the head of a finished mini-batch."""
        self._rows.clear()
        self._heads.clear()

    def take_counters(self) -> dict[str, float]:
        """The counters since they were last taken, as metrics."""
        taken, self.counters = self.counters, ScheduleCounters()
        return {name: float(value) for name, value in asdict(taken).items()}
