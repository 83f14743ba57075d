"""Blobs put into a folder in groups: written, flushed together, then named."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from opd.storage.blob_folder import BlobFolder, Partial, disk_full
from opd.storage.blobs import CacheRecord, check_key, describe, encode_header, write_blob

_FLUSHERS = 16

Item = tuple[bytes, np.ndarray, CacheRecord]
"""Key, rows `[R, D]`, and what is known of them."""


class BlobGroup:
    """One group on its way into a folder; use once.

    Args:
        durable: Flush the bytes of all blobs before the first gets its name, and the names at the end.
    """

    def __init__(self, files: BlobFolder, durable: bool) -> None:
        self._files = files
        self._durable = durable
        self._pending: dict[int, Partial] = {}
        self.written = 0
        """Bytes of rows that are now in the folder because of this group."""
        self.rejected = 0
        """Items for which quota and leases, or the disk, left no room."""

    def put(self, items: Sequence[Item]) -> list[bool]:
        """For each item, whether the folder now has a blob under its key. Raises `OSError`, `ValueError`.

        After an error nothing of the group is acknowledged, and what has no name yet is removed.
        """
        kept = []
        try:
            for index, item in enumerate(items):
                kept.append(self._is_here(item[0]) or self._write(index, item))
            if self._durable:
                self._flush(kept)
            named = bool(self._pending)
            for index, partial in list(self._pending.items()):
                self._files.publish(partial)
                del self._pending[index]
                self.written += items[index][1].nbytes
        finally:
            for partial in self._pending.values():
                self._files.discard(partial)
        if named and self._durable:
            self._files.flush_names()
        return kept

    def _flush(self, kept: list[bool]) -> None:
        # Side by side, so that the file system's journal commits many of them at once.
        with ThreadPoolExecutor(_FLUSHERS) as pool:
            flushed = {i: pool.submit(os.fdatasync, p.descriptor) for i, p in self._pending.items()}
        for index, future in flushed.items():
            kept[index] = self._unless_full(index, lambda _, done=future: done.result())

    def _is_here(self, key: bytes) -> bool:
        check_key(key)
        try:
            self._files.touch(self._files.path(key))
        except FileNotFoundError:
            return False
        except PermissionError:  # another user's file
            return True
        return True

    def _write(self, index: int, item: Item) -> bool:
        key, rows, record = item
        rows = np.ascontiguousarray(rows)
        header = encode_header(key, describe(rows, record))
        partial = self._files.begin(key, len(header) + rows.nbytes)
        if partial is None:
            self.rejected += 1
            return False
        self._pending[index] = partial
        return self._unless_full(index, lambda file: write_blob(file, header, rows))

    def _unless_full(self, index: int, act: Callable[[int], None]) -> bool:
        """`act` on a pending blob's descriptor; a full disk gives that blob up and returns False."""
        try:
            act(self._pending[index].descriptor)
        except OSError as error:
            if not disk_full(error):
                raise
            self._files.discard(self._pending.pop(index))
            self.rejected += 1
            return False
        return True
