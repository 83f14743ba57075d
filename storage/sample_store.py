"""`SampleWriter` and `SampleStore`: samples in folders of lots, one writer a folder, any number of readers.

    FOLDER/BATCH-NUMBER.safetensors     a lot (`sample_lot.py`) of one batch
           writer                       locked by who writes

A rename publishes a lot, an unlink gives up its batch, and a reader that has it open keeps it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from opd.errors import RunFolderError, StorageError, limit_fix
from opd.storage.files import FileLock, fsync_folder, write_atomic
from opd.storage.sample_lot import (
    EVERY_FIELD,
    EXPERT_CHOICES,
    FIELDS,
    SAMPLING_MASKS,
    ReadCounters,
    SampleItem,
    SampleLot,
    SampleRecord,
    encode_lot,
)
from opd.types import Sample

Rows = Sequence[int] | np.ndarray
_NAME = re.compile(r"([0-9]{8})-([0-9]{8})\.safetensors")
BATCHES = 10**8
"""Limit of batches and of lots that have names."""


@contextlib.contextmanager
def _convert_errors(folder: Path, action: str) -> Iterator[None]:
    """Raise any `OSError` of the block as a `StorageError`: "samples in FOLDER cannot be ACTION ..."."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        mend = limit_fix(error, "free disk space or check its permissions")
        if error.errno == errno.ENOMEM:
            mend = "each of its files is mapped: raise vm.max_map_count, or write more samples together"
        raise StorageError(
            f"samples in {folder} cannot be {action} ({error.strerror or error}); {mend}"
        ) from error


def _lots_of(folder: Path) -> list[tuple[int, int, Path]]:
    """Return batch, number and path of every lot, in the order in which they were written."""
    names = [(_NAME.fullmatch(entry), entry) for entry in os.listdir(folder)]
    lots = [(int(match[1]), int(match[2]), folder / entry) for match, entry in names if match]
    return sorted(lots, key=lambda lot: lot[1])


class SampleWriter:
    """The one process that writes a folder of samples. Safe for threads.

    Args:
        folder: Made if missing. Half-written files of a killed writer are removed.
        durable: Whether a lot is on the disk when `put` returns, so that a power cut does not remove it.

    Raises `StorageError` if another process writes the folder, or the disk refuses.
    """

    def __init__(self, folder: str | os.PathLike[str], *, durable: bool = True) -> None:
        self.folder = Path(folder)
        self._durable = durable
        self._mutex = threading.Lock()
        self._open = True
        with _convert_errors(self.folder, "written"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.folder / "writer")
            try:
                self._lock.acquire()
            except RunFolderError as error:
                raise StorageError(f"{error}; samples have one writer at a time") from None
            try:
                for half in self.folder.glob(".[0-9]*-[0-9]*.safetensors.*.tmp"):
                    half.unlink()
                self._next = 1 + max((number for _, number, _ in _lots_of(self.folder)), default=0)
                if durable:
                    fsync_folder(self.folder.parent)
            except BaseException:
                self._lock.release()
                raise

    def put(self, items: Sequence[SampleItem], batch: int = 0, drops: Sequence[str] = ()) -> None:
        """Write samples as a lot of `batch`. They replace samples of the batch that have their uids, or are
        named by `drops`, atomically.

        Raises `StorageError` if the disk is full.
        """
        uids = [record.uid for record, _ in items]
        if not 0 <= batch < BATCHES:
            raise ValueError(f"batch {batch}: give a number from 0 to {BATCHES - 1}")
        if len(set(uids)) < len(uids):
            raise ValueError("a sample is given twice; give each once")
        with self._mutex, _convert_errors(self.folder, "written"):
            if not self._open:
                raise StorageError(f"the writer of the samples in {self.folder} was closed; open another one")
            if self._next >= BATCHES:
                raise StorageError(f"{self.folder} has as many files as have names; remove the newest")
            path = self.folder / f"{batch:08d}-{self._next:08d}.safetensors"
            data = encode_lot(items, drops, path.name)
            self._next += 1
            try:
                write_atomic(path, data, durable=self._durable, sweep=False)  # done when it was opened
            except OSError:
                path.unlink(missing_ok=True)  # it may have its name, and not be on the disk
                raise

    def retire_before(self, batch: int) -> None:
        """Remove every batch before number `batch` from the disk."""
        with self._mutex, _convert_errors(self.folder, "removed"):
            for lot_batch, _, path in _lots_of(self.folder):
                if lot_batch < batch:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process write. Does nothing the second time."""
        with self._mutex:
            if self._open:
                self._open = False
                self._lock.release()

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SampleStore:
    """A reader of folders: their contents at opening, even if their writers remove them later.

    `records` has the samples of the first folder, then those of the second, and so on. A uid may be in
    several folders and batches. Opening reads not one byte of a field.
    """

    def __init__(self, lots: Sequence[Sequence[tuple[int, SampleLot]]], counters: ReadCounters) -> None:
        """Use `open`. `lots`: by folder, batch and lot."""
        self.counters = counters
        self._lots: list[SampleLot] = []
        self.records: list[SampleRecord] = []
        """The record of every sample. `lease` takes their numbers as rows."""
        places, batches, starts = [np.zeros((0, 2), np.int64)], [], [0]
        for folder in lots:
            # Lot number and row of each sample that no later lot of its batch has removed or rewritten.
            live: dict[tuple[int, str], tuple[int, int]] = {}
            for position, (batch, lot) in enumerate(folder):
                for uid in lot.drops:
                    live.pop((batch, uid), None)
                live.update(((batch, one.uid), (position, at)) for at, one in enumerate(lot.records))
            self.records += [folder[position][1].records[at] for position, at in live.values()]
            batches.append(np.array([batch for batch, _ in live], np.int64))
            starts.append(len(self.records))
            alive = np.array(list(live.values()), np.int64).reshape(-1, 2)
            places.append(alive + np.array([len(self._lots), 0]))
            self._lots += [lot for _, lot in folder]
        self.batch = np.concatenate([np.zeros(0, np.int64), *batches])
        """[n] int64: the batch of each sample."""
        self.starts = np.array(starts, np.int64)
        """[S + 1] int64: the rows of folder `s` are `starts[s] ... starts[s + 1] - 1`."""
        self._places = np.concatenate(places)
        """[n, 2] int64: the lot number of each sample, and its row there."""

    @classmethod
    def open(cls, folders: Iterable[Path], batch: int | None = None) -> SampleStore:
        """Open the samples in `folders`, of one `batch` or of all.

        Raises `StorageError` if a folder is missing, or a file damaged or of a newer format.
        """
        counters, by_folder = ReadCounters(), []
        for folder in folders:
            lots = []
            try:
                entries = _lots_of(folder)
            except FileNotFoundError:
                raise StorageError(f"there are no samples in {folder}; check the path") from None
            except OSError as error:
                raise StorageError(f"{folder} cannot be read ({error.strerror}); check the path") from error
            for lot_batch, _, path in entries:
                if batch is None or lot_batch == batch:
                    with _convert_errors(folder, "read"), contextlib.suppress(FileNotFoundError):  # removed
                        lots.append((lot_batch, SampleLot(path, counters)))
            by_folder.append(lots)
        return cls(by_folder, counters)

    def heavy_bytes(self) -> np.ndarray:
        """Return [n] int64: bytes of the written fields of each sample."""
        sizes = [lot.field_bytes() for lot in self._lots]
        first = np.cumsum([0, *map(len, sizes)])
        number, row = self._places.T
        return np.concatenate([np.zeros(0, np.int64), *sizes])[first[number] + row]

    def choices_placeholder(self, row: int) -> np.ndarray | None:
        """Return an array of the shape and dtype of the expert choices of sample `row`, without memory and
        without their values. `None` if it has none.
        """
        number, lot_row = self._places[row].tolist()
        lot = self._lots[number]
        if not lot.has_field(lot_row, EXPERT_CHOICES):
            return None
        dtype, form = lot.field_form(EXPERT_CHOICES)
        return np.broadcast_to(np.zeros((), dtype), (lot.field_length(lot_row, EXPERT_CHOICES), *form))

    def lease(self, rows: Rows) -> SampleBatch:
        """Return the samples in these rows, readable until they are released."""
        places: dict[int, tuple[SampleLot, int]] = {}
        for row in np.asarray(rows, np.int64).tolist():
            lot, lot_row = self._places[row].tolist()
            places[row] = self._lots[lot], lot_row
        return SampleBatch(self.records, places)

    def lease_batches(
        self, plan: Iterable[Rows], fields: Sequence[str], *, ahead: bool = True
    ) -> Iterator[SampleBatch]:
        """Lease the mini-batches of `plan` one after another. Each is released when the next is requested.

        With `ahead` a thread reads and checks the `fields` of the next one while this one is used: two are in
        memory, else one.
        """
        if not ahead:
            for rows in plan:
                with self.lease(rows) as batch:
                    yield batch
            return

        def load_batch(rows: Rows) -> SampleBatch:
            batch = self.lease(rows)
            try:
                return batch.load(fields)
            except BaseException:
                batch.release()
                raise

        waiting: Future[SampleBatch] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="opd-samples") as pool:
            try:
                for rows in plan:
                    coming = pool.submit(load_batch, rows)
                    if waiting is not None:
                        current, waiting = waiting, coming
                        yield from _use_batch(current)
                    waiting = coming
                if waiting is not None:
                    current, waiting = waiting, None
                    yield from _use_batch(current)
            finally:
                if waiting is not None and waiting.exception() is None:
                    waiting.result().release()


def _use_batch(future: Future[SampleBatch]) -> Iterator[SampleBatch]:
    with future.result() as batch:
        yield batch


class SampleBatch:
    """The fields of some samples. Each is read on first use, and `release` frees the memory.

    Arrays handed out stay readable, and right, after `release`, but reading them then takes memory again.
    Made by `SampleStore.lease`.
    """

    def __init__(self, records: Sequence[SampleRecord], places: Mapping[int, tuple[SampleLot, int]]) -> None:
        self._records = records
        self.rows = list(places)
        self._places = dict(places)
        self._read: set[tuple[int, str]] = set()

    def has_field(self, row: int, name: str) -> bool:
        lot, lot_row = self._locate_row(row)
        return lot.has_field(lot_row, name)

    def read(self, row: int, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows `start ... stop - 1` (default: all) of field `name` of sample `row`, `[R]`.

        A read-only view of the file's pages, shared with every process that reads them. Raises `StorageError`
        if the sample has no such field or its bytes are wrong, and `ValueError` for rows that do not exist.
        """
        lot, lot_row = self._locate_row(row)
        length = lot.field_length(lot_row, name)
        end = length if stop is None else stop
        if not 0 <= start <= end <= length:
            raise ValueError(f"rows {start} to {end} of {name}: sample {self._records[row].uid} has {length}")
        if not lot.has_field(lot_row, name):
            raise StorageError(f"sample {self._records[row].uid} has no {name}: it was written without")
        if not length:
            return np.zeros(0, FIELDS[name])  # a sample with expert choices has some
        self._read.add((row, name))
        return lot.read(lot_row, name, start, end)

    def load(self, fields: Sequence[str]) -> SampleBatch:
        """Read and check all rows of `fields` now, if samples have them. Return itself."""
        for row in self.rows:
            for name in fields:
                if self.has_field(row, name):
                    self.read(row, name)
        return self

    def get_sample(self, row: int) -> Sample:
        """Return the sample in `row`, whose arrays are views. Missing fields are empty.

        Raises `StorageError` if it was written without tokens.
        """
        record = self._records[row]
        tokens = self.read(row, "token_ids")
        others = (name for name in EVERY_FIELD if name != "token_ids" and self.has_field(row, name))
        arrays: dict[str, Any] = {name: self.read(row, name) for name in others}
        extra = record.extra
        return Sample(
            uid=record.uid,
            group_uid=record.group_uid,
            domain=record.domain,
            teacher=record.teacher or None,
            prompt_ids=tokens[: record.prompt_tokens],
            response_ids=tokens[record.prompt_tokens :],
            reward=record.reward,
            status=record.status,
            label=extra.get("label"),
            reward_parts=extra.get("reward_parts", {}),
            failure=extra.get("failure"),
            metadata=extra.get("metadata", {}),
            branch_of=extra.get("branch_of", ""),
            **arrays,
        )

    def release(self) -> None:
        """Free the memory. A second call does nothing."""
        read, self._read = self._read, set()
        places, self._places = self._places, {}
        for row, name in read:
            lot, lot_row = places[row]
            lot.release_field(lot_row, name)

    def __enter__(self) -> SampleBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _locate_row(self, row: int) -> tuple[SampleLot, int]:
        if row not in self._places:
            uid = self._records[row].uid
            raise StorageError(f"sample {uid} is not in this batch, or it was released; lease it first")
        return self._places[row]


def fields_of(sample: Sample) -> dict[str, np.ndarray]:
    """Return the fields that a sample has, in the dtypes of `FIELDS`."""
    arrays = {name: getattr(sample, name) for name in FIELDS}
    fields = {
        name: np.asarray(array, FIELDS[name])
        for name, array in arrays.items()
        if name == "token_ids" or len(array)
    }
    if sample.expert_choices is not None and len(sample.expert_choices):
        fields[EXPERT_CHOICES] = np.asarray(sample.expert_choices)
    if sample.sampling_masks is not None and len(sample.sampling_masks):
        fields[SAMPLING_MASKS] = np.asarray(sample.sampling_masks)
    return fields
