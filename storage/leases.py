"""Leases of a folder's entries, visible to every process of the node and released when one dies.

One empty file stands for all entries: an entry is the byte of that file whose offset is the head of its key,
and using it means holding a read lock on that byte (Linux open file description locks). The kernel counts the
readers over all processes and drops the locks of a dead one, so nothing has to be reclaimed, and any number
of leases costs one file descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from opd.storage.blobs import CacheRecord
from opd.storage.files import open_plain


class LeaseTable:
    """Shared and exclusive holds on keys (bytes, at least 8). Safe for threads and across `fork`.

    If the system has no such locks, leases of other processes are not seen. Then the caller must be safe by
    other means, as files that are unlinked, and never overwritten, are.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._open_file()

    def acquire(self, key: bytes) -> bool:
        """Hold `key` shared. Return False while another process holds it exclusively."""
        self._after_fork()
        offset = _lock_offset(key)
        with self._mutex:
            self._release_dropped()
            if self._holds[offset] == 0 and not self._set_lock(fcntl.F_RDLCK, offset):
                return False
            self._holds[offset] += 1
            return True

    def claim(self, key: bytes) -> bool:
        """Hold `key` exclusively. Return False while anybody holds it, this process too. `release` gives it
        back.

        For tables whose keys are claimed and never acquired.
        """
        self._after_fork()
        offset = _lock_offset(key)
        with self._mutex:
            self._release_dropped()
            if self._holds[offset] or not self._set_lock(fcntl.F_WRLCK, offset):
                return False
            self._holds[offset] = 1
            return True

    def release(self, key: bytes, owner: int) -> None:
        """Release one hold that process `owner` acquired. Does nothing in another process."""
        if os.getpid() != owner:  # a copy made by fork: the hold is the parent's
            return
        with self._mutex:
            self._dropped.append(_lock_offset(key))
            self._release_dropped()

    def release_nowait(self, key: bytes, owner: int) -> None:
        """`release` without ever waiting: for finalisers, which may run inside the table's own calls."""
        if os.getpid() != owner:
            return
        self._dropped.append(_lock_offset(key))
        if self._mutex.acquire(blocking=False):
            try:
                self._release_dropped()
            finally:
                self._mutex.release()

    @contextlib.contextmanager
    def try_exclusive(self, key: bytes) -> Iterator[bool]:
        """Yield whether nobody else holds `key`. If so, nobody can take it until the block ends."""
        self._after_fork()
        offset = _lock_offset(key)
        with self._mutex:
            self._release_dropped()
            # A lock of this table would be converted, not refused, so its own holds are checked first.
            free = self._holds[offset] == 0 and self._set_lock(fcntl.F_WRLCK, offset)
            try:
                yield free
            finally:
                if free:
                    self._set_lock(fcntl.F_UNLCK, offset)

    def close(self) -> None:
        """Drop every hold of this table."""
        with self._mutex:
            self._holds.clear()
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _open_file(self) -> None:
        self._descriptor = open_plain(self._path, os.O_RDWR | os.O_CREAT)
        self._owner = os.getpid()
        self._mutex = threading.Lock()
        self._holds: Counter[int] = Counter()
        self._dropped: deque[int] = deque()
        self._shared = hasattr(fcntl, "F_OFD_SETLK")
        if self._shared:
            try:
                self._set_lock(fcntl.F_UNLCK, 0)
            except OSError:  # a file system or kernel without them
                self._shared = False

    def _after_fork(self) -> None:
        """A child shares its parent's locks until it opens the file itself."""
        if self._owner != os.getpid():
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._open_file()

    def _release_dropped(self) -> None:
        """Release dropped holds. Under the mutex."""
        while self._dropped:
            offset = self._dropped.popleft()
            self._holds[offset] -= 1
            if self._holds[offset] <= 0:
                del self._holds[offset]
                self._set_lock(fcntl.F_UNLCK, offset)

    def _set_lock(self, kind: int, offset: int) -> bool:
        if not self._shared or self._descriptor < 0:
            return True
        # `struct flock` for one byte. `l_pid` must be 0 for open file description locks.
        flock = struct.pack("hhqqi0q", kind, os.SEEK_SET, offset, 1, 0)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, flock)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def __del__(self) -> None:
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)


class Lease:
    """One array of the cache in use. It stays in the cache until `release`, the `with` block or the last
    reference ends. `rows` and arrays made from it stay readable, and right, even longer.
    """

    __slots__ = ("_array", "_key", "_owner", "_table", "record")

    def __init__(self, table: LeaseTable, key: bytes, array: np.ndarray, record: CacheRecord) -> None:
        self._key = key
        self._owner = os.getpid()
        self._table: LeaseTable | None = table
        self._array = array
        self.record = record

    @property
    def rows(self) -> np.ndarray:
        """[R, D] read-only view of the file's bytes, as uint16 if `record.dtype` is bfloat16."""
        view = self._array.view()
        view.flags.writeable = False
        return view

    @property
    def private_rows(self) -> np.ndarray:
        """[R, D] the same bytes, writable. Writes stay in this view's pages, never in the file."""
        return self._array

    def release(self) -> None:
        """Let the cache evict the array again. A second call does nothing."""
        table, self._table = self._table, None
        if table is not None:
            table.release(self._key, self._owner)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if self._table is not None:
            self._table.release_nowait(self._key, self._owner)


def _lock_offset(key: bytes) -> int:
    """Return a key's lock offset. Keys with one offset share a lock: a harmless collision in 62 bits."""
    return int.from_bytes(key[:8], "little") >> 2
