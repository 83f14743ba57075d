"""One trajectory while it is being written: its lengths are checked, its fields are streams."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from opd.errors import StorageError
from opd.storage.files import fsync_folder
from opd.storage.trajectories.fields import Field, StoreHeader
from opd.storage.trajectories.segments import FieldStream, SegmentWriter
from opd.storage.trajectories.table import TrajectoryRecord

Piece = tuple[Field, memoryview]


class OpenTrajectory:
    """What `append` adds to and `seal` completes. `locations` (`[F]`) is what it had when it was reopened."""

    def __init__(
        self, header: StoreHeader, segment: SegmentWriter, record: TrajectoryRecord, locations: np.ndarray
    ) -> None:
        """`record` says its uid, its prompt's length, and how long its response may become."""
        self.reopened = bool(locations["segment"].any())
        self.segment = segment
        self._header = header
        self._record = record
        self._locations = locations
        self._streams: dict[str, FieldStream] = {}
        segment.users += 1

    def check(self, name: str, values: np.ndarray) -> Piece:
        """A piece of field `name`, ready to be written. Raises `StorageError`, `ValueError` if wrong."""
        index = self._header.index(name)
        kind = self._header.fields[index]
        data = kind.bytes_of(values)
        if self._locations["segment"][index]:
            raise StorageError(
                f"trajectory {self._record.uid} has field {name} already; what is sealed stays as it is"
            )
        have = self._streams[name].rows if name in self._streams else 0
        rows, most = have + len(data) // kind.row_bytes, self._expected(kind, self._record.response_tokens)
        if rows > most:
            raise StorageError(
                f"trajectory {self._record.uid}: {rows} rows of {name}, but it was begun with room for"
                f" {most}; begin it with the longest response it may get"
            )
        return kind, data

    def append(self, piece: Piece) -> None:
        """Raises `OSError` as the system does."""
        kind, data = piece
        if not len(data):
            return
        if kind.name not in self._streams:
            most = self._expected(kind, self._record.response_tokens)
            rows = self._header.block_rows(kind)
            self._streams[kind.name] = FieldStream(self.segment, kind, most, rows)
        self._streams[kind.name].append(data)

    def check_complete(self, record: TrajectoryRecord) -> None:
        """Raises `StorageError` unless every field has as many rows as the lengths of `record` say."""
        if record.prompt_tokens != self._record.prompt_tokens:
            raise StorageError(
                f"trajectory {record.uid} was begun with {self._record.prompt_tokens} prompt tokens and is"
                f" sealed with {record.prompt_tokens}; they must agree"
            )
        if self.reopened and record.response_tokens != self._record.response_tokens:
            raise StorageError(
                f"trajectory {record.uid} was sealed with {self._record.response_tokens} response tokens and"
                f" now with {record.response_tokens}; they must agree"
            )
        for name, stream in self._streams.items():
            expected = self._expected(stream.field, record.response_tokens)
            if stream.rows != expected:
                raise StorageError(
                    f"trajectory {record.uid} has {stream.rows} rows of {name}, but its lengths ask for"
                    f" {expected}; append the rest, or give the right lengths"
                )

    def finish(self) -> np.ndarray:
        """Write what is left; returns `[F]` `LOCATION`. Raises `OSError`."""
        for name, stream in self._streams.items():
            stream.finish()
            check = self.segment.write_checks(stream.digests)
            self._locations[self._header.index(name)] = (self.segment.number, check, stream.start)
        return self._locations

    @property
    def fields(self) -> list[str]:
        """The fields it got."""
        return list(self._streams)

    def release(self) -> None:
        """It writes to its segment no longer."""
        self.segment.users -= 1

    def abandon(self) -> None:
        """Give up what was written, and its disk. Raises `OSError`."""
        for stream in self._streams.values():
            stream.abandon()

    def _expected(self, kind: Field, response_tokens: int) -> int:
        return response_tokens + (self._record.prompt_tokens if kind.rows == "sequence" else 0)


def sync(folder: Path, trajectories: Sequence[OpenTrajectory]) -> None:
    """Return when everything of finished `trajectories` is on the disk. Raises `OSError`."""
    names: dict[SegmentWriter, set[str]] = {}
    for trajectory in trajectories:
        names.setdefault(trajectory.segment, {"checks"}).update(trajectory.fields)
    for segment, fields in names.items():
        segment.sync(fields)
    if any([segment.take_new() for segment in names]):
        fsync_folder(folder / "segments")
