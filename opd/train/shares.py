"""Which rank scores and trains which sample: the same answer on every rank, without a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from opd.ranks import Ranks
from opd.train.packing import pieces
from opd.train.plan_cost import CostModel
from opd.types import Sample

PerSample = Callable[[Sequence[Sample]], list[np.ndarray]]
"""One `[R]` float32 array for each sample."""


class Shares:
    """Samples dealt out to the data-parallel ranks, each teacher's as evenly as all of them.

    Ranks read a streamed teacher in lock step, so the slowest decides how long it takes. The order of samples
    decides nothing: what was dealt keeps its rank, sorted or filtered.
    """

    def __init__(self, data: Ranks, cost: CostModel | None = None) -> None:
        """`cost`: what a sample costs to train on; by default its tokens."""
        self._data, self._cost = data, cost or CostModel()
        self._owners: dict[str, int] = {}

    def deal(self, samples: Iterable[Sample]) -> None:
        """Forget what was dealt and deal `samples`: the dearest first, to the rank that has the cheapest of
        its teacher's, then of all."""
        self._owners.clear()
        self._add(samples)

    def mine(self, samples: Sequence[Sample]) -> list[Sample]:
        """Those of `samples` that are this rank's; what was not dealt yet is dealt now."""
        if self._data.alone:
            return list(samples)
        return [
            s for s, owner in zip(samples, self._owners_of(samples), strict=True) if owner == self._data.rank
        ]

    def in_step(
        self, samples: Sequence[Sample], max_tokens: int, *, by_teacher: bool = True
    ) -> list[list[int]]:
        """This rank's places in `samples`, of those that have a response, piece by piece; see `pieces`.

        Every rank has as many pieces of each teacher as the one that has most, so that they read a teacher
        and pass through a model together: some may be empty. All ranks are given the same samples, of which
        lengths and teachers count, and nobody has to be told anything.
        """
        answered = [place for place, sample in enumerate(samples) if len(sample.response_ids)]
        if self._data.alone:
            return pieces(samples, answered, max_tokens, by_teacher=by_teacher)
        owners = self._owners_of(samples)
        result: list[list[int]] = []
        for teacher in dict.fromkeys(samples[place].teacher if by_teacher else None for place in answered):
            together = [p for p in answered if not by_teacher or samples[p].teacher == teacher]
            each = [
                pieces(samples, [p for p in together if owners[p] == rank], max_tokens, by_teacher=by_teacher)
                for rank in range(self._data.size)
            ]
            mine = each[self._data.rank]
            result += mine + [[] for _ in range(max(map(len, each)) - len(mine))]
        return result

    def each(self, samples: Sequence[Sample], compute: PerSample, what: str) -> list[np.ndarray]:
        """`compute` of all `samples`, each done by its rank and told to the others; `what` names it."""
        if self._data.alone:
            return compute(samples)
        mine = self.mine(samples)
        found = compute(mine)
        flat = np.concatenate([np.zeros(0, np.float32), *found]).astype(np.float32)
        parts = [np.frombuffer(said, np.float32) for said in self._data.gather(flat.tobytes(), what)]
        places = [0] * self._data.size
        results = []
        for sample in samples:
            owner, length = self._owners[sample.uid], len(sample.response_ids)
            results.append(parts[owner][places[owner] : places[owner] + length].copy())
            places[owner] += length
        return results

    def _owners_of(self, samples: Sequence[Sample]) -> list[int]:
        self._add(sample for sample in samples if sample.uid not in self._owners)
        return [self._owners[sample.uid] for sample in samples]

    def _add(self, samples: Iterable[Sample]) -> None:
        waiting = list(samples)
        lengths = np.array([len(s.prompt_ids) + len(s.response_ids) for s in waiting], np.int64)
        priced = zip(waiting, self._cost.operations(lengths).tolist(), strict=True)
        total = [0.0] * self._data.size
        of_teacher: dict[str | None, list[float]] = {}
        for sample, cost in sorted(priced, key=lambda pair: (-pair[1], pair[0].uid)):
            own = of_teacher.setdefault(sample.teacher, [0.0] * self._data.size)
            owner = min(range(self._data.size), key=lambda rank: (own[rank], total[rank], rank))
            own[owner] += cost
            total[owner] += cost
            self._owners[sample.uid] = owner
