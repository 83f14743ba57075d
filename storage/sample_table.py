"""`SampleTable`: the records of samples without their tokens, column by column.

Shapes: `n` samples, `B` bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import numpy as np

from opd.errors import StorageError
from opd.foreign import decoding, shown
from opd.types import Status


class Strings:
    """An immutable column of strings: `heap[offsets[i]:offsets[i + 1]]` is the UTF-8 of number `i`."""

    __slots__ = ("heap", "offsets")

    def __init__(self, offsets: np.ndarray, heap: np.ndarray) -> None:
        self.offsets = offsets
        """[n + 1] int64."""
        self.heap = heap
        """[B] uint8."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> Strings:
        parts = [text.encode() for text in texts]
        return cls(_ends([len(part) for part in parts]), np.frombuffer(b"".join(parts), np.uint8))

    @classmethod
    def join(cls, columns: Sequence[Strings]) -> Strings:
        """Concatenate `columns`."""
        if not columns:
            return cls.of(())
        lengths = np.concatenate([np.diff(column.offsets) for column in columns])
        heaps = [column.heap[column.offsets[0] : column.offsets[-1]] for column in columns]
        return cls(_ends(lengths), np.concatenate(heaps))

    def take(self, rows: np.ndarray) -> Strings:
        """Return the strings number `rows` (`[k]` integers)."""
        starts, lengths = self.offsets[rows], np.diff(self.offsets)[rows]
        offsets = _ends(lengths)
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Strings(offsets, self.heap[places])

    def check(self) -> None:
        """Raise `ValueError` if these arrays, read from a file, hold no strings."""
        offsets, heap = self.offsets, self.heap
        # The bounds first: differences of the largest numbers are wrong.
        outside = not len(offsets) or ((offsets < 0) | (offsets > len(heap))).any()
        if outside or (np.diff(offsets) < 0).any():
            raise ValueError("strings that do not follow on one another")
        if len(heap) and heap.max() >= 0x80:
            used = heap[offsets[0] : offsets[-1]]
            used.tobytes().decode()
            begins = offsets[offsets < offsets[-1]] - offsets[0]
            if (used[begins] & 0xC0 == 0x80).any():
                raise ValueError("a string that begins within a letter")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> str:
        if row < 0:
            row += len(self)
        return bytes(self.heap[self.offsets[row] : self.offsets[row + 1]]).decode()

    def __iter__(self) -> Iterator[str]:
        heap = self.heap.tobytes()
        ends = self.offsets.tolist()
        for start, stop in pairwise(ends):
            yield heap[start:stop].decode()


class Category:
    """An immutable column of strings with few different values: `names[codes[i]]` is number `i`."""

    __slots__ = ("codes", "names")

    def __init__(self, names: Sequence[str], codes: np.ndarray) -> None:
        self.names = tuple(names)
        self.codes = codes
        """[n] int32."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> Category:
        places: dict[str, int] = {}
        codes = [places.setdefault(text, len(places)) for text in texts]
        return cls(tuple(places), np.array(codes, np.int32))

    @classmethod
    def join(cls, columns: Sequence[Category]) -> Category:
        """Concatenate `columns`, with one list of names."""
        places: dict[str, int] = {}
        parts = []
        for column in columns:
            new = [places.setdefault(name, len(places)) for name in column.names]
            parts.append(np.array(new, np.int32)[column.codes])
        return cls(tuple(places), np.concatenate(parts) if parts else np.zeros(0, np.int32))

    def check(self) -> None:
        """Raise `ValueError` if a code, read from a file, has no name."""
        if not all(isinstance(name, str) for name in self.names):
            raise ValueError("names that are no strings")
        if ((self.codes < 0) | (self.codes >= len(self.names))).any():
            raise ValueError("a code without a name")

    def take(self, rows: np.ndarray) -> Category:
        return Category(self.names, self.codes[rows])

    def equals(self, name: str) -> np.ndarray:
        """Return [n] bool: True for rows that are `name`."""
        if name not in self.names:
            return np.zeros(len(self.codes), dtype=bool)
        return self.codes == self.names.index(name)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, row: int) -> str:
        return self.names[self.codes[row]]

    def __iter__(self) -> Iterator[str]:
        return (self.names[code] for code in self.codes.tolist())


def _ends(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


STATUSES = tuple(Status)
_MOST = 1 << 48
"""Limit of bytes of a file, or tokens."""


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """The record of one sample that has ended."""

    uid: str
    prompt_tokens: int
    response_tokens: int
    group_uid: str = ""
    domain: str = ""
    teacher: str = ""
    reward: float = float("nan")
    """NaN if there is none yet."""
    status: Status = Status.COMPLETED
    trainable_tokens: int = 0
    """Response tokens the loss counts."""
    first_version: int = 0
    last_version: int = 0
    """Oldest and newest policy that wrote one of its tokens."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other small values, JSON-able."""


@dataclass(frozen=True, slots=True)
class SampleTable:
    """`n` samples in `n` rows, immutable, all of it in memory."""

    uid: Strings
    group_uid: Strings
    extra: Strings
    """JSON, or empty."""
    domain: Category
    teacher: Category
    prompt_tokens: np.ndarray
    """[n] int64."""
    response_tokens: np.ndarray
    """[n] int64."""
    trainable_tokens: np.ndarray
    """[n] int64."""
    reward: np.ndarray
    """[n] float64, NaN if there is none."""
    status: np.ndarray
    """[n] uint8: an index into `STATUSES`."""
    first_version: np.ndarray
    """[n] int32."""
    last_version: np.ndarray
    """[n] int32."""
    fields: np.ndarray
    """[n] uint8: bit `i` is set if field number `i` of `sample_lot.FIELDS` was written."""

    @classmethod
    def of(cls, records: Sequence[SampleRecord], written: Sequence[int] = ()) -> SampleTable:
        """Make the table of `records`, whose `fields` are `written` (default: none)."""

        def numbers(name: str, dtype: str) -> np.ndarray:
            return np.array([getattr(record, name) for record in records], dtype=dtype)

        return cls(
            uid=Strings.of(record.uid for record in records),
            group_uid=Strings.of(record.group_uid for record in records),
            extra=Strings.of(_extra(r) if r.extra else "" for r in records),
            domain=Category.of(record.domain for record in records),
            teacher=Category.of(record.teacher for record in records),
            prompt_tokens=numbers("prompt_tokens", "<i8"),
            response_tokens=numbers("response_tokens", "<i8"),
            trainable_tokens=numbers("trainable_tokens", "<i8"),
            reward=numbers("reward", "<f8"),
            status=np.array([STATUSES.index(Status(record.status)) for record in records], np.uint8),
            first_version=numbers("first_version", "<i4"),
            last_version=numbers("last_version", "<i4"),
            fields=np.array(written or [0] * len(records), np.uint8),
        )

    @classmethod
    def join(cls, tables: Sequence[SampleTable]) -> SampleTable:
        """Return the rows of all `tables`, in order."""
        if len(tables) < 2:
            return tables[0] if tables else cls.of([])
        return cls(**{column.name: _joined([getattr(t, column.name) for t in tables]) for column in _COLUMNS})

    def check(self) -> None:
        """Raise `ValueError` if this, read from a file, cannot be a table."""
        if any(len(getattr(self, column.name)) != len(self) for column in _COLUMNS):
            raise ValueError("columns of different lengths")
        for column in (self.uid, self.group_uid, self.extra, self.domain, self.teacher):
            column.check()
        counts = (self.prompt_tokens, self.response_tokens, self.trainable_tokens)
        if any(((numbers < 0) | (numbers > _MOST)).any() for numbers in counts):
            raise ValueError("a length that no sample has")
        if (self.status >= len(STATUSES)).any():
            raise ValueError("a status that there is not")

    def take(self, rows: np.ndarray) -> SampleTable:
        """Return rows number `rows` (`[k]` integers), or the rows at which `rows` (`[n]` bool) is true."""
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        return SampleTable(**{c.name: _taken(getattr(self, c.name), rows) for c in _COLUMNS})

    def record(self, row: int) -> SampleRecord:
        """Return the record of row `row`."""
        return SampleRecord(
            uid=self.uid[row],
            prompt_tokens=int(self.prompt_tokens[row]),
            response_tokens=int(self.response_tokens[row]),
            group_uid=self.group_uid[row],
            domain=self.domain[row],
            teacher=self.teacher[row],
            reward=float(self.reward[row]),
            status=STATUSES[self.status[row]],
            trainable_tokens=int(self.trainable_tokens[row]),
            first_version=int(self.first_version[row]),
            last_version=int(self.last_version[row]),
            extra=self._extra(row),
        )

    def _extra(self, row: int) -> dict[str, Any]:
        found = None
        with decoding(lambda cause: StorageError(f"sample {shown(self.uid[row])}: {cause}")):
            found = json.loads(self.extra[row] or "{}")
        if not isinstance(found, dict):
            raise StorageError(f"what is kept of sample {shown(self.uid[row])} is no JSON object")
        return found

    def arrays(self) -> tuple[dict[str, np.ndarray], dict[str, tuple[str, ...]]]:
        """Return the arrays of the columns by name, and the names of the categories."""
        arrays: dict[str, np.ndarray] = {}
        names: dict[str, tuple[str, ...]] = {}
        for column in _COLUMNS:
            value = getattr(self, column.name)
            if isinstance(value, Strings):
                arrays[f"{column.name}.offsets"], arrays[f"{column.name}.heap"] = value.offsets, value.heap
            elif isinstance(value, Category):
                arrays[column.name], names[column.name] = value.codes, value.names
            else:
                arrays[column.name] = value
        return arrays, names

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], names: Mapping[str, Sequence[str]]) -> SampleTable:
        """Return the table for which `arrays` returned these. Others raise `ValueError` or `KeyError`."""
        due, _ = _EMPTY.arrays()
        if wrong := [n for n in due if (arrays[n].dtype, arrays[n].ndim) != (due[n].dtype, due[n].ndim)]:
            raise ValueError(f"column {wrong[0]} is of another kind")
        columns: dict[str, Any] = {}
        for column in _COLUMNS:
            name, kind = column.name, type(getattr(_EMPTY, column.name))
            if kind is Strings:
                columns[name] = Strings(arrays[f"{name}.offsets"], arrays[f"{name}.heap"])
            elif kind is Category:
                columns[name] = Category(names[name], arrays[name])
            else:
                columns[name] = arrays[name]
        table = cls(**columns)
        table.check()
        return table

    @property
    def tokens(self) -> np.ndarray:
        """[n] int64: prompt and response tokens of each sample."""
        return self.prompt_tokens + self.response_tokens

    def has_status(self, *wanted: Status) -> np.ndarray:
        """Return [n] bool: True for samples that ended with one of these statuses."""
        return np.isin(self.status, [STATUSES.index(status) for status in wanted])

    def __len__(self) -> int:
        return len(self.prompt_tokens)


_COLUMNS = fields(SampleTable)
_EMPTY = SampleTable.of([])


def _joined(columns: list) -> Any:
    return np.concatenate(columns) if isinstance(columns[0], np.ndarray) else type(columns[0]).join(columns)


def _taken(column: Any, rows: np.ndarray) -> Any:
    return column[rows] if isinstance(column, np.ndarray) else column.take(rows)


def _extra(record: SampleRecord) -> str:
    try:
        return json.dumps(dict(record.extra), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError(
            f"what sample {shown(record.uid)} carries cannot be kept on the disk ({shown(error)}); keep label"
            " and metadata to what JSON can hold, or set storage.trajectories to memory"
        ) from error
