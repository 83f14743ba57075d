"""The bytes of a metadata file: frames, each a change to the table, each under its own checksum.

    magic 8 | kind u32 | zero u32 | sequence u64 | payload bytes u64 | xxh3-128 of all of it but itself 16
    payload: columns of a table (ADD, REPLACE), or a list of uids as JSON (REMOVE)

Sequence numbers grow by one through all files of a store's life, so a missing frame is noticed.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
import xxhash

from opd.foreign import shown, whole
from opd.storage.trajectories.table import Category, Strings, TrajectoryTable

_MAGIC = b"OPDTRAJ1"
_HEADER = struct.Struct("<8sIIQQ16s")
_SEALED = _HEADER.size - 16
_LENGTH = struct.Struct("<Q")
FRAME_BYTES = _HEADER.size
_MAX_SIDE = 1 << 40


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
    sequence: int
    table: TrajectoryTable | None
    uids: tuple[str, ...] = ()


def encode_change(change: Change) -> bytes:
    """The frame of `change`."""
    if change.table is not None:
        payload = _encode_table(change.table)
    else:
        text = json.dumps(change.uids).encode()
        payload = text.ljust(_rounded(len(text)))  # so that all arrays of the file stay aligned
    head = _HEADER.pack(_MAGIC, change.kind, 0, change.sequence, len(payload), b"\0" * 16)[:_SEALED]
    digest = xxhash.xxh3_128(head)
    digest.update(payload)
    return b"".join([head, digest.digest(), payload])


def scan(data: memoryview, start: int = 0) -> Iterator[tuple[int, Change]]:
    """(end, change) of every frame from `start` on, up to the first place that is not a whole, right one."""
    while (found := _frame_at(data, start)) is not None:
        start, change = found
        yield start, change


def frame_beyond(data: memoryview, start: int) -> bool:
    """Whether a whole, right frame lies anywhere after `start`: then what is at `start` was one too."""
    text, place = bytes(data[start:]), 0
    budget = 4 * len(text)  # heads made to name the same payload again and again: nobody else writes such
    while (place := text.find(_MAGIC, place + 1)) >= 0:
        if place + FRAME_BYTES <= len(text):
            length = _HEADER.unpack_from(text, place)[4]
            budget -= length if length <= len(text) - place else 0
        if budget < 0 or _frame_at(data, start + place) is not None:
            return True
    return False


def _frame_at(data: memoryview, start: int) -> tuple[int, Change] | None:
    if len(data) - start < FRAME_BYTES:
        return None
    magic, kind, zero, sequence, length, expected = _HEADER.unpack_from(data, start)
    end = start + FRAME_BYTES + length
    if magic != _MAGIC or zero or end > len(data) or kind not in ChangeKind._value2member_map_:
        return None
    digest = xxhash.xxh3_128(data[start : start + _SEALED])
    digest.update(data[start + FRAME_BYTES : end])
    if digest.digest() != expected:
        return None
    payload = data[start + FRAME_BYTES : end]
    if kind == ChangeKind.REMOVE:
        uids = json.loads(bytes(payload))
        if not isinstance(uids, list) or not all(isinstance(uid, str) for uid in uids):
            raise ValueError("no list of uids")
        return end, Change(ChangeKind(kind), sequence, None, tuple(uids))
    return end, Change(ChangeKind(kind), sequence, _decode_table(payload))


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
    document = json.loads(bytes(payload[_LENGTH.size : _LENGTH.size + length]))
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


def _padded(data: bytes) -> bytes:
    return data.ljust(_rounded(len(data)), b"\0")
