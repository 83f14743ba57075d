"""A node's cache of teachers' last hidden states: computed once, then mapped by whoever needs them again.

Keys name a computation (teacher, tokens, rows), values are files that describe and check themselves
(`blobs.py`) in a folder that is its own index (`blob_folder.py`). Wrong bytes are a miss, never an answer.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from opd.errors import StorageError
from opd.storage.blob_folder import BlobFolder
from opd.storage.blob_writer import BlobGroup, Item
from opd.storage.blobs import (
    CacheRecord,
    CorruptBlobError,
    array_view,
    cache_key,
    check_key,
    decode_header,
    describe,
    encode_header,
    verify_payload,
)
from opd.storage.files import open_plain
from opd.storage.leases import Lease, LeaseTable
from opd.storage.mapped_file import MappedFile
from opd.storage.rows_writer import RowsWriter

__all__ = ["CacheCounters", "CacheRecord", "HiddenStateCache", "Lease", "cache_key"]

_GROUP = 64


def _ignore(message: str) -> None:
    del message


@dataclass(slots=True)
class CacheCounters:
    """What this process did with the cache since the counters were last taken."""

    hits: int = 0
    misses: int = 0
    """Lookups without an answer, corrupt blobs included."""
    bytes_read: int = 0
    """Of rows handed out."""
    bytes_written: int = 0
    """Of rows put in."""
    evictions: int = 0
    corrupt: int = 0
    """Blobs that failed a check and were set aside."""
    rejected: int = 0
    """Rows not kept: quota all leased, or disk full."""


class HiddenStateCache:
    """Arrays by key within a byte quota, least recently used out first, shared by all processes of a node.

    Safe for threads, for processes that open the same folder, and across `fork`. A process may be killed at
    any point: what `put` acknowledged is there, its leases end, and its leftovers are swept at the next open.

    Args:
        folder: On a local disk or in memory (tmpfs); made if missing.
        quota_bytes: Most bytes of disk, in blocks of 4 KiB. The smallest quota of those who share it counts.
        verify: `always` compares the checksum on every `get`; `first` only when this process first maps a
            blob, so that damage done to it later goes unseen.
        durable: Flush every blob before it gets its name: it survives a power cut. Without, a power cut may
            cost blobs, which their checksums then show; a killed process never does.
        on_warning: Told, in one sentence, of every corrupt blob.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        quota_bytes: int,
        verify: Literal["always", "first"] = "always",
        durable: bool = True,
        on_warning: Callable[[str], None] = _ignore,
    ) -> None:
        """Raises `StorageError` if the folder cannot be used."""
        if quota_bytes < 1 or verify not in ("always", "first"):
            raise ValueError(
                f"quota_bytes={quota_bytes}, verify={verify!r}: give a positive quota, always or first"
            )
        self.folder = Path(folder)
        self._counters = CacheCounters()
        self._evictions_taken = 0
        self._owner = os.getpid()
        self._durable = durable
        self._warn = on_warning
        self._counting = threading.Lock()
        self._verified: set[tuple[bytes, int]] | None = None if verify == "always" else set()
        with self._reporting("opened"):
            self._files = BlobFolder(self.folder, quota_bytes)

    def get(self, key: bytes) -> Lease | None:
        """The array put under `key`, held until its lease is released; None if it is not here or was damaged.

        Raises `StorageError` if the system refuses (permissions, no more files or maps).
        """
        check_key(key)
        with self._reporting("read"):
            table = self._files.leases
            if not table.acquire(key):  # it is being evicted
                return self._missed()
            lease = None
            try:
                lease = self._open(key, table)
            finally:
                if lease is None:
                    table.release(key, os.getpid())
        if lease is None:
            return self._missed()
        self._count(hits=1, bytes_read=lease.rows.nbytes)
        return lease

    def put(self, key: bytes, rows: np.ndarray, record: CacheRecord) -> bool:
        """Keep `rows` (`[R, D]`: float32, float16, or uint16 holding bfloat16) under `key`.

        Returns whether the cache now has an array under `key`. One that is there already is kept, since equal
        keys mean equal rows. False if quota and leases, or the disk, leave no room. `uid`, `teacher` and
        `version` of `record` are kept, the rest is filled in. Raises `StorageError` if the disk fails.
        """
        return self.put_many([(key, rows, record)])[0]

    def put_many(self, items: Sequence[Item]) -> list[bool]:
        """`put` for several arrays, made durable together, which is faster than one by one."""
        kept: list[bool] = []
        with self._reporting("written"):
            for start in range(0, len(items), _GROUP):
                group = BlobGroup(self._files, self._durable)
                kept += group.put(items[start : start + _GROUP])
                self._count(bytes_written=group.written, rejected=group.rejected)
        return kept

    def open_rows(self, key: bytes, like: np.ndarray, count: int, record: CacheRecord) -> RowsWriter | None:
        """Begin an array of `count` rows of the width and dtype of `like` (`[1, D]`), written in pieces.

        `None` if quota and leases, or the disk, leave no room. See `put` for the rest.
        """
        check_key(key)
        whole = replace(describe(like, record), rows=count, checksum="00" * 16)
        size = len(encode_header(key, whole)) + count * like.nbytes
        with self._reporting("written"):
            partial = self._files.begin(key, size)
        if partial is None:
            self._count(rejected=1)
            return None
        return RowsWriter(self._files, partial, whole, self._durable, self._reporting)

    def written(self, count: int) -> None:
        """Count `count` bytes that a `RowsWriter` put in, or with 0 an array it had to give up."""
        self._count(bytes_written=count, rejected=count == 0)

    def used_bytes(self) -> int:
        """Bytes of disk the folder takes, by all processes."""
        with self._reporting("read"):
            return self._files.used_bytes()

    @property
    def counters(self) -> CacheCounters:
        """What this process did since `take_counters` was last called."""
        return replace(self._counters, evictions=self._files.evictions - self._evictions_taken)

    def take_counters(self) -> dict[str, float]:
        """The counters since they were last taken, as metrics."""
        with self._counting:
            taken = self.counters
            self._counters = CacheCounters()
            self._evictions_taken += taken.evictions
        return {name: float(value) for name, value in asdict(taken).items()}

    def close(self) -> None:
        """End all leases of this process. Rows handed out stay readable."""
        self._files.leases.close()

    def __enter__(self) -> HiddenStateCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, key: bytes, table: LeaseTable) -> Lease | None:
        try:
            descriptor = open_plain(self._files.path(key))
        except FileNotFoundError:
            return None
        try:
            array, record = self._map(key, descriptor)
            with contextlib.suppress(
                PermissionError
            ):  # another user's file: its place in the order is theirs
                self._files.touch(descriptor)
        except CorruptBlobError as error:
            self._files.quarantine(key, descriptor)
            self._count(corrupt=1)
            self._warn(f"{self._files.path(key)} was set aside, it is corrupt: {error}")
            return None
        finally:
            os.close(descriptor)
        return Lease(table, key, array, record)

    def _map(self, key: bytes, descriptor: int) -> tuple[np.ndarray, CacheRecord]:
        status = os.fstat(descriptor)
        if status.st_size == 0:
            raise CorruptBlobError("empty")
        mapped = MappedFile(descriptor, status.st_size)
        known = self._verified is not None and (key, status.st_ino) in self._verified
        if not known and not mapped.load():
            raise CorruptBlobError("the disk cannot read all of it")
        data = np.asarray(mapped)
        record, start = decode_header(data, key)
        if not known:
            verify_payload(data, record, start)
        if self._verified is not None:
            self._verified.add((key, status.st_ino))
        return array_view(data, record, start), record

    def _missed(self) -> None:
        self._count(misses=1)

    def _count(self, **changes: int) -> None:
        if self._owner != os.getpid():  # forked, perhaps while another thread held the lock
            self._owner, self._counting = os.getpid(), threading.Lock()
        with self._counting:
            for name, change in changes.items():
                setattr(self._counters, name, getattr(self._counters, name) + change)

    @contextlib.contextmanager
    def _reporting(self, action: str) -> Iterator[None]:
        """The system's errors, as one sentence that names the folder."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"the cache {self.folder} cannot be {action} ({error.strerror or error});"
                " check its disk and permissions, or use another folder"
            ) from error
