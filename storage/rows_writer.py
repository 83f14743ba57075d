"""One array on its way into the hidden-state cache, written as it is computed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from opd.storage.blob_folder import BlobFolder, Partial, disk_full
from opd.storage.blobs import CacheRecord, bytes_of, encode_header

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class RowsWriter:
    """Rows `[R, D]` under one key, appended in order; made by `HiddenStateCache.open_rows`.

    The bytes go to the file and its checksum as they come, so that no more than a piece is in memory. Nothing
    has a name before `finish`: a killed writer leaves what the next open of the cache sweeps.
    """

    def __init__(
        self,
        files: BlobFolder,
        partial: Partial,
        record: CacheRecord,
        durable: bool,
        reporting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """`record` says rows, width and dtype already; `partial` has room for them and a header."""
        self._files, self._partial, self._record, self._durable = files, partial, record, durable
        self._reporting = reporting
        self._checksum = xxhash.xxh3_128()
        self._begin = len(self._header())
        self._offset = self._begin
        self._open = True

    def append(self, rows: np.ndarray) -> bool:
        """Add `rows` `[r, D]`; False if the disk is full: then nothing of them counts, see `give_up`.

        Raises `StorageError` if the disk fails, `ValueError` if there are more rows than were announced.
        """
        data = bytes_of(np.ascontiguousarray(rows))
        if self._offset + len(data) > self._partial.size:
            raise ValueError(f"more than the {self._record.rows} rows announced; append no more")
        with self._reporting("written"):
            try:
                _write_all(self._partial.descriptor, data, self._offset)
            except OSError as error:
                if not disk_full(error):
                    self._discard()
                    raise
                return False
        self._offset += len(data)
        self._checksum.update(data)
        return True

    def finish(self) -> int:
        """Give the array its name; returns its bytes. Raises `ValueError` if rows are missing."""
        if self._offset != self._partial.size:
            self._discard()
            raise ValueError(f"fewer than the {self._record.rows} rows announced; append all of them")
        with self._reporting("written"):
            try:
                _write_all(self._partial.descriptor, memoryview(self._header()), 0)
                if self._durable:
                    os.fdatasync(self._partial.descriptor)
                self._files.publish(self._partial)
                self._open = False
                if self._durable:
                    self._files.flush_names()
            finally:
                self._discard()
        return self._offset - self._begin

    def give_up(self) -> np.ndarray:
        """Take back the bytes `[n]` uint8 of all rows appended so far; the cache's room is free again."""
        with self._reporting("read"):
            taken = np.empty(self._offset - self._begin, np.uint8)
            done = 0
            while done < len(taken):
                view = taken[done:].data
                count = os.preadv(self._partial.descriptor, [view], self._begin + done)
                if not count:
                    raise OSError("rows that were written are gone")
                done += count
            self._discard()
        return taken

    def close(self) -> None:
        """Drop what was not finished."""
        with contextlib.suppress(OSError):
            self._discard()

    def _header(self) -> bytes:
        return encode_header(self._partial.key, replace(self._record, checksum=self._checksum.hexdigest()))

    def _discard(self) -> None:
        if self._open:
            self._open = False
            self._files.discard(self._partial)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
