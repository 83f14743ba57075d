"""Hidden states of a mini-batch kept in the node's cache: computed once, then mapped."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from opd.protocols import Teacher
from opd.storage.hidden_cache import CacheRecord, HiddenStateCache, Lease, cache_key
from opd.storage.tensors import rows_array, rows_tensor
from opd.types import Sample


class CachedScores:
    """The `ScoreCache` of a schedule, on a `HiddenStateCache` that other processes may use too.

    What is stored is handed back as a map of the cache's file: a mini-batch's hidden states cost page cache,
    which the system can take back, and no memory of their own. The cache keeps them until `release`.

    Args:
        cache: Where rows are kept, within its quota.
        variant: What changes a teacher's rows besides its digest and the tokens: the dtype it computes in.
    """

    def __init__(self, cache: HiddenStateCache, *, variant: str = "") -> None:
        self.cache = cache
        self.variant = variant
        self._leases: list[Lease] = []

    def find(self, teacher: Teacher, sample: Sample) -> Tensor | None:
        """[R, D] on the CPU, valid until `release`; `None` if the cache has no rows, or no whole ones."""
        lease = self.cache.get(self._key(teacher, sample))
        if lease is None:
            return None
        if len(lease.rows) != len(sample.response_ids):
            lease.release()
            return None
        self._leases.append(lease)
        return rows_tensor(lease)

    def store(self, teacher: Teacher, samples: Sequence[Sample], rows: Sequence[Tensor]) -> list[Tensor]:
        """Keep `rows`, [R, D] of each sample, and return what to use in their place until `release`.

        Rows the cache has no room for are returned as they are. Raises `StorageError` if its disk fails.
        """
        kept = self.cache.put_many(
            [
                (self._key(teacher, sample), rows_array(own), self._record(teacher, sample))
                for sample, own in zip(samples, rows, strict=True)
            ]
        )
        mapped = []
        for sample, own, there in zip(samples, rows, kept, strict=True):
            found = self.find(teacher, sample) if there else None
            mapped.append(own if found is None else found)
        return mapped

    def release(self) -> None:
        """End the leases: what `find` and `store` returned may be evicted from now on."""
        leases, self._leases = self._leases, []
        for lease in leases:
            lease.release()

    def _key(self, teacher: Teacher, sample: Sample) -> bytes:
        return cache_key(teacher.digest, sample.token_ids, len(sample.prompt_ids) - 1, self.variant)

    def _record(self, teacher: Teacher, sample: Sample) -> CacheRecord:
        return CacheRecord(uid=sample.uid, teacher=teacher.name, version=teacher.digest[:16])
