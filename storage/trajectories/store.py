"""`TrajectoryStore`: metadata in memory, heavy fields mapped when they are needed and released when used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from opd.errors import StorageError
from opd.storage.files import read_plain
from opd.storage.store_faults import StoreOptions
from opd.storage.trajectories.batch import TrajectoryBatch
from opd.storage.trajectories.blocks import BlockChecks, LocalSegments, ReadCounters
from opd.storage.trajectories.faults import reporting
from opd.storage.trajectories.fields import HEADER, Field, StoreHeader, decode_header
from opd.storage.trajectories.metadata import MetadataReader
from opd.storage.trajectories.read_ahead import Rows, batches
from opd.storage.trajectories.remote import RemoteMetadata, RemoteSegments, open_remote
from opd.storage.trajectories.segments import segment_path
from opd.storage.trajectories.table import TrajectoryTable


class TrajectoryStore:
    """A reader; any number of processes may have one, also while the store is written.

    Opening reads the metadata and not one byte of a heavy field. `table` is a snapshot of what was sealed
    then; `refresh` takes a newer one. Safe for threads, except `refresh` beside other calls.
    """

    def __init__(
        self,
        name: str,
        header: StoreHeader,
        metadata: MetadataReader | RemoteMetadata,
        segments: LocalSegments | RemoteSegments,
    ) -> None:
        """Use `open`."""
        self.name = name
        self.header = header
        self._metadata = metadata
        self._segments = segments
        self._checks = BlockChecks(header)
        self.table: TrajectoryTable = metadata.table()
        """What is known of every trajectory; rows of it are what `lease` takes."""

    @classmethod
    def open(
        cls,
        url: str | Path,
        *,
        cache: str | Path | None = None,
        cache_bytes: int = 64 << 30,
        options: StoreOptions | None = None,
    ) -> TrajectoryStore:
        """The store at `url`: a folder, `file://`, or any URL of `ObjectStore` (`s3://` needs the extra).

        What is read from a remote store is kept in the folder `cache`, which all processes of a node share,
        up to about `cache_bytes` beside what is in use. Raises `StorageError` if there is no store, it is
        damaged or of a newer format, or a remote one has no `cache`.
        """
        text = str(url).removeprefix("file://")
        if "://" in text:
            if cache is None:
                raise StorageError(
                    f"{text} is a remote trajectory store, which is read through a folder on this node; give"
                    " one as cache"
                )
            return cls(text, *open_remote(text, Path(cache), cache_bytes, options))
        folder = Path(text)
        with reporting(folder, "read"):
            try:
                header, _ = decode_header(read_plain(folder / HEADER), str(folder / HEADER))
            except FileNotFoundError:
                raise StorageError(f"there is no trajectory store in {folder}; check the path") from None
            metadata = MetadataReader(folder, len(header.fields))
            metadata.refresh()
            return cls(text, header, metadata, LocalSegments(folder))

    @property
    def fields(self) -> tuple[Field, ...]:
        return self.header.fields

    @property
    def folder(self) -> Path:
        """Where its segments lie on this node."""
        return self._segments.folder

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
        with reporting(self.name, "read"):
            changed = self._metadata.refresh()
        if changed:
            self.table = self._metadata.table()
        return changed

    def lease(self, rows: Rows) -> TrajectoryBatch:
        """The trajectories in these rows of `table`, to be read until they are released.

        Raises `StorageError` if one was retired meanwhile, and its disk given back.
        """
        with reporting(self.name, "read"):
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

    def read_checks(self, number: int) -> bytes:
        """All checksums of segment `number`."""
        with reporting(self.name, "read"):
            self._segments.bring(number, "checks", 0, 0)
            path = segment_path(self.folder, number, "checks")
            self._segments.bring(number, "checks", 0, path.stat().st_size)
            return path.read_bytes()

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
        if not isinstance(self._metadata, MetadataReader):
            return True
        latest = MetadataReader(self.folder, len(self.fields))
        latest.refresh()
        return table.uid[row] in set(latest.table().uid)
