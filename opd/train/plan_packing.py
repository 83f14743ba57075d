"""Trajectories over ranks and into micro-batches: two greedy algorithms with a bound each."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np


def balance(costs: np.ndarray, ranks: int) -> np.ndarray:
    """[n] int64: a rank for each of `costs` (`[n]`), so that no rank is far above the mean.

    The most expensive first, each to the rank with the least so far (Graham 1969, "Bounds on Multiprocessing
    Timing Anomalies"): at most 4/3 - 1/(3 ranks) of the best possible, and at most the mean plus
    (1 - 1/ranks) of the largest cost. Ties go to the earlier trajectory and the lower rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; give at least 1")
    chosen = np.zeros(len(costs), np.int64)
    loads = [(0.0, rank) for rank in range(ranks)]
    for place in np.argsort(-np.asarray(costs, np.float64), kind="stable").tolist():
        load, rank = loads[0]
        chosen[place] = rank
        heapq.heapreplace(loads, (load + float(costs[place]), rank))
    return chosen


def pack(shares: np.ndarray) -> list[list[int]]:
    """Places of `shares` (`[n]`, of a micro-batch's capacity) in few micro-batches of at most 1.

    The largest first, each into the fullest micro-batch it fits (best fit decreasing): at most 11/9 of the
    fewest possible plus four (Johnson et al. 1974, "Worst-Case Performance Bounds for Simple One-Dimensional
    Packing Algorithms"). What is larger than 1 gets a micro-batch of its own.
    """
    packed: list[list[int]] = []
    room: list[tuple[float, int]] = []
    values = np.asarray(shares, np.float64)
    for place in np.argsort(-values, kind="stable").tolist():
        share = float(values[place])
        found = bisect_left(room, (share, -1))
        if found == len(room):
            packed.append([place])
            left, index = 1.0 - share, len(packed) - 1
        else:
            left, index = room.pop(found)
            packed[index].append(place)
            left -= share
        if left > 0:
            insort(room, (left, index))
    return packed
