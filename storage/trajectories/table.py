"""`TrajectoryTable`: what is known of every trajectory without its tokens, column by column."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from opd.errors import StorageError
from opd.foreign import decoding, shown
from opd.storage.trajectories.strings import Category, Strings
from opd.types import Status

STATUSES = tuple(Status)
_MOST = 1 << 48
"""Bytes of a file, or tokens."""
LOCATION = np.dtype([("segment", "<u4"), ("check", "<u4"), ("offset", "<i8")])
"""Where a field of a trajectory lies: its segment (0: the trajectory has no such field), the number of its
first checksum there, and its first byte in the field's file."""


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """What is known of one trajectory when it is sealed."""

    uid: str
    prompt_tokens: int
    response_tokens: int
    group_uid: str = ""
    domain: str = ""
    teacher: str = ""
    reward: float = float("nan")
    """NaN where there is none yet."""
    status: Status = Status.COMPLETED
    trainable_tokens: int = 0
    """Response tokens the loss counts."""
    first_version: int = 0
    last_version: int = 0
    """Oldest and newest policy that wrote one of its tokens."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else is small; JSON-able."""


@dataclass(frozen=True, slots=True)
class TrajectoryTable:
    """`n` trajectories in `n` rows; an immutable snapshot, all of it in memory (about 200 bytes a row)."""

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
    """[n] float64; NaN where there is none."""
    status: np.ndarray
    """[n] uint8: a place in `STATUSES`."""
    first_version: np.ndarray
    """[n] int32."""
    last_version: np.ndarray
    """[n] int32."""
    locations: np.ndarray
    """[n, F] `LOCATION`."""

    @classmethod
    def of(cls, records: Sequence[TrajectoryRecord], locations: np.ndarray) -> TrajectoryTable:
        """A table of `records` whose fields lie at `locations` (`[n, F]`)."""

        def numbers(name: str, dtype: str) -> np.ndarray:
            return np.array([getattr(record, name) for record in records], dtype=dtype)

        return cls(
            uid=Strings.of(record.uid for record in records),
            group_uid=Strings.of(record.group_uid for record in records),
            extra=Strings.of(json.dumps(dict(r.extra), allow_nan=False) if r.extra else "" for r in records),
            domain=Category.of(record.domain for record in records),
            teacher=Category.of(record.teacher for record in records),
            prompt_tokens=numbers("prompt_tokens", "<i8"),
            response_tokens=numbers("response_tokens", "<i8"),
            trainable_tokens=numbers("trainable_tokens", "<i8"),
            reward=numbers("reward", "<f8"),
            status=np.array([STATUSES.index(Status(record.status)) for record in records], np.uint8),
            first_version=numbers("first_version", "<i4"),
            last_version=numbers("last_version", "<i4"),
            locations=locations,
        )

    @classmethod
    def empty(cls, field_count: int) -> TrajectoryTable:
        return cls.of([], np.zeros((0, field_count), LOCATION))

    @classmethod
    def join(cls, tables: Sequence[TrajectoryTable]) -> TrajectoryTable:
        """The rows of all `tables` (at least one), in order."""
        if len(tables) == 1:
            return tables[0]
        return cls(**{column.name: _joined([getattr(t, column.name) for t in tables]) for column in _COLUMNS})

    def check(self) -> None:
        """Raise `ValueError` if this cannot be a table: it was read from a file."""
        if any(len(getattr(self, column.name)) != len(self) for column in _COLUMNS):
            raise ValueError("columns of different lengths")
        for column in (self.uid, self.group_uid, self.extra, self.domain, self.teacher):
            column.check()
        counts = (self.prompt_tokens, self.response_tokens, self.trainable_tokens, self.locations["offset"])
        if any(((numbers < 0) | (numbers > _MOST)).any() for numbers in counts):
            raise ValueError("a length or a place that no file has")
        if (self.status >= len(STATUSES)).any():
            raise ValueError("a status that there is not")

    def take(self, rows: np.ndarray) -> TrajectoryTable:
        """Rows number `rows` (`[k]` integers), or those where `rows` (`[n]` bool) is true."""
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        return TrajectoryTable(**{c.name: _taken(getattr(self, c.name), rows) for c in _COLUMNS})

    def record(self, row: int) -> TrajectoryRecord:
        """Everything known of row `row`."""
        return TrajectoryRecord(
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
        with decoding(lambda cause: StorageError(f"trajectory {shown(self.uid[row])}: {cause}")):
            found = json.loads(self.extra[row] or "{}")
        if not isinstance(found, dict):
            raise StorageError(f"what is kept of trajectory {shown(self.uid[row])} is no JSON object")
        return found

    @property
    def tokens(self) -> np.ndarray:
        """[n] int64: prompt and response tokens of each trajectory."""
        return self.prompt_tokens + self.response_tokens

    def has_status(self, *wanted: Status) -> np.ndarray:
        """[n] bool: which trajectories ended in one of these ways."""
        return np.isin(self.status, [STATUSES.index(status) for status in wanted])

    def __len__(self) -> int:
        return len(self.prompt_tokens)


_COLUMNS = fields(TrajectoryTable)


def _joined(columns: list) -> Any:
    return np.concatenate(columns) if isinstance(columns[0], np.ndarray) else type(columns[0]).join(columns)


def _taken(column: Any, rows: np.ndarray) -> Any:
    return column[rows] if isinstance(column, np.ndarray) else column.take(rows)
