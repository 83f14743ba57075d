"""The segment being written: frames go to its end, and one place knows which of them are on the disk."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

from opd.storage.wal.frames import FRAME_BYTES, HEADER_BYTES, FileHeader, FrameKind, frame_header
from opd.storage.wal.io import LogIO
from opd.storage.wal.layout import TEMPORARY, file_name, salt_of

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
