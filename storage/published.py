"""Read a published model: each rank its slice of each unit, straight into a buffer, verified."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from opd.errors import StorageError
from opd.storage.manifest import (
    FILES,
    LATEST,
    MANIFEST,
    MAX_LATEST_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    Unit,
    block_checksum,
    is_version,
    parse_latest,
    parse_manifest,
)
from opd.storage.object_store import ObjectStore, Range, StoreOptions
from opd.untrusted import require_memory

if TYPE_CHECKING:
    from opd.storage.shard_cache import ShardCache

_log = logging.getLogger(__name__)

_PROBED = 16
"""Shard files whose size is checked when a model is opened. Others are checked on first use."""


@dataclass(frozen=True, slots=True)
class BlockPiece(Range):
    """A block of a unit: its position in the store, and its target."""

    unit: Unit
    index: int
    """Index of the block in its unit."""

    @property
    def checksum(self) -> bytes:
        """[16] bytes, the expected checksum of the block."""
        return self.unit.block_checksum(self.index)


class PublishedModel:
    """A model in an object store. Safe between threads. Close it, or use `with`."""

    def __init__(
        self, store: ObjectStore, manifest: Manifest, folder: str, cache: ShardCache | None = None
    ) -> None:
        """`folder` is the version's folder in `store`: "" if the store's URL is the version's own. A store on
        this machine needs no `cache`.
        """
        self.store = store
        self.cached_bytes = 0
        """Bytes taken from `cache` so far, instead of the store."""
        self._cache = None if store.near else cache
        self._counting = threading.Lock()
        self.manifest = manifest
        self._folder = folder
        self._sized: set[int] = set()
        self._proven: set[str] = set()
        """Units whose bytes had the checksum that the digest covers. Their blocks' are then right too."""

    @classmethod
    def open(
        cls,
        source: str | Path | ObjectStore,
        *,
        options: StoreOptions | None = None,
        cache: ShardCache | None = None,
    ) -> PublishedModel:
        """Open the model at a URL, path or store: its latest version, or the version whose own folder it is.

        Reads `latest` and the manifest alone, and checks the sizes of shard files. Raises `StorageError` if
        there is no published model, or if its manifest is incomplete, corrupt, of a newer format, or does not
        match its files. Slices of units are read from `cache` first, and stored there, unless the store is a
        folder.
        """
        if isinstance(source, ObjectStore):
            return cls(source, *_find_manifest(source), cache)._check_sizes()
        store = ObjectStore.open(source, options=options)
        try:
            return cls(store, *_find_manifest(store), cache)._check_sizes()
        except BaseException:
            store.close()
            raise

    @property
    def bytes_read(self) -> int:
        """Bytes received from the store so far, manifest and repeated reads included."""
        return self.store.bytes_read

    def part_bytes(self, unit: str, world: int) -> int:
        """Return the bytes of the largest slice, for a gather of equal sizes."""
        entry = self.manifest.unit(unit)
        return max(stop - start for start, stop in (entry.rank_range(rank, world) for rank in range(world)))

    def require_memory(self, unit: str) -> None:
        """Raise `StorageError` if this machine cannot hold all of `unit`, before allocating it."""
        require_memory(self.manifest.unit(unit).nbytes, f"{unit} of {self.store.url}")

    def read_part(self, unit: str, rank: int, world: int, into: memoryview) -> None:
        """Fill `into[: stop - start]` with the slice of rank `rank` of `world`. Every block is verified.

        `into` is writable and contiguous, of any item type. Bytes beyond the slice are left alone. A block
        with a wrong checksum is read again `StoreOptions.rereads` times. Raises `StorageError` naming object,
        range and cause, or if `into` is too small. After an error the content of `into` is undefined.
        """
        self.read_parts([unit], rank, world, [into])

    def read_parts(self, units: Sequence[str], rank: int, world: int, into: Sequence[memoryview]) -> None:
        """`read_part` several units at once, which keeps every connection busy also for small slices."""
        pieces: list[BlockPiece] = []
        for name, buffer in zip(units, into, strict=True):
            pieces += self._rank_blocks(name, rank, world, buffer)
        self._read(pieces)
        for name, buffer in zip(units, into, strict=True):
            # Compare a unit that was read as a whole with the checksum in the digest, once.
            if world > 1 or name in self._proven:
                continue
            unit = self.manifest.unit(name)
            if xxhash.xxh3_128(_as_bytes(buffer)[: unit.nbytes]).hexdigest() != unit.checksum:
                raise StorageError(
                    f"{name} of {self.store.url} is not what was published under its digest, although its"
                    " blocks match the manifest; publish the model again."
                )
            self._proven.add(name)

    def read_blocks(self, unit: str, blocks: Sequence[int], into: memoryview) -> None:
        """Fill `into` with `blocks` of a unit, in order, each at the next multiple of `block_bytes`; all are
        verified. Raises `StorageError` as `read_part`.
        """
        entry, wanted = self.manifest.unit(unit), {block: at for at, block in enumerate(blocks)}
        buffer, pieces = _as_bytes(into), []
        for extent in self.manifest.rank_extents(unit, 0, 1):
            in_extent = range(extent.start // entry.block_bytes, -(-extent.stop // entry.block_bytes))
            indices = [block for block in blocks if block in in_extent]
            if not indices:
                continue
            self._require_size(extent.shard)
            path = self._store_path(self.manifest.shard_path(extent.shard))
            for index in indices:
                low, high = entry.block_range(index)
                at = wanted[index] * entry.block_bytes
                target = buffer[at : at + high - low]
                pieces.append(BlockPiece(path, extent.offset + low - extent.start, target, entry, index))
        self._read(pieces)

    def _read(self, pieces: list[BlockPiece]) -> None:
        # Units' parts lie side by side in a shard file: in its order they share requests.
        pieces.sort(key=lambda piece: (piece.path, piece.start))
        if self._cache is None:
            self._fetch_blocks(pieces)
            return
        cached = self._cache.fill_blocks(self.manifest.digest, pieces, self._fetch_blocks)
        with self._counting:
            self.cached_bytes += cached

    def read_unit(self, unit: str, into: memoryview) -> None:
        """Fill `into[: nbytes]` with the full unit: `read_part` for a world of one."""
        self.read_part(unit, 0, 1, into)

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return name -> content of the tokenizer's files. Raises `StorageError` if one has changed."""
        return {name: self._read_file(name) for name in self.manifest.tokenizer}

    def close(self) -> None:
        """Close the store's threads and connections."""
        self.store.close()

    def __enter__(self) -> PublishedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _store_path(self, below_url: str) -> str:
        return below_url if self._folder else below_url.partition("/")[2]

    def _fetch_blocks(
        self, pieces: Sequence[BlockPiece], keep: Callable[[BlockPiece], None] | None = None
    ) -> None:
        """Read `pieces` from the store, and call `keep` with each verified one. A block with a wrong checksum
        is read again, a few times.
        """

        def verify_arrived(block: Range) -> None:
            assert isinstance(block, BlockPiece)
            where = f"{self.store.object_address(block.path)} bytes {block.start}-{block.stop}"
            rereads = self.store.options.rereads
            for _ in range(rereads):
                if block_checksum(block.into) == block.checksum:
                    break
                _log.warning("%s came with a wrong checksum and are read again; look at the network", where)
                self.store.read_range(block)
            else:
                if block_checksum(block.into) != block.checksum:
                    raise StorageError(
                        f"{where} ({block.unit.name}, block {block.index}) are corrupt: the checksum differs"
                        f" in each of {1 + rereads} reads; delete the object and publish the model again."
                    )
            if keep is not None:
                keep(block)

        self.store.read_ranges(pieces, verify_arrived)

    def _rank_blocks(self, name: str, rank: int, world: int, into: memoryview) -> Iterator[BlockPiece]:
        """Yield the blocks to read."""
        unit = self.manifest.unit(name)
        start, stop = unit.rank_range(rank, world)
        buffer = _as_bytes(into)
        if len(buffer) < stop - start:
            raise StorageError(
                f"the buffer for {name} has {len(buffer)} bytes and rank {rank} of {world} owns"
                f" {stop - start}; use part_bytes to size it."
            )
        for extent in self.manifest.rank_extents(name, rank, world):
            self._require_size(extent.shard)
            path = self._store_path(self.manifest.shard_path(extent.shard))
            for index in range(extent.start // unit.block_bytes, -(-extent.stop // unit.block_bytes)):
                low, high = unit.block_range(index)
                at = extent.offset + low - extent.start
                yield BlockPiece(path, at, buffer[low - start : high - start], unit, index)

    def _check_sizes(self) -> PublishedModel:
        shards = self.manifest.shards
        for step in range(min(shards, _PROBED)):
            self._require_size(step * (shards - 1) // max(1, min(shards, _PROBED) - 1))
        return self

    def _require_size(self, shard: int) -> None:
        """Raise `StorageError` unless a shard file has the size in the manifest."""
        if shard in self._sized:
            return
        path = self._store_path(self.manifest.shard_path(shard))
        size, due = self.store.size(path), self.manifest.sizes[shard]
        if size != due:
            raise StorageError(
                f"{self.store.object_address(path)} has {size} bytes where its manifest says {due}; publish"
                " the model again."
            )
        self._sized.add(shard)

    def _read_file(self, name: str) -> bytes:
        path = self._store_path(f"{self.manifest.version_name}/{FILES}/{name}")
        entry = self.manifest.tokenizer[name]
        if (size := self.store.size(path)) != entry.size:
            raise StorageError(
                f"{self.store.object_address(path)} has {size} bytes where its manifest says {entry.size};"
                " delete the object and publish the model again."
            )
        data = self.store.get_range(path, 0, entry.size)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise StorageError(
                f"{self.store.object_address(path)} bytes 0-{entry.size} are corrupt: the sha256 differs;"
                " delete the object and publish the model again."
            )
        return data


def _as_bytes(into: memoryview) -> memoryview:
    return into.cast("B") if into.format != "B" or into.ndim != 1 else into


def _find_manifest(store: ObjectStore) -> tuple[Manifest, str]:
    """Return the manifest below `store` and its folder."""
    if store.exists(LATEST):
        folder = parse_latest(store.get(LATEST, most=MAX_LATEST_BYTES), store.object_address(LATEST))
        path, due = f"{folder}/{MANIFEST}", folder
    elif store.exists(MANIFEST):
        folder, path = "", MANIFEST
        last = store.url.rpartition("/")[2]
        due = last if is_version(last) else None
    else:
        raise StorageError(f"{store.url} holds no published model; write one with `opd publish`.")
    manifest = parse_manifest(store.get(path, most=MAX_MANIFEST_BYTES), store.object_address(path))
    if due is not None and manifest.version_name != due:
        raise StorageError(
            f"{store.object_address(path)} describes another version; publish the model again."
        )
    return manifest, folder
