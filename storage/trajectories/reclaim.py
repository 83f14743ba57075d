"""Disk that trajectories no longer need, given back as soon as no process uses it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from opd.storage.leases import LeaseTable
from opd.storage.trajectories.fields import StoreHeader
from opd.storage.trajectories.segments import (
    lease_key,
    punch,
    punch_gaps,
    segment_files,
    segment_numbers,
    segment_path,
)
from opd.storage.trajectories.table import TrajectoryTable

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
