"""Which rank scores and trains which sample: the same answer on every rank, without a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from opd.ranks import Ranks
from opd.types import RolloutBatch, Sample

PerSample = Callable[[Sequence[Sample]], list[np.ndarray]]
"""One `[R]` float32 array for each sample."""


class Shares:
    """Samples dealt out to the data-parallel ranks, each teacher's as evenly as all of them.

    Ranks read a streamed teacher in lock step, so the slowest decides how long it takes. The order of samples
    decides nothing: what was dealt keeps its rank, sorted or filtered.
    """

    def __init__(self, data: Ranks) -> None:
        self._data = data
        self._owners: dict[str, int] = {}
        self._apart = data.alone

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While the block runs every rank is given its own samples: all are its own, and no other is told."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    def deal(self, samples: Iterable[Sample]) -> None:
        """Forget what was dealt and deal `samples`: the longest first, to the rank with the fewest tokens of
        its teacher, then of all."""
        self._owners.clear()
        self._add(samples)

    def mine(self, samples: Sequence[Sample]) -> list[Sample]:
        """Those of `samples` that are this rank's; what was not dealt yet is dealt now."""
        if self._apart:
            return list(samples)
        self._add(sample for sample in samples if sample.uid not in self._owners)
        return [sample for sample in samples if self._owners[sample.uid] == self._data.rank]

    def batch(self, batch: RolloutBatch) -> RolloutBatch:
        """The part of `batch` that is this rank's."""
        if self._apart:
            return batch
        mine = {sample.uid for sample in self.mine(batch.samples)}
        kept = [(sample, terms) for sample, terms in batch if sample.uid in mine]
        return RolloutBatch([sample for sample, _ in kept], [terms for _, terms in kept])

    def each(self, samples: Sequence[Sample], compute: PerSample, what: str) -> list[np.ndarray]:
        """`compute` of all `samples`, each done by its rank and told to the others; `what` names it."""
        if self._apart:
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

    def _add(self, samples: Iterable[Sample]) -> None:
        total = [0] * self._data.size
        of_teacher: dict[str | None, list[int]] = {}
        for sample in sorted(samples, key=lambda s: (-_tokens(s), s.uid)):
            own = of_teacher.setdefault(sample.teacher, [0] * self._data.size)
            owner = min(range(self._data.size), key=lambda rank: (own[rank], total[rank], rank))
            own[owner] += _tokens(sample)
            total[owner] += _tokens(sample)
            self._owners[sample.uid] = owner


def _tokens(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)
