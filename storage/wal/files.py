"""The files of a log under its one writer: the segment being written, the snapshot that replaces others."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from opd.storage.wal.frames import (
    FRAME_BYTES,
    HEADER_BYTES,
    TEMPORARY,
    FileHeader,
    FrameKind,
    LogIO,
    file_name,
    frame_header,
    salt_of,
)
from opd.storage.wal.records import encode_close, encode_open
from opd.storage.wal.recovery import Recovered
from opd.storage.wal.table import Entry, RequestTable
from opd.types import Status

RESERVE = 1 << 20
"""Bytes of zeros put ahead of the frames of a log that waits for the disk: a sync then has no new size and no
new blocks of the file to write, which takes a quarter of its time away or more.
"""


def write_file(folder: Path, header: FileHeader, content: Iterable[list], io: LogIO) -> int:
    """Write a whole file durably, then give it its name durably; returns it open for appending. `content`
    gives lists of buffers, which are written one list after another.

    A crash leaves a temporary file or the whole one: a file with a final name always has its header.
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


class Segment:
    """One open file of a log. `append` has one caller at a time; `sync` may be called beside it."""

    def __init__(
        self, folder: Path, header: FileHeader, tail: bytes, tail_frames: int, io: LogIO, limit: int = 0
    ) -> None:
        """Begin a segment with the frames of `tail`, which no other file is known to hold durably. Space is
        reserved ahead of the frames, up to `limit` bytes of the file.
        """
        self._io = io
        self._limit = limit
        self._salt = salt_of(header.log_id)
        self._sync_lock = threading.Lock()
        self.sequence = header.sequence
        self._file: int | None = write_file(folder, header, [[tail]] if tail else [], io)
        self.next_lsn = header.first_lsn + tail_frames
        self.durable_lsn = self.next_lsn - 1
        self.size = self._reserved = HEADER_BYTES + len(tail)

    @property
    def dirty(self) -> bool:
        """Something was appended that is not known to be on the disk."""
        return self.next_lsn - 1 > self.durable_lsn

    def append(self, kind: FrameKind, payload: list, length: int, tokens: int) -> None:
        """Write one frame; `payload` is buffers of `length` bytes in all."""
        head = frame_header(kind, payload, tokens, self.next_lsn, self.durable_lsn, self._salt)
        self._write([head, *payload], FRAME_BYTES + length)
        self.next_lsn += 1

    def append_all(self, kind: FrameKind, payloads: list[bytes]) -> None:
        """Write frames without tokens, one for each payload, all at once."""
        lsn, durable, salt = self.next_lsn, self.durable_lsn, self._salt
        parts: list[bytes] = []
        for number, payload in enumerate(payloads, start=lsn):
            parts += (frame_header(kind, [payload], 0, number, durable, salt), payload)
        data = b"".join(parts)
        self._write([data], len(data))
        self.next_lsn += len(payloads)

    def _write(self, buffers: list, length: int) -> None:
        assert self._file is not None
        size = self.size + length
        if self._reserved < size <= self._limit:
            self._reserve(size)
        self._io.append(self._file, buffers)
        self.size = size

    def _reserve(self, size: int) -> None:
        """Reserve for the frames up to `size` and for more. Where there is no room the file just grows: the
        append says so if it has none either.
        """
        assert self._file is not None
        end = min(size + RESERVE, self._limit)
        try:
            self._io.reserve(self._file, self._reserved, end - self._reserved)
            self._reserved = end
        except OSError:
            self._limit = 0

    def trim(self) -> None:
        """Give back what was reserved and not used."""
        with self._sync_lock:
            if self._file is not None and self._reserved > self.size:
                self._io.cut(self._file, self.size)
            self._reserved = self._limit = 0

    def sync(self) -> None:
        """Return when every frame appended before the call is on the disk."""
        with self._sync_lock:
            written = self.next_lsn - 1
            if self._file is not None and written > self.durable_lsn:
                self._io.sync(self._file)
                self.durable_lsn = written

    def close(self) -> None:
        """Close the file, as it is; safe to call twice."""
        with self._sync_lock:
            if self._file is not None:
                file, self._file = self._file, None
                self._io.close(file)


SMALL_FILES = 16
"""More files than this, if they are mostly small, are put together when a log is opened."""
_TOKENS_PER_FRAME = 1 << 20


def write_snapshot(folder: Path, header: FileHeader, table: RequestTable, io: LogIO) -> int:
    """Write `table` durably under its name and return the file's size. `header.first_lsn` is the number with
    which the log goes on.
    """
    table.sort()
    size = HEADER_BYTES

    def counted() -> Iterator[list]:
        nonlocal size
        for frame in _frames(table, salt_of(header.log_id)):
            size += sum(len(part) for part in frame)
            yield frame

    io.close(write_file(folder, header, counted(), io))
    return size


def is_due(stored: int, live: int, segment_bytes: int) -> bool:
    """Whether rewriting what lives frees enough: a segment's worth at least, and half of the log."""
    return stored - live >= segment_bytes and 2 * live <= stored


def _frames(table: RequestTable, salt: int) -> Iterator[list]:
    lsn = 0
    for uid in table:
        entry = table.entry(uid)
        assert entry is not None
        for kind, payload, tokens in _frames_of(entry):
            yield [frame_header(kind, payload, tokens, lsn, 0, salt), *payload]
            lsn += 1
    yield [frame_header(FrameKind.END, [], 0, lsn, 0, salt)]


def _frames_of(entry: Entry) -> Iterator[tuple[FrameKind, list, int]]:
    yield FrameKind.OPEN, [encode_open(entry.number, entry.request, entry.metadata)], 0
    records = entry.records()
    for first in range(0, len(records), _TOKENS_PER_FRAME):
        part = records[first : first + _TOKENS_PER_FRAME]
        yield FrameKind.STEP, [part.view(np.uint8)], len(part)
    if entry.status is not Status.PENDING:
        yield FrameKind.CLOSE, [encode_close(entry.number, entry.status, entry.failure)], 0


_SMALLEST_SEGMENT = 512


class LogFiles:
    """Appends frames, begins a new segment when one is full, and puts a snapshot in the place of old ones.

    No file is changed once another follows it, and none is ever cut: opening a log begins a new segment,
    whose header says where the one before it ends.
    """

    def __init__(
        self, folder: Path, found: Recovered, segment_bytes: int, io: LogIO, *, reserve: bool = False
    ) -> None:
        """Continue what `recover` found. What may not be on the disk yet is written again, into the new
        segment: after a failed sync, the system's cache shows bytes that the disk does not have. `reserve`:
        put zeros ahead of the frames, which pays where every commit waits for the disk.
        """
        self._folder, self._io = folder, io
        self._limit = max(segment_bytes, _SMALLEST_SEGMENT)
        self._reserve = self._limit if reserve else 0
        self._log_id = found.log_id or os.urandom(16)
        self._older = list(found.report.files)
        self._older_bytes = found.report.stored_bytes
        io.sync_folder(folder)  # the writer before may have died between a rename and its sync
        self._remove(found.obsolete)
        if found.report.damage is not None:
            self._replace(found.table, found.last_sequence + 1, found.next_lsn, keep_as=".damaged")
        elif self._many_small():
            self._replace(found.table, found.last_sequence + 1, found.next_lsn)
        else:
            header = self._header(found.last_sequence + 1, found.durable_lsn + 1)
            self._segment = Segment(folder, header, found.tail, found.tail_frames, io, self._reserve)

    @property
    def stored_bytes(self) -> int:
        return self._older_bytes + self._segment.size

    def append(self, kind: FrameKind, payload: list, length: int, tokens: int) -> None:
        """Write one frame of `length` payload bytes, in a new segment if this one is full."""
        if self._is_full(FRAME_BYTES + length):
            self._rotate()
        self._segment.append(kind, payload, length, tokens)

    def append_all(self, kind: FrameKind, payloads: list[bytes]) -> None:
        """Write frames without tokens, one for each payload, in as few writes as segments allow."""
        waiting: list[bytes] = []
        size = 0
        for payload in payloads:
            if waiting and self._segment.size + size + FRAME_BYTES + len(payload) > self._limit:
                self._append_group(kind, waiting, size)
                waiting, size = [], 0
            waiting.append(payload)
            size += FRAME_BYTES + len(payload)
        if waiting:
            self._append_group(kind, waiting, size)

    def _append_group(self, kind: FrameKind, payloads: list[bytes], size: int) -> None:
        if self._is_full(size):
            self._rotate()
        self._segment.append_all(kind, payloads)

    def _is_full(self, more: int) -> bool:
        """Whether `more` bytes are to begin a new segment; an empty one takes whatever comes."""
        size = self._segment.size
        return size > HEADER_BYTES and size + more > self._limit

    def sync(self) -> None:
        """Return when everything appended is on the disk. May be called beside `append`."""
        self._segment.sync()

    def end(self) -> None:
        """Make everything durable, then say so in the file."""
        self._segment.sync()
        self._segment.trim()
        self._segment.append(FrameKind.END, [], 0, 0)
        self._segment.sync()

    def close(self) -> None:
        self._segment.close()

    def wasteful(self, table: RequestTable) -> bool:
        """Whether a snapshot would free enough to be worth writing."""
        return is_due(self.stored_bytes, table.live_bytes, self._limit)

    def rewrite(self, table: RequestTable) -> None:
        """Put a snapshot of `table` in the place of every segment written so far."""
        segment = self._segment
        self._older.append(file_name(segment.sequence))
        self._replace(table, segment.sequence, segment.next_lsn)
        segment.close()

    def _replace(self, table: RequestTable, sequence: int, next_lsn: int, keep_as: str | None = None) -> None:
        """Snapshot first, then the segment that follows it, then the old files go: a crash in between leaves
        the old files, or the snapshot, whole.
        """
        size = write_snapshot(self._folder, self._header(sequence, next_lsn, snapshot=True), table, self._io)
        self._segment = self._begin(sequence + 1, next_lsn)
        old, self._older = self._older, [file_name(sequence, snapshot=True)]
        self._older_bytes = size
        if keep_as is None:
            self._remove(old)
        else:
            self._set_aside(keep_as, sequence)

    def _set_aside(self, suffix: str, sequence: int) -> None:
        kept = (file_name(sequence, snapshot=True), file_name(sequence + 1))
        for name in self._io.names(self._folder):
            if name.endswith((".wal", ".snapshot")) and name not in kept:
                self._io.rename(self._folder / name, self._folder / (name + suffix))

    def _rotate(self) -> None:
        full = self._segment
        full.sync()
        full.trim()
        self._segment = self._begin(full.sequence + 1, full.next_lsn)
        full.close()
        self._older.append(file_name(full.sequence))
        self._older_bytes += full.size

    def _begin(self, sequence: int, next_lsn: int) -> Segment:
        """A new segment without frames."""
        return Segment(self._folder, self._header(sequence, next_lsn), b"", 0, self._io, self._reserve)

    def _many_small(self) -> bool:
        count = len(self._older)
        return count > SMALL_FILES and 4 * self._older_bytes < count * self._limit

    def _header(self, sequence: int, first_lsn: int, *, snapshot: bool = False) -> FileHeader:
        return FileHeader(sequence, first_lsn, self._log_id, snapshot, self._io.clock())

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self._io.remove(self._folder / name)
