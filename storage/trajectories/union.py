"""Several stores read as one: what the ranks of a run have written, each its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields as columns
from pathlib import Path
from types import TracebackType

import numpy as np

from opd.storage.trajectories.batch import TrajectoryBatch
from opd.storage.trajectories.blocks import ReadCounters
from opd.storage.trajectories.read_ahead import Rows, batches
from opd.storage.trajectories.store import TrajectoryStore
from opd.storage.trajectories.table import TrajectoryTable
from opd.types import Sample


class UnionBatch:
    """Some trajectories in use, until it is released; see `TrajectoryBatch`."""

    def __init__(self, table: TrajectoryTable, rows: Sequence[int]) -> None:
        self.table = table
        self.rows = list(rows)
        self.parts: dict[int, TrajectoryBatch] = {}
        """By store; made by `TrajectoryUnion.lease`."""
        self.places: dict[int, tuple[int, int]] = {}
        """Of each row: its store, and its row there."""

    def read(self, row: int, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """See `TrajectoryBatch.read`."""
        store, own = self.places[row]
        return self.parts[store].read(own, name, start, stop)

    def sample(self, row: int) -> Sample:
        """See `TrajectoryBatch.sample`."""
        store, own = self.places[row]
        return self.parts[store].sample(own)

    def load(self, fields: Sequence[str]) -> UnionBatch:
        """Read and check all rows of `fields` now; returns itself."""
        for part in self.parts.values():
            part.load(fields)
        return self

    def release(self) -> None:
        """Give the memory back and let others reclaim; a second call does nothing."""
        for part in self.parts.values():
            part.release()

    def __enter__(self) -> UnionBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class TrajectoryUnion:
    """Stores with the same fields as one `TrajectoryStore` for readers: `table` has the rows of the first,
    then of the second, and so on. A uid may be in several of them.
    """

    def __init__(self, stores: Sequence[TrajectoryStore]) -> None:
        """`stores`: at least one; closed with the union."""
        self.stores = list(stores)
        self.table = TrajectoryTable.join([store.table for store in stores])
        self.starts = np.cumsum([0, *(len(store.table) for store in stores)])
        """[S + 1] int64: the rows of store `s` are `starts[s] ... starts[s + 1] - 1`."""

    @classmethod
    def open(cls, folders: Iterable[Path]) -> TrajectoryUnion:
        """The stores in `folders`. Raises `StorageError` as `TrajectoryStore.open` does."""
        stores: list[TrajectoryStore] = []
        try:
            for folder in folders:
                stores.append(TrajectoryStore.open(folder))
            return cls(stores)
        except BaseException:
            for store in stores:
                store.close()
            raise

    @property
    def counters(self) -> ReadCounters:
        """What this object has read of heavy fields."""
        each = [store.counters for store in self.stores]
        return ReadCounters(*(sum(getattr(c, f.name) for c in each) for f in columns(ReadCounters)))

    def heavy_bytes(self, fields: Sequence[str] | None = None) -> np.ndarray:
        """[n] int64; see `TrajectoryStore.heavy_bytes`."""
        return np.concatenate([store.heavy_bytes(fields) for store in self.stores])

    def lease(self, rows: Rows) -> UnionBatch:
        """The trajectories in these rows of `table`; see `TrajectoryStore.lease`."""
        chosen = np.asarray(rows, np.int64)
        batch = UnionBatch(self.table, chosen.tolist())
        owners = np.searchsorted(self.starts, chosen, side="right") - 1
        own = chosen - self.starts[owners]
        try:
            for store in np.unique(owners).tolist():
                batch.parts[store] = self.stores[store].lease(own[owners == store])
        except BaseException:
            batch.release()
            raise
        pairs = zip(owners.tolist(), own.tolist(), strict=True)
        batch.places = dict(zip(batch.rows, pairs, strict=True))
        return batch

    def batches(
        self, plan: Iterable[Rows], fields: Sequence[str], *, ahead: bool = True
    ) -> Iterator[UnionBatch]:
        """Lease the mini-batches of `plan` one after another; see `TrajectoryStore.batches`."""
        return batches(self.lease, plan, fields, ahead=ahead)

    def close(self) -> None:
        """End all leases of this object."""
        for store in self.stores:
            store.close()

    def __enter__(self) -> TrajectoryUnion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
