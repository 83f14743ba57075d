"""A node's cache of teachers' last hidden states: computed once, then mapped by whoever needs them again.

Keys name a computation (teacher, tokens, rows), values are blobs that describe and check themselves
(`blobs.py`) in the segments of a folder (`cache_index.py`). Wrong bytes are a miss and
logged, never an answer.
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

from opd.errors import StorageError, way_out
from opd.storage.blobs import (
    CacheRecord,
    CorruptBlobError,
    array_view,
    bytes_of,
    cache_key,
    check_key,
    decode_header,
    describe,
    encode_header,
    verify_payload,
)
from opd.storage.cache_index import CacheFolder, HeldBytes, Place, disk_full
from opd.storage.leases import Lease

__all__ = ["CacheCounters", "CacheRecord", "HiddenStateCache", "Lease", "RowsWriter", "cache_key"]

_log = logging.getLogger(__name__)

_GROUP = 64

Item = tuple[bytes, np.ndarray, CacheRecord]
"""Key, rows `[R, D]`, and what is known of them."""


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
        kept_since: What was used after this (Unix time in ns) is never evicted: a put that would need its
            room is turned down. A cache that is read in circles, and is too small for the circle, would else
            always have evicted what comes next.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        quota_bytes: int,
        verify: Literal["always", "first"] = "always",
        durable: bool = True,
        kept_since: int | None = None,
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
        self._counting = threading.Lock()
        self._always = verify == "always"
        self._known: set[tuple[bytes, Place]] = set()
        """Whole when this process first used them."""
        with self._reporting("opened"):
            self._files = CacheFolder(self.folder, quota_bytes, kept_since)

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
                lease = self._open(key)
            finally:
                if lease is None:
                    table.release(key, os.getpid())
        if lease is None:
            return self._missed()
        self._count(hits=1, bytes_read=lease.rows.nbytes)
        return lease

    def read_into(self, key: bytes, into: memoryview, checksum: bytes) -> bool:
        """Fill `into` with the bytes of the array put under `key`; whether it is here, as long as `into`, and
        has this xxh3-128 (16 bytes). What has not is given up and counted as corrupt.

        Nothing is mapped, and what is compared are the bytes in `into`. Raises as `get` does.
        """
        check_key(key)
        with self._reporting("read"):
            table, found = self._files.leases, False
            if table.acquire(key):  # or it is being evicted
                try:
                    found = self._filled(key, into, checksum)
                finally:
                    table.release(key, os.getpid())
        if found:
            self._count(hits=1, bytes_read=len(into))
        else:
            self._missed()
        return found

    def put(self, key: bytes, rows: np.ndarray, record: CacheRecord) -> bool:
        """Keep `rows` (`[R, D]`: float32, float16, uint8, or uint16 holding bfloat16) under `key`.

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
                group = _Group(self._files, self._durable)
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
            place = self._files.begin(size)
        if place is None:
            self._count(rejected=1)
            return None
        blob = _Blob(self._files, key, place)
        return RowsWriter(blob, whole, self._durable, self._reporting)

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
        self._files.close()

    def __enter__(self) -> HiddenStateCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, key: bytes) -> Lease | None:
        found = self._files.find(key)
        if found is None:
            return None
        place, held = found
        try:
            array, record = self._checked(key, place, held)
        except CorruptBlobError as error:
            self._files.remove(key, place)
            self._count(corrupt=1)
            _log.warning("%s was given up, it is corrupt: %s", self._files.where(place), error)
            return None
        self._files.touch(place)
        return Lease(self._files.leases, key, array, record)

    def _checked(self, key: bytes, place: Place, held: HeldBytes) -> tuple[np.ndarray, CacheRecord]:
        known = (key, place) in self._known
        if not (self._files.reaches(place) if known else held.load()):
            raise CorruptBlobError("the disk cannot read all of it")
        data = np.asarray(held)
        try:
            record, start = decode_header(data, key)
            if self._always or not known:
                verify_payload(data, record, start)
        except CorruptBlobError:
            self._known.discard((key, place))
            held.forget()  # somebody may have written to the rows in this process
            record, start = decode_header(data, key)
            verify_payload(data, record, start)
        self._known.add((key, place))
        return array_view(data, record, start), record

    def _filled(self, key: bytes, into: memoryview, checksum: bytes) -> bool:
        place = self._files.index.find(key)
        if place is None:
            return False
        try:
            _Blob(self._files, key, place).read_into(into, place.size - len(into))
            whole = xxhash.xxh3_128_digest(into) == checksum
        except OSError:  # cut short, or a disk that cannot read it
            whole = False
        if whole:
            self._files.touch(place)
        else:
            self._files.remove(key, place)
            self._count(corrupt=1)
        return whole

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
            if error.errno == errno.ENOMEM:  # not the folder's fault
                raise
            mend = way_out(error, "check its disk and permissions, or use another folder")
            raise StorageError(
                f"the cache {self.folder} cannot be {action} ({error.strerror or error}); {mend}"
            ) from error


@dataclass(frozen=True, slots=True)
class _Blob:
    """One blob being written: its place is reserved."""

    files: CacheFolder
    key: bytes
    place: Place

    def write(self, parts: Sequence[bytes | memoryview], offset: int) -> None:
        """Write `parts`, one after another, from byte `offset` of the blob on. Raises `OSError`."""
        descriptor, at = self.files.index.file(self.place.segment), self.place.blob + offset
        for part in parts:
            data = memoryview(part)
            while data:
                written = os.pwrite(descriptor, data, at)
                data, at = data[written:], at + written

    def read_into(self, data: memoryview, offset: int) -> None:
        """Fill `data` from byte `offset` of the blob on. Raises `OSError`."""
        descriptor, at = self.files.index.file(self.place.segment), self.place.blob + offset
        while data:
            count = os.preadv(descriptor, [data], at)
            if not count:
                raise OSError("rows that were written are gone")
            data, at = data[count:], at + count


class _Group:
    """Blobs written, flushed and named together; use once."""

    def __init__(self, files: CacheFolder, durable: bool) -> None:
        """`durable`: flush the bytes of all blobs before the first gets its name."""
        self._files = files
        self._durable = durable
        self._pending: dict[int, _Blob] = {}
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
            full = False
            try:
                if self._durable and self._pending:
                    self._files.index.flush({blob.place.segment for blob in self._pending.values()})
                self._files.publish([(blob.key, blob.place) for blob in self._pending.values()])
            except OSError as error:
                full = disk_full(error)
                if not full:
                    raise
            for index in [] if full else list(self._pending):
                del self._pending[index]
                self.written += items[index][1].nbytes
            for index in self._pending:
                kept[index] = False
            self.rejected += len(self._pending)
        finally:
            for blob in self._pending.values():
                self._files.discard(blob.place)
        return kept

    def _is_here(self, key: bytes) -> bool:
        check_key(key)
        place = self._files.index.find(key)
        if place is not None:
            self._files.touch(place)
        return place is not None

    def _write(self, index: int, item: Item) -> bool:
        key, rows, record = item
        rows = np.ascontiguousarray(rows)
        header = encode_header(key, describe(rows, record))
        place = self._files.begin(len(header) + rows.nbytes)
        if place is not None:
            blob = self._pending[index] = _Blob(self._files, key, place)
            try:
                # The header last: with it the blob counts, should the index be made anew.
                blob.write([bytes_of(rows)], len(header))
                blob.write([header], 0)
                return True
            except OSError as error:
                if not disk_full(error):
                    raise
                del self._pending[index]
                self._files.discard(place)
        self.rejected += 1
        return False


class RowsWriter:
    """Rows `[R, D]` under one key, appended in order; made by `HiddenStateCache.open_rows`.

    The bytes go to the file and its checksum as they come, so that no more than a piece is in memory. Nothing
    has a name before `finish`: a killed writer leaves what the next open of the cache sweeps.
    """

    def __init__(
        self,
        blob: _Blob,
        record: CacheRecord,
        durable: bool,
        reporting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """`record` says rows, width and dtype already; `blob` has room for them and a header."""
        self._blob, self._record, self._durable = blob, record, durable
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
        if self._offset + len(data) > self._blob.place.size:
            raise ValueError(f"more than the {self._record.rows} rows announced; append no more")
        with self._reporting("written"):
            try:
                self._blob.write([data], self._offset)
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
        if self._offset != self._blob.place.size:
            self._discard()
            raise ValueError(f"fewer than the {self._record.rows} rows announced; append all of them")
        with self._reporting("written"):
            try:
                self._blob.write([self._header()], 0)
                if self._durable:
                    self._blob.files.index.flush({self._blob.place.segment})
                self._blob.files.publish([(self._blob.key, self._blob.place)])
                self._open = False
            finally:
                self._discard()
        return self._offset - self._begin

    def give_up(self) -> np.ndarray:
        """Take back the bytes `[n]` uint8 of all rows appended so far; the cache's room is free again."""
        with self._reporting("read"):
            taken = np.empty(self._offset - self._begin, np.uint8)
            self._blob.read_into(taken.data, self._begin)
            self._discard()
        return taken

    def close(self) -> None:
        """Drop what was not finished."""
        with contextlib.suppress(OSError):
            self._discard()

    def _header(self) -> bytes:
        return encode_header(self._blob.key, replace(self._record, checksum=self._checksum.hexdigest()))

    def _discard(self) -> None:
        if self._open:
            self._open = False
            self._blob.files.discard(self._blob.place)
