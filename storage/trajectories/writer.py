"""`TrajectoryWriter`: trajectories written piece by piece while a rollout runs, acknowledged when sealed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from opd.errors import RunFolderError, StorageError
from opd.storage.files import FileLock, fsync_folder, write_atomic
from opd.storage.framed_log_writer import WriteGuard
from opd.storage.trajectories.metadata import Change, ChangeKind, MetadataWriter
from opd.storage.trajectories.segments import (
    HEADER,
    SAMPLE_FIELDS,
    Field,
    FieldStream,
    Reclaimer,
    SegmentWriter,
    StoreHeader,
    check_fields,
    find_header,
    refuse_lost,
    reporting,
    segment_numbers,
)
from opd.storage.trajectories.table import LOCATION, TrajectoryRecord, TrajectoryTable
from opd.types import Sample

Piece = tuple[Field, memoryview]


class OpenTrajectory:
    """What `append` adds to and `seal` completes. `locations` (`[F]`) is what it had when it was reopened."""

    def __init__(
        self, header: StoreHeader, segment: SegmentWriter, record: TrajectoryRecord, locations: np.ndarray
    ) -> None:
        """`record` says its uid, its prompt's length, and how long its response may become."""
        self.reopened = bool(locations["segment"].any())
        self.segment = segment
        self._header = header
        self._record = record
        self._locations = locations
        self._streams: dict[str, FieldStream] = {}
        segment.users += 1

    def check(self, name: str, values: np.ndarray) -> Piece:
        """A piece of field `name`, ready to be written. Raises `StorageError`, `ValueError` if wrong."""
        index = self._header.index(name)
        kind = self._header.fields[index]
        data = kind.bytes_of(values)
        if self._locations["segment"][index]:
            raise StorageError(
                f"trajectory {self._record.uid} has field {name} already; what is sealed stays as it is"
            )
        have = self._streams[name].rows if name in self._streams else 0
        rows, most = have + len(data) // kind.row_bytes, self._expected(kind, self._record.response_tokens)
        if rows > most:
            raise StorageError(
                f"trajectory {self._record.uid}: {rows} rows of {name}, but it was begun with room for"
                f" {most}; begin it with the longest response it may get"
            )
        return kind, data

    def append(self, piece: Piece) -> None:
        """Raises `OSError` as the system does."""
        kind, data = piece
        if not len(data):
            return
        if kind.name not in self._streams:
            most = self._expected(kind, self._record.response_tokens)
            rows = self._header.block_rows(kind)
            self._streams[kind.name] = FieldStream(self.segment, kind, most, rows)
        self._streams[kind.name].append(data)

    def check_complete(self, record: TrajectoryRecord) -> None:
        """Raises `StorageError` unless every field has as many rows as the lengths of `record` say."""
        if record.prompt_tokens != self._record.prompt_tokens:
            raise StorageError(
                f"trajectory {record.uid} was begun with {self._record.prompt_tokens} prompt tokens and is"
                f" sealed with {record.prompt_tokens}; they must agree"
            )
        if self.reopened and record.response_tokens != self._record.response_tokens:
            raise StorageError(
                f"trajectory {record.uid} was sealed with {self._record.response_tokens} response tokens and"
                f" now with {record.response_tokens}; they must agree"
            )
        for name, stream in self._streams.items():
            expected = self._expected(stream.field, record.response_tokens)
            if stream.rows != expected:
                raise StorageError(
                    f"trajectory {record.uid} has {stream.rows} rows of {name}, but its lengths ask for"
                    f" {expected}; append the rest, or give the right lengths"
                )

    def finish(self) -> np.ndarray:
        """Write what is left; returns `[F]` `LOCATION`. Raises `OSError`."""
        for name, stream in self._streams.items():
            stream.finish()
            check = self.segment.write_checks(stream.digests)
            self._locations[self._header.index(name)] = (self.segment.number, check, stream.start)
        return self._locations

    @property
    def fields(self) -> list[str]:
        """The fields it got."""
        return list(self._streams)

    def release(self) -> None:
        """It writes to its segment no longer."""
        self.segment.users -= 1

    def abandon(self) -> None:
        """Give up what was written, and its disk. Raises `OSError`."""
        for stream in self._streams.values():
            stream.abandon()

    def _expected(self, kind: Field, response_tokens: int) -> int:
        return response_tokens + (self._record.prompt_tokens if kind.rows == "sequence" else 0)


def sync(folder: Path, trajectories: Sequence[OpenTrajectory]) -> None:
    """Return when everything of finished `trajectories` is on the disk. Raises `OSError`."""
    names: dict[SegmentWriter, set[str]] = {}
    for trajectory in trajectories:
        names.setdefault(trajectory.segment, {"checks"}).update(trajectory.fields)
    for segment, fields in names.items():
        segment.sync(fields)
    if any([segment.take_new() for segment in names]):
        fsync_folder(folder / "segments")


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
        self._guard = WriteGuard(f"the trajectory store {self.folder}")
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
            with self._guard:
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
            with self._guard:
                if known:
                    self._metadata.append(Change(ChangeKind.REMOVE, None, known))
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
            if self._guard.closed:
                return
            try:
                with reporting(self.folder, "closed"):
                    self._finish()
            finally:
                self._guard.close()
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
        self.header = found or StoreHeader(fields, block_bytes)
        self._metadata = MetadataWriter(
            self.folder, len(fields), self._durable, self._guard, made=found is not None
        )
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
        if self._guard.intact:
            self._metadata.compact()
            self._reclaimer.reclaim()
            self._metadata.end()
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
        self._metadata.append(Change(kind, TrajectoryTable.of(records, locations)))
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
            self._guard.check()
            yield


def record_of(sample: Sample) -> TrajectoryRecord:
    """What the metadata says of a finished sample."""
    versions = sample.policy_versions
    extra = {
        "label": sample.label,
        "reward_parts": sample.reward_parts,
        "failure": sample.failure,
        "metadata": sample.metadata,
        "branch_of": sample.branch_of,
    }
    return TrajectoryRecord(
        uid=sample.uid,
        prompt_tokens=len(sample.prompt_ids),
        response_tokens=len(sample.response_ids),
        group_uid=sample.group_uid,
        domain=sample.domain,
        teacher=sample.teacher or "",
        reward=float("nan") if sample.reward is None else float(sample.reward),
        status=sample.status,
        trainable_tokens=sample.trainable_tokens,
        first_version=int(versions.min()) if len(versions) else 0,
        last_version=int(versions.max()) if len(versions) else 0,
        extra={name: value for name, value in extra.items() if value},
    )


def put_samples(
    writer: TrajectoryWriter, samples: Sequence[Sample], records: Sequence[TrajectoryRecord] | None = None
) -> None:
    """Write finished samples, in a store of `SAMPLE_FIELDS`, and seal them together.

    `records`: what the metadata is to say of each; by default what `record_of` does.
    """
    items = []
    for sample, record in zip(samples, records or map(record_of, samples), strict=True):
        values: dict[str, np.ndarray] = {"token_ids": sample.token_ids.astype(np.int32, copy=False)}
        for name, dtype in (("rollout_logprobs", "f4"), ("policy_versions", "i4"), ("loss_mask", "?")):
            array = getattr(sample, name)
            if len(array):
                values[name] = np.asarray(array, dtype)
        items.append((record, values))
    writer.put_many(items)
