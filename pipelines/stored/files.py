"""The responses of a merge on disk: each rank writes its own into a trajectory store, and reads every rank's.

A response is here from its end until a checkpoint holds what was learnt from it. So a run that was killed
finds it here, and neither the token log nor any process has to keep it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from opd.errors import RolloutError
from opd.ranks import Ranks, path_of_rank
from opd.storage.trajectories import TrajectoryUnion, TrajectoryWriter, put_samples, record_of
from opd.types import Sample, SamplingParams


@dataclass(frozen=True, slots=True)
class Written:
    """What is known of a response without reading its store's table."""

    group_uid: str
    place: int
    """In its group."""
    batch: int
    asked: str
    """Digest of prompt, sampling settings and seed."""


class SampleFiles:
    """One stage's responses. Any number of threads may write, one reads.

    Args:
        folders: A store for each rank.
        writer: Of this rank's.
    """

    def __init__(self, folders: Sequence[Path], writer: TrajectoryWriter) -> None:
        self._folders, self._writer = list(folders), writer
        self._groups: dict[str, dict[int, str]] = {}
        """Of each group the uids of its samples, by their place in it."""
        self._written: dict[str, Written] = {}
        self._mutex = threading.Lock()
        for uid in writer.uids:
            record = writer.record(uid)
            self._note(uid, record.group_uid, record.extra)

    @classmethod
    @contextmanager
    def open(
        cls, folder: Path, ranks: Ranks | None = None, *, keep: bool = False, durable: bool = False
    ) -> Iterator[SampleFiles]:
        """The store in `folder`; for the other ranks beside it. `keep` what an earlier attempt left: else its
        batches are written again. `durable`: nothing that is here goes with the power.
        """
        ranks = ranks or Ranks()
        folders = [path_of_rank(folder, rank) for rank in range(ranks.size)]
        with TrajectoryWriter(folders[ranks.rank], durable=durable) as writer:
            if not keep:
                writer.retire(writer.uids)
            yield cls(folders, writer)

    def put(
        self, samples: Sequence[Sample], batch: int, asked: Mapping[str, str], places: Mapping[str, int]
    ) -> None:
        """Write samples that have ended; when this returns they are here. `asked`: by group; `places`: by
        uid, in their groups.

        Raises `StorageError` if the disk is full; none of them is here then.
        """
        records = []
        for sample in samples:
            record, place = record_of(sample), places[sample.uid]
            extra = {"batch": batch, "asked": asked[sample.group_uid], "place": place}
            records.append(replace(record, extra={**record.extra, **extra}))
        put_samples(self._writer, samples, records)
        for record in records:
            self._note(record.uid, record.group_uid, record.extra)

    def group(self, group_uid: str, asked: str) -> dict[int, str]:
        """The samples of a group that are here: uids by their place in the group.

        Raises `RolloutError` if they were written to another prompt or with other settings than `asked`.
        """
        with self._mutex:
            found = dict(self._groups.get(group_uid, {}))
        for uid in found.values():
            if self._written[uid].asked != asked:
                raise RolloutError(
                    f"{self._writer.folder} holds response {uid} to another prompt, or with other sampling"
                    " settings or another seed: it was written by another run; remove the folder."
                )
        return found

    def retire_before(self, batch: int) -> None:
        """Forget the responses of every batch before number `batch`, and give their disk back."""
        with self._mutex:
            old = [uid for uid, known in self._written.items() if known.batch < batch]
        self.retire(old)

    def retire(self, uids: Iterable[str]) -> None:
        """Forget these responses."""
        gone = sorted(set(uids))
        self._writer.retire(gone)
        with self._mutex:
            for uid in gone:
                known = self._written.pop(uid, None)
                group = self._groups.get(known.group_uid, {}) if known else {}
                if known and group.get(known.place) == uid:
                    del group[known.place]
                    if not group:
                        del self._groups[known.group_uid]

    @contextmanager
    def view(self) -> Iterator[TrajectoryUnion]:
        """What all ranks have written up to now, while the block runs."""
        with TrajectoryUnion.open(self._folders) as union:
            yield union

    def _note(self, uid: str, group_uid: str, extra: Mapping[str, object]) -> None:
        # What is not of a batch, from before there were numbers, is older than all and goes with the first.
        batch, place = (int(str(extra.get(name, -1))) for name in ("batch", "place"))
        with self._mutex:
            self._written[uid] = Written(group_uid, place, batch, str(extra.get("asked", "")))
            if batch >= 0:
                self._groups.setdefault(group_uid, {})[place] = uid


def digest_of(prompt_ids: np.ndarray, sampling: SamplingParams, seed: int, owner: str = "") -> str:
    """What tells responses to one question from those to another, and those of one run from another's."""
    settings = f"{sampling}/{seed}/{len(prompt_ids)}/{owner}".encode()
    data = np.ascontiguousarray(prompt_ids, np.int32)
    return hashlib.blake2b(data.tobytes() + settings, digest_size=16).hexdigest()


def rows_by_uid(union: TrajectoryUnion, rank: int) -> dict[str, int]:
    """The rows of `union.table` with what `rank` has written, by uid."""
    first = int(union.starts[rank])
    return {uid: first + row for row, uid in enumerate(union.stores[rank].table.uid)}
