"""The one writer of a log. It appends frames and knows which of them are on the disk."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self

from opd.errors import StorageError, error_fix, limit_fix
from opd.storage.framed_log import (
    END,
    FRAME_BYTES,
    HEADER_BYTES,
    TEMPORARY,
    FileHeader,
    LogIO,
    LogRecovery,
    Replay,
    file_name,
    frame_header,
    recover_log,
    salt_of,
)

SyncPolicy = Literal["always", "interval", "os"]
_LOCK = "LOCK"
_SMALLEST_SEGMENT = 512
_SMALL_FILES = 16
"""More files than this are merged when a log is opened, if they are mostly small."""


class FrameContent(NamedTuple):
    """One frame of a snapshot. `payload` is byte objects that are written one after another."""

    kind: int
    payload: list
    count: int = 0


@dataclass(frozen=True, slots=True)
class LogPolicy:
    """Sync policy of a log, see `TokenWAL` for the promise of each `fsync`."""

    fsync: SyncPolicy
    interval_seconds: float = 0.2
    """For `"interval"`."""
    segment_bytes: int = 64 << 20
    """About the size limit of one file."""
    reserve: bool = False
    """Write zeros ahead of the frames, which pays if every commit waits for the disk."""

    def __post_init__(self) -> None:
        if self.fsync not in ("always", "interval", "os"):
            raise StorageError(f"fsync={self.fsync!r} is not a policy of the log; use always, interval or os")


class WriteGuard:
    """Permits or refuses writes, with the reason. After the first failure it refuses every write.

    Used as a context from the first byte written until memory agrees. An interruption of the block ends the
    log.
    """

    def __init__(self, label: str) -> None:
        """`label` names the written thing: "the log in FOLDER"."""
        self._label = label
        self._process = os.getpid()
        self._failure: str | None = None
        self._reported = False
        self._busy = False
        self._began = 0.0
        self.seconds = 0.0
        """Spent in writes so far, waits for the disk included."""
        self.closed = False
        """Every further write is refused."""

    @property
    def is_intact(self) -> bool:
        """Return whether nothing has failed and this process opened the log."""
        return self._failure is None and os.getpid() == self._process

    @property
    def has_unreported_failure(self) -> bool:
        """Return whether something failed in the background and no call has reported it yet."""
        return self._failure is not None and not self._reported

    def check(self) -> None:
        """Raise `StorageError` after a failure, once closed, in a forked child, or inside another write."""
        if self._failure is not None:
            self._reported = True
            raise StorageError(self._failure)
        if self.closed:
            raise StorageError(f"{self._label} has been shut down; open it again")
        if self._busy:
            raise StorageError(
                f"{self._label} was called in the middle of a write, as from a signal handler;"
                " set a flag there and call it later"
            )
        if os.getpid() != self._process:
            raise StorageError(
                f"{self._label} belongs to process {self._process}; a forked child cannot write to it"
            )

    def __enter__(self) -> None:
        """Begin a write."""
        self._busy, self._began = True, time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End a write. Memory agrees with the file, or nothing is written again."""
        self._busy, self.seconds = False, self.seconds + time.perf_counter() - self._began
        if isinstance(error, OSError):
            self._reported = True
            raise StorageError(self._note_failure(error)) from error
        if kind is not None:
            self._failure = f"a write to {self._label} was broken off by {kind.__name__}; open it again"

    def in_background(self, sync: Callable[[], None]) -> None:
        """Run `sync`. The next write reports a failure."""
        if self._failure is None:
            try:
                sync()
            except OSError as error:
                self._note_failure(error)

    def _note_failure(self, error: OSError) -> str:
        self._failure = (
            f"{self._label} could not be written ({error.strerror or error}) and takes nothing more;"
            f" {error_fix(error, 'mend that')}, and open it again (a run with --resume): what was"
            " acknowledged is kept"
        )
        return self._failure


class Syncer:
    """Calls `sync` at most every `interval` seconds while there is something to do, until stopped.

    It waits by the monotonic clock, so setting the machine's time changes nothing.
    """

    def __init__(self, sync: Callable[[], None], interval: float) -> None:
        self._sync = sync
        self._interval = interval
        self._work = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, name="opd-wal-sync", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Note that something was written."""
        if not self._work.is_set():
            self._work.set()

    def stop(self) -> None:
        """Wait for a running sync, then end the thread. Does not sync by itself."""
        self._stopped.set()
        self._work.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run_loop(self) -> None:
        while not self._stopped.is_set():
            self._work.wait()
            if self._stopped.wait(self._interval):
                return
            self._work.clear()  # before the sync: a write during it asks for another one
            self._sync()


RESERVE = 1 << 20
"""Bytes of zeros ahead of the frames of a log that waits for the disk. A sync then has no new size and no new
blocks of the file to write, which saves a quarter of its time or more.
"""


def _write_file(folder: Path, header: FileHeader, content: Iterable[list], io: LogIO) -> int:
    """Write a file durably, then name it durably. Return it open for appending. `content` yields lists of
    buffers, written one list after another.

    A crash leaves a temporary file or the complete one: a file with a final name always has its header.
    """
    name = file_name(header.sequence, snapshot=header.is_snapshot)
    path, temporary = folder / name, folder / (name + TEMPORARY)
    file = io.create(temporary)
    try:
        io.append(file, [header.encode()])
        for buffers in content:
            io.append(file, buffers)
        io.sync(file)
        io.rename(temporary, path)
        io.sync_folder(folder)
    except BaseException:
        io.close(file)
        raise
    return file


class LogSegment:
    """One open file of a log. `append` has one caller at a time. `sync` may be called concurrently."""

    def __init__(
        self, folder: Path, header: FileHeader, tail: bytes, tail_frames: int, io: LogIO, limit: int = 0
    ) -> None:
        """Begin a segment with the frames of `tail`, which no other file is known to hold durably. Bytes are
        reserved ahead of the frames, up to `limit` bytes of the file.
        """
        self._io = io
        self._limit = limit
        self._salt = salt_of(header.log_id)
        self._sync_lock = threading.Lock()
        self.sequence = header.sequence
        self._file: int | None = _write_file(folder, header, [[tail]] if tail else [], io)
        self.next_lsn = header.first_lsn + tail_frames
        self.durable_lsn = self.next_lsn - 1
        self.size = self._reserved = HEADER_BYTES + len(tail)

    @property
    def is_dirty(self) -> bool:
        """Return whether a frame was appended that is not known to be on the disk."""
        return self.next_lsn - 1 > self.durable_lsn

    def append(self, kind: int, payloads: Sequence[bytes], count: int = 0) -> None:
        """Write one frame for each payload, all at once."""
        assert self._file is not None
        buffers: list[bytes] = []
        for number, payload in enumerate(payloads, start=self.next_lsn):
            buffers += (frame_header(kind, (payload,), count, number, self.durable_lsn, self._salt), payload)
        if len(payloads) > 1:
            buffers = [b"".join(buffers)]
        size = self.size + sum(map(len, buffers))
        if self._reserved < size <= self._limit:
            end = min(size + RESERVE, self._limit)
            try:
                self._io.reserve(self._file, self._reserved, end - self._reserved)
                self._reserved = end
            except OSError:  # the disk is full: the file just grows, and the append raises if it fails too
                self._limit = 0
        self._io.append(self._file, buffers)
        self.size = size
        self.next_lsn += len(payloads)

    def trim_reserve(self) -> None:
        """Give back reserved bytes that were not used."""
        with self._sync_lock:
            if self._file is not None and self._reserved > self.size:
                self._io.truncate_file(self._file, self.size)
            self._reserved = self._limit = 0

    def sync(self) -> None:
        """Return when every frame appended before the call is on the disk."""
        with self._sync_lock:
            written = self.next_lsn - 1
            if self._file is not None and written > self.durable_lsn:
                self._io.sync(self._file)
                self.durable_lsn = written

    def close(self) -> None:
        """Close the file, as it is. A second call does nothing."""
        with self._sync_lock:
            if self._file is not None:
                file, self._file = self._file, None
                self._io.close(file)


class FramedLog:
    """Appends frames, begins a new segment when one is full, and replaces old ones by a snapshot.

    No file is changed once another follows it, and none is ever cut: opening a log begins a new segment,
    whose header says where the previous one ends. One thread at a time, but `sync` may be called
    concurrently.
    """

    def __init__(
        self,
        folder: Path,
        recovery: LogRecovery,
        policy: LogPolicy,
        guard: WriteGuard,
        io: LogIO,
        contents: Callable[[], Iterable[FrameContent]],
    ) -> None:
        """Continue the log of `recover_log`. Frames that may not be on the disk are written again, into the
        new segment: after a failed sync, the system's cache shows bytes that the disk does not have.
        `contents` returns the frames of a snapshot of the current state.
        """
        self._folder, self._io, self._policy = folder, io, policy
        self._contents = contents
        self._limit = max(policy.segment_bytes, _SMALLEST_SEGMENT)
        self._reserve = self._limit if policy.reserve else 0
        self._log_id = recovery.log_id or os.urandom(16)
        self._older = list(recovery.report.files)
        self._older_bytes = recovery.report.stored_bytes
        io.sync_folder(folder)  # the previous writer may have died between a rename and its sync
        self._remove_files(recovery.obsolete)
        sequence, count = recovery.last_sequence + 1, len(self._older)
        many_small = count > _SMALL_FILES and 4 * self._older_bytes < count * self._limit
        if recovery.report.damage is not None:
            self._replace_segments(sequence, recovery.next_lsn, keep_as=".damaged")
        elif recovery.outdated or many_small:
            self._replace_segments(sequence, recovery.next_lsn)
        else:
            header = self._file_header(sequence, recovery.durable_lsn + 1)
            self._segment = LogSegment(folder, header, recovery.tail, recovery.tail_frames, io, self._reserve)
        self._syncer: Syncer | None = None
        if policy.fsync == "interval":
            self._syncer = Syncer(lambda: guard.in_background(self.sync), policy.interval_seconds)

    @property
    def stored_bytes(self) -> int:
        return self._older_bytes + self._segment.size

    def append(self, kind: int, payload: bytes, count: int = 0) -> None:
        """Write one frame, in a new segment if this one is full."""
        if self._is_full(FRAME_BYTES + len(payload)):
            self._rotate_segment()
        self._segment.append(kind, (payload,), count)

    def commit(self) -> None:
        """Sync as the policy requires before an acknowledgement."""
        if self._syncer is not None:
            self._syncer.notify()
        elif self._policy.fsync == "always":
            self._segment.sync()

    def append_all(self, kind: int, payloads: list[bytes]) -> None:
        """Write one frame for each payload, in as few writes as segments allow."""
        ends, first = list(accumulate(FRAME_BYTES + len(payload) for payload in payloads)), 0
        while first < len(payloads):
            written = ends[first - 1] if first else 0
            if self._is_full(ends[first] - written):
                self._rotate_segment()
            fitting = bisect_right(ends, written + self._limit - self._segment.size)
            stop = max(first + 1, fitting)
            self._segment.append(kind, payloads[first:stop])
            first = stop

    def _is_full(self, length: int) -> bool:
        """Return whether `length` more bytes need a new segment. An empty one takes any number."""
        size = self._segment.size
        return size > HEADER_BYTES and size + length > self._limit

    def sync(self) -> None:
        """Return when everything appended is on the disk. May run concurrently with `append`."""
        self._segment.sync()

    def write_end(self) -> None:
        """Make everything durable, then mark the end in the file."""
        self._segment.sync()
        self._segment.trim_reserve()
        self._segment.append(END, (b"",))
        self._segment.sync()

    def close(self) -> None:
        """Stop the background thread and close the file, as it is."""
        if self._syncer is not None:
            self._syncer.stop()
        self._segment.close()

    def is_wasteful(self, live: int) -> bool:
        """Return whether a snapshot of `live` bytes frees a segment's size or more, and half of the log."""
        stored = self.stored_bytes
        return stored - live >= self._limit and 2 * live <= stored

    def compact_segments(self) -> None:
        """Replace every segment written so far by a snapshot."""
        segment = self._segment
        self._older.append(file_name(segment.sequence))
        self._replace_segments(segment.sequence, segment.next_lsn)
        segment.close()

    def _replace_segments(self, sequence: int, next_lsn: int, keep_as: str | None = None) -> None:
        """Write the snapshot first, then the next segment, then remove the old files. A crash in between
        leaves the old files, or the snapshot, complete.
        """
        header = self._file_header(sequence, next_lsn, snapshot=True)
        size, salt = HEADER_BYTES, salt_of(self._log_id)

        def frame_buffers() -> Iterator[list]:
            nonlocal size
            for lsn, (kind, payload, count) in enumerate(chain(self._contents(), [FrameContent(END, [])])):
                frame = [frame_header(kind, payload, count, lsn, 0, salt), *payload]
                size += sum(len(part) for part in frame)
                yield frame

        self._io.close(_write_file(self._folder, header, frame_buffers(), self._io))
        self._segment = self._begin_segment(sequence + 1, next_lsn)
        snapshot = file_name(sequence, snapshot=True)
        old, self._older = self._older, [snapshot]
        self._older_bytes = size
        if keep_as is None:
            self._remove_files(old)
            return
        for name in self._io.file_names(self._folder):
            if name.endswith((".wal", ".snapshot")) and name not in (snapshot, file_name(sequence + 1)):
                self._io.rename(self._folder / name, self._folder / (name + keep_as))

    def _rotate_segment(self) -> None:
        full = self._segment
        full.sync()
        full.trim_reserve()
        self._segment = self._begin_segment(full.sequence + 1, full.next_lsn)
        full.close()
        self._older.append(file_name(full.sequence))
        self._older_bytes += full.size

    def _begin_segment(self, sequence: int, next_lsn: int) -> LogSegment:
        """Return a new segment without frames."""
        return LogSegment(
            self._folder, self._file_header(sequence, next_lsn), b"", 0, self._io, self._reserve
        )

    def _file_header(self, sequence: int, first_lsn: int, *, snapshot: bool = False) -> FileHeader:
        return FileHeader(sequence, first_lsn, self._log_id, snapshot, self._io.clock())

    def _remove_files(self, names: list[str]) -> None:
        for name in names:
            self._io.remove(self._folder / name)


class LogWriter(ABC):
    """The one writer of a log in a folder of its own. Its subclass defines the meaning of frames. Several
    threads may call the subclass's methods. The object does not survive a fork.
    """

    def __init__(
        self, folder: Path, label: str, replay: Replay, policy: LogPolicy, io: LogIO, mend: str | None
    ) -> None:
        """Replay the existing frames, drop a write cut short, and go on in a new segment.

        `label` names the written thing: "the log". `mend` gives a fix for damage besides restoring the file.
        Without it the frames before the damage are kept, and the rest is given up. Raises `StorageError` if
        another process writes, the folder cannot be written, or durable bytes are damaged.
        """
        self.folder = folder
        self._io = io
        self._mutex = threading.RLock()
        self._guard = WriteGuard(f"{label} in {folder}")
        try:
            io.make_folder(folder)
            self._lock = io.lock(folder / _LOCK)
            try:
                recovery = recover_log(folder, io, replay)
                if recovery.report.damage is not None and mend is not None:
                    raise StorageError(f"{recovery.report.damage}; restore the file, or {mend}")
                self._files = FramedLog(folder, recovery, policy, self._guard, io, self._contents)
            except BaseException:
                self._lock.release()
                raise
        except StorageError:
            raise
        except OSError as error:
            out = limit_fix(error, "mend that and continue with --resume")
            raise StorageError(
                f"{label} in {folder} cannot be opened for writing ({error.strerror or error}); what it holds"
                f" is kept; {out}"
            ) from error

    @abstractmethod
    def _contents(self) -> Iterator[FrameContent]:
        """Yield the frames of a snapshot of the current state."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of the log's files."""
        return self._files.stored_bytes

    @property
    def write_seconds(self) -> float:
        """Seconds in writes so far, waits for the disk included."""
        return self._guard.seconds

    def sync(self) -> None:
        """Return when everything logged so far is on the disk, under any policy."""
        with self._mutex:
            self._guard.check()
            with self._guard:
                self._files.sync()

    def compact(self) -> None:
        """Write all records that are not retired into one snapshot and remove every earlier segment."""
        with self._mutex:
            self._guard.check()
            with self._guard:
                self._files.compact_segments()

    def shutdown(self) -> None:
        """Make everything durable, mark the end, and let another process write. Raises `StorageError` if some
        records may not be durable and no call has reported it yet. Does nothing the second time.
        """
        with self._mutex:
            if self._guard.closed:
                return
            try:
                if self._guard.is_intact:
                    with self._guard:
                        self._files.write_end()
                elif self._guard.has_unreported_failure:
                    self._guard.check()
            finally:
                self._guard.closed = True
                self._files.close()
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(StorageError) if error is not None else contextlib.nullcontext():
            self.shutdown()
