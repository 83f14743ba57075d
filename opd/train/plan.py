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
from itertools import chain
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

    def take(self, rows: np.ndarray) -> Workload:
        """The trajectories in `rows` (`[k]` integers), in that order."""
        return Workload(self.lengths[rows], self.teachers[rows], self.sizes[rows])


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
    # Shuffled once: then a mini-batch lies together in memory, however many there are.
    planner = _Planner(work.take(shuffled), cost, budget)
    packed: list[_Packed] = []
    keys: list[np.ndarray] = []
    for step, start in enumerate(range(0, len(work), settings.mini_batch)):
        rows = np.arange(start, min(start + settings.mini_batch, len(work)))
        ranks = balance(planner.operations[rows], settings.ranks)
        parts = [rows[ranks == rank] for rank in range(settings.ranks)]
        chosen = planner.quickest(parts)
        packed += chosen
        counts = [len(own.counts) for own in chosen]
        keys.append(np.repeat(step * settings.ranks + np.arange(settings.ranks), counts))
    none = np.zeros(0, np.int64)
    order = shuffled[np.concatenate([none, *(own.order for own in packed)])]
    starts = np.concatenate([[0], np.cumsum(np.concatenate([none, *(own.counts for own in packed)]))])
    key = np.concatenate([none, *keys])
    return TrainingPlan(
        order=order,
        starts=starts.astype(np.int64),
        mini_batch=key // settings.ranks,
        rank=key % settings.ranks,
        teacher=np.asarray(work.teachers, np.int64)[order[starts[:-1]]],
        oversize=np.sort(shuffled[planner.oversize]),
        mini_batches=-(-len(work) // settings.mini_batch),
        ranks=settings.ranks,
    )


class _Packed(NamedTuple):
    """The micro-batches of one rank in one mini-batch, end to end."""

    order: np.ndarray
    """[k] int64: rows of the shuffled workload."""
    counts: np.ndarray
    """[K] int64: trajectories of each micro-batch, at least 1."""


class _Planner:
    """What is the same for every mini-batch of a plan."""

    def __init__(self, work: Workload, cost: CostModel, budget: DeviceBudget) -> None:
        self._work, self._cost, self._budget = work, cost, budget
        self.operations = cost.operations(work.lengths)
        self.oversize = budget.oversize(work.lengths, work.sizes)
        self._compute = cost.compute_seconds(work.lengths)
        self._read = cost.read_seconds(work.sizes)

    def quickest(self, parts: list[np.ndarray]) -> list[_Packed]:
        """For each rank its micro-batches, of the size with which the slowest rank is done first."""
        tried = [[self._pack(rows, tokens) for rows in parts] for tokens in self._sizes(parts)]
        return min(tried, key=lambda ranks: max(map(self._seconds, ranks)))  # the first, if several are

    def _sizes(self, parts: list[np.ndarray]) -> list[float]:
        """Micro-batch sizes worth trying, in tokens, largest first: the largest that fits, and those around
        the best number of equal parts.
        """
        lengths, cost = self._work.lengths, self._cost
        rows = np.concatenate(parts)
        rows = rows[~self.oversize[rows]]
        if not len(rows):
            return [1.0]
        least = float(max(1, lengths[rows].max()))
        most = max(least, min(self._most(rows), max(float(lengths[part].sum()) for part in parts)))
        if math.isinf(cost.bytes_per_second):
            return [most]
        heaviest = max(parts, key=lambda part: float(self.operations[part].sum()))
        shorter = min(float(self._compute[heaviest].sum()), float(self._read[heaviest].sum()))
        count = max(1.0, math.sqrt(shorter / max(cost.overhead_seconds, _LEAST_OVERHEAD)))
        tokens = float(lengths[heaviest].sum())
        return sorted({most, *(min(most, max(least, tokens / (count * f))) for f in _TRIED)}, reverse=True)

    def _most(self, rows: np.ndarray) -> float:
        """Most tokens of a micro-batch that leave room for the data of each of `rows`, which fit alone."""
        budget = self._budget
        most = math.inf if budget.max_tokens is None else float(budget.max_tokens)
        if budget.bytes_per_token:
            free = budget.max_bytes - 2.0 * float(self._work.sizes[rows].max())
            most = min(most, free / budget.bytes_per_token)
        return most

    def _pack(self, rows: np.ndarray, tokens: float) -> _Packed:
        """`rows` teacher by teacher, in micro-batches of at most `tokens` and the bytes these leave."""
        work = self._work
        data = max(self._budget.data_bytes(tokens), 1.0)
        shares = np.maximum(work.lengths[rows] / tokens, work.sizes[rows] / data)
        teachers = work.teachers[rows]
        places: list[np.ndarray] = [np.zeros(0, np.int64)]
        counts: list[int] = []
        for teacher in np.unique(teachers).tolist():
            mine = np.flatnonzero(teachers == teacher)
            packed = pack(shares[mine])
            places.append(mine[np.fromiter(chain.from_iterable(packed), np.int64, len(mine))])
            counts += map(len, packed)
        return _Packed(rows[np.concatenate(places)], np.array(counts, np.int64))

    def _seconds(self, packed: _Packed) -> float:
        if not len(packed.counts):
            return 0.0
        starts = np.cumsum(packed.counts) - packed.counts
        compute = np.add.reduceat(self._compute[packed.order], starts)
        read = np.add.reduceat(self._read[packed.order], starts)
        return self._cost.pipeline_seconds(compute, read)
