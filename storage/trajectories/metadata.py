"""The table on disk: a log of changes to it, and now and then a snapshot of the whole, which is mapped.

A frame's payload is columns of a table (ADD, REPLACE), or a list of uids as JSON (REMOVE). When the changes
have grown to a share of the table they are put together, so that what is written, and read at the next open,
stays linear in the number of trajectories.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path

import numpy as np

from opd.errors import StorageError
from opd.foreign import read_document, shown, whole
from opd.storage.framed_log import Frame, FrameReport, LogIO, Recovered, read_beside_writer, recover
from opd.storage.framed_log_writer import Content, FramedLog, LogPolicy, WriteGuard
from opd.storage.trajectories.table import Category, Strings, TrajectoryRecord, TrajectoryTable

_LENGTH = struct.Struct("<Q")
_MAX_SIDE = 1 << 40
_LEAST_CHANGES = 256
_SNAPSHOT_BYTES = 1 << 30
"""About the most of a table in one frame."""


class ChangeKind(IntEnum):
    """What a frame does to the table."""

    ADD = 1
    REPLACE = 2
    """Rows of trajectories that got further fields; each takes the place of the row of its uid."""
    REMOVE = 3


@dataclass(frozen=True, slots=True)
class Change:
    """One frame's content: a table, or for `REMOVE` uids."""

    kind: ChangeKind
    table: TrajectoryTable | None
    uids: tuple[str, ...] = ()

    def encode(self) -> bytes:
        if self.table is not None:
            return _encode_table(self.table)
        return _padded(json.dumps(self.uids).encode(), b" ")

    @classmethod
    def decode(cls, kind: int, payload: memoryview, field_count: int) -> Change:
        """What `encode` wrote for a store of so many fields; its table is a view of `payload`."""
        if kind == ChangeKind.REMOVE:
            uids = read_document(bytes(payload), len(payload))
            if not isinstance(uids, list) or not all(isinstance(uid, str) for uid in uids):
                raise ValueError("no list of uids")
            return cls(ChangeKind.REMOVE, None, tuple(uids))
        table = _decode_table(payload)
        if table.locations.shape[1] != field_count:
            raise ValueError(f"places of {table.locations.shape[1]} fields where there are {field_count}")
        return cls(ChangeKind(kind), table)


class TableReplay:
    """The changes of a table as they are read from its log."""

    def __init__(self, folder: Path, field_count: int) -> None:
        self.changes: list[Change] = []
        self.settled = 0
        """How many of them are a snapshot."""
        self.report = FrameReport(str(folder))
        self._field_count = field_count

    def take(self, frame: Frame, payload: memoryview) -> None:
        """See `framed_log.Replay`."""
        self.changes.append(Change.decode(frame.kind, payload, self._field_count))

    def end_file(self) -> None:
        """See `framed_log.Replay`."""
        if self.report.files[-1].endswith(".snapshot"):
            self.settled = len(self.changes)

    def refuse_damage(self) -> None:
        """Raise `StorageError` if something that had been acknowledged is damaged: also where no frame proves
        it, since what a writer wrote later is there.
        """
        damage, report = self.report.damage, self.report
        if damage is None and report.cut_frames:
            damage = f"{report.folder}/{report.cut_file} at byte {report.cut_offset}: a frame is damaged"
        if damage is not None:
            raise StorageError(
                f"{damage}: trajectories that were acknowledged are lost; restore this file from a copy, or"
                " write the store again"
            )


class MetadataReader:
    """The table as its writer has acknowledged it; any number of processes, at any time, without a lock."""

    def __init__(self, folder: Path, field_count: int) -> None:
        self._folder = folder / "metadata"
        self._field_count = field_count
        self._changes: list[Change] = []
        self._next = 0

    def refresh(self) -> bool:
        """Read what has been acknowledged; whether that is more than at the last call.

        What is being written, or was when its writer was killed, is left out. Raises `StorageError`.
        """
        replay, found = read_beside_writer(
            self._folder, LogIO(), lambda: TableReplay(self._folder, self._field_count)
        )
        replay.refuse_damage()
        changed, self._next = self._next != found.next_lsn, found.next_lsn
        self._changes = replay.changes
        return changed

    def table(self) -> TrajectoryTable:
        """The table after everything read so far."""
        return settled(self._changes, self._field_count)


class MetadataWriter:
    """The one writer's side. Use from one thread at a time."""

    def __init__(
        self, folder: Path, field_count: int, durable: bool, guard: WriteGuard, *, made: bool
    ) -> None:
        """Take up what is there, and give up a frame cut short; if the store is not yet `made`, there may be
        nothing. Raises `StorageError`, `OSError`.
        """
        self._folder, self._io = folder / "metadata", LogIO()
        self._field_count = field_count
        self._changes: list[Change] = []
        self._places: dict[str, tuple[TrajectoryTable, int]] = {}
        self._io.make_folder(self._folder)
        found = self._load()
        if made and not found.report.files:
            raise StorageError(
                f"{self._folder} holds no metadata of trajectories; check the path, or restore the folder"
            )
        policy = LogPolicy("always" if durable else "os")
        self._log = FramedLog(self._folder, found, policy, guard, self._io, self._contents)

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
        return settled(self._changes, self._field_count)

    def append(self, change: Change) -> None:
        """Acknowledge one change: it is in the file, and if `durable` on the disk, when this returns."""
        self._log.append(change.kind, change.encode())
        self._log.commit()
        self._take(change)
        self._changes.append(change)
        # A frame costs about as much to read as some tens of rows of a snapshot.
        if len(self._changes) > max(_LEAST_CHANGES, len(self._places) // 16):
            self.compact()

    def compact(self) -> None:
        """Put the changes since the last snapshot, if there are any, and the table into a new one."""
        if len(self._changes) > self._settled:
            self._log.rewrite()
            self._load()  # as views of the file, which all processes share

    def end(self) -> None:
        """Everything acknowledged is on the disk, and the log says that nothing follows."""
        self._log.end()

    def close(self) -> None:
        """Give back the file, as it is."""
        self._log.close()

    def _load(self) -> Recovered:
        replay = TableReplay(self._folder, self._field_count)
        found = recover(self._folder, self._io, replay)
        replay.refuse_damage()
        self._changes, self._settled = replay.changes, replay.settled
        self._places.clear()
        for change in self._changes:
            self._take(change)
        return found

    def _contents(self) -> Iterator[Content]:
        table = self.table()
        bytes_of_all = sum(array.nbytes for array in _parts(table)[0].values())
        step = -(-len(table) // (1 + bytes_of_all // _SNAPSHOT_BYTES))
        for first in range(0, len(table), max(1, step)):
            rows = np.arange(first, min(len(table), first + step))
            part = table if step >= len(table) else table.take(rows)
            yield Content(ChangeKind.ADD, [_encode_table(part)])

    def _take(self, change: Change) -> None:
        for uid in change.uids:
            self._places.pop(uid, None)
        table = change.table
        if table is not None:
            self._places.update((uid, (table, row)) for row, uid in enumerate(table.uid))


def settled(changes: list[Change], field_count: int) -> TrajectoryTable:
    """The table after all of `changes`. A replaced row keeps its place."""
    tables = [change.table for change in changes if change.table is not None]
    whole = TrajectoryTable.join(tables or [TrajectoryTable.empty(field_count)])
    if all(change.kind == ChangeKind.ADD for change in changes):
        return whole
    rows: dict[str, int] = {}
    seen = 0
    for change in changes:
        for uid in change.uids:
            rows.pop(uid, None)
        for uid in change.table.uid if change.table is not None else ():
            rows[uid] = seen
            seen += 1
    return whole.take(np.fromiter(rows.values(), np.int64, len(rows)))


def _parts(table: TrajectoryTable) -> tuple[dict[str, np.ndarray], dict[str, tuple[str, ...]]]:
    """The arrays of a table by name, and the names of its categories."""
    arrays: dict[str, np.ndarray] = {}
    names: dict[str, tuple[str, ...]] = {}
    for column in fields(table):
        value = getattr(table, column.name)
        if isinstance(value, Strings):
            arrays[f"{column.name}.offsets"] = value.offsets
            arrays[f"{column.name}.heap"] = value.heap
        elif isinstance(value, Category):
            names[column.name] = value.names
            arrays[column.name] = value.codes
        else:
            arrays[column.name] = value
    return arrays, names


def _encode_table(table: TrajectoryTable) -> bytes:
    arrays, names = _parts(table)
    layout = {name: [_dtype_text(array.dtype), list(array.shape)] for name, array in arrays.items()}
    text = json.dumps({"names": names, "arrays": layout}, separators=(",", ":")).encode()
    parts = [_LENGTH.pack(len(text)), _padded(text)]
    parts += [_padded(np.ascontiguousarray(array).tobytes()) for array in arrays.values()]
    return b"".join(parts)


def _decode_table(payload: memoryview) -> TrajectoryTable:
    (length,) = _LENGTH.unpack_from(payload)
    document = read_document(bytes(payload[_LENGTH.size : _LENGTH.size + length]), len(payload))
    place = _LENGTH.size + _rounded(length)
    due, _ = _parts(TrajectoryTable.empty(1))
    arrays: dict[str, np.ndarray] = {}
    for name, (text, shape) in document["arrays"].items():
        dtype = due[name].dtype
        if text != _dtype_text(dtype) or len(shape) != due[name].ndim:
            raise ValueError(f"{name} is {shown(text)} of {len(shape)} sides")
        count = math.prod(whole(side, 0, _MAX_SIDE, f"a side of {name}") for side in shape)
        arrays[name] = np.frombuffer(payload, dtype, count, place).reshape(shape)
        place += _rounded(count * dtype.itemsize)
    columns: dict[str, object] = {}
    for column in fields(TrajectoryTable):
        name = column.name
        if name in document["names"]:
            columns[name] = Category(document["names"][name], arrays[name])
        elif f"{name}.heap" in arrays:
            columns[name] = Strings(arrays[f"{name}.offsets"], arrays[f"{name}.heap"])
        else:
            columns[name] = arrays[name]
    table = TrajectoryTable(**columns)  # type: ignore[arg-type]
    table.check()
    return table


def _dtype_text(dtype: np.dtype) -> object:
    return dtype.str if dtype.names is None else [[name, dtype[name].str] for name in dtype.names]


def _rounded(size: int) -> int:
    return -(-size // 8) * 8


def _padded(data: bytes, filler: bytes = b"\0") -> bytes:
    return data.ljust(_rounded(len(data)), filler)
