"""`TrajectoryBatch`: some trajectories in use, until it is released."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import numpy as np

from opd.errors import StorageError
from opd.storage.trajectories.blocks import BlockChecks, MappedRows, Segments, WrongBytesError
from opd.storage.trajectories.faults import reporting
from opd.storage.trajectories.table import TrajectoryTable
from opd.types import Sample


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
