"""The heavy fields that a store keeps of each trajectory, the file that says so, and the segments they lie
in.

    segments/000001.token_ids    rows of trajectories, each beginning at a multiple of 64 bytes
    segments/000001.checks       xxh3-128 of every block, 16 bytes each

A segment has one file for each field, in which many trajectories lie one after another, and their checksums.
A trajectory that is being written owns a range as long as it may become. What it does not use stays a hole in
the file and takes no disk; so do rows that are all zero. What nobody needs any longer is given back.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from opd.errors import StorageError, way_out
from opd.foreign import decoding, read_document, whole
from opd.storage.files import punch_hole, read_plain
from opd.storage.leases import LeaseTable
from opd.storage.trajectories.table import TrajectoryTable

FORMAT = 2
HEADER = "store.json"
MAX_HEADER_BYTES = 2**20
MAX_FIELDS = 32
_MAX_NAME, _MAX_WIDTH = 100, 1 << 24
_MAX_BLOCK = 1 << 40
_DTYPES = {
    "bool": np.dtype(np.bool_),
    "uint8": np.dtype("u1"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
}


@dataclass(frozen=True, slots=True)
class Field:
    """One heavy field: a row for each token of a trajectory."""

    name: str
    dtype: str
    """`bool`, `uint8`, `int32`, `int64`, `float16`, `float32`, or `bfloat16` (as its uint16 bits)."""
    width: int = 0
    """0: rows are numbers and arrays `[R]`; `D`: rows are vectors and arrays `[R, D]`."""
    rows: Literal["sequence", "response"] = "response"
    """Whether there is a row for prompt and response tokens, or for response tokens alone."""

    def __post_init__(self) -> None:
        if (
            not self.name.isidentifier()
            or len(self.name.encode()) > _MAX_NAME
            or self.name == "checks"
            or self.dtype not in _DTYPES
            or not 0 <= self.width <= _MAX_WIDTH
            or self.rows not in ("sequence", "response")
        ):
            raise ValueError(
                f"field {self.name!r} of {self.dtype!r}, width {self.width}: give an identifier, one of"
                f" {', '.join(_DTYPES)}, and a width that is not negative"
            )

    @property
    def numpy(self) -> np.dtype:
        """How its numbers lie in memory."""
        return _DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.numpy.itemsize * max(1, self.width)

    def shape(self, rows: int) -> tuple[int, ...]:
        """Of an array of so many rows."""
        return (rows, self.width) if self.width else (rows,)

    def bytes_of(self, values: np.ndarray) -> memoryview:
        """The bytes of `values` (`[R]` or `[R, D]`). Raises `ValueError` for another shape or dtype."""
        array = np.asarray(values)
        if array.dtype != self.numpy or array.shape[1:] != self.shape(0)[1:] or array.ndim == 0:
            raise ValueError(
                f"field {self.name} takes {self.numpy} {['R', *self.shape(0)[1:]]}, not {array.dtype}"
                f" {list(array.shape)}; convert it"
            )
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


SAMPLE_FIELDS = (
    Field("token_ids", "int32", rows="sequence"),
    Field("rollout_logprobs", "float32"),
    Field("policy_versions", "int32"),
    Field("loss_mask", "bool"),
)
"""What a `Sample` holds of each token."""


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """What is fixed when a store is made."""

    fields: tuple[Field, ...]
    block_bytes: int
    """Most bytes under one checksum; a block holds whole rows."""

    def index(self, name: str) -> int:
        """The place of field `name`. Raises `StorageError` if the store has no such field."""
        for place, field in enumerate(self.fields):
            if field.name == name:
                return place
        known = ", ".join(field.name for field in self.fields)
        raise StorageError(
            f"this trajectory store has no field {name}; it has {known or 'none'}, which is fixed when a"
            " store is made"
        )

    def block_rows(self, field: Field) -> int:
        """Rows under one checksum."""
        return max(1, self.block_bytes // field.row_bytes)

    def rows(self, field: Field, table: TrajectoryTable, row: Any) -> Any:
        """How many rows of `field` a trajectory (or each of several) of `table` has."""
        prompt = table.prompt_tokens[row] if field.rows == "sequence" else 0
        return prompt + table.response_tokens[row]

    def encode(self) -> bytes:
        document = {"format": FORMAT, "block_bytes": self.block_bytes}
        document |= {"fields": [asdict(field) for field in self.fields]}
        return json.dumps(document | {"checksum": _checksum(document)}, indent=1).encode()


def decode_header(data: bytes, where: str) -> StoreHeader:
    """The header. Raises `StorageError` for a newer format or other content."""

    def refusal(cause: str) -> StorageError:
        return StorageError(
            f"{where} is not the header of a trajectory store ({cause}); check the path, or restore the file"
        )

    with decoding(refusal):
        document = read_document(data, MAX_HEADER_BYTES)
        written = int(document["format"])
        if written != FORMAT:
            mend = "update opd" if written > FORMAT else "an older release wrote it: write the store again"
            raise StorageError(
                f"{where} has format {written} of trajectory stores, this version reads {FORMAT}; {mend}"
            )
        if document.pop("checksum") != _checksum(document):
            raise ValueError("wrong checksum")
        fields = tuple(Field(**entry) for entry in document["fields"])
        block = whole(document["block_bytes"], 1, _MAX_BLOCK, "block_bytes")
        if any(type(field.width) is not int for field in fields):
            raise ValueError("a width that is no whole number")
        return StoreHeader(check_fields(fields), block)


def _checksum(document: dict) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True).encode())


def find_header(path: Path, fields: Sequence[Field]) -> StoreHeader | None:
    """The header of the store whose file is at `path`; None if there is none. Raises `StorageError` if it was
    made with other fields than `fields`.
    """
    if not path.exists():
        return None
    header = decode_header(read_plain(path), str(path))
    if header.fields != tuple(fields):
        raise StorageError(
            f"{path} was made with other fields ({', '.join(field.name for field in header.fields)}) than are"
            f" asked for ({', '.join(field.name for field in fields)}); use another folder"
        )
    return header


def refuse_lost(path: Path, trajectories: int) -> None:
    """Raises `StorageError` if there are trajectories but no header at `path`: a new one would not fit."""
    if trajectories:
        raise StorageError(
            f"{path} is missing, but there are {trajectories} trajectories; restore the file from a copy, or"
            " use another folder"
        )


@contextlib.contextmanager
def reporting(store: str | Path, action: str) -> Iterator[None]:
    """Any `OSError` of the block as a `StorageError`: "STORE cannot be ACTION (cause); ..."."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        mend = way_out(error, "check its disk and permissions, or use another folder")
        raise StorageError(
            f"the trajectory store {store} cannot be {action} ({error.strerror or error}); {mend}"
        ) from error


def check_fields(fields: Sequence[Field]) -> tuple[Field, ...]:
    """`fields`, unless two share a name or there are too many (`ValueError`)."""
    names = [field.name for field in fields]
    if len(set(names)) < len(names) or len(names) > MAX_FIELDS:
        raise ValueError(f"fields {names}: give at most {MAX_FIELDS}, each with a name of its own")
    return tuple(fields)


CHECK_BYTES = 16
_ALIGNMENT = 64
_BUFFERED = 32 * 1024
_NAME = re.compile(r"(\d{6,})\.\w+")


def segment_path(folder: Path, number: int, name: str) -> Path:
    """The file of field `name`, or of `checks`, in segment `number`."""
    return folder / "segments" / f"{number:06d}.{name}"


def segment_numbers(folder: Path) -> set[int]:
    """Every segment of which there is a file."""
    names = os.listdir(folder / "segments")
    return {int(match[1]) for match in map(_NAME.fullmatch, names) if match}


def segment_files(folder: Path, number: int) -> list[Path]:
    return sorted((folder / "segments").glob(f"{number:06d}.*"))


def lease_key(number: int) -> bytes:
    """What `LeaseTable` knows segment `number` by."""
    return (number << 2).to_bytes(8, "little")


def punch(path: Path, start: int, stop: int) -> None:
    """Give back the disk under those whole pages, where the file system can; they then read as zeros."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        punch_hole(descriptor, start, stop)
    finally:
        os.close(descriptor)


def punch_gaps(path: Path, starts: np.ndarray, sizes: np.ndarray) -> None:
    """Give back everything of a file outside the ranges at `starts` (`[k]`) of `sizes` (`[k]` bytes)."""
    place = 0
    for i in np.argsort(starts).tolist():
        punch(path, place, int(starts[i]))
        place = max(place, int(starts[i] + sizes[i]))
    punch(path, place, os.path.getsize(path))


class SegmentWriter:
    """The files of one segment, open for writing."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.users = 0
        """Trajectories being written to it."""
        self.written = 0
        """Bytes of rows given to it."""
        self._folder = folder
        self._files: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._checks = 0
        self._new = False

    @property
    def reserved(self) -> int:
        """The longest of its files, holes included."""
        return max(self._ends.values(), default=0)

    def reserve(self, name: str, size: int) -> int:
        """A range of `size` bytes in the file of field `name`; returns its first byte."""
        start = -(-self._ends.get(name, 0) // _ALIGNMENT) * _ALIGNMENT
        self._ends[name] = start + size
        return start

    def shrink(self, name: str, reserved_end: int, end: int) -> None:
        """Take back what a finished range does not use, if nothing follows it."""
        if self._ends[name] == reserved_end:
            self._ends[name] = end

    def write(self, name: str, data: memoryview, offset: int) -> None:
        """Write rows; zeros are left as holes."""
        self.written += len(data)
        if not np.frombuffer(data, np.uint8).any():
            return
        file = self._file(name)
        while data:
            count = os.pwrite(file, data, offset)
            data, offset = data[count:], offset + count

    def cover(self, name: str, end: int) -> None:
        """Make the file at least `end` bytes long: its last rows may be a hole."""
        file = self._file(name)
        if os.fstat(file).st_size < end:
            os.ftruncate(file, end)

    def write_checks(self, digests: list[bytes]) -> int:
        """Append checksums; returns the number of the first."""
        first = self._checks
        data, offset = memoryview(b"".join(digests)), first * CHECK_BYTES
        while data:
            count = os.pwrite(self._file("checks"), data, offset)
            data, offset = data[count:], offset + count
        self._checks += len(digests)
        return first

    def discard(self, name: str, start: int, stop: int) -> None:
        """Give back the disk of a range that was given up; nothing else is ever written there."""
        if name in self._files:
            punch(segment_path(self._folder, self.number, name), start, stop)

    def sync(self, names: Iterable[str]) -> None:
        """Return when these files are on the disk."""
        for name in names:
            if name in self._files:
                os.fdatasync(self._files[name])

    def take_new(self) -> bool:
        """Whether files were made since the last call, whose names may not be on the disk."""
        new, self._new = self._new, False
        return new

    def close(self) -> None:
        """Give back the descriptors."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _file(self, name: str) -> int:
        if name not in self._files:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._files[name] = os.open(segment_path(self._folder, self.number, name), flags, 0o666)
            self._new = True
        return self._files[name]


class FieldStream:
    """One field of one trajectory on its way to the disk: pieces are gathered, written, and summed up."""

    def __init__(self, segment: SegmentWriter, field: Field, capacity_rows: int, block_rows: int) -> None:
        self.field = field
        self.rows = 0
        self.capacity_rows = capacity_rows
        self.digests: list[bytes] = []
        self.start = segment.reserve(field.name, capacity_rows * field.row_bytes)
        self._reserved_end = self.start + capacity_rows * field.row_bytes
        self._segment = segment
        self._place = self.start
        self._buffer = bytearray()
        self._block_bytes = block_rows * field.row_bytes
        self._block_left = self._block_bytes
        self._hash = xxhash.xxh3_128()

    def append(self, data: memoryview) -> None:
        """Add rows, already checked to be whole and to fit."""
        self.rows += len(data) // self.field.row_bytes
        if len(self._buffer) + len(data) < _BUFFERED:
            self._buffer += data
            return
        self._flush()
        self._write(data)

    def finish(self) -> None:
        """Write what is left; afterwards `digests` has one checksum a block."""
        self._flush()
        if self._block_left < self._block_bytes:
            self._end_block()
        self._segment.shrink(self.field.name, self._reserved_end, self._place)
        self._segment.cover(self.field.name, self._place)

    def abandon(self) -> None:
        """Give back what was written."""
        self._buffer.clear()
        self._segment.discard(self.field.name, self.start, self._reserved_end)

    def _flush(self) -> None:
        if self._buffer:
            whole, self._buffer = self._buffer, bytearray()
            self._write(memoryview(whole))

    def _write(self, data: memoryview) -> None:
        while data:
            part, data = data[: self._block_left], data[self._block_left :]
            self._segment.write(self.field.name, part, self._place)
            self._hash.update(part)
            self._place += len(part)
            self._block_left -= len(part)
            if self._block_left == 0:
                self._end_block()

    def _end_block(self) -> None:
        self.digests.append(self._hash.digest())
        self._hash = xxhash.xxh3_128()
        self._block_left = self._block_bytes


Range = tuple[str, int, int]
"""Field, first byte, end."""


class Reclaimer:
    """Counts what lives in each segment: an empty one is removed, retired ranges of others become holes.

    Nothing of a segment is touched while a process leases it; a lease ends with its process.
    """

    def __init__(self, folder: Path, header: StoreHeader) -> None:
        self._folder = folder
        self._header = header
        self._live: Counter[int] = Counter()
        self._retired: dict[int, list[Range]] = {}
        self._leases = LeaseTable(folder / "leases")

    def added(self, locations: np.ndarray, sign: int = 1) -> None:
        """Fields at these places (`LOCATION`, any shape) are in the store now; with sign -1 no longer."""
        numbers, counts = np.unique(locations["segment"], return_counts=True)
        self._live.update({n: sign * c for n, c in zip(numbers.tolist(), counts.tolist(), strict=True) if n})

    def retired(self, table: TrajectoryTable, row: int) -> None:
        """A trajectory has left the store."""
        for index, location in enumerate(table.locations[row]):
            number, start = int(location["segment"]), int(location["offset"])
            if number:
                self._live[number] -= 1
                field = self._header.fields[index]
                size = field.row_bytes * self._header.rows(field, table, row)
                self._retired.setdefault(number, []).append((field.name, start, start + size))

    def reclaim(self, in_use: Iterable[int] = ()) -> None:
        """Give back what can be; the rest waits for the next call. Segments `in_use` are being written."""
        for number in list(self._retired):
            with self._leases.exclusive(lease_key(number)) as free:
                if free:
                    self._reclaim(number, number in in_use)

    def sweep(self, table: TrajectoryTable, dirty: bool) -> None:
        """Remove segments of which `table` knows nothing; if `dirty`, also what a killed writer left in
        others.
        """
        self._live.clear()
        self.added(table.locations)
        for number in segment_numbers(self._folder):
            with self._leases.exclusive(lease_key(number)) as free:
                if not free:
                    self._retired.setdefault(number, [])
                elif not self._live[number]:
                    self._unlink(number)
                elif dirty:
                    self._punch_gaps(number, table)

    def close(self) -> None:
        self._leases.close()

    def _reclaim(self, number: int, in_use: bool) -> None:
        if not self._live[number] and not in_use:
            self._unlink(number)
            del self._retired[number]
            return
        for name, start, stop in self._retired[number]:
            punch(segment_path(self._folder, number, name), start, stop)
        if in_use:  # it may be empty when it is full
            self._retired[number] = []
        else:
            del self._retired[number]

    def _unlink(self, number: int) -> None:
        for path in segment_files(self._folder, number):
            path.unlink(missing_ok=True)
        del self._live[number]

    def _punch_gaps(self, number: int, table: TrajectoryTable) -> None:
        for index, field in enumerate(self._header.fields):
            path = segment_path(self._folder, number, field.name)
            rows = np.flatnonzero(table.locations["segment"][:, index] == number)
            if os.path.exists(path):
                sizes = field.row_bytes * self._header.rows(field, table, rows)
                punch_gaps(path, table.locations["offset"][rows, index], sizes)
