"""An optimiser step on samples in a trajectory store: planned from metadata, read when it is their turn.

Lengths, domains and teachers decide everything beforehand: micro-batches, their order, the weight of a token.
Tokens, masks, log-probabilities and hidden states are mapped when their micro-batch is trained and let go
after it, so that memory is that of one micro-batch and the next, however many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from opd.algorithms.normalise import per_teacher_scales
from opd.errors import TrainingError
from opd.storage.trajectories import TrajectoryBatch, TrajectoryStore
from opd.teachers.schedule import TeacherSchedule
from opd.train.backend import Backend
from opd.train.plan import PlanSettings, TrainingPlan, Workload, make_plan
from opd.train.plan_cost import CostModel, DeviceBudget
from opd.types import RolloutBatch, Sample, TokenTerms

FIELDS = ("token_ids", "rollout_logprobs", "policy_versions", "loss_mask")
"""What a micro-batch reads of a store."""
_SCORED_TOKENS = 1 << 20
"""Tokens a teacher is given at a time, about: it reads its layers once for all of them."""


@dataclass(frozen=True, slots=True)
class StoredSettings:
    """How a stored step is planned."""

    cost: CostModel
    budget: DeviceBudget
    hidden_bytes: int
    """Of a teacher's hidden state, a token."""
    shares: Mapping[str, float] | None = None
    """Each route's share of the loss; `None`: every token weighs the same."""
    seed: int = 0


class StoredStep:
    """One step on the rows of a store.

    Args:
        store: Where the samples are.
        rows: Which of them, of `store.table`; their `teacher` is the route that scores them.
        teachers: Routes in the order in which they are worked through.
    """

    def __init__(
        self, store: TrajectoryStore, rows: np.ndarray, teachers: Sequence[str], settings: StoredSettings
    ) -> None:
        self.store = store
        self.settings = settings
        table = store.table
        self.rows = np.asarray(rows, np.int64)[table.response_tokens[rows] > 0]
        self.routes = [table.teacher[row] for row in self.rows.tolist()]
        self._places = {name: place for place, name in enumerate(dict.fromkeys([*teachers, *self.routes]))}

    def plan(self, number: int = 0) -> TrainingPlan:
        """The micro-batches of step `number`, from metadata alone; its rows are places in `rows`."""
        teachers = np.array([self._places[route] for route in self.routes], np.int64)
        work = Workload(self.store.table.tokens[self.rows], teachers, self.sizes())
        settings = PlanSettings(max(1, len(self.rows)), seed=self.settings.seed, epoch=number)
        return make_plan(work, settings, self.settings.cost, self.settings.budget)

    def sizes(self) -> np.ndarray:
        """[n] int64: heavy bytes of each of `rows`, its hidden states among them."""
        hidden = self.store.table.response_tokens[self.rows] * self.settings.hidden_bytes
        return self.store.heavy_bytes(FIELDS)[self.rows] + hidden

    def score(self, schedule: TeacherSchedule, plan: TrainingPlan) -> None:
        """Let every teacher read its samples and leave its hidden states in the schedule's cache, whence
        `train` takes them; a schedule without one scores in `train`."""
        if not schedule.caches:
            return
        for group in self._together(plan):
            with self.store.lease(group) as batch:
                samples = self._samples(batch, schedule)
                schedule.score(samples)
                schedule.forget(samples)

    def train(self, backend: Backend, schedule: TeacherSchedule, plan: TrainingPlan) -> dict[str, float]:
        """Accumulate the gradient, micro-batch by micro-batch; returns metrics.

        Raises `TrainingError` if no sample has a response, or the loss is not finite.
        """
        if not len(self.rows):
            raise TrainingError(
                "all responses of this step are empty: there is nothing to learn from; check the stop ids,"
                " the prompts and rollout.max_new_tokens."
            )
        metrics = backend.forward_backward_parts(self._parts(schedule, plan))
        schedule.release()
        return metrics

    def _parts(self, schedule: TeacherSchedule, plan: TrainingPlan) -> Iterator[RolloutBatch]:
        scales = self._scales()
        micros = [self.rows[micro.rows] for micro in plan.of(0, 0)]
        for batch in self.store.batches(micros, FIELDS):
            samples = self._samples(batch, schedule)
            schedule.score(samples)
            yield RolloutBatch(samples, [_terms(sample, scales) for sample in samples])
            schedule.forget(samples)

    def _together(self, plan: TrainingPlan) -> Iterator[np.ndarray]:
        """Rows a teacher reads at a time: those of successive micro-batches of one teacher."""
        waiting: list[np.ndarray] = []
        tokens, teacher = 0, -1
        for micro in plan.of(0, 0):
            rows = self.rows[micro.rows]
            size = int(self.store.table.tokens[rows].sum())
            if waiting and (micro.teacher != teacher or tokens + size > _SCORED_TOKENS):
                yield np.concatenate(waiting)
                waiting, tokens = [], 0
            waiting.append(rows)
            tokens, teacher = tokens + size, micro.teacher
        if waiting:
            yield np.concatenate(waiting)

    def _samples(self, batch: TrajectoryBatch, schedule: TeacherSchedule) -> list[Sample]:
        samples = [batch.sample(row) for row in batch.rows]
        schedule.assign(samples)
        return samples

    def _scales(self) -> dict[str, float]:
        """The weight of a token of each route, over the whole step."""
        counts: dict[str, int] = {}
        tokens = self.store.table.trainable_tokens[self.rows].tolist()
        for route, count in zip(self.routes, tokens, strict=True):
            if count:
                counts[route] = counts.get(route, 0) + count
        if self.settings.shares is None:
            return dict.fromkeys(counts, 1.0 / max(1, sum(counts.values())))
        return per_teacher_scales(counts, self.settings.shares)


def _terms(sample: Sample, scales: Mapping[str, float]) -> TokenTerms:
    terms = TokenTerms.zeros(len(sample.response_ids))
    weight = np.where(sample.loss_mask, scales.get(sample.teacher or "", 0.0), 0.0).astype(np.float32)
    terms.kl_weight = terms.policy_weight = weight
    return terms
