"""`TrajectoryBatch`: rows of some trajectories, mapped, checked block by block when read, given back."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from opd.errors import StorageError
from opd.storage.files import MappedFile, open_plain
from opd.storage.leases import LeaseTable
from opd.storage.trajectories.segments import (
    CHECK_BYTES,
    Field,
    StoreHeader,
    lease_key,
    reporting,
    segment_path,
)
from opd.storage.trajectories.table import TrajectoryTable
from opd.types import Sample


class WrongBytesError(StorageError):
    """A block does not have its checksum."""


class Segments:
    """The files of a store's segments, kept as long as somebody holds them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._leases = LeaseTable(folder / "leases")

    def acquire(self, number: int) -> bool:
        """Keep the files of a segment until `release`; False if they are being removed."""
        return self._leases.acquire(lease_key(number))

    def release(self, number: int, owner: int) -> None:
        """Give back what process `owner` acquired; in another process, made by a fork, it does nothing."""
        self._leases.release(lease_key(number), owner)

    def drop(self, number: int, owner: int) -> None:
        """`release` for finalisers: never waits."""
        self._leases.drop(lease_key(number), owner)

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
        self._right: dict[tuple[int, str], bytearray] = {}
        self._mutex = threading.Lock()
        self._counters = ReadCounters()

    def known(self, file: tuple[int, str], check: int) -> bool:
        """Whether block `check` of a file (segment, field) was found right before."""
        seen = self._right.get(file)
        return seen is not None and check < len(seen) and bool(seen[check])

    def remember(self, file: tuple[int, str], check: int) -> None:
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
        self._file = (self._number, field.name)
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
        width = self._field.row_bytes
        first, end = self._start + start * width, self._start + stop * width
        expected = self._expected(self._check + block)
        if not self._is(expected, first, end):
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


class TrajectoryBatch:
    """The heavy fields of a mini-batch. Nothing is read until it is asked for; everything goes on `release`.

    While it is held, no process reclaims its trajectories. Arrays handed out stay readable, and right, after
    `release`, but reading them then takes memory again. Made by `TrajectoryStore.lease`.
    """

    def __init__(
        self,
        table: TrajectoryTable,
        rows: Sequence[int],
        segments: Segments,
        checks: BlockChecks,
        still_there: Callable[[TrajectoryTable, int], bool],
    ) -> None:
        """`rows` are of `table`; `still_there` says whether one of them is in the store as it is now."""
        self.table = table
        self.rows = list(rows)
        self._segments, self._checks, self._still_there = segments, checks, still_there
        self._held: list[int] = []
        self._owner = os.getpid()
        self._maps: dict[tuple[int, str], MappedRows] = {}
        self._mutex = threading.Lock()
        used = table.locations["segment"][self.rows]
        for number in np.unique(used[used > 0]).tolist():
            if not segments.acquire(number):
                self.release()
                raise self._gone(self.rows[int(np.argmax((used == number).any(axis=1)))])
            self._held.append(number)

    def has(self, row: int, name: str) -> bool:
        """Whether trajectory `row` has field `name`."""
        place = self._checks.header.index(name)
        return bool(self.table.locations["segment"][row, place]) or not self._length(row, name)

    def read(self, row: int, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows `start ... stop - 1` (default: all) of field `name` of trajectory `row`: `[R]` or `[R, D]`.

        A read-only view of the file's pages, shared with every process that reads them. Raises `StorageError`
        if the trajectory has no such field, was retired, or its bytes are wrong; `ValueError` for rows that
        are not there.
        """
        length = self._length(row, name)
        end = length if stop is None else stop
        if not 0 <= start <= end <= length:
            raise ValueError(
                f"rows {start} to {end} of {name}: trajectory {self.table.uid[row]} has {length}"
            )
        if not self.has(row, name):
            raise StorageError(
                f"trajectory {self.table.uid[row]} has no field {name}; it was written without, so write it"
                " (`TrajectoryWriter.reopen`) or do not ask for it"
            )
        with reporting(self._segments.folder, "read"):
            if not length:
                kind = self._checks.header.fields[self._checks.header.index(name)]
                return np.zeros(kind.shape(0), kind.numpy)
            try:
                return self._map(row, name).read(start, end)
            except FileNotFoundError:
                raise self._gone(row) from None
            except WrongBytesError:
                if self._still_there(self.table, row):
                    raise
                raise self._gone(row) from None

    def forget(self, row: int, name: str, start: int = 0, stop: int | None = None) -> None:
        """Give back the memory of rows that have been used, in the middle of a long trajectory."""
        mapped = self._maps.get((row, name))
        if mapped is not None:
            mapped.forget(start, mapped.rows if stop is None else stop)

    def load(self, fields: Sequence[str]) -> TrajectoryBatch:
        """Read and check all rows of `fields` now, where trajectories have them; returns itself."""
        for row in self.rows:
            for name in fields:
                if self.has(row, name):
                    self.read(row, name)
        return self

    def sample(self, row: int) -> Sample:
        """Trajectory `row` as a `Sample`, whose arrays are views; fields it has not are empty."""
        record, arrays = self.table.record(row), {}
        for name in ("token_ids", "rollout_logprobs", "policy_versions", "loss_mask"):
            if any(field.name == name for field in self._checks.header.fields) and self.has(row, name):
                arrays[name] = self.read(row, name)
        tokens = arrays.pop("token_ids", np.zeros(record.prompt_tokens, np.int32))
        extra = dict(record.extra)
        return Sample(
            uid=record.uid,
            group_uid=record.group_uid,
            domain=record.domain,
            teacher=record.teacher or None,
            prompt_ids=tokens[: record.prompt_tokens],
            response_ids=tokens[record.prompt_tokens :],
            reward=None if np.isnan(record.reward) else record.reward,
            status=record.status,
            label=extra.get("label"),
            reward_parts=extra.get("reward_parts", {}),
            failure=extra.get("failure"),
            metadata=extra.get("metadata", {}),
            branch_of=extra.get("branch_of", ""),
            **arrays,
        )

    def release(self) -> None:
        """Give the memory back and let others reclaim; a second call does nothing."""
        with self._mutex:
            maps, self._maps = self._maps, {}
            held, self._held = self._held, []
        for mapped in maps.values():
            mapped.forget(0, mapped.rows)
        for number in held:
            self._segments.release(number, self._owner)

    def __enter__(self) -> TrajectoryBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        for number in getattr(self, "_held", ()):
            self._segments.drop(number, self._owner)

    def _gone(self, row: int) -> StorageError:
        return StorageError(
            f"trajectory {self.table.uid[row]} of {self._segments.folder} is gone: it was retired after this"
            " table was read, or its files were lost; call refresh() and plan again"
        )

    def _length(self, row: int, name: str) -> int:
        header = self._checks.header
        return int(header.rows(header.fields[header.index(name)], self.table, row))

    def _map(self, row: int, name: str) -> MappedRows:
        with self._mutex:
            if (row, name) not in self._maps:
                index = self._checks.header.index(name)
                place = self.table.locations[row, index]
                if int(place["segment"]) not in self._held:
                    raise StorageError(
                        f"trajectory {self.table.uid[row]} is not in this batch, or the batch was released;"
                        " lease it first"
                    )
                field, rows = self._checks.header.fields[index], self._length(row, name)
                self._maps[row, name] = MappedRows(self._segments, self._checks, field, rows, place)
            return self._maps[row, name]
