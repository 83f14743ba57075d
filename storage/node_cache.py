"""A node's cache: arrays computed or fetched once, and mapped by every process that needs them again.

A key identifies the origin of an array (teacher, tokens, rows, or a block of a model). Its value is a file
that describes and checks itself (`blobs.py`, `cache_files.py`). Wrong bytes count as a miss.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from opd.errors import StorageError, limit_fix
from opd.storage.blobs import (
    CacheRecord,
    CorruptBlobError,
    array_view,
    bytes_of,
    cache_key,
    check_key,
    complete_record,
    decode_header,
    encode_header,
    verify_payload,
)
from opd.storage.cache_files import CacheFiles, NewBlob, disk_full
from opd.storage.files import MappedFile, fill_from
from opd.storage.leases import Lease

__all__ = ["CacheCounters", "CacheRecord", "Lease", "NodeCache", "RowsWriter", "cache_key"]

_log = logging.getLogger(__name__)

_GROUP = 16
"""Number of arrays that `put_many` begins and publishes as one batch."""

Item = tuple[bytes, np.ndarray, CacheRecord]
"""Key, rows `[R, D]`, and their record."""


@dataclass(slots=True)
class CacheCounters:
    """This process's use of the cache since the counters were last taken."""

    hits: int = 0
    misses: int = 0
    """Lookups without an answer, corrupt blobs included."""
    bytes_read: int = 0
    """Bytes of rows handed out."""
    bytes_written: int = 0
    """Bytes of rows put in."""
    evictions: int = 0
    corrupt: int = 0
    """Blobs that failed a check and were removed."""
    rejected: int = 0
    """Rows not cached: the quota is all leased, or the disk is full."""


class NodeCache:
    """Arrays by key within a byte quota, least recently used out first, shared by all processes of a node.

    Safe for threads, for processes that open the same folder, and across `fork`. A process may be killed at
    any point: arrays that `put` acknowledged are there, its leases end, and the next open removes its
    leftovers. Nothing is flushed: a power cut may cost blobs, and their checksums then show it.

    Args:
        folder: On a local disk or in memory (tmpfs). Made if missing.
        quota_bytes: Most bytes of disk, in blocks of 4 KiB. The smallest quota of those who share it counts.
        verify: `always` compares the checksum on every `get`. `first` compares only when this process first
            maps a blob, so later damage goes unseen.
        kept_since: Blobs used after this (Unix time in ns) are never evicted, and a put that would need their
            capacity is refused. Otherwise a cache that is read in circles, and too small for the circle,
            would always have evicted the next blob.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        quota_bytes: int,
        verify: Literal["always", "first"] = "always",
        kept_since: int | None = None,
    ) -> None:
        """Open the cache. Raises `StorageError` if the folder cannot be used."""
        if quota_bytes < 1 or verify not in ("always", "first"):
            raise ValueError(
                f"quota_bytes={quota_bytes}, verify={verify!r}: give a positive quota, always or first"
            )
        self.folder = Path(folder)
        self._counters = CacheCounters()
        self._evictions_taken = 0
        self._owner = os.getpid()
        self._counting = threading.Lock()
        self._always = verify == "always"
        self._verified: set[tuple[bytes, int]] = set()
        """Keys and inodes whose bytes were right when this process first read them."""
        with self._convert_errors("opened"):
            self._files = CacheFiles(self.folder, quota_bytes, kept_since)

    def get(self, key: bytes) -> Lease | None:
        """Return the array put under `key`, held until its lease is released, or `None` if it is missing or
        was damaged.

        Raises `StorageError` if the system refuses (permissions, no more files or maps).
        """
        check_key(key)
        lease = None
        with self._convert_errors("read"):
            table = self._files.leases
            if table.acquire(key):  # or it is being evicted
                try:
                    lease = self._open_lease(key)
                finally:
                    if lease is None:
                        table.release(key, os.getpid())
        if lease is None:
            self._add_counts(misses=1)
        else:
            self._add_counts(hits=1, bytes_read=lease.rows.nbytes)
        return lease

    def read_into(self, key: bytes, into: memoryview, checksum: bytes) -> bool:
        """Fill `into` with the bytes of the array put under `key`. Return whether it is here, as long as
        `into`, and has this xxh3-128 (16 bytes). A blob without these is removed and counted as corrupt.

        Nothing is mapped, and the comparison covers the bytes in `into`. Raises as `get` does.
        """
        check_key(key)
        is_right = False
        with self._convert_errors("read"):
            descriptor = self._files.open_blob(key)
            if descriptor is not None:
                try:
                    header = os.fstat(descriptor).st_size - len(into)
                    try:
                        if header > 0:
                            fill_from(descriptor, header, into)
                        is_right = header > 0 and xxhash.xxh3_128_digest(into) == checksum
                    except (OSError, EOFError):  # a disk that cannot read it, or cut short meanwhile
                        is_right = False
                    if is_right:
                        self._files.mark_used(descriptor)
                    else:
                        self._remove_corrupt(key, descriptor)
                finally:
                    os.close(descriptor)
        self._add_counts(hits=int(is_right), misses=int(not is_right), bytes_read=len(into) * is_right)
        return is_right

    def put(self, key: bytes, rows: np.ndarray, record: CacheRecord) -> bool:
        """Store `rows` (`[R, D]`: float32, float16, uint8, or uint16 holding bfloat16) under `key`.

        Return whether the cache now has an array under `key`. An existing one stays, since equal keys mean
        equal rows. `False` if quota and leases, or the disk, leave no capacity. `uid`, `teacher` and
        `version` of `record` are stored, the rest is filled in. Raises `StorageError` if the disk fails.
        """
        return self.put_many([(key, rows, record)])[0]

    def put_many(self, items: Sequence[Item]) -> list[bool]:
        """`put` for several arrays, which is faster than one by one."""
        stored: list[bool] = []
        with self._convert_errors("written"):
            for start in range(0, len(items), _GROUP):
                stored += self._put_group(items[start : start + _GROUP])
        return stored

    def open_rows(self, key: bytes, like: np.ndarray, count: int, record: CacheRecord) -> RowsWriter | None:
        """Begin an array of `count` rows of the width and dtype of `like` (`[1, D]`), written in chunks.

        Return `None` if quota and leases, or the disk, leave no capacity. See `put` for the rest.
        """
        check_key(key)
        complete = replace(complete_record(like, record), rows=count, checksum="00" * 16)
        size = len(encode_header(key, complete)) + count * like.nbytes
        with self._convert_errors("written"):
            (blob,) = self._files.reserve_blobs([(key, size)])
        if blob is None:
            self._add_counts(rejected=1)
            return None
        return RowsWriter(self._files, blob, complete, self._convert_errors)

    def count_write(self, count: int) -> None:
        """Count `count` bytes that a `RowsWriter` put in, or with 0 an array it had to give up."""
        self._add_counts(bytes_written=count, rejected=count == 0)

    def used_bytes(self) -> int:
        """Return the bytes of disk the folder takes, by all processes."""
        with self._convert_errors("read"):
            return self._files.used_bytes()

    @property
    def counters(self) -> CacheCounters:
        """This process's use of the cache since the last call of `take_counters`."""
        return replace(self._counters, evictions=self._files.evictions - self._evictions_taken)

    def take_counters(self) -> dict[str, float]:
        """Return the counters since they were last taken, as metrics."""
        with self._counting:
            counters = self.counters
            self._counters = CacheCounters()
            self._evictions_taken += counters.evictions
        return {name: float(value) for name, value in asdict(counters).items()}

    def close(self) -> None:
        """End all leases of this process. Rows handed out stay readable."""
        self._files.close()

    def __enter__(self) -> NodeCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_lease(self, key: bytes) -> Lease | None:
        """Map a blob and compare its checksums. With `first`, check only the header of a verified blob."""
        descriptor = self._files.open_blob(key)
        if descriptor is None:
            return None
        try:
            status = os.fstat(descriptor)
            if not status.st_size:
                raise CorruptBlobError("it is empty")
            mapped = MappedFile(descriptor, status.st_size)
            data, blob = np.asarray(mapped), (key, status.st_ino)
            was_right = blob in self._verified
            if not was_right and not mapped.load():
                raise CorruptBlobError("the disk cannot read all of it")
            record, start = decode_header(data, key)
            if self._always or not was_right:
                verify_payload(data, record, start)
                self._verified.add(blob)
            array = array_view(data, record, start)
            self._files.mark_used(descriptor)
        except CorruptBlobError as error:
            self._remove_corrupt(key, descriptor)
            _log.warning("%s was removed, it is corrupt: %s", self._files.blob_path(key), error)
            return None
        finally:
            os.close(descriptor)
        return Lease(self._files.leases, key, array, record)

    def _remove_corrupt(self, key: bytes, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        self._verified.discard((key, inode))
        self._files.remove_blob(key, inode)
        self._add_counts(corrupt=1)

    def _put_group(self, items: Sequence[Item]) -> list[bool]:
        """Write arrays and name them as one batch. After an error none of them is acknowledged."""
        stored, parts = [], {}
        for index, (key, rows, record) in enumerate(items):
            check_key(key)
            stored.append(self._files.has_blob(key))
            if not stored[-1]:
                rows = np.ascontiguousarray(rows)
                parts[index] = (encode_header(key, complete_record(rows, record)), bytes_of(rows))
        begun = self._files.reserve_blobs([(items[index][0], sum(map(len, parts[index]))) for index in parts])
        blobs = {index: blob for index, blob in zip(parts, begun, strict=True) if blob is not None}
        try:
            for index, blob in list(blobs.items()):
                try:
                    blob.write(parts[index], 0)
                except OSError as error:
                    if not disk_full(error):
                        raise
                    self._files.discard_blobs([blobs.pop(index)])
            try:
                self._files.publish_blobs(list(blobs.values()))
            except OSError as error:
                if not disk_full(error):
                    raise
            else:
                for index in blobs:
                    stored[index] = True
                    self._add_counts(bytes_written=len(parts[index][1]))
                blobs.clear()
        finally:
            self._files.discard_blobs(list(blobs.values()))
        self._add_counts(rejected=stored.count(False))
        return stored

    def _add_counts(self, **changes: int) -> None:
        if self._owner != os.getpid():  # forked, perhaps while another thread held the lock
            self._owner, self._counting = os.getpid(), threading.Lock()
        with self._counting:
            for name, change in changes.items():
                setattr(self._counters, name, getattr(self._counters, name) + change)

    @contextlib.contextmanager
    def _convert_errors(self, action: str) -> Iterator[None]:
        """Raise the system's errors as one sentence that names the folder."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            if error.errno == errno.ENOMEM:  # not the folder's fault
                raise
            mend = limit_fix(error, "check its disk and permissions, or use another folder")
            raise StorageError(
                f"the cache {self.folder} cannot be {action} ({error.strerror or error}); {mend}"
            ) from error


class RowsWriter:
    """Rows `[R, D]` under one key, appended in order, made by `NodeCache.open_rows`.

    The bytes go to the file and its checksum as they come, so no more than a chunk is in memory. Nothing has
    a name before `finish`. If the writer is killed, the next open of the cache removes its file.
    """

    def __init__(
        self,
        files: CacheFiles,
        blob: NewBlob,
        record: CacheRecord,
        reporting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """`record` has rows, width and dtype already. `blob` has capacity for them and a header."""
        self._files, self._blob, self._record, self._reporting = files, blob, record, reporting
        self._checksum = xxhash.xxh3_128()
        self._begin = len(self._encode_header())
        self._offset = self._begin
        self._open = True

    def append(self, rows: np.ndarray) -> bool:
        """Add `rows` `[r, D]`. Return `False` if the disk is full: then none of them counts, see `give_up`.

        Raises `StorageError` if the disk fails, `ValueError` if there are more rows than announced.
        """
        data = bytes_of(np.ascontiguousarray(rows))
        if self._offset + len(data) > self._blob.size:
            raise ValueError(f"more than the {self._record.rows} rows announced; append no more")
        with self._reporting("written"):
            try:
                self._blob.write([data], self._offset)
            except OSError as error:
                if not disk_full(error):
                    self._discard_blob()
                    raise
                return False
        self._offset += len(data)
        self._checksum.update(data)
        return True

    def finish(self) -> int:
        """Give the array its name and return its bytes. Raises `ValueError` if rows are missing."""
        if self._offset != self._blob.size:
            self._discard_blob()
            raise ValueError(f"fewer than the {self._record.rows} rows announced; append all of them")
        with self._reporting("written"):
            try:
                self._blob.write([self._encode_header()], 0)
                self._files.publish_blobs([self._blob])
                self._open = False
            finally:
                self._discard_blob()
        return self._offset - self._begin

    def give_up(self) -> np.ndarray:
        """Read back the bytes `[n]` uint8 of all rows so far, and free their capacity in the cache."""
        with self._reporting("read"):
            rows = np.empty(self._offset - self._begin, np.uint8)
            try:
                fill_from(self._blob.descriptor, self._begin, rows.data)
            except EOFError:
                raise OSError(errno.EIO, "rows that were written are gone") from None
            self._discard_blob()
        return rows

    def close(self) -> None:
        """Drop an unfinished array."""
        self._discard_blob()

    def _encode_header(self) -> bytes:
        return encode_header(self._blob.key, replace(self._record, checksum=self._checksum.hexdigest()))

    def _discard_blob(self) -> None:
        if self._open:
            self._open = False
            self._files.discard_blobs([self._blob])
