"""Teachers' results for a mini-batch, until it is used: hidden states or log-probabilities.

Hidden states of packed samples are handed out sample by sample, those of long ones in chunks, and stored in
the node's cache: computed once, then mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.models.causal_lm import held_bytes
from opd.protocols import Teacher
from opd.storage.node_cache import CacheRecord, Lease, NodeCache, cache_key
from opd.storage.tensors import rows_array, rows_tensor
from opd.train.teacher_views import ScoredView
from opd.types import Sample, TokenLogprobs, TopKLogprobs

RowPieces = Iterator[tuple[Sample, Tensor]]
"""Rows [r, D] of the samples in order, those of a long one in chunks. Each is valid until the next."""


@runtime_checkable
class ChunkedTeacher(Protocol):
    """A teacher that can return rows without gathering all of them."""

    sequence_chunk: int | None
    """Packed tokens of a chunk of a long sequence, or `None` if nothing is cut."""

    def score_pieces(self, samples: Sequence[Sample]) -> RowPieces:
        """Yield the rows of `score`, chunk by chunk."""
        ...


def reads_chunks(teacher: object, samples: Sequence[Sample]) -> bool:
    """Return whether `teacher` reads one of `samples` in chunks."""
    chunk = teacher.sequence_chunk if isinstance(teacher, ChunkedTeacher) else None
    return chunk is not None and any(len(s.prompt_ids) + len(s.response_ids) > chunk for s in samples)


def row_pieces(samples: Sequence[Sample], hidden: Tensor, chunk: int | None) -> RowPieces:
    """Yield the rows that predict response tokens from `hidden` [T, D], of `samples` packed end to end."""
    for sample, first, last in response_rows(samples):
        for start in range(first, last, chunk or max(1, last - first)):
            yield sample, hidden[start : last if chunk is None else min(start + chunk, last)]


def response_rows(samples: Sequence[Sample]) -> Iterator[tuple[Sample, int, int]]:
    """Yield each of `samples`, packed end to end, with the range of rows that predict its response tokens."""
    start = 0
    for sample in samples:
        first = start + len(sample.prompt_ids) - 1
        last = first + len(sample.response_ids)
        yield sample, first, last
        start = last + 1


class TeacherLogprobs:
    """Log-probabilities by teacher and sample. They are too few to need the cache of hidden states."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], tuple[Tensor, ...]] = {}
        """(sampled [N],) or (sampled [N], ids [N, K], log-probabilities [N, K]) by teacher and uid."""

    def add_scores(self, name: str, samples: Sequence[Sample], targets: TokenLogprobs | TopKLogprobs) -> None:
        """Store the results of teacher `name` for `samples`. Raises `TeacherError` for a wrong number of
        values or one that is not finite.
        """
        counts = [len(s.response_ids) for s in samples]
        if isinstance(targets, TokenLogprobs):
            streams = (targets.logprobs,)
        elif targets.sampled is None:
            raise TeacherError(
                f"teacher {name} gave no log-probabilities of the sampled tokens; check its back end."
            )
        else:
            streams = (targets.sampled, targets.ids, targets.logprobs)
        for stream in streams:
            if len(stream) != sum(counts) or not torch.isfinite(stream).all():
                raise TeacherError(
                    f"teacher {name} returned {len(stream)} log-probabilities for {sum(counts)} response"
                    " tokens, or some that are not finite; check its back end."
                )
        parts = zip(*(stream.split(counts) for stream in streams), strict=True)
        self._streams |= {(name, sample.uid): values for sample, values in zip(samples, parts, strict=True)}

    def has_sample(self, name: str, sample: Sample) -> bool:
        """Return whether teacher `name` gave log-probabilities of `sample`."""
        return (name, sample.uid) in self._streams

    def scored_view(
        self, name: str, weight: float, samples: Sequence[Sample], device: torch.device | None
    ) -> ScoredView:
        """Return the log-probabilities of `samples`, end to end. Raises `TeacherError` if one is unscored."""
        missing = next((s.uid for s in samples if not self.has_sample(name, s)), None)
        if missing is not None:
            raise TeacherError(
                f"sample {missing} was not scored by teacher {name}; call score() on it first."
            )
        streams = zip(*(self._streams[name, sample.uid] for sample in samples), strict=True)
        joined = [torch.cat(parts) for parts in streams]
        return ScoredView(name, weight, *(w if device is None else w.to(device) for w in joined))

    def clear(self) -> None:
        self._streams.clear()


class ScoreCache(Protocol):
    """Hidden states that outlive a mini-batch. `CachedScores` is one."""

    def caches_teacher(self, name: str) -> bool:
        """Return whether it takes hidden states of teacher `name`. No other method is called for others."""
        ...

    def find(self, teacher: Teacher, sample: Sample) -> Tensor | None:
        """Return the rows [R, D] of `sample` under `teacher`, valid until `release`, or `None` if unknown."""
        ...

    def store(self, teacher: Teacher, samples: Sequence[Sample], rows: Sequence[Tensor]) -> list[Tensor]:
        """Store the rows [R, D] of each sample. Return rows to use instead until `release`."""
        ...

    def store_pieces(self, teacher: Teacher, pieces: RowPieces) -> dict[str, Tensor]:
        """`store` rows that come in chunks, each valid until the next. Return rows by uid."""
        ...

    def resident_bytes(self) -> int:
        """Return the bytes of rows that are in memory, and in no file."""
        ...

    def drop_samples(self, samples: Sequence[Sample]) -> None:
        """Release the rows of `samples` that were found and stored."""
        ...

    def release(self, *, learned: bool = True) -> None:
        """Release all rows that were found and stored; `learned`: the student's weights learn from them."""
        ...


HIDDEN_MB = 64
"""MiB of a mini-batch's rows that stay in memory, where a recipe leaves it open."""


def spare_bytes(device: torch.device) -> int:
    """Half of the bytes that are free on a GPU in the largest moment so far: memory comes in pieces, and
    another batch has longer responses.
    """
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return max(0, free - torch.cuda.max_memory_allocated(device)) // 2


class CachedScores:
    """The `ScoreCache` of a schedule, on a `NodeCache` that other processes may use too.

    Stored rows are handed back as a map of the cache's file. So a mini-batch's hidden states cost page cache,
    which the system can take back, and no memory of their own. The cache keeps them until `release`.

    Args:
        cache: Stores the rows, within its quota.
        variants: Name of a teacher -> the settings besides digest and tokens that change its rows, such as
            its dtype. Rows of a teacher without a name here are not stored. `None` stores all.
        memory_bytes: So many bytes of a mini-batch's rows stay where they were computed until `release`. They
            are gone with the process, because writing and mapping a few costs more than computing them. If
            it is above 0, nobody else writes to the cache.
        grows: Called once, at the end of the second mini-batch that is learned from. Returns the bytes that
            may stay from then on, if more. Not earlier, because the optimiser's moments come with its first
            step.
    """

    def __init__(
        self,
        cache: NodeCache,
        *,
        variants: Mapping[str, str] | None = None,
        memory_bytes: int = 0,
        grows: Callable[[], int] | None = None,
    ) -> None:
        self.cache = cache
        self.variants = variants
        self._leases: list[tuple[str, Lease]] = []
        self._memory = self._free_bytes = memory_bytes
        self._grows, self._stored, self._learned = grows, False, 0
        self._near: dict[tuple[str, str], tuple[np.ndarray, Tensor]] = {}
        """By teacher and sample its response, [R], and its rows in memory."""
        self._searched = memory_bytes == 0 or cache.used_bytes() > 0

    def caches_teacher(self, name: str) -> bool:
        """Return whether `name` has a variant."""
        return self.variants is None or name in self.variants

    def find(self, teacher: Teacher, sample: Sample) -> Tensor | None:
        """Return [R, D], valid until `release`, or `None` if the cache has no rows, or no complete ones."""
        response, rows = self._near.get((teacher.name, sample.uid), (None, None))
        if response is not None and np.array_equal(response, sample.response_ids):
            return rows
        if not self._searched:
            return None
        lease = self.cache.get(self._cache_key(teacher, sample))
        if lease is None:
            return None
        if len(lease.rows) != len(sample.response_ids):
            lease.release()
            return None
        self._leases.append((sample.uid, lease))
        return rows_tensor(lease)

    def store(self, teacher: Teacher, samples: Sequence[Sample], rows: Sequence[Tensor]) -> list[Tensor]:
        """Store `rows`, [R, D] of each sample, and return rows to use instead until `release`.

        Rows for which the cache has no capacity, or that are few, are returned as they are. Raises
        `StorageError` if its disk fails.
        """
        size, self._stored = sum(part.nbytes for part in rows), True
        if size <= self._free_bytes:
            self._free_bytes -= size
            for sample, part in zip(samples, rows, strict=True):
                self._near[teacher.name, sample.uid] = sample.response_ids, part
            return list(rows)
        self._searched = True
        written = self.cache.put_many(
            [
                (self._cache_key(teacher, sample), rows_array(part), self._cache_record(teacher, sample))
                for sample, part in zip(samples, rows, strict=True)
            ]
        )
        mapped = []
        for sample, part, is_written in zip(samples, rows, written, strict=True):
            view = self.find(teacher, sample) if is_written else None
            mapped.append(part if view is None else view)
        return mapped

    def store_pieces(self, teacher: Teacher, pieces: RowPieces) -> dict[str, Tensor]:
        """Store the rows of samples as they come, chunk by chunk. Return rows to use until `release`, by uid.

        At most one piece is in memory, besides samples that fit into `memory_bytes` and rows for which the
        cache has no capacity. Raises `StorageError` if its disk fails, and `TeacherError` if a sample does
        not get a row for each token.
        """
        stored: dict[str, Tensor] = {}
        for sample, parts in groupby(pieces, key=lambda piece: piece[0]):
            stored[sample.uid] = self._store_one(teacher, sample, (rows for _, rows in parts))
        return stored

    def _store_one(self, teacher: Teacher, sample: Sample, parts: Iterator[Tensor]) -> Tensor:
        first, count, self._stored = next(parts), len(sample.response_ids), True
        if count * first[:1].nbytes <= self._free_bytes:
            return self._store_in_memory(
                teacher, sample, chain([first], parts), first.new_empty(count, first.shape[1])
            )
        self._searched, key = True, self._cache_key(teacher, sample)
        writer = self.cache.open_rows(key, rows_array(first[:1]), count, self._cache_record(teacher, sample))
        if writer is None:
            return torch.cat([first, *parts])
        done = 0
        try:
            for rows in chain([first], parts):
                done += len(rows)
                if done > count or not torch.isfinite(rows).all():
                    raise unusable_error(teacher.name, sample, done)
                if not writer.append(rows_array(rows)):
                    # The disk is full: written rows are read back, and the others stay in memory too.
                    self.cache.count_write(0)
                    written = torch.from_numpy(writer.give_up()).view(rows.dtype).view(-1, rows.shape[1])
                    return torch.cat([written.to(rows.device), rows, *parts])
            if done < count:
                raise unusable_error(teacher.name, sample, done)
            self.cache.count_write(writer.finish())
        finally:
            writer.close()
        view = self.find(teacher, sample)
        if view is None:
            raise TeacherError(
                f"the hidden states of sample {sample.uid} under teacher {teacher.name} were evicted as soon"
                " as they were written; raise storage.cache_mb, or let fewer runs share the cache."
            )
        return view

    def _store_in_memory(
        self, teacher: Teacher, sample: Sample, parts: Iterator[Tensor], buffer: Tensor
    ) -> Tensor:
        """`buffer` [R, D] with what comes in `parts`, on their device, until `release`."""
        done = 0
        for rows in parts:
            done += len(rows)
            if done > len(buffer) or not torch.isfinite(rows).all():
                raise unusable_error(teacher.name, sample, done)
            buffer[done - len(rows) : done] = rows
        if done < len(buffer):
            raise unusable_error(teacher.name, sample, done)
        self._free_bytes -= buffer.nbytes
        self._near[teacher.name, sample.uid] = sample.response_ids, buffer
        return buffer

    def release(self, *, learned: bool = True) -> None:
        """End the leases: what `find` and `store` returned may be evicted from now on."""
        self._learned += learned
        if self._grows is not None and self._stored and self._learned > 1:
            self._memory, self._grows = max(self._memory, self._grows()), None
        self._free_bytes = self._memory
        self._near.clear()
        leases, self._leases = self._leases, []
        for _, lease in leases:
            lease.release()

    def resident_bytes(self) -> int:
        """Return the bytes of the rows of this mini-batch that were few enough to stay in memory."""
        return self._memory - self._free_bytes

    def drop_samples(self, samples: Sequence[Sample]) -> None:
        """End the leases on the rows of `samples` alone."""
        gone = {sample.uid for sample in samples}
        for lease in [lease for uid, lease in self._leases if uid in gone]:
            lease.release()
        self._leases = [entry for entry in self._leases if entry[0] not in gone]

    def _cache_key(self, teacher: Teacher, sample: Sample) -> bytes:
        variant = "" if self.variants is None else self.variants[teacher.name]
        return cache_key(teacher.digest, sample.token_ids, len(sample.prompt_ids) - 1, variant)

    def _cache_record(self, teacher: Teacher, sample: Sample) -> CacheRecord:
        return CacheRecord(uid=sample.uid, teacher=teacher.name, version=teacher.digest[:16])


def resident_parts(
    teachers: Mapping[str, Teacher],
    heads: Mapping[str, Head],
    rows: Iterable[Tensor],
    cache: ScoreCache | None,
) -> dict[str, int]:
    """Return the bytes of the weights of `teachers` in this process now, of the `heads` among them, and of
    hidden states in memory: `rows`, and those of `cache`. Streamed teachers share one buffer, and each
    reports it.
    """
    local = {name: one for name, one in teachers.items() if isinstance(one, ResidentTeacher)}
    total = max((one.weight_bytes for one in local.values() if one.streams), default=0)
    total += sum(one.weight_bytes for one in local.values() if not one.streams)
    borrowing = {name for name, one in teachers.items() if isinstance(one, Borrowing) and one.borrows}
    own_heads = [head for name, head in heads.items() if name not in borrowing]
    resident = held_bytes(t for head in own_heads for t in (head.weight, head.bias) if t is not None)
    return {
        "teacher_weights": max(0, total - resident),
        "teacher_heads": resident,
        "hidden_states": held_bytes(rows) + (0 if cache is None else cache.resident_bytes()),
    }


@runtime_checkable
class ResidentTeacher(Protocol):
    """A teacher whose weights are in this process."""

    streams: bool
    """Whether they are streamed through memory that it shares with others."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of them in memory now, heads too. Teachers that share memory report the sum."""
        ...


@runtime_checkable
class Borrowing(Protocol):
    """What a teacher offers beyond `Teacher` when its weights may be others' too."""

    @property
    def borrows(self) -> bool:
        """Return whether its head belongs to a base that others compute with too."""
        ...


def check_finite(rows: Tensor, whose: str) -> None:
    """Raise `TeacherError` if hidden states `rows` `[N, D]` hold NaN or infinity."""
    if not torch.isfinite(rows).all():
        dtype = str(rows.dtype).removeprefix("torch.")
        raise TeacherError(
            f"{whose} returned hidden states in {dtype} that are not finite; check its weights and dtype"
            " (bfloat16 has the range of float32)."
        )


def unusable_error(name: str, sample: Sample, rows: int) -> TeacherError:
    """Return the error for a teacher that gave `rows` rows so far, too few or many, or some not finite."""
    return TeacherError(
        f"teacher {name} returned {rows} hidden states for the {len(sample.response_ids)} response tokens of"
        f" sample {sample.uid}, or numbers that are not finite; check its weights, dtype and back end."
    )
