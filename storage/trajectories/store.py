"""Readers: `TrajectoryStore`; several stores as one; batches one after another, the next read meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields as columns
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

import numpy as np

from opd.errors import StorageError
from opd.storage.files import read_plain
from opd.storage.trajectories.batch import BlockChecks, ReadCounters, Segments, TrajectoryBatch
from opd.storage.trajectories.metadata import MetadataReader
from opd.storage.trajectories.segments import HEADER, Field, StoreHeader, decode_header, reporting
from opd.storage.trajectories.table import TrajectoryTable
from opd.types import Sample

Rows = Sequence[int] | np.ndarray


class Batch(Protocol):
    """Some trajectories in use."""

    def load(self, fields: Sequence[str]) -> Self: ...

    def release(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


B = TypeVar("B", bound=Batch)


def batches(
    lease: Callable[[Rows], B], plan: Iterable[Rows], fields: Sequence[str], *, ahead: bool
) -> Iterator[B]:
    """`lease` the rows of `plan` one after another; each batch is released when the next is asked for.

    With `ahead` the `fields` of the next one are read and checked by a thread while this one is used: two
    are in memory, else one.
    """
    if not ahead:
        for rows in plan:
            with lease(rows) as batch:
                yield batch
        return

    def loaded(rows: Rows) -> B:
        batch = lease(rows)
        try:
            return batch.load(fields)
        except BaseException:
            batch.release()
            raise

    waiting: Future[B] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="opd-trajectories") as pool:
        try:
            for rows in plan:
                coming = pool.submit(loaded, rows)
                if waiting is not None:
                    current, waiting = waiting, coming
                    yield from _used(current)
                waiting = coming
            if waiting is not None:
                current, waiting = waiting, None
                yield from _used(current)
        finally:
            if waiting is not None and waiting.exception() is None:
                waiting.result().release()


def _used(future: Future[B]) -> Iterator[B]:
    with future.result() as batch:
        yield batch


class TrajectoryStore:
    """A reader; any number of processes may have one, also while the store is written.

    Opening reads the metadata and not one byte of a heavy field. `table` is a snapshot of what was sealed
    then; `refresh` takes a newer one. Safe for threads, except `refresh` beside other calls.
    """

    def __init__(self, folder: Path, header: StoreHeader, metadata: MetadataReader) -> None:
        """Use `open`."""
        self.folder = folder
        self.header = header
        self._metadata = metadata
        self._segments = Segments(folder)
        self._checks = BlockChecks(header)
        self.table: TrajectoryTable = metadata.table()
        """What is known of every trajectory; rows of it are what `lease` takes."""

    @classmethod
    def open(cls, folder: str | Path) -> TrajectoryStore:
        """The store in `folder`; `StorageError` if there is none, it is damaged or of a newer format."""
        path = Path(folder)
        with reporting(path, "read"):
            try:
                header = decode_header(read_plain(path / HEADER), str(path / HEADER))
            except FileNotFoundError:
                raise StorageError(f"there is no trajectory store in {path}; check the path") from None
            metadata = MetadataReader(path, len(header.fields))
            metadata.refresh()
            return cls(path, header, metadata)

    @property
    def fields(self) -> tuple[Field, ...]:
        return self.header.fields

    @property
    def counters(self) -> ReadCounters:
        """What this object has read of heavy fields."""
        return self._checks.counters

    def heavy_bytes(self, fields: Sequence[str] | None = None) -> np.ndarray:
        """[n] int64: bytes of `fields` (default: all) that each trajectory of `table` has."""
        total = np.zeros(len(self.table), np.int64)
        for name in fields if fields is not None else [field.name for field in self.fields]:
            index = self.header.index(name)
            field = self.fields[index]
            rows = self.header.rows(field, self.table, slice(None))
            total += rows * field.row_bytes * (self.table.locations["segment"][:, index] > 0)
        return total

    def refresh(self) -> bool:
        """Take what has been sealed and retired since; whether `table` is another one now. Batches that are
        held keep theirs.
        """
        with reporting(self.folder, "read"):
            changed = self._metadata.refresh()
        if changed:
            self.table = self._metadata.table()
        return changed

    def lease(self, rows: Rows) -> TrajectoryBatch:
        """The trajectories in these rows of `table`, to be read until they are released.

        Raises `StorageError` if one was retired meanwhile, and its disk given back.
        """
        with reporting(self.folder, "read"):
            chosen = np.asarray(rows, np.int64).tolist()
            return TrajectoryBatch(self.table, chosen, self._segments, self._checks, self._still_there)

    def batches(
        self, plan: Iterable[Rows], fields: Sequence[str], *, ahead: bool = True
    ) -> Iterator[TrajectoryBatch]:
        """Lease the mini-batches of `plan` one after another; each is released when the next is asked for.

        With `ahead` the `fields` of the next one are read and checked by a thread while this one is used: two
        mini-batches are in memory, else one.
        """
        return batches(self.lease, plan, fields, ahead=ahead)

    def close(self) -> None:
        """End all leases of this object."""
        self._segments.close()

    def __enter__(self) -> TrajectoryStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _still_there(self, table: TrajectoryTable, row: int) -> bool:
        """Whether the trajectory in `row` of `table` is in the store as it is now."""
        latest = MetadataReader(self.folder, len(self.fields))
        latest.refresh()
        return table.uid[row] in set(latest.table().uid)


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
