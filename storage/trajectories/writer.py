"""`TrajectoryWriter`: trajectories written piece by piece while a rollout runs, acknowledged when sealed."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from opd.errors import RunFolderError, StorageError
from opd.storage.files import FileLock, fsync_folder, write_atomic
from opd.storage.trajectories.faults import FailureLatch, reporting
from opd.storage.trajectories.fields import (
    HEADER,
    SAMPLE_FIELDS,
    Field,
    StoreHeader,
    check_fields,
    find_header,
    refuse_lost,
)
from opd.storage.trajectories.frames import ChangeKind
from opd.storage.trajectories.metadata import MetadataWriter
from opd.storage.trajectories.open_trajectory import OpenTrajectory, sync
from opd.storage.trajectories.reclaim import Reclaimer
from opd.storage.trajectories.segments import SegmentWriter, segment_numbers
from opd.storage.trajectories.table import LOCATION, TrajectoryRecord, TrajectoryTable

_MOST_RESERVED = 1 << 40
"""Bytes, holes included, after which a segment takes no further trajectory: file systems limit a file."""
_AT_WORK = "writing"
"""A file that is there while a writer is, and after it was killed."""


class TrajectoryWriter:
    """The one process that writes a store in a local folder; any number read it meanwhile.

    `begin`, `append` as often as there is something, `seal`: what `seal` returned for is in the store, whole,
    whatever happens to the process, and with `durable` to the power. Everything else that a killed writer
    leaves is given back by the next. Safe for threads.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        fields: Sequence[Field] = SAMPLE_FIELDS,
        block_bytes: int = 1 << 20,
        segment_bytes: int = 256 << 20,
        durable: bool = True,
    ) -> None:
        """Make the store, with a checksum for every `block_bytes` and a new segment after about
        `segment_bytes`, or go on with the one that is there.

        Raises `StorageError` if another process writes it, its fields differ, it is damaged, or the disk
        refuses.
        """
        self.folder = Path(folder)
        self._segment_bytes = segment_bytes
        self._durable = durable
        self._mutex = threading.RLock()
        self._open: dict[str, OpenTrajectory] = {}
        self._latch = FailureLatch(self.folder)
        self._closed = False
        with reporting(self.folder, "opened for writing"):
            (self.folder / "segments").mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.folder / "writer")
            try:
                self._lock.acquire()
            except RunFolderError as error:
                raise StorageError(f"{error}; a trajectory store has one writer at a time") from None
            try:
                self._start(check_fields(fields), block_bytes)
            except BaseException:
                self._lock.release()
                raise

    def begin(self, uid: str, prompt_tokens: int, max_response_tokens: int) -> None:
        """A new trajectory. It may become shorter than announced, not longer.

        Raises `StorageError` if its uid is in the store already.
        """
        with self._writing():
            if uid in self._open or uid in self._metadata:
                raise StorageError(f"trajectory {uid} is in {self.folder} already; retire it first")
            lengths = TrajectoryRecord(uid, prompt_tokens, max_response_tokens)
            empty = np.zeros(len(self.header.fields), LOCATION)
            self._open[uid] = OpenTrajectory(self.header, self._segment_for_next(), lengths, empty)

    def reopen(self, uid: str) -> None:
        """Give a sealed trajectory fields that it has not, such as a teacher's; then `seal` it again."""
        with self._writing():
            if uid in self._open:
                raise StorageError(f"trajectory {uid} is open already; seal or abort it first")
            record, segment = self.record(uid), self._segment_for_next()
            own = self._metadata.locations(uid).copy()
            self._open[uid] = OpenTrajectory(self.header, segment, record, own)

    def append(self, uid: str, **pieces: np.ndarray) -> None:
        """Add rows (`[R]` or `[R, D]`) to fields of an open trajectory; nothing is acknowledged yet.

        Wrong pieces raise `StorageError` or `ValueError` and write nothing. If the disk is full the
        trajectory is given up, with the disk it took; others go on.
        """
        with self._writing():
            target = self._target(uid)
            checked = [target.check(name, values) for name, values in pieces.items()]
            try:
                for piece in checked:
                    target.append(piece)
            except OSError as error:
                self._give_up(uid)
                raise StorageError(
                    f"trajectory {uid} cannot be written to {self.folder} ({error.strerror or error}) and was"
                    " given up; free disk space, then write it again"
                ) from error

    def seal(self, record: TrajectoryRecord) -> None:
        """The trajectory is complete: acknowledge it. See `seal_many`."""
        self.seal_many([record])

    def seal_many(self, records: Sequence[TrajectoryRecord]) -> None:
        """Acknowledge several trajectories together, which shares the wait for the disk.

        Raises `StorageError` if a field's rows do not fit a record's lengths (nothing is sealed then), or the
        disk refuses, after which this writer takes nothing more.
        """
        with self._writing():
            for record in records:
                self._target(record.uid).check_complete(record)
            if len({record.uid for record in records}) < len(records):
                raise ValueError("a trajectory is sealed twice in one call; give each once")
            again = {r.uid for r in records if self._open[r.uid].reopened}
            with self._latch.watching():
                self._acknowledge([r for r in records if r.uid not in again], ChangeKind.ADD)
                self._acknowledge([r for r in records if r.uid in again], ChangeKind.REPLACE)

    def put(self, record: TrajectoryRecord, **values: np.ndarray) -> None:
        """Write and seal one whole trajectory."""
        self.put_many([(record, values)])

    def put_many(self, items: Sequence[tuple[TrajectoryRecord, Mapping[str, np.ndarray]]]) -> None:
        """Write several whole trajectories and seal them together; all or none."""
        with self._writing():
            begun: list[str] = []
            try:
                for record, values in items:
                    self.begin(record.uid, record.prompt_tokens, record.response_tokens)
                    begun.append(record.uid)
                    self.append(record.uid, **values)
                self.seal_many([record for record, _ in items])
            finally:
                for uid in begun:
                    if uid in self._open:
                        self._give_up(uid)

    def abort(self, uid: str) -> None:
        """Give up an open trajectory and the disk it took; a reopened one stays as it was sealed."""
        with self._writing():
            self._target(uid)
            self._give_up(uid)

    def retire(self, uids: Sequence[str]) -> None:
        """Forget sealed trajectories; unknown ones are passed over. Their disk is given back as soon as no
        process leases their segment: now, or at a later call.
        """
        with self._writing():
            known = tuple(uid for uid in dict.fromkeys(uids) if uid in self._metadata)
            for uid in known:
                if uid in self._open:
                    raise StorageError(f"trajectory {uid} is open again; seal or abort it, then retire it")
            places = [self._metadata.find(uid) for uid in known]
            with self._latch.watching():
                if known:
                    self._metadata.append(ChangeKind.REMOVE, None, known)
                for table, row in places:
                    self._reclaimer.retired(table, row)
                self._reclaimer.reclaim(self._segments)

    def record(self, uid: str) -> TrajectoryRecord:
        """What is known of a sealed trajectory, for sealing it again. Raises `StorageError` if unknown."""
        with self._mutex:
            if uid not in self._metadata:
                raise StorageError(f"trajectory {uid} is not sealed in {self.folder}; check its uid")
            return self._metadata.record(uid)

    @property
    def uids(self) -> list[str]:
        """Of the sealed trajectories."""
        with self._mutex:
            return self._metadata.uids

    def close(self) -> None:
        """Give up what is open and let another process write. Does nothing the second time."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            try:
                with reporting(self.folder, "closed"):
                    self._finish()
            finally:
                closed = f"the writer of {self.folder} has been closed; open it again"
                self._latch.reason = self._latch.reason or closed
                for segment in self._segments.values():
                    segment.close()
                self._metadata.close()
                self._reclaimer.close()
                self._lock.release()

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(StorageError) if error is not None else contextlib.nullcontext():
            self.close()

    def _start(self, fields: tuple[Field, ...], block_bytes: int) -> None:
        path = self.folder / HEADER
        found = find_header(path, fields)
        self.header = found or StoreHeader(secrets.token_hex(8), fields, block_bytes)
        self._metadata = MetadataWriter(self.folder, len(fields), self._durable, made=found is not None)
        self._reclaimer = Reclaimer(self.folder, self.header)
        table = self._metadata.table()
        if found is None:
            refuse_lost(path, len(table))
        self._reclaimer.sweep(table, dirty=(self.folder / _AT_WORK).exists())
        (self.folder / _AT_WORK).touch()
        self._next = 1 + max(
            [0, *segment_numbers(self.folder), int(table.locations["segment"].max(initial=0))]
        )
        self._segments: dict[int, SegmentWriter] = {}
        self._segment_for_next()
        if found is None:  # last: without it there is no store
            write_atomic(path, self.header.encode())
            fsync_folder(self.folder.parent)

    def _finish(self) -> None:
        for uid in list(self._open):
            self._give_up(uid)
        if self._latch.reason is None:
            self._metadata.compact()
            self._reclaimer.reclaim()
            (self.folder / _AT_WORK).unlink(missing_ok=True)

    def _target(self, uid: str) -> OpenTrajectory:
        if uid not in self._open:
            raise StorageError(f"trajectory {uid} is not open in {self.folder}; begin it first")
        return self._open[uid]

    def _segment_for_next(self) -> SegmentWriter:
        current = self._segments.get(self._next - 1)
        if current is None or current.written >= self._segment_bytes or current.reserved >= _MOST_RESERVED:
            current = self._segments[self._next] = SegmentWriter(self.folder, self._next)
            self._next += 1
            self._close_unused()
        return current

    def _close_unused(self) -> None:
        for number, segment in list(self._segments.items()):
            if not segment.users and number != self._next - 1:
                segment.close()
                del self._segments[number]

    def _acknowledge(self, records: Sequence[TrajectoryRecord], kind: ChangeKind) -> None:
        if not records:
            return
        trajectories = [self._open[record.uid] for record in records]
        locations = np.stack([trajectory.finish() for trajectory in trajectories])
        if self._durable:
            sync(self.folder, trajectories)
        replaced = records if kind == ChangeKind.REPLACE else []
        before = [self._metadata.locations(record.uid) for record in replaced]
        self._metadata.append(kind, TrajectoryTable.of(records, locations))
        self._reclaimer.added(locations)
        for old in before:
            self._reclaimer.added(old, -1)
        for record, trajectory in zip(records, trajectories, strict=True):
            trajectory.release()
            del self._open[record.uid]
        self._close_unused()

    def _give_up(self, uid: str) -> None:
        trajectory = self._open.pop(uid)
        trajectory.release()
        trajectory.abandon()
        self._close_unused()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._mutex:
            self._latch.check()
            yield
