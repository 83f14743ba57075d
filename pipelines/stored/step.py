"""An optimiser step on samples in a trajectory store: planned from metadata, read when it is their turn.

Lengths, domains and teachers decide everything beforehand: which rank trains what, micro-batches, their
order, the weight of a token. Tokens, masks, log-probabilities and hidden states are mapped when their
micro-batch is trained and let go after it, so that memory is that of one and the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from opd.algorithms.normalise import per_teacher_scales
from opd.errors import TrainingError
from opd.ranks import Ranks
from opd.storage.trajectories import TrajectoryBatch, TrajectoryStore, TrajectoryUnion, UnionBatch
from opd.teachers.schedule import TeacherSchedule
from opd.train.backend import Backend
from opd.train.plan import PlanSettings, TrainingPlan, Workload, make_plan
from opd.train.plan_cost import CostModel, DeviceBudget
from opd.types import RolloutBatch, Sample, TokenTerms

FIELDS = ("token_ids", "rollout_logprobs", "policy_versions", "loss_mask")
"""What a micro-batch reads of a store."""
_SCORED_TOKENS = 1 << 20
"""Tokens a teacher is given at a time, about: it reads its layers once for all of them."""

Piece = tuple[int, np.ndarray]
"""The place of a teacher, and rows it is given together."""


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
    taught: bool = True
    """Whether the loss itself needs what teachers say; k1 has it in the advantages."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Which tokens the loss counts, where that is not what the store says."""

    tokens: np.ndarray
    """[n] int64: how many of each of `rows`."""
    oldest: int
    """Policy version before which a token does not count."""


class Policy(Protocol):
    """The policy-gradient stream of a step."""

    def fill(self, terms: TokenTerms, sample: Sample) -> None:
        """Set old log-probabilities, advantages and policy weights."""
        ...


class StoredStep:
    """One step on the rows of a store.

    Args:
        store: Where the samples are.
        rows: Which of them, of `store.table`; their `teacher` is the route that scores them.
        teachers: Routes in the order in which they are worked through.
        settings: How the step is planned.
        data: The ranks that share the rows. All of them make the same calls.
        counted: Where tokens that are too old do not count.
    """

    def __init__(
        self,
        store: TrajectoryStore | TrajectoryUnion,
        rows: np.ndarray,
        teachers: Sequence[str],
        settings: StoredSettings,
        *,
        data: Ranks | None = None,
        counted: Counted | None = None,
    ) -> None:
        self.store = store
        self.settings = settings
        self.data = data or Ranks()
        table = store.table
        answered = table.response_tokens[rows] > 0
        self.rows = np.asarray(rows, np.int64)[answered]
        self.routes = [table.teacher[row] for row in self.rows.tolist()]
        tokens = table.trainable_tokens[rows] if counted is None else counted.tokens
        self.tokens = np.asarray(tokens, np.int64)[answered]
        """[n] int64: how many tokens of each of `rows` the loss counts."""
        self._oldest = None if counted is None else counted.oldest
        self._places = {name: place for place, name in enumerate(dict.fromkeys([*teachers, *self.routes]))}

    def plan(self, number: int = 0) -> TrainingPlan:
        """The micro-batches of step `number`, from metadata alone; its rows are places in `rows`."""
        teachers = np.array([self._places[route] for route in self.routes], np.int64)
        work = Workload(self.store.table.tokens[self.rows], teachers, self.sizes())
        ranks, seed = self.data.size, self.settings.seed
        settings = PlanSettings(max(1, len(self.rows)), ranks, seed=seed, epoch=number)
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
        for group in self._in_step(lambda rank: list(self._together(plan, rank))):
            with self.store.lease(group) as batch:
                samples = self._samples(batch, schedule)
                schedule.score(samples)
                schedule.forget(samples)

    def train(
        self,
        backend: Backend,
        schedule: TeacherSchedule,
        plan: TrainingPlan,
        policy: Policy | None = None,
    ) -> dict[str, float]:
        """Accumulate the gradient, micro-batch by micro-batch; returns metrics.

        Raises `TrainingError` if no sample has a response, or the loss is not finite.
        """
        if not len(self.rows):
            raise TrainingError(
                "all responses of this step are empty: there is nothing to learn from; check the stop ids,"
                " the prompts and rollout.max_new_tokens."
            )
        with backend.shares.apart():
            metrics = backend.forward_backward_parts(self._parts(schedule, plan, policy))
        schedule.release()
        return metrics

    def samples(self, schedule: TeacherSchedule, plan: TrainingPlan) -> Iterator[list[Sample]]:
        """This rank's samples, micro-batch by micro-batch; all ranks are given as many lists, some empty."""
        for batch in self.store.batches(self._in_step(lambda rank: self._micros(plan, rank)), FIELDS):
            yield self._samples(batch, schedule)

    def scales(self, tokens: Mapping[str, float]) -> dict[str, float]:
        """The weight of a token of each route that has `tokens` in the whole step."""
        counts = {route: int(count) for route, count in tokens.items() if count}
        if self.settings.shares is None:
            return dict.fromkeys(counts, 1.0 / max(1, sum(counts.values())))
        return per_teacher_scales(counts, self.settings.shares)

    def _parts(
        self, schedule: TeacherSchedule, plan: TrainingPlan, policy: Policy | None
    ) -> Iterator[RolloutBatch]:
        counts: dict[str, int] = {}
        for route, count in zip(self.routes, self.tokens.tolist(), strict=True):
            counts[route] = counts.get(route, 0) + count
        scales = self.scales(counts)
        for samples in self.samples(schedule, plan):
            if self.settings.taught:
                schedule.score(samples)
            terms = [_terms(sample, scales) for sample in samples]
            if policy is not None:
                for sample, own in zip(samples, terms, strict=True):
                    policy.fill(own, sample)
            yield RolloutBatch(samples, terms)
            schedule.forget(samples)

    def _in_step(self, of_rank: Callable[[int], list[Piece]]) -> list[np.ndarray]:
        """This rank's pieces, of each teacher as many as the rank that has most: then ranks read a teacher
        together, and none waits for another. What it has fewer is empty.
        """
        pieces = [of_rank(rank) for rank in range(self.data.size)]
        result: list[np.ndarray] = []
        for teacher in sorted({teacher for own in pieces for teacher, _ in own}):
            each = [[rows for own, rows in rank if own == teacher] for rank in pieces]
            mine = each[self.data.rank]
            result += mine + [np.zeros(0, np.int64)] * (max(map(len, each)) - len(mine))
        return result

    def _micros(self, plan: TrainingPlan, rank: int) -> list[Piece]:
        return [(micro.teacher, self.rows[micro.rows]) for micro in plan.of(0, rank)]

    def _together(self, plan: TrainingPlan, rank: int) -> Iterator[Piece]:
        """Rows a teacher reads at a time: those of successive micro-batches of one teacher."""
        waiting: list[np.ndarray] = []
        tokens, teacher = 0, -1
        for owner, rows in self._micros(plan, rank):
            size = int(self.store.table.tokens[rows].sum())
            if waiting and (owner != teacher or tokens + size > _SCORED_TOKENS):
                yield teacher, np.concatenate(waiting)
                waiting, tokens = [], 0
            waiting.append(rows)
            tokens, teacher = tokens + size, owner
        if waiting:
            yield teacher, np.concatenate(waiting)

    def _samples(self, batch: TrajectoryBatch | UnionBatch, schedule: TeacherSchedule) -> list[Sample]:
        samples = [batch.sample(row) for row in batch.rows]
        if self._oldest is not None:
            for sample in samples:
                sample.loss_mask = sample.loss_mask & (sample.policy_versions >= self._oldest)
        schedule.assign(samples)
        return samples


def _terms(sample: Sample, scales: Mapping[str, float]) -> TokenTerms:
    terms = TokenTerms.zeros(len(sample.response_ids))
    weight = np.where(sample.loss_mask, scales.get(sample.teacher or "", 0.0), 0.0).astype(np.float32)
    terms.kl_weight = terms.policy_weight = weight
    return terms
