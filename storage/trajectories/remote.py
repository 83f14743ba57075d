"""A store in an object store, read through a folder on this node that all its processes share.

    cache/IDENTITY/metadata             the table, as it was uploaded
    cache/IDENTITY/segments/000001.F    a sparse copy of the object, as far as it was needed
    cache/IDENTITY/segments/000001.F.have    one byte for every MiB of it: 1 if it is here
    cache/IDENTITY/leases               who uses which segment

A process that is killed leaves whole MiBs or ones that are not marked; wrong bytes fail the checksum of their
block and are fetched again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from opd.errors import StorageError
from opd.foreign import decoding, shown, whole
from opd.storage.files import write_atomic
from opd.storage.leases import LeaseTable
from opd.storage.object_store import ObjectStore
from opd.storage.store_faults import MIB, StoreOptions
from opd.storage.trajectories.faults import reporting
from opd.storage.trajectories.fields import HEADER, MAX_HEADER_BYTES, StoreHeader, decode_header
from opd.storage.trajectories.metadata import mapped, read_base
from opd.storage.trajectories.segments import lease_key, segment_numbers, segment_path
from opd.storage.trajectories.table import TrajectoryTable

METADATA = "metadata"
MAX_OBJECT_BYTES = 5 * 2**40
"""S3's limit."""
_FETCHED = 32 * MIB
"""Most bytes held in memory on their way into the cache."""


def object_name(number: int, name: str) -> str:
    """Where the file of a segment lies below the store's URL."""
    return f"segments/{number:06d}.{name}"


def open_remote(
    url: str, cache: Path, cache_bytes: int, options: StoreOptions | None
) -> tuple[StoreHeader, RemoteMetadata, RemoteSegments]:
    """What a `TrajectoryStore` of `url` is made of. Raises `StorageError`."""
    store = ObjectStore.open(url, options=options)
    if not store.exists(HEADER):
        raise StorageError(f"there is no trajectory store at {url}; check the URL, or upload it again")
    header, document = decode_header(store.get(HEADER, most=MAX_HEADER_BYTES), store.name(HEADER))
    sizes = _sizes(document, header, store.name(HEADER))
    folder = cache / header.identity
    with reporting(cache, "used as cache"):
        (folder / "segments").mkdir(parents=True, exist_ok=True)
        metadata = RemoteMetadata(store, folder, len(header.fields))
        return header, metadata, RemoteSegments(store, folder, sizes, cache_bytes)


def _sizes(document: dict[str, Any], header: StoreHeader, where: str) -> dict[str, dict[str, int]]:
    """Bytes of each file of each segment, as an uploaded header tells them."""
    names = {"checks", *(field.name for field in header.fields)}
    with decoding(lambda cause: StorageError(f"{where} is damaged ({cause}); upload the store again")):
        for number, files in document["segments"].items():
            if not number.isdecimal() or not files.keys() <= names:
                raise ValueError(f"segment {shown(number)}")
            for size in files.values():
                whole(size, 0, MAX_OBJECT_BYTES, f"a size in segment {number}")
        return document["segments"]


class RemoteMetadata:
    """The table of an uploaded store, which never changes."""

    def __init__(self, store: ObjectStore, folder: Path, field_count: int) -> None:
        path = folder / METADATA
        try:
            self._change = read_base(mapped(path), str(path), field_count)
        except (FileNotFoundError, StorageError):  # not here yet, or damaged
            write_atomic(path, store.get(METADATA))
            self._change = read_base(mapped(path), store.name(METADATA), field_count)

    def table(self) -> TrajectoryTable:
        assert self._change.table is not None
        return self._change.table

    def refresh(self) -> bool:
        """Nothing is added to an uploaded store."""
        return False


@dataclass(slots=True)
class _Copy:
    """A local copy of an object, perhaps with holes."""

    size: int
    flags: mmap.mmap
    """Which of its MiBs are here. As long as it is mapped, no other file gets its `inode`."""
    inode: int
    generation: int


class RemoteSegments:
    """`Segments` of which the needed MiBs are fetched into a local folder of at most about `cache_bytes`."""

    def __init__(
        self, store: ObjectStore, folder: Path, sizes: dict[str, dict[str, int]], cache_bytes: int
    ) -> None:
        self.folder = folder
        self._store = store
        self._sizes = sizes
        self._limit = cache_bytes
        self._leases = LeaseTable(folder / "leases")
        self._have: dict[tuple[int, str], _Copy] = {}
        self._mutex = threading.RLock()

    @property
    def bytes_fetched(self) -> int:
        """Bytes this process has received from the store."""
        return self._store.bytes_read

    def acquire(self, number: int) -> bool:
        if not self._leases.acquire(lease_key(number)):
            return False
        with contextlib.suppress(FileNotFoundError):
            os.utime(segment_path(self.folder, number, "checks"))  # its place in the order of eviction
        return True

    def drop(self, number: int, owner: int) -> None:
        self._leases.drop(lease_key(number), owner)

    def generation(self, number: int, name: str) -> int:
        with self._mutex:
            return self._copy(number, name).generation

    def release(self, number: int, owner: int) -> None:
        self._leases.release(lease_key(number), owner)

    def bring(self, number: int, name: str, start: int, stop: int) -> None:
        self._bring(number, name, start, stop, again=False)

    def bring_again(self, number: int, name: str, start: int, stop: int) -> bool:
        self._bring(number, name, start, stop, again=True)
        return True

    def close(self) -> None:
        """End all leases, and the connections."""
        with self._mutex:
            for copy in self._have.values():
                copy.flags.close()
            self._have.clear()
        self._leases.close()
        self._store.close()

    def _bring(self, number: int, name: str, start: int, stop: int, again: bool) -> None:
        with self._mutex:
            copy = self._copy(number, name)
            wanted = range(start // MIB, -(-min(stop, copy.size) // MIB))
            missing = [unit for unit in wanted if again or not copy.flags[unit]]
            if missing:
                self._make_room(number, len(missing) * MIB)
            step = _FETCHED // MIB
            for at in range(0, len(missing), step):
                for units in _runs(missing[at : at + step]):
                    self._fetch(number, name, copy, units)

    def _fetch(self, number: int, name: str, copy: _Copy, units: list[int]) -> None:
        first, end = units[0] * MIB, min(copy.size, (units[-1] + 1) * MIB)
        buffer = memoryview(bytearray(end - first))
        self._store.read_into(object_name(number, name), first, buffer)
        descriptor = os.open(segment_path(self.folder, number, name), os.O_WRONLY | os.O_CLOEXEC)
        try:
            while buffer:
                written = os.pwrite(descriptor, buffer, first)
                buffer, first = buffer[written:], first + written
        finally:
            os.close(descriptor)
        for unit in units:
            copy.flags[unit] = 1

    def _copy(self, number: int, name: str) -> _Copy:
        """The copy as it is now; made, without content, if there is none."""
        path = segment_path(self.folder, number, name)
        marks = path.with_name(f"{path.name}.have")
        known = self._have.get((number, name))
        if known is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(marks).st_ino == known.inode:
                    return known
        size = self._sizes.get(f"{number:06d}", {}).get(name)
        if size is None:
            raise StorageError(
                f"{self._store.name(object_name(number, name))} is not among the store's objects; upload the"
                " store again"
            )
        os.close(_sized(path, size))
        descriptor = _sized(marks, max(1, -(-size // MIB)))
        try:
            flags, inode = mmap.mmap(descriptor, 0), os.fstat(descriptor).st_ino
        finally:
            os.close(descriptor)
        generation = known.generation + 1 if known is not None else 0
        self._have[number, name] = _Copy(size, flags, inode, generation)
        return self._have[number, name]

    def _make_room(self, keep: int, size: int) -> None:
        """Remove the segments used longest ago that nobody leases, until `size` bytes more may come."""
        taken = {number: self._taken(number) for number in segment_numbers(self.folder)}
        excess = sum(held for held, _ in taken.values()) + size - self._limit
        for number in sorted(taken, key=lambda n: taken[n][1]):
            if excess <= 0:
                return
            if number == keep:
                continue
            with self._leases.exclusive(lease_key(number)) as free:
                if free:
                    for path in self._paths(number, marks_first=True):
                        path.unlink(missing_ok=True)
                    excess -= taken[number][0]

    def _taken(self, number: int) -> tuple[int, float]:
        """(bytes of disk, last use) of what is here of a segment."""
        held, used = 0, 0.0
        for path in self._paths(number):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                held += status.st_blocks * 512
                used = max(used, status.st_mtime)
        return held, used

    def _paths(self, number: int, marks_first: bool = False) -> list[Path]:
        found = list((self.folder / "segments").glob(f"{number:06d}.*"))
        return sorted(found, key=lambda path: path.suffix != ".have") if marks_first else found


def _runs(units: list[int]) -> list[list[int]]:
    """`units`, ascending, cut wherever one is missing between two."""
    cuts = [i for i in range(1, len(units)) if units[i] != units[i - 1] + 1]
    return [units[a:b] for a, b in pairwise([0, *cuts, len(units)])]


def _sized(path: Path, size: int) -> int:
    """A descriptor of the file, which is made if need be and has `size` bytes."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    if os.fstat(descriptor).st_size != size:
        os.ftruncate(descriptor, size)
    return descriptor
