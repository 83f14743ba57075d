"""A store from a local folder into an object store, without its holes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from opd.errors import StorageError
from opd.storage.object_store import ObjectStore
from opd.storage.store_faults import StoreOptions
from opd.storage.trajectories.fields import HEADER, Field
from opd.storage.trajectories.frames import Change, ChangeKind, encode_change
from opd.storage.trajectories.remote import METADATA, object_name
from opd.storage.trajectories.segments import CHECK_BYTES
from opd.storage.trajectories.store import TrajectoryStore
from opd.storage.trajectories.table import LOCATION

_ALIGNMENT = 64
_PIECE = 4 << 20


def upload(
    store: TrajectoryStore,
    url: str,
    *,
    options: StoreOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write everything `store` holds to `url`; `TrajectoryStore.open(url, cache=...)` then reads it.

    Every block is compared with its checksum on the way. `progress` is told of bytes read. The header comes
    last, so that a broken upload is no store. Raises `StorageError` if there is one at `url` already, and for
    corrupt blocks.
    """
    with ObjectStore.open(url, options=options) as target:
        if target.exists(HEADER):
            raise StorageError(f"{target.name(HEADER)} exists already; choose another URL, or delete it")
        locations = np.zeros(store.table.locations.shape, LOCATION)
        sizes: dict[str, dict[str, int]] = {}
        for number in np.unique(store.table.locations["segment"]).tolist():
            if number:
                files = sizes[f"{number:06d}"] = {}
                for index, field in enumerate(store.fields):
                    rows = np.flatnonzero(store.table.locations["segment"][:, index] == number)
                    if len(rows):
                        own, size = _packed(store, field, index, rows)
                        locations[rows, index] = own
                        _put(target, store, number, field, rows, own, progress)
                        files[field.name] = size
                files["checks"] = _put_checks(target, store, number)
        table = replace(store.table, locations=locations)
        target.put(METADATA, encode_change(Change(ChangeKind.ADD, 1, table)))
        target.put(HEADER, store.header.encode(segments=sizes))


def _packed(store: TrajectoryStore, field: Field, index: int, rows: np.ndarray) -> tuple[np.ndarray, int]:
    """Places one after another for these trajectories, and the end of the last."""
    locations = store.table.locations[rows, index].copy()
    sizes = store.header.rows(field, store.table, rows) * field.row_bytes
    rounded = -(-sizes // _ALIGNMENT) * _ALIGNMENT
    locations["offset"] = np.cumsum(rounded) - rounded
    return locations, int(locations["offset"][-1] + sizes[-1])


def _put(
    target: ObjectStore,
    store: TrajectoryStore,
    number: int,
    field: Field,
    rows: np.ndarray,
    places: np.ndarray,
    progress: Callable[[int], None] | None,
) -> None:
    def chunks() -> Iterator[memoryview]:
        end = 0
        for row, start in zip(rows.tolist(), places["offset"].tolist(), strict=True):
            yield memoryview(bytes(start - end))
            end = start
            with store.lease([row]) as batch:
                count = int(store.header.rows(field, store.table, row))
                step = max(1, _PIECE // field.row_bytes)
                for first in range(0, count, step):
                    piece = batch.read(row, field.name, first, min(count, first + step))
                    yield piece.reshape(-1).view(np.uint8).data
                    batch.forget(row, field.name, first, first + len(piece))
                    end += piece.nbytes
                    if progress is not None:
                        progress(piece.nbytes)

    target.put(object_name(number, field.name), chunks)


def _put_checks(target: ObjectStore, store: TrajectoryStore, number: int) -> int:
    data = store.read_checks(number)
    whole = data[: len(data) // CHECK_BYTES * CHECK_BYTES]
    target.put(object_name(number, "checks"), whole)
    return len(whole)
