"""Where the arrays of a cache lie: a few large segment files, and an LMDB index that can always be made anew.

    folder/v2/
        segments/NNNNNN     blobs (`blobs.py`), each in whole pages, behind the time of its last use
        index/              LMDB: key -> place, what is being written, the sum of all bytes
        index.sum           digest of the index, there while nobody uses the cache
        leases, ranges      who uses which key, and which bytes
        users               locked, shared, by whoever has the cache open

The blobs describe themselves, so the index holds nothing that cannot be found again. It is flushed by nobody
and believed only where its digest holds or another process is at work with it: whoever opens a cache alone
after a kill, a power cut or damage reads the headers of the blobs and writes a new one. What is evicted
becomes a hole in its segment, and a segment without blobs is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import resource
import shutil
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import lmdb
import xxhash

from opd.storage.blobs import read_key
from opd.storage.files import MappedFile, fsync_folder, open_plain, punch_hole, read_plain, write_atomic
from opd.storage.leases import LeaseTable

PAGE = 4096
STAMP_BYTES = 64
"""Before a blob: when it was last used, outside its checksums."""
_SEGMENT_BYTES = 1 << 30
_MAP_BYTES = 1 << 30
"""Most bytes of the index; 200 or so a blob."""
_LARGE = 64 << 20
_READERS = 1024
_LOCK_BYTES = 128 + 64 * (_READERS + 64)
"""What LMDB maps to know its readers, 64 bytes each, and somewhat more."""
_SPARE = 256 * 1024
"""Of the index, taken when it is made: an eviction is written where the disk is full."""
_SCANS = 16
"""Looks at the cache before a blob gets no room; others may use blobs between a look and the eviction."""
_LITTLE = 256 * 1024
"""What is free on a disk that is as good as full."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ODD = (errno.EISDIR, errno.ENXIO)
"""In a segment's place is a link, a pipe or a folder."""
_NAME = re.compile(r"\d{6,12}")
_PLACE = struct.Struct("<QQQ")
_RANGE = struct.Struct(">QQ")
_NUMBER = struct.Struct("<Q")
_USED, _NEXT = b"used", b"next"


def disk_full(error: OSError) -> bool:
    """Whether the disk, the user's share of it, or the process's file size limit is used up."""
    return error.errno in _FULL


class Place(NamedTuple):
    """A range of a segment that belongs to one blob."""

    segment: int
    offset: int
    size: int
    """Bytes of the blob."""

    @property
    def footprint(self) -> int:
        """Bytes of disk: whole pages."""
        return -(-(STAMP_BYTES + self.size) // PAGE) * PAGE

    @property
    def blob(self) -> int:
        """The blob's first byte."""
        return self.offset + STAMP_BYTES

    @property
    def range_key(self) -> bytes:
        """What `LeaseTable` knows these bytes by."""
        return ((self.segment << 40 | self.offset // PAGE) << 2).to_bytes(16, "little")[:8]


class HeldBytes:
    """A blob's bytes in this process: nobody gives them back to the disk while an array on them lives."""

    def __init__(self, mapped: MappedFile, place: Place, ranges: LeaseTable) -> None:
        """`ranges` holds the place already, for this object."""
        self._mapped, self._place, self._ranges = mapped, place, ranges
        self._owner = os.getpid()

    @property
    def __array_interface__(self) -> dict[str, object]:
        address = (self._mapped.address + self._place.blob, False)
        return {"version": 3, "typestr": "|u1", "shape": (self._place.size,), "data": address}

    def load(self) -> bool:
        """Read all pages; False if the disk cannot, or the segment is too short."""
        return self._mapped.load(self._place.blob, self._place.blob + self._place.size)

    def forget(self) -> None:
        """Read the pages from the file again; what was written to them is lost."""
        self._mapped.forget(self._place.offset, self._place.offset + self._place.footprint)

    def __del__(self) -> None:
        if self._place.size > _LARGE:  # small ones stay mapped, which makes the next use cheap
            self.forget()
        self._ranges.drop(self._place.range_key, self._owner)


class SegmentIndex:
    """The LMDB index and the segments' files, one object for all who use a cache within a process."""

    _open: ClassVar[dict[tuple[int, str], SegmentIndex]] = {}
    _opening: ClassVar = threading.Lock()

    @classmethod
    def of(cls, root: Path) -> SegmentIndex:
        """The one of this process; give it back with `close`. Raises `OSError`."""
        with cls._opening:
            key = (os.getpid(), os.path.realpath(root))
            for pid, path in list(cls._open):
                if pid != key[0]:  # a parent's: LMDB leaves it alone, and would take it for this process's
                    cls._open.pop((pid, path)).env.close()
            if key not in cls._open:
                cls._open[key] = cls(root, key)
            cls._open[key]._uses += 1
            return cls._open[key]

    def __init__(self, root: Path, key: tuple[int, str]) -> None:
        self._root, self._key, self._uses = root, key, 0
        self._segments = root / "segments"
        self._files: dict[int, int] = {}
        self._maps: dict[int, MappedFile] = {}
        self._mutex = threading.Lock()
        self._segments.mkdir(parents=True, exist_ok=True)
        self._users = open_plain(root / "users", os.O_RDWR | os.O_CREAT)
        try:
            with self._opened_or_closed_by_nobody_else():
                self._start(self._is_alone())
                fcntl.flock(self._users, fcntl.LOCK_SH)
        except BaseException:
            os.close(self._users)
            raise

    @contextlib.contextmanager
    def _opened_or_closed_by_nobody_else(self) -> Iterator[None]:
        descriptor = open_plain(self._root / "opening", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _is_alone(self) -> bool:
        """Whether no other process has the cache open; then it is locked until the caller takes `LOCK_SH`."""
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _start(self, alone: bool) -> None:
        folder, whole = self._root / "index", True
        if alone:
            whole = self._is_whole(folder)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._root / "index.sum")
            if not whole:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                (folder / "lock.mdb").unlink(missing_ok=True)
        for name in ("data.mdb", "lock.mdb"):
            _refuse_odd(folder / name)
        with self.errors():
            _reserve(folder / "lock.mdb", _LOCK_BYTES)
            self.env = lmdb.open(
                str(folder),
                map_size=_MAP_BYTES,
                sync=False,
                metasync=False,
                max_readers=_READERS,
                readahead=False,
            )
            self.env.reader_check()
            if not whole:
                with contextlib.suppress(OSError):
                    _reserve(folder / "data.mdb", _SPARE)
                self._rebuild()

    def _is_whole(self, folder: Path) -> bool:
        """Whether the index is what its last user left."""
        try:
            return read_plain(self._root / "index.sum") == _sum(folder)
        except OSError:
            return False

    def _rebuild(self) -> None:
        """Find every whole blob of every segment. Nobody else uses the cache."""
        used, newest = 0, 0
        with self.change() as txn:
            for name in sorted(os.listdir(self._segments)):
                if not _NAME.fullmatch(name):
                    continue
                segment, end, live = int(name), 0, 0
                newest = max(newest, segment)
                try:
                    descriptor = self.file(segment)
                except OSError as error:
                    if error.errno not in _ODD:
                        raise
                    continue
                for key, place in _found(descriptor, segment):
                    if txn.put(b"k" + key, _PLACE.pack(*place), overwrite=False):
                        punch_hole(descriptor, end, place.offset)
                        used, live, end = used + place.footprint, live + 1, place.offset + place.footprint
                punch_hole(descriptor, end, os.fstat(descriptor).st_size)
                self._count(txn, segment, live)
            txn.put(_USED, _NUMBER.pack(used))
            txn.put(_NEXT, _RANGE.pack(newest + 1, 0))

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """What LMDB raises as `OSError`s, as files do."""
        try:
            yield
        except lmdb.Error as error:
            texts = [os.strerror(code) for code in _FULL]
            # Of pages of which the first still fit, LMDB says that they could not be written.
            if _room_behind(self._root / "index" / "data.mdb") < _LITTLE:
                texts.append(os.strerror(errno.EIO))
            full = isinstance(error, lmdb.MapFullError) or any(text in str(error) for text in texts)
            raise OSError(errno.ENOSPC if full else errno.EIO, f"the cache's index: {error}") from error

    @contextlib.contextmanager
    def change(self) -> Iterator[lmdb.Transaction]:
        """A change of the index, made whole at the end of the block; one at a time over all processes."""
        with self.errors(), self.env.begin(write=True) as txn:
            yield txn

    def changes(self) -> int:
        """How often the index was changed, by any process."""
        return self.env.info()["last_txnid"]

    def find(self, key: bytes) -> Place | None:
        try:
            with self.env.begin() as txn:
                value = txn.get(b"k" + key)
        except lmdb.Error as error:
            raise OSError(errno.EIO, f"the cache's index: {error}") from error
        return None if value is None else Place._make(_PLACE.unpack(value))

    def entries(self) -> list[tuple[bytes, Place]]:
        """Every key and its place."""
        with self.errors(), self.env.begin() as txn:
            cursor = txn.cursor()
            cursor.set_range(b"k")
            return [(key[1:], Place._make(_PLACE.unpack(value))) for key, value in cursor if key[:1] == b"k"]

    def listed(self, txn: lmdb.Transaction, kind: bytes) -> list[Place]:
        """The places of `kind`: `p`, being written, or `d`, evicted and not yet given back."""
        cursor = txn.cursor()
        cursor.set_range(kind)
        return [
            Place._make(_PLACE.unpack(value)) for key, value in cursor if key[:1] == kind and len(key) == 17
        ]

    def used(self, txn: lmdb.Transaction) -> int:
        return _NUMBER.unpack(txn.get(_USED, bytes(8)))[0]

    def allocate(self, txn: lmdb.Transaction, size: int) -> Place:
        """Space for a blob of `size` bytes, noted as being written."""
        segment, offset = _RANGE.unpack(txn.get(_NEXT, _RANGE.pack(1, 0)))
        place = Place(segment, offset, size)
        if offset and offset + place.footprint > _SEGMENT_BYTES:
            self._end(txn, segment)
            place = Place(segment + 1, 0, size)
        txn.put(_NEXT, _RANGE.pack(place.segment, place.offset + place.footprint))
        txn.put(b"p" + _RANGE.pack(place.segment, place.offset), _PLACE.pack(*place))
        self._count(txn, place.segment, 1)
        txn.put(_USED, _NUMBER.pack(self.used(txn) + place.footprint))
        return place

    def name(self, txn: lmdb.Transaction, key: bytes, place: Place) -> None:
        """What was being written at `place` is the blob of `key`."""
        txn.delete(b"p" + _RANGE.pack(place.segment, place.offset))
        txn.put(b"k" + key, _PLACE.pack(*place))

    def unname(self, txn: lmdb.Transaction, key: bytes, place: Place) -> bool:
        """`place` is the blob of `key` no longer; False if it was not."""
        if txn.get(b"k" + key) != _PLACE.pack(*place):
            return False
        txn.delete(b"k" + key)
        txn.put(b"d" + _RANGE.pack(place.segment, place.offset), _PLACE.pack(*place))
        txn.put(_USED, _NUMBER.pack(max(0, self.used(txn) - place.footprint)))
        return True

    def free(self, txn: lmdb.Transaction, place: Place) -> None:
        """`place` is nothing any longer: its bytes go back to the disk."""
        at = _RANGE.pack(place.segment, place.offset)
        if txn.delete(b"p" + at):
            txn.put(_USED, _NUMBER.pack(max(0, self.used(txn) - place.footprint)))
        elif not txn.delete(b"d" + at):
            return
        with contextlib.suppress(OSError):
            punch_hole(self.file(place.segment), place.offset, place.offset + place.footprint)
        segment, offset = _RANGE.unpack(txn.get(_NEXT, _RANGE.pack(1, 0)))
        if (segment, offset) == (place.segment, place.offset + place.footprint):
            txn.put(_NEXT, _RANGE.pack(segment, place.offset))
        self._count(txn, place.segment, -1)
        if segment != place.segment:
            self._end(txn, place.segment)

    def _count(self, txn: lmdb.Transaction, segment: int, change: int) -> None:
        key = b"s" + _NUMBER.pack(segment)
        txn.put(key, _NUMBER.pack(max(0, _NUMBER.unpack(txn.get(key, bytes(8)))[0] + change)))

    def _end(self, txn: lmdb.Transaction, segment: int) -> None:
        """Remove a segment to which nothing is added any longer, if nothing is left in it."""
        if not any(txn.get(b"s" + _NUMBER.pack(segment), bytes(8))):
            self.path(segment).unlink(missing_ok=True)
            txn.delete(b"s" + _NUMBER.pack(segment))

    def path(self, segment: int) -> Path:
        return self._segments / f"{segment:06d}"

    def file(self, segment: int) -> int:
        """The descriptor of a segment; it is made if it is not there. Raises `OSError`."""
        with self._mutex:
            if segment not in self._files:
                self._files[segment] = open_plain(self.path(segment), os.O_RDWR | os.O_CREAT)
            return self._files[segment]

    def mapped(self, place: Place) -> MappedFile:
        """The map of a segment, which is as long as the segment may become. Raises `OSError`."""
        descriptor = self.file(place.segment)
        with self._mutex:
            found = self._maps.get(place.segment)
            if found is None or found.size < place.offset + place.footprint:
                size = max(_SEGMENT_BYTES, place.offset + place.footprint)
                found = self._maps[place.segment] = MappedFile(descriptor, size)
            return found

    def flush(self, segments: set[int]) -> None:
        """Return when those segments are on the disk, and their names."""
        for segment in segments:
            os.fdatasync(self.file(segment))
        fsync_folder(self._segments)

    def close(self) -> None:
        """Give back what `of` gave; the last user of the cache leaves the digest of the index."""
        with SegmentIndex._opening:
            self._uses -= 1
            if self._uses or self._key[0] != os.getpid():
                return
            del SegmentIndex._open[self._key]
            self.env.close()
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()
            self._maps.clear()
            with contextlib.suppress(OSError), self._opened_or_closed_by_nobody_else():
                if self._is_alone():
                    write_atomic(self._root / "index.sum", _sum(self._root / "index"))
            os.close(self._users)


def _refuse_links(root: Path) -> None:
    """Raises `OSError` if a link is in the place of one of the cache's folders: it would be followed."""
    for folder in (root, root / "segments", root / "index"):
        if folder.is_symlink():
            raise OSError(errno.ENXIO, f"{folder.name} is a link", str(folder))


def _refuse_odd(path: Path) -> None:
    """Raises `OSError` if something else than a file is at `path`: LMDB would follow it or wait for it."""
    with contextlib.suppress(FileNotFoundError):
        os.close(open_plain(path))


def _reserve(path: Path, size: int) -> None:
    """Let the file have so many bytes of disk, and make it where it is not there: LMDB maps one with holes,
    and a disk without room for them would end the process at the first touch. Raises `OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


def _sum(folder: Path) -> bytes:
    return xxhash.xxh3_128_digest(read_plain(folder / "data.mdb"))


def _found(descriptor: int, segment: int) -> Iterator[tuple[bytes, Place]]:
    """Every blob whose header is whole."""
    at, end = 0, os.fstat(descriptor).st_size
    while at < end:
        try:
            at = os.lseek(descriptor, at, os.SEEK_DATA) // PAGE * PAGE
        except OSError:  # nothing but a hole
            return
        found = read_key(descriptor, at + STAMP_BYTES, end)
        if found is None:
            at += PAGE
        else:
            place = Place(segment, at, found[1])
            yield found[0], place
            at += place.footprint


def _room_behind(file: Path) -> int:
    """Bytes by which `file` may grow, on its disk and within the process's limit."""
    limit, room = resource.getrlimit(resource.RLIMIT_FSIZE)[0], shutil.disk_usage(file.parent).free
    return room if limit == resource.RLIM_INFINITY else min(room, limit - _size(file))


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


class CacheFolder:
    """Room for blobs, their names and their removal, shared by the processes and threads of a node."""

    def __init__(
        self, folder: str | os.PathLike[str], quota_bytes: int, kept_since: int | None = None
    ) -> None:
        """Sweep what dead writers left and evict down to `quota_bytes`. Raises `OSError`.

        What was used after `kept_since` (Unix time in ns) is never evicted.
        """
        self.root = Path(folder) / "v2"
        _refuse_links(self.root)
        self.root.mkdir(parents=True, exist_ok=True)
        self.quota_bytes = quota_bytes
        self._kept_since = kept_since
        self.evictions = 0
        self._untidy = False
        """What was given up is still noted as being written."""
        self.leases = LeaseTable(self.root / "leases")
        self.ranges = LeaseTable(self.root / "ranges")
        self._candidates: deque[tuple[bytes, Place, bytes]] = deque()
        """In the order of their last use at the time of the last scan; under `_evicting`."""
        self._open_index()
        self._sweep()
        self._make_room(0)

    @property
    def index(self) -> SegmentIndex:
        if self._process != os.getpid():  # LMDB does not survive a fork
            self._open_index()
        return self._index

    def _open_index(self) -> None:
        self._evicting = threading.Lock()
        self._index = SegmentIndex.of(self.root)
        self._process = os.getpid()  # last: another thread of a forked process looks at it first

    def find(self, key: bytes) -> tuple[Place, HeldBytes] | None:
        """The bytes of the blob of `key`, which the caller leases. Raises `OSError`."""
        place = self.index.find(key)
        if place is None:
            return None
        try:
            mapped = self._index.mapped(place)
        except OSError as error:
            if error.errno not in _ODD:
                raise
            self.remove(key, place)
            return None
        self.ranges.acquire(place.range_key)  # nobody gives back what is named and leased
        return place, HeldBytes(mapped, place, self.ranges)

    def reaches(self, place: Place) -> bool:
        """Whether the segment is still long enough: touching what is cut off would end the process."""
        return os.fstat(self._index.file(place.segment)).st_size >= place.blob + place.size

    def where(self, place: Place) -> str:
        """For people."""
        return f"{self._index.path(place.segment)} at byte {place.blob}"

    def touch(self, place: Place) -> None:
        """Note that a blob is used now."""
        os.pwrite(self._index.file(place.segment), _NUMBER.pack(time.time_ns()), place.offset)

    def used_bytes(self) -> int:
        """Bytes of disk that blobs take, and those being written."""
        with self.index.errors(), self.index.env.begin() as txn:
            return self._index.used(txn)

    def begin(self, size: int) -> Place | None:
        """Reserve a place for a blob of `size` bytes; None if quota and leases, or the disk, leave none."""
        need = Place(0, 0, size).footprint
        try:
            if self._untidy:
                self._sweep()
                self._untidy = False
            index = self.index
            with self._evicting:
                while self._make_room(need):
                    with index.change() as txn:
                        if index.used(txn) + need > self.quota_bytes:
                            continue  # another process was faster
                        place = index.allocate(txn, size)
                        self.ranges.acquire(place.range_key)  # or a sweep would take it for a dead writer's
                        return place
        except OSError as error:
            if not disk_full(error):
                raise
        return None

    def publish(self, written: list[tuple[bytes, Place]]) -> None:
        """Give written blobs their names, unless another writer of the same key was first."""
        for _, place in written:
            self.touch(place)
        late = []
        with self.index.change() as txn:
            for key, place in written:
                if txn.get(b"k" + key) is None:
                    self._index.name(txn, key, place)
                else:
                    late.append(place)
        for _, place in written:
            if place not in late:
                self.ranges.release(place.range_key, os.getpid())
        for place in late:
            self.discard(place)

    def discard(self, place: Place) -> None:
        """Give up a place that could not be written."""
        try:
            with self.index.change() as txn:
                self._index.free(txn, place)
        except OSError:  # the index cannot be written either
            self._untidy = True
        finally:
            self.ranges.release(place.range_key, os.getpid())

    def remove(self, key: bytes, place: Place) -> None:
        """Take a damaged blob out of service, and its bytes, which an index made anew would find again."""
        with self.index.change() as txn:
            self._index.unname(txn, key, place)
        self._sweep()

    def close(self) -> None:
        """End all leases of this object."""
        self.leases.close()
        self.ranges.close_if_idle()
        if self._process == os.getpid():
            self._index.close()

    def _make_room(self, need: int) -> bool:
        """Evict what was not used for longest until `need` bytes fit in the quota."""
        if need > self.quota_bytes:
            return False
        scans, outdated, seen = 0, True, -1
        while self.used_bytes() + need > self.quota_bytes:
            if self._candidates:
                outdated |= self._evict(*self._candidates.popleft())
            elif scans == _SCANS or not (outdated or self._index.changes() != seen):
                return False  # what is left is leased or being written
            else:
                seen = self._index.changes()
                self._scan()
                scans, outdated = scans + 1, False
        return True

    def _evict(self, key: bytes, place: Place, stamp: bytes) -> bool:
        """Remove a candidate unless it is leased, gone already, or was used after the scan. Returns the last:
        then its place in the order is another one.

        Whatever is not among the candidates was used after the scan, so this order is the true one.
        """
        with self.leases.exclusive(key) as free:  # until the index says so: nobody leases it meanwhile
            if os.pread(self.index.file(place.segment), _NUMBER.size, place.offset) != stamp:
                return True
            if not free:
                return False
            with self._index.change() as txn:
                gone = self._index.unname(txn, key, place)
        self.evictions += gone
        self._sweep()
        return False

    def _sweep(self) -> None:
        """Give back what was evicted, and what dead writers left, where nobody uses the bytes any longer."""
        with self.index.change() as txn:
            for kind in (b"d", b"p"):
                for place in self._index.listed(txn, kind):
                    with self.ranges.exclusive(place.range_key) as free:
                        if free:
                            self._index.free(txn, place)

    def _scan(self) -> None:
        """Order the candidates by their last use."""
        found = []
        for key, place in self.index.entries():
            stamp = os.pread(self._index.file(place.segment), _NUMBER.size, place.offset)
            used = int.from_bytes(stamp, "little")
            if self._kept_since is None or not self._kept_since <= used <= time.time_ns():
                found.append((used, key, place, stamp))
        found.sort()
        self._candidates = deque(candidate[1:] for candidate in found)


os.register_at_fork(after_in_child=lambda: setattr(SegmentIndex, "_opening", threading.Lock()))
