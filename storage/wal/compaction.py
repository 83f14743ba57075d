"""A snapshot: the requests that have not been retired, in one file that replaces every segment before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from opd.storage.wal.frames import HEADER_BYTES, FileHeader, FrameKind, frame_header
from opd.storage.wal.io import LogIO
from opd.storage.wal.layout import salt_of
from opd.storage.wal.records import encode_close, encode_open
from opd.storage.wal.segment import write_file
from opd.storage.wal.table import Entry, RequestTable
from opd.types import Status

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
