"""Rows of one field of a trajectory: mapped, checked block by block when first read, given back on demand."""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from opd.errors import StorageError
from opd.storage.files import open_plain
from opd.storage.leases import LeaseTable
from opd.storage.mapped_file import MappedFile
from opd.storage.trajectories.fields import Field, StoreHeader
from opd.storage.trajectories.segments import CHECK_BYTES, lease_key, segment_path


class WrongBytesError(StorageError):
    """A block does not have its checksum."""


class Segments(Protocol):
    """Where the files of segments come from."""

    folder: Path

    def acquire(self, number: int) -> bool:
        """Keep the files of a segment until `release`; False if they are being removed."""
        ...

    def release(self, number: int, owner: int) -> None:
        """Give back what process `owner` acquired; in another process, made by a fork, it does nothing."""
        ...

    def drop(self, number: int, owner: int) -> None:
        """`release` for finalisers: never waits."""
        ...

    def generation(self, number: int, name: str) -> int:
        """Changes when a file was removed and made anew; never while its segment is held."""
        ...

    def bring(self, number: int, name: str, start: int, stop: int) -> None:
        """Make bytes `start ... stop - 1` of a file present. Raises `StorageError` if they cannot be had."""
        ...

    def bring_again(self, number: int, name: str, start: int, stop: int) -> bool:
        """Those bytes are wrong: bring them once more; False where there is no other copy."""
        ...


class LocalSegments:
    """Segments of a store in a local folder: they are there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._leases = LeaseTable(folder / "leases")

    def acquire(self, number: int) -> bool:
        return self._leases.acquire(lease_key(number))

    def release(self, number: int, owner: int) -> None:
        self._leases.release(lease_key(number), owner)

    def drop(self, number: int, owner: int) -> None:
        self._leases.drop(lease_key(number), owner)

    def generation(self, number: int, name: str) -> int:
        del number, name
        return 0

    def bring(self, number: int, name: str, start: int, stop: int) -> None:
        del number, name, start, stop

    def bring_again(self, number: int, name: str, start: int, stop: int) -> bool:
        del number, name, start, stop
        return False

    def close(self) -> None:
        self._leases.close()


@dataclass(slots=True)
class ReadCounters:
    """What a reader did with heavy data since the counters were last taken."""

    bytes_mapped: int = 0
    """Of fields that were mapped, in address space: no byte of them need have been read."""
    bytes_read: int = 0
    """Of rows handed out."""
    bytes_checked: int = 0
    """Of blocks whose checksum was compared."""


class BlockChecks:
    """Which blocks this process has compared with their checksums, and how much it read."""

    def __init__(self, header: StoreHeader) -> None:
        self.header = header
        self._right: dict[tuple[int, str, int], bytearray] = {}
        self._mutex = threading.Lock()
        self._counters = ReadCounters()

    def known(self, file: tuple[int, str, int], check: int) -> bool:
        """Whether block `check` of a file (segment, field, generation) was found right before."""
        seen = self._right.get(file)
        return seen is not None and check < len(seen) and bool(seen[check])

    def remember(self, file: tuple[int, str, int], check: int) -> None:
        with self._mutex:
            seen = self._right.setdefault(file, bytearray())
            if check >= len(seen):
                seen.extend(bytes(check + 1 - len(seen)))
            seen[check] = 1

    def count(self, mapped: int = 0, read: int = 0, checked: int = 0) -> None:
        with self._mutex:
            self._counters.bytes_mapped += mapped
            self._counters.bytes_read += read
            self._counters.bytes_checked += checked

    @property
    def counters(self) -> ReadCounters:
        return replace(self._counters)


class MappedRows:
    """All rows of a field of one trajectory in address space; memory is taken only by what is touched."""

    def __init__(
        self, segments: Segments, checks: BlockChecks, field: Field, rows: int, place: np.void
    ) -> None:
        """`place` is a `LOCATION`. Raises `FileNotFoundError` if the segment was removed, `StorageError` if
        its file is too short, `OSError` as the system does.
        """
        self.rows = rows
        self._segments, self._checks, self._field = segments, checks, field
        self._number, self._check = int(place["segment"]), int(place["check"])
        self._start = int(place["offset"])
        self._skip = self._start % mmap.ALLOCATIONGRANULARITY
        size = rows * field.row_bytes
        segments.bring(self._number, field.name, self._start, self._start)
        self._file = (self._number, field.name, segments.generation(self._number, field.name))
        self.path = segment_path(segments.folder, self._number, field.name)
        descriptor = open_plain(self.path)
        try:
            have = os.fstat(descriptor).st_size
            if have < self._start + size:
                raise StorageError(
                    f"{self.path} is cut short: it has {have} bytes, but a trajectory's rows end at byte"
                    f" {self._start + size}; restore the file from a copy, or retire its trajectories"
                )
            first = self._start - self._skip
            self._map = MappedFile(descriptor, self._skip + size, first, shared=True)
        finally:
            os.close(descriptor)
        checks.count(mapped=size)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows `start ... stop - 1`, `[R]` or `[R, D]`: a read-only view of the file's pages.

        Blocks that this process has not seen are compared with their checksums first. Raises `StorageError`
        for a wrong one.
        """
        height, width = self._checks.header.block_rows(self._field), self._field.row_bytes
        blocks = range(start // height, -(-stop // height))
        unknown = [block for block in blocks if not self._checks.known(self._file, self._check + block)]
        if unknown:
            last = min(self.rows, (unknown[-1] + 1) * height)
            ends = [self._start + row * width for row in (unknown[0] * height, last)]
            self._segments.bring(self._number, self._field.name, *ends)
        for block in unknown:
            self._verify(block, block * height, min(self.rows, (block + 1) * height))
        data = np.asarray(self._map)[self._skip + start * width : self._skip + stop * width]
        self._checks.count(read=len(data))
        return data.view(self._field.numpy).reshape(self._field.shape(stop - start))

    def forget(self, start: int, stop: int) -> None:
        """Give back the memory of those rows; views of them stay right and take it again when read."""
        width = self._field.row_bytes
        self._map.forget(self._skip + start * width, self._skip + stop * width)

    def _verify(self, block: int, start: int, stop: int) -> None:
        width, name = self._field.row_bytes, self._field.name
        first, end = self._start + start * width, self._start + stop * width
        expected = self._expected(self._check + block)
        if not self._is(expected, first, end):
            again = self._segments.bring_again(self._number, name, first, end)
            if not again or not self._is(expected, first, end):
                raise WrongBytesError(
                    f"{self.path} bytes {first}-{end} are corrupt: they do not have their checksum; restore"
                    " the file from a copy, or retire the trajectory"
                )
        self._checks.remember(self._file, self._check + block)

    def _is(self, expected: bytes, first: int, end: int) -> bool:
        begin, stop = (place - self._start + self._skip for place in (first, end))
        if not self._map.load(begin, stop):
            raise StorageError(
                f"{self.path} bytes {first}-{end}: the disk cannot read them; restore the file from a copy"
            )
        self._checks.count(checked=end - first)
        return xxhash.xxh3_128_digest(np.asarray(self._map)[begin:stop].data) == expected

    def _expected(self, check: int) -> bytes:
        start = check * CHECK_BYTES
        self._segments.bring(self._number, "checks", start, start + CHECK_BYTES)
        path = segment_path(self._segments.folder, self._number, "checks")
        descriptor = open_plain(path)
        try:
            expected = os.pread(descriptor, CHECK_BYTES, start)
        finally:
            os.close(descriptor)
        if len(expected) < CHECK_BYTES:
            raise StorageError(
                f"{path} is cut short: checksum {check} is missing; restore the file from a copy, or retire"
                " its trajectories"
            )
        return expected
