"""Who trains on which trajectory, in which order, in which micro-batch: decided from metadata alone.

A mini-batch (one optimiser step) is a slice of a shuffled order. Its trajectories are spread over the ranks
by cost, each rank works through its own teacher by teacher, and packs those of one teacher into micro-batches
within the byte budget; how large is chosen by the time the rank would take (`plan_cost.py`). Nothing here
reads a token: lengths, teachers and sizes are enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from opd.train.plan_cost import CostModel, DeviceBudget
from opd.train.plan_packing import balance, pack

_TRIED = (1.0, 0.5, 2.0)
"""How many micro-batches are tried, as multiples of the number that is best for equal parts."""
_LEAST_OVERHEAD = 1e-9


@dataclass(frozen=True, slots=True)
class Workload:
    """What a plan needs to know of `n` trajectories."""

    lengths: np.ndarray
    """[n] int64: tokens, prompt and response."""
    teachers: np.ndarray
    """[n] integers: the place of each one's teacher in the order in which teachers are worked through."""
    sizes: np.ndarray
    """[n] int64: heavy bytes to read."""

    def __post_init__(self) -> None:
        if not len(self.lengths) == len(self.teachers) == len(self.sizes):
            counts = [len(self.lengths), len(self.teachers), len(self.sizes)]
            raise ValueError(f"{counts} lengths, teachers and sizes; give one of each for every trajectory")

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """How an epoch is cut."""

    mini_batch: int
    """Trajectories of one optimiser step, over all ranks; the last step may have fewer."""
    ranks: int = 1
    """Data-parallel."""
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.mini_batch < 1 or self.ranks < 1:
            raise ValueError(f"{self}: mini_batch and ranks must be at least 1; correct them")


class MicroBatchPlan(NamedTuple):
    """Trajectories of one teacher that a rank packs together."""

    mini_batch: int
    rank: int
    teacher: int
    rows: np.ndarray
    """[k] int64: rows of the workload."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """An epoch: every trajectory once, sorted by mini-batch, rank, teacher and micro-batch."""

    order: np.ndarray
    """[n] int64: rows of the workload; micro-batch `m` is `order[starts[m]:starts[m + 1]]`."""
    starts: np.ndarray
    """[M + 1] int64."""
    mini_batch: np.ndarray
    """[M] int64: the mini-batch each micro-batch belongs to."""
    rank: np.ndarray
    """[M] int64."""
    teacher: np.ndarray
    """[M] int64."""
    oversize: np.ndarray
    """[k] int64: rows that do not fit the budget even alone; each is a micro-batch, to be read in pieces."""
    mini_batches: int
    ranks: int

    def __len__(self) -> int:
        return len(self.mini_batch)

    def __getitem__(self, index: int) -> MicroBatchPlan:
        rows = self.order[self.starts[index] : self.starts[index + 1]]
        return MicroBatchPlan(
            int(self.mini_batch[index]), int(self.rank[index]), int(self.teacher[index]), rows
        )

    def of(self, mini_batch: int, rank: int) -> Iterator[MicroBatchPlan]:
        """The micro-batches of one rank in one mini-batch, in order."""
        first, last = np.searchsorted(self.mini_batch, [mini_batch, mini_batch + 1])
        first, last = first + np.searchsorted(self.rank[first:last], [rank, rank + 1])
        return map(self.__getitem__, range(int(first), int(last)))

    def rows(self, mini_batch: int) -> np.ndarray:
        """[k] int64: all trajectories of a mini-batch, in order."""
        first, last = np.searchsorted(self.mini_batch, [mini_batch, mini_batch + 1])
        return self.order[self.starts[first] : self.starts[last]]

    def totals(self, values: np.ndarray) -> np.ndarray:
        """[M]: the sum of `values` (`[n]`, by row of the workload) over each micro-batch."""
        sums = np.concatenate([[0], np.cumsum(values[self.order])])
        return sums[self.starts[1:]] - sums[self.starts[:-1]]

    def seconds(self, work: Workload, cost: CostModel) -> np.ndarray:
        """[mini-batches, ranks] float64: how long each rank takes, by the model of `plan_cost`."""
        compute = self.totals(cost.compute_seconds(work.lengths))
        read = self.totals(cost.read_seconds(work.sizes))
        found = np.zeros((self.mini_batches, self.ranks))
        keys = self.mini_batch * self.ranks + self.rank
        cuts = np.flatnonzero(np.diff(keys, prepend=-1, append=-1))
        for first, last in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            place = (self.mini_batch[first], self.rank[first])
            found[place] = cost.pipeline_seconds(compute[first:last], read[first:last])
        return found


def make_plan(work: Workload, settings: PlanSettings, cost: CostModel, budget: DeviceBudget) -> TrainingPlan:
    """Plan one epoch. The same arguments give the same plan, on every rank and after a resume."""
    shuffled = np.random.default_rng([settings.seed, settings.epoch]).permutation(len(work))
    operations, oversize = cost.operations(work.lengths), budget.oversize(work.lengths, work.sizes)
    order: list[np.ndarray] = []
    labels: list[tuple[int, int, int]] = []
    for step, start in enumerate(range(0, len(work), settings.mini_batch)):
        rows = shuffled[start : start + settings.mini_batch]
        ranks = balance(operations[rows], settings.ranks)
        parts = [rows[ranks == rank] for rank in range(settings.ranks)]
        for rank, micro in enumerate(_quickest(work, parts, cost, budget)):
            order += micro
            labels += [(step, rank, int(work.teachers[own[0]])) for own in micro]
    columns = np.array(labels, np.int64).reshape(-1, 3)
    return TrainingPlan(
        order=np.concatenate([np.zeros(0, np.int64), *order]),
        starts=np.concatenate([[0], np.cumsum([len(rows) for rows in order], dtype=np.int64)]),
        mini_batch=columns[:, 0],
        rank=columns[:, 1],
        teacher=columns[:, 2],
        oversize=np.flatnonzero(oversize),
        mini_batches=-(-len(work) // settings.mini_batch),
        ranks=settings.ranks,
    )


def _quickest(
    work: Workload, parts: list[np.ndarray], cost: CostModel, budget: DeviceBudget
) -> list[list[np.ndarray]]:
    """For each rank its micro-batches, of the size with which the slowest rank is done first."""
    best, best_seconds = [[] for _ in parts], math.inf
    for tokens in _sizes(work, parts, cost, budget):
        tried = [_micro_batches(work, rows, tokens, budget) for rows in parts]
        slowest = max(_seconds(work, micro, cost) for micro in tried)
        if slowest < best_seconds:
            best, best_seconds = tried, slowest
    return best


def _sizes(work: Workload, parts: list[np.ndarray], cost: CostModel, budget: DeviceBudget) -> list[float]:
    """Micro-batch sizes worth trying, in tokens, largest first: the largest that fits, and those around the
    best number of equal parts.
    """
    rows = np.concatenate(parts)
    rows = rows[~budget.oversize(work.lengths[rows], work.sizes[rows])]
    if not len(rows):
        return [1.0]
    least = float(max(1, work.lengths[rows].max()))
    most = max(float(work.lengths[part].sum()) for part in parts)
    if budget.max_tokens is not None:
        most = min(most, float(budget.max_tokens))
    if budget.bytes_per_token:
        # More tokens leave less for data: never so many that a trajectory which fits alone does not.
        free = budget.max_bytes - 2.0 * float(work.sizes[rows].max())
        most = min(most, free / budget.bytes_per_token)
    most = max(most, least)
    if math.isinf(cost.bytes_per_second):
        return [most]
    heaviest = max(parts, key=lambda part: float(cost.operations(work.lengths[part]).sum()))
    shorter = min(
        float(cost.compute_seconds(work.lengths[heaviest]).sum()),
        float(cost.read_seconds(work.sizes[heaviest]).sum()),
    )
    count = max(1.0, math.sqrt(shorter / max(cost.overhead_seconds, _LEAST_OVERHEAD)))
    tokens = float(work.lengths[heaviest].sum())
    return sorted({most, *(min(most, max(least, tokens / (count * f))) for f in _TRIED)}, reverse=True)


def _micro_batches(work: Workload, rows: np.ndarray, tokens: float, budget: DeviceBudget) -> list[np.ndarray]:
    """`rows` teacher by teacher, in micro-batches of at most `tokens` and the bytes these leave for data."""
    data = max(budget.data_bytes(tokens), 1.0)
    shares = np.maximum(work.lengths[rows] / tokens, work.sizes[rows] / data)
    teachers = work.teachers[rows]
    found = []
    for teacher in np.unique(teachers).tolist():
        mine = np.flatnonzero(teachers == teacher)
        found += [rows[mine[places]] for places in pack(shares[mine])]
    return found


def _seconds(work: Workload, micro: list[np.ndarray], cost: CostModel) -> float:
    compute = np.array([cost.compute_seconds(work.lengths[rows]).sum() for rows in micro])
    read = np.array([cost.read_seconds(work.sizes[rows]).sum() for rows in micro])
    return cost.pipeline_seconds(compute, read)
