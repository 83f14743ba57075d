"""The files of a log under its one writer: the segment being written, and those it replaces."""

from __future__ import annotations

import os
from pathlib import Path

from opd.storage.wal.compaction import SMALL_FILES, is_due, write_snapshot
from opd.storage.wal.frames import FRAME_BYTES, HEADER_BYTES, FileHeader, FrameKind
from opd.storage.wal.io import LogIO
from opd.storage.wal.layout import file_name
from opd.storage.wal.recovery import Recovered
from opd.storage.wal.segment import Segment
from opd.storage.wal.table import RequestTable

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
