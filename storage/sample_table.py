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
from opd.types import Status
from opd.untrusted import convert_decode_errors, safe_excerpt


class StringColumn:
    """An immutable column of strings: `heap[offsets[i]:offsets[i + 1]]` is the UTF-8 of number `i`."""

    __slots__ = ("heap", "offsets")

    def __init__(self, offsets: np.ndarray, heap: np.ndarray) -> None:
        self.offsets = offsets
        """[n + 1] int64."""
        self.heap = heap
        """[B] uint8."""

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> StringColumn:
        parts = [text.encode() for text in texts]
        return cls(_end_offsets([len(part) for part in parts]), np.frombuffer(b"".join(parts), np.uint8))

    @classmethod
    def join(cls, columns: Sequence[StringColumn]) -> StringColumn:
        """Concatenate `columns`."""
        if not columns:
            return cls.from_texts(())
        lengths = np.concatenate([np.diff(column.offsets) for column in columns])
        heaps = [column.heap[column.offsets[0] : column.offsets[-1]] for column in columns]
        return cls(_end_offsets(lengths), np.concatenate(heaps))

    def select_rows(self, rows: np.ndarray) -> StringColumn:
        """Return the strings number `rows` (`[k]` integers)."""
        starts, lengths = self.offsets[rows], np.diff(self.offsets)[rows]
        offsets = _end_offsets(lengths)
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return StringColumn(offsets, self.heap[places])

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


class CategoryColumn:
    """An immutable column of strings with few different values: `names[codes[i]]` is number `i`."""

    __slots__ = ("codes", "names")

    def __init__(self, names: Sequence[str], codes: np.ndarray) -> None:
        self.names = tuple(names)
        self.codes = codes
        """[n] int32."""

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> CategoryColumn:
        places: dict[str, int] = {}
        codes = [places.setdefault(text, len(places)) for text in texts]
        return cls(tuple(places), np.array(codes, np.int32))

    @classmethod
    def join(cls, columns: Sequence[CategoryColumn]) -> CategoryColumn:
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

    def select_rows(self, rows: np.ndarray) -> CategoryColumn:
        return CategoryColumn(self.names, self.codes[rows])

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


def _end_offsets(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
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

    uid: StringColumn
    group_uid: StringColumn
    extra: StringColumn
    """JSON, or empty."""
    domain: CategoryColumn
    teacher: CategoryColumn
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
    def from_records(cls, records: Sequence[SampleRecord], written: Sequence[int] = ()) -> SampleTable:
        """Make the table of `records`, whose `fields` are `written` (default: none)."""

        def number_column(name: str, dtype: str) -> np.ndarray:
            return np.array([getattr(record, name) for record in records], dtype=dtype)

        return cls(
            uid=StringColumn.from_texts(record.uid for record in records),
            group_uid=StringColumn.from_texts(record.group_uid for record in records),
            extra=StringColumn.from_texts(_encode_extra(r) if r.extra else "" for r in records),
            domain=CategoryColumn.from_texts(record.domain for record in records),
            teacher=CategoryColumn.from_texts(record.teacher for record in records),
            prompt_tokens=number_column("prompt_tokens", "<i8"),
            response_tokens=number_column("response_tokens", "<i8"),
            trainable_tokens=number_column("trainable_tokens", "<i8"),
            reward=number_column("reward", "<f8"),
            status=np.array([STATUSES.index(Status(record.status)) for record in records], np.uint8),
            first_version=number_column("first_version", "<i4"),
            last_version=number_column("last_version", "<i4"),
            fields=np.array(written or [0] * len(records), np.uint8),
        )

    @classmethod
    def join(cls, tables: Sequence[SampleTable]) -> SampleTable:
        """Return the rows of all `tables`, in order."""
        if len(tables) < 2:
            return tables[0] if tables else cls.from_records([])
        joined: dict[str, Any] = {}
        for column in _COLUMNS:
            parts = [getattr(table, column.name) for table in tables]
            join = np.concatenate if isinstance(parts[0], np.ndarray) else type(parts[0]).join
            joined[column.name] = join(parts)
        return cls(**joined)

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

    def select_rows(self, rows: np.ndarray) -> SampleTable:
        """Return rows number `rows` (`[k]` integers), or the rows at which `rows` (`[n]` bool) is true."""
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        selected: dict[str, Any] = {}
        for column in _COLUMNS:
            values = getattr(self, column.name)
            selected[column.name] = (
                values[rows] if isinstance(values, np.ndarray) else values.select_rows(rows)
            )
        return SampleTable(**selected)

    def get_record(self, row: int) -> SampleRecord:
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
            extra=self._decode_extra(row),
        )

    def _decode_extra(self, row: int) -> dict[str, Any]:
        extra = None
        with convert_decode_errors(
            lambda cause: StorageError(f"sample {safe_excerpt(self.uid[row])}: {cause}")
        ):
            extra = json.loads(self.extra[row] or "{}")
        if not isinstance(extra, dict):
            raise StorageError(f"what is kept of sample {safe_excerpt(self.uid[row])} is no JSON object")
        return extra

    def to_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, tuple[str, ...]]]:
        """Return the arrays of the columns by name, and the names of the categories."""
        arrays: dict[str, np.ndarray] = {}
        names: dict[str, tuple[str, ...]] = {}
        for column in _COLUMNS:
            value = getattr(self, column.name)
            if isinstance(value, StringColumn):
                arrays[f"{column.name}.offsets"], arrays[f"{column.name}.heap"] = value.offsets, value.heap
            elif isinstance(value, CategoryColumn):
                arrays[column.name], names[column.name] = value.codes, value.names
            else:
                arrays[column.name] = value
        return arrays, names

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], names: Mapping[str, Sequence[str]]) -> SampleTable:
        """Return the table for which `arrays` returned these. Others raise `ValueError` or `KeyError`."""
        due, _ = _EMPTY.to_arrays()
        if wrong := [n for n in due if (arrays[n].dtype, arrays[n].ndim) != (due[n].dtype, due[n].ndim)]:
            raise ValueError(f"column {wrong[0]} is of another kind")
        columns: dict[str, Any] = {}
        for column in _COLUMNS:
            name, kind = column.name, type(getattr(_EMPTY, column.name))
            if kind is StringColumn:
                columns[name] = StringColumn(arrays[f"{name}.offsets"], arrays[f"{name}.heap"])
            elif kind is CategoryColumn:
                columns[name] = CategoryColumn(names[name], arrays[name])
            else:
                columns[name] = arrays[name]
        table = cls(**columns)
        table.check()
        return table

    @property
    def token_counts(self) -> np.ndarray:
        """[n] int64: prompt and response tokens of each sample."""
        return self.prompt_tokens + self.response_tokens

    def has_status(self, *wanted: Status) -> np.ndarray:
        """Return [n] bool: True for samples that ended with one of these statuses."""
        return np.isin(self.status, [STATUSES.index(status) for status in wanted])

    def __len__(self) -> int:
        return len(self.prompt_tokens)


_COLUMNS = fields(SampleTable)
_EMPTY = SampleTable.from_records([])


def _encode_extra(record: SampleRecord) -> str:
    try:
        return json.dumps(dict(record.extra), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError(
            f"what sample {safe_excerpt(record.uid)} carries cannot be kept on the disk"
            f" ({safe_excerpt(error)}); keep label"
            " and metadata to what JSON can hold, or set storage.trajectories to memory"
        ) from error
