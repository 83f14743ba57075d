"""Assign trajectories to ranks, order and micro-batches, from metadata only.

A mini-batch (one optimiser step) is a slice of a shuffled order. Its trajectories are spread over the ranks
by cost. Each rank works through its own teacher by teacher, and packs those of one teacher into micro-batches
within the byte budget. The time that the rank would take (`CostModel`) decides their size. Nothing here reads
a token: lengths, teachers and sizes are enough. `opd plan` shows the plan for ranks, budgets and speeds.
Training assigns a step by the same cost and packs it in its order (`packing.py`).

Compute. A sequence of `L` tokens takes `linear * L + quadratic * L^2` floating-point operations: matrix
products with every parameter, and attention of every token to those before it. Forward and backward pass
together are three times the forward one (Kaplan et al. 2020, "Scaling Laws", section 2.1: `6 P` a token;
the causal half of attention: `2 h L^2` forward a layer for hidden size `h`, so `6 h L^2`). In a layer whose
window is `w < L` tokens see `w` of those before: `6 h w (2 L - w)`.

Overlap. A rank works through `K` micro-batches. While one is computed the next is read, as in a pipeline of
two stages with two buffers:

    T = read_1 + sum_{k=1}^{K-1} max(compute_k, read_{k+1}) + compute_K + K * overhead

For equal parts of total compute C and total reading D this is `max(C, D) + min(C, D) / K + K * overhead`.
More micro-batches hide more of the shorter of the two, until `sqrt(min(C, D) / overhead)`, where launching
another one costs more than it hides. `overhead` is the fixed cost of a micro-batch. The byte budget bounds
its size from above. (DeepSeek-V4, report, section 5.2.4, chooses the number of on-device mini-batches by
workload, to balance compute throughput against I/O overlap; it does not give the rule.)
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, in increasing order."""
    return [some for some in range(1, number + 1) if number % some == 0]


def context_size(longest: int, ranks: int, max_tokens: int) -> int:
    """Return how many of `ranks` share each sequence with `train.context_parallel: auto`. It is the least
    divisor that leaves a rank at most `max_tokens` of the `longest` sequence's tokens, or all ranks.
    """
    return next((size for size in divisors(ranks) if -(-longest // size) <= max_tokens), ranks)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Operations of one forward and backward pass, and the speed of the device that does them."""

    linear: float = 1.0
    """Operations a token."""
    quadratic: float = 0.0
    """Operations a pair of tokens, in layers of full attention."""
    windowed: float = 0.0
    """The same, in layers with a window."""
    window: int = 1
    """Window size in tokens."""
    operations_per_second: float = 1.0
    bytes_per_second: float = float("inf")
    """Speed of reading heavy data to the device."""
    overhead_seconds: float = 0.0
    """Fixed time of a micro-batch."""

    def __post_init__(self) -> None:
        speeds = self.operations_per_second > 0 and self.bytes_per_second > 0
        costs = (self.quadratic, self.windowed, self.overhead_seconds)
        if not speeds or min(costs) < 0 or self.linear <= 0:
            raise ValueError(
                f"{self}: linear cost and speeds must be positive, the others not negative; correct them"
            )

    @classmethod
    def of_model(
        cls, parameters: int, hidden_size: int, windows: Sequence[int | None], **speeds: float
    ) -> CostModel:
        """Cost of a decoder with causal attention. `windows` has each layer's, `None` for full attention."""
        pair = 6.0 * hidden_size
        cut = [window for window in windows if window is not None]
        return cls(
            linear=6.0 * parameters,
            quadratic=pair * (len(windows) - len(cut)),
            windowed=pair * len(cut),
            window=max(cut, default=1),
            **speeds,
        )

    def attention_operations(self, lengths: np.ndarray) -> np.ndarray:
        """Return `[n]` float64 operations on pairs of tokens, for sequences of `lengths` (`[n]` tokens)."""
        tokens = np.asarray(lengths, np.float64)
        visible = np.minimum(tokens, self.window)
        return self.quadratic * tokens * tokens + self.windowed * visible * (2.0 * tokens - visible)

    def total_operations(self, lengths: np.ndarray) -> np.ndarray:
        """Return `[n]` float64 operations for sequences of `lengths` (`[n]` tokens)."""
        return self.linear * np.asarray(lengths, np.float64) + self.attention_operations(lengths)

    def compute_seconds(self, lengths: np.ndarray) -> np.ndarray:
        """[n] float64."""
        return self.total_operations(lengths) / self.operations_per_second

    def read_seconds(self, sizes: np.ndarray) -> np.ndarray:
        """[n] float64, of `sizes` (`[n]` bytes)."""
        return np.asarray(sizes, np.float64) / self.bytes_per_second

    def pipeline_seconds(self, compute: np.ndarray, read: np.ndarray) -> float:
        """The seconds of micro-batches with these compute and read times (`[K]` seconds each), in order."""
        if not len(compute):
            return 0.0
        hidden = np.maximum(compute[:-1], read[1:]).sum()
        return float(read[0] + hidden + compute[-1] + len(compute) * self.overhead_seconds)


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """Memory of the device: activations of the current micro-batch, its data, and the next one's."""

    max_bytes: float
    bytes_per_token: float = 0.0
    """Activations, and other memory of the current micro-batch, per token."""
    max_tokens: int | None = None
    """Maximum packed tokens of a micro-batch, if there is another limit."""

    def __post_init__(self) -> None:
        limit = 1 if self.max_tokens is None else self.max_tokens
        if not self.max_bytes > 0 or self.bytes_per_token < 0 or limit <= 0:
            raise ValueError(f"{self}: limits must be positive; correct them")

    def data_bytes(self, tokens: float) -> float:
        """Return the maximum heavy bytes of a micro-batch if none has more than `tokens`. It is half of the
        memory beside activations, so that two fit.
        """
        return (self.max_bytes - self.bytes_per_token * tokens) / 2


def balance_ranks(costs: np.ndarray, ranks: int) -> np.ndarray:
    """Return `[n]` int64, a rank for each of `costs` (`[n]`), so that no rank is far above the mean.

    The most expensive first, each to the rank with the least so far (Graham 1969, "Bounds on Multiprocessing
    Timing Anomalies"). The result is at most 4/3 - 1/(3 ranks) of the best possible, and at most the mean
    plus (1 - 1/ranks) of the largest cost. Ties go to the earlier trajectory and the lower rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; give at least 1")
    chosen = np.zeros(len(costs), np.int64)
    loads = [(0.0, rank) for rank in range(ranks)]
    for index in np.argsort(-np.asarray(costs, np.float64), kind="stable").tolist():
        load, rank = loads[0]
        chosen[index] = rank
        heapq.heapreplace(loads, (load + float(costs[index]), rank))
    return chosen


def pack_shares(shares: np.ndarray) -> list[list[int]]:
    """Pack `shares` (`[n]`, of a micro-batch's capacity) into few micro-batches of at most 1. Return indices.

    The largest first, each into the fullest micro-batch it fits (best fit decreasing). The result is at most
    11/9 of the fewest possible plus four (Johnson et al. 1974, "Worst-Case Performance Bounds for Simple
    One-Dimensional Packing Algorithms"). An item larger than 1 gets a micro-batch of its own.
    """
    packed: list[list[int]] = []
    spaces: list[tuple[float, int]] = []
    values = np.asarray(shares, np.float64)
    for item in np.argsort(-values, kind="stable").tolist():
        share = float(values[item])
        fullest = bisect_left(spaces, (share, -1))
        if fullest == len(spaces):
            packed.append([item])
            space, index = 1.0 - share, len(packed) - 1
        else:
            space, index = spaces.pop(fullest)
            packed[index].append(item)
            space -= share
        if space > 0:
            insort(spaces, (space, index))
    return packed


_TRIED = (1.0, 0.5, 2.0)
"""Tried numbers of micro-batches, as multiples of the best number for equal parts."""
_LEAST_OVERHEAD = 1e-9


@dataclass(frozen=True, slots=True)
class Workload:
    """Metadata of `n` trajectories, for a plan."""

    lengths: np.ndarray
    """[n] int64: tokens, prompt and response."""
    teachers: np.ndarray
    """[n] integers: index of each trajectory's teacher in the order of teachers."""
    sizes: np.ndarray
    """[n] int64: heavy bytes to read."""

    def __post_init__(self) -> None:
        if not len(self.lengths) == len(self.teachers) == len(self.sizes):
            counts = [len(self.lengths), len(self.teachers), len(self.sizes)]
            raise ValueError(f"{counts} lengths, teachers and sizes; give one of each for every trajectory")

    def __len__(self) -> int:
        return len(self.lengths)

    def select_rows(self, rows: np.ndarray) -> Workload:
        """Return the trajectories in `rows` (`[k]` integers), in that order."""
        return Workload(self.lengths[rows], self.teachers[rows], self.sizes[rows])


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Settings of an epoch's plan."""

    mini_batch: int
    """Trajectories of one optimiser step, over all ranks; the last step may have fewer."""
    ranks: int = 1
    """Number of data-parallel ranks."""
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
    """[k] int64: rows that do not fit the budget even alone. Each is a micro-batch, to be read in chunks."""
    mini_batches: int
    ranks: int

    def __len__(self) -> int:
        return len(self.mini_batch)

    def __getitem__(self, index: int) -> MicroBatchPlan:
        rows = self.order[self.starts[index] : self.starts[index + 1]]
        return MicroBatchPlan(
            int(self.mini_batch[index]), int(self.rank[index]), int(self.teacher[index]), rows
        )

    def batch_totals(self, values: np.ndarray) -> np.ndarray:
        """Return `[M]`, the sum of `values` (`[n]`, by row of the workload) over each micro-batch."""
        sums = np.concatenate([[0], np.cumsum(values[self.order])])
        return sums[self.starts[1:]] - sums[self.starts[:-1]]

    def rank_seconds(self, work: Workload, cost: CostModel) -> np.ndarray:
        """Return `[mini-batches, ranks]` float64 seconds of each rank, by `CostModel`."""
        compute = self.batch_totals(cost.compute_seconds(work.lengths))
        read = self.batch_totals(cost.read_seconds(work.sizes))
        seconds = np.zeros((self.mini_batches, self.ranks))
        keys = self.mini_batch * self.ranks + self.rank
        cuts = np.flatnonzero(np.diff(keys, prepend=-1, append=-1))
        for first, last in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            of_rank = cost.pipeline_seconds(compute[first:last], read[first:last])
            seconds[self.mini_batch[first], self.rank[first]] = of_rank
        return seconds


def make_plan(work: Workload, settings: PlanSettings, cost: CostModel, budget: DeviceBudget) -> TrainingPlan:
    """Plan one epoch. Equal arguments give an equal plan, on every rank and after a resume."""
    shuffled = np.random.default_rng([settings.seed, settings.epoch]).permutation(len(work))
    # Shuffled once, so a mini-batch is contiguous in memory.
    planner = _Planner(work.select_rows(shuffled), cost, budget)
    packed: list[_RankBatches] = []
    keys: list[np.ndarray] = []
    for step, start in enumerate(range(0, len(work), settings.mini_batch)):
        rows = np.arange(start, min(start + settings.mini_batch, len(work)))
        ranks = balance_ranks(planner.operations[rows], settings.ranks)
        parts = [rows[ranks == rank] for rank in range(settings.ranks)]
        chosen = planner.quickest_batches(parts)
        packed += chosen
        counts = [len(batches.counts) for batches in chosen]
        keys.append(np.repeat(step * settings.ranks + np.arange(settings.ranks), counts))
    none = np.zeros(0, np.int64)
    order = shuffled[np.concatenate([none, *(batches.order for batches in packed)])]
    starts = np.cumsum(np.concatenate([[0], *(batches.counts for batches in packed)]))
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


class _RankBatches(NamedTuple):
    """The micro-batches of one rank in one mini-batch, end to end."""

    order: np.ndarray
    """[k] int64: rows of the shuffled workload."""
    counts: np.ndarray
    """[K] int64: trajectories of each micro-batch, at least 1."""


class _Planner:
    """State shared by all mini-batches of a plan."""

    def __init__(self, work: Workload, cost: CostModel, budget: DeviceBudget) -> None:
        self._work, self._cost, self._budget = work, cost, budget
        self.operations = cost.total_operations(work.lengths)
        # Sequences that do not fit even alone.
        self.oversize = work.sizes > budget.data_bytes(0.0) - budget.bytes_per_token * work.lengths / 2
        if budget.max_tokens is not None:
            self.oversize |= work.lengths > budget.max_tokens
        self._compute = cost.compute_seconds(work.lengths)
        self._read = cost.read_seconds(work.sizes)

    def quickest_batches(self, parts: list[np.ndarray]) -> list[_RankBatches]:
        """Return each rank's micro-batches, at the size with which the slowest rank finishes first."""
        tried = [[self._pack_rank(rows, tokens) for rows in parts] for tokens in self._candidate_sizes(parts)]
        return min(tried, key=lambda ranks: max(map(self._seconds_of, ranks)))  # the first in a tie

    def _candidate_sizes(self, parts: list[np.ndarray]) -> list[float]:
        """Return micro-batch sizes worth trying, in tokens, largest first: the largest that fits, and those
        around the best number of equal parts.
        """
        lengths, cost, budget = self._work.lengths, self._cost, self._budget
        rows = np.concatenate(parts)
        rows = rows[~self.oversize[rows]]
        if not len(rows):
            return [1.0]
        fits = math.inf if budget.max_tokens is None else float(budget.max_tokens)
        if budget.bytes_per_token:  # leave memory for the data of each of the rows
            free = budget.max_bytes - 2.0 * float(self._work.sizes[rows].max())
            fits = min(fits, free / budget.bytes_per_token)
        least = float(max(1, lengths[rows].max()))
        most = max(least, min(fits, max(float(lengths[part].sum()) for part in parts)))
        if math.isinf(cost.bytes_per_second):
            return [most]
        heaviest = max(parts, key=lambda part: float(self.operations[part].sum()))
        shorter = min(float(self._compute[heaviest].sum()), float(self._read[heaviest].sum()))
        count = max(1.0, math.sqrt(shorter / max(cost.overhead_seconds, _LEAST_OVERHEAD)))
        tokens = float(lengths[heaviest].sum())
        return sorted({most, *(min(most, max(least, tokens / (count * f))) for f in _TRIED)}, reverse=True)

    def _pack_rank(self, rows: np.ndarray, tokens: float) -> _RankBatches:
        """Pack `rows` teacher by teacher, into micro-batches of at most `tokens` and the remaining bytes."""
        work = self._work
        data = max(self._budget.data_bytes(tokens), 1.0)
        shares = np.maximum(work.lengths[rows] / tokens, work.sizes[rows] / data)
        teachers = work.teachers[rows]
        order: list[np.ndarray] = [np.zeros(0, np.int64)]
        counts: list[int] = []
        for teacher in np.unique(teachers).tolist():
            of_teacher = np.flatnonzero(teachers == teacher)
            packed = pack_shares(shares[of_teacher])
            order.append(of_teacher[np.fromiter(chain.from_iterable(packed), np.int64, len(of_teacher))])
            counts += map(len, packed)
        return _RankBatches(rows[np.concatenate(order)], np.array(counts, np.int64))

    def _seconds_of(self, packed: _RankBatches) -> float:
        if not len(packed.counts):
            return 0.0
        starts = np.cumsum(packed.counts) - packed.counts
        compute = np.add.reduceat(self._compute[packed.order], starts)
        read = np.add.reduceat(self._read[packed.order], starts)
        return self._cost.pipeline_seconds(compute, read)
