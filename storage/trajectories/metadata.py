"""The table on disk: a base, which is one frame, and a tail of what changed since.

    metadata/base.000001    the whole table; written whole or not at all
    metadata/tail.000001    frames after it, appended one by one

When the tail has grown to a share of the base both are written into the next base, so that what is
written, and read at the next open, stays linear in the number of trajectories.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from opd.errors import StorageError
from opd.foreign import decoding
from opd.storage.files import fsync_folder, open_plain, write_atomic
from opd.storage.mapped_file import MappedFile
from opd.storage.trajectories.frames import (
    Change,
    ChangeKind,
    encode_change,
    frame_beyond,
    scan,
    settled,
)
from opd.storage.trajectories.table import TrajectoryRecord, TrajectoryTable

_NAME = re.compile(r"base\.(\d{6})")
_LEAST_FRAMES = 256
_ATTEMPTS = 100


def _no_table(where: str) -> Callable[[str], StorageError]:
    return lambda cause: StorageError(
        f"{where}: the trajectories' metadata holds what no store does ({cause}); restore this file from a"
        " copy, or write the store again"
    )


def check_width(change: Change, field_count: int) -> Change:
    """`change`; `ValueError` if its table is of a store with another number of fields."""
    if change.table is not None and change.table.locations.shape[1] != field_count:
        raise ValueError(f"places of {change.table.locations.shape[1]} fields where there are {field_count}")
    return change


def read_base(data: memoryview, where: str, field_count: int) -> Change:
    """The one frame of a base. Raises `StorageError` if it is damaged."""
    with decoding(_no_table(where)):
        frames = [(end, check_width(change, field_count)) for end, change in scan(data)]
    if len(frames) != 1 or frames[0][0] != len(data) or frames[0][1].table is None:
        raise StorageError(
            f"{where}: the trajectories' metadata is damaged; restore this file from a copy, or write the"
            " store again"
        )
    return frames[0][1]


def mapped(path: Path) -> memoryview:
    """The bytes of a file, in pages that all processes share."""
    descriptor = open_plain(path)
    try:
        size = os.fstat(descriptor).st_size
        if size == 0:
            return memoryview(b"")
        data = MappedFile(descriptor, size, shared=True)
        if not data.load():
            raise StorageError(f"{path}: the disk cannot read all of it; restore this file from a copy")
        return np.asarray(data).data
    finally:
        os.close(descriptor)


class MetadataReader:
    """The table as its writer has acknowledged it; any number of processes, at any time, without a lock."""

    def __init__(self, folder: Path, field_count: int) -> None:
        self.folder = folder / "metadata"
        self.field_count = field_count
        self.number = 0
        """Of the base in use; 0 before the first."""
        self.changes: list[Change] = []
        self.cut = False
        """The tail ends in the middle of a frame."""
        self._tail_end = 0

    @property
    def sequence(self) -> int:
        """Of the newest change read."""
        return self.changes[-1].sequence if self.changes else 0

    def refresh(self) -> bool:
        """Read what has been acknowledged since the last call; whether there was anything.

        A tail that ends in the middle of a frame is being written, or its writer was killed: the frame is
        left out. Raises `StorageError` for damage, and `OSError` as the system does.
        """
        before = self.sequence, self.number
        for _ in range(_ATTEMPTS):
            number = self._newest()
            try:
                if number != self.number:
                    self._read_base(number)
                self._read_tail()
            except FileNotFoundError:  # replaced by the next base meanwhile
                self.number = 0
                continue
            if self._newest() == number:
                return before != (self.sequence, self.number)
        raise StorageError(f"{self.folder}: the metadata changes faster than it can be read; try again")

    def table(self) -> TrajectoryTable:
        """The table after everything read so far."""
        return settled(self.changes, self.field_count)

    def _newest(self) -> int:
        numbers = [int(match[1]) for match in map(_NAME.fullmatch, os.listdir(self.folder)) if match]
        if not numbers:
            raise StorageError(
                f"{self.folder} holds no metadata of trajectories; check the path, or restore the folder"
            )
        return max(numbers)

    def _read_base(self, number: int) -> None:
        path = self.folder / f"base.{number:06d}"
        self.changes = [read_base(mapped(path), str(path), self.field_count)]
        self.number, self._tail_end = number, 0

    def _read_tail(self) -> None:
        path = self.folder / f"tail.{self.number:06d}"
        try:
            with os.fdopen(open_plain(path), "rb") as file:
                file.seek(self._tail_end)
                data = memoryview(file.read())
        except FileNotFoundError:
            self.cut = False
            return
        end = 0
        with decoding(_no_table(str(path))):
            for stop, change in scan(data):
                if change.sequence != self.sequence + 1:
                    raise self._damage(path, self._tail_end + end)
                self.changes.append(check_width(change, self.field_count))
                end = stop
            if end < len(data) and frame_beyond(data, end):
                raise self._damage(path, self._tail_end + end)
        self._tail_end += end
        self.cut = end < len(data)

    def _damage(self, path: Path, place: int) -> StorageError:
        return StorageError(
            f"{path} is damaged at byte {place}, before trajectories that were acknowledged; restore this"
            " file from a copy, or write the store again"
        )


class MetadataWriter:
    """The one writer's side. Use from one thread at a time."""

    def __init__(self, folder: Path, field_count: int, durable: bool, made: bool) -> None:
        """Take up what is there, and give up a frame cut short; if the store is not yet `made`, there may be
        nothing. Raises `StorageError`, `OSError`.
        """
        self._reader = MetadataReader(folder, field_count)
        self._durable = durable
        self._tail = -1
        self._places: dict[str, tuple[TrajectoryTable, int]] = {}
        self._reader.folder.mkdir(exist_ok=True)
        if not made and not any(map(_NAME.fullmatch, os.listdir(self._reader.folder))):
            self._write_base(TrajectoryTable.empty(field_count), 1, 1)
        self._load()
        if self._reader.cut:  # nothing may follow half a frame
            self.compact()

    def __contains__(self, uid: str) -> bool:
        return uid in self._places

    @property
    def uids(self) -> list[str]:
        return list(self._places)

    def find(self, uid: str) -> tuple[TrajectoryTable, int]:
        """A table and the row in which it says what is known of `uid`."""
        return self._places[uid]

    def record(self, uid: str) -> TrajectoryRecord:
        """What is known of `uid`."""
        table, row = self._places[uid]
        return table.record(row)

    def locations(self, uid: str) -> np.ndarray:
        """[F] `LOCATION`: where its fields lie."""
        table, row = self._places[uid]
        return table.locations[row]

    def table(self) -> TrajectoryTable:
        """The table as acknowledged."""
        return self._reader.table()

    def append(self, kind: ChangeKind, table: TrajectoryTable | None, uids: tuple[str, ...] = ()) -> None:
        """Acknowledge one change: it is in the file, and if `durable` on the disk, when this returns."""
        change = Change(kind, self._reader.sequence + 1, table, uids)
        data = memoryview(encode_change(change))
        if self._tail < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            path = self._reader.folder / f"tail.{self._reader.number:06d}"
            self._tail = os.open(path, flags, 0o666)
            if self._durable:
                fsync_folder(self._reader.folder)
        while data:
            data = data[os.write(self._tail, data) :]
        if self._durable:
            os.fdatasync(self._tail)
        self._take(change)
        self._reader.changes.append(change)
        # A frame costs about as much to read as some tens of rows of a base.
        if len(self._reader.changes) > max(_LEAST_FRAMES, len(self._places) // 16):
            self.compact()

    def compact(self) -> None:
        """Write base and tail into the next base, if there is a tail."""
        if len(self._reader.changes) == 1 and not self._reader.cut:
            return
        number = self._reader.number + 1
        self._write_base(self.table(), number, self._reader.sequence)
        self.close()
        for path in self._reader.folder.iterdir():
            if path.name.startswith(("base.", "tail.")) and not path.name.endswith(f".{number:06d}"):
                path.unlink(missing_ok=True)
        self._load()

    def close(self) -> None:
        """Give back the file. Everything acknowledged is there."""
        if self._tail >= 0:
            os.close(self._tail)
            self._tail = -1

    def _load(self) -> None:
        self._reader.refresh()
        self._places.clear()
        for change in self._reader.changes:
            self._take(change)

    def _take(self, change: Change) -> None:
        for uid in change.uids:
            self._places.pop(uid, None)
        table = change.table
        if table is not None:
            self._places.update((uid, (table, row)) for row, uid in enumerate(table.uid))

    def _write_base(self, table: TrajectoryTable, number: int, sequence: int) -> None:
        data = encode_change(Change(ChangeKind.ADD, sequence, table))
        write_atomic(self._reader.folder / f"base.{number:06d}", data)
