"""What the cache's tests share: rows that follow from a number, and a look at the folder from outside."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from opd.storage.cache_index import Place, SegmentIndex
from opd.storage.hidden_cache import CacheRecord, HiddenStateCache, cache_key

BLOCK = 4096


def key_of(number: int) -> bytes:
    return cache_key("digest", np.array([number, number + 1], dtype=np.int32), 0)


def rows_of(number: int, rows: int = 5, width: int = 48) -> np.ndarray:
    """[R, D] float32 that no other number gives."""
    return np.random.default_rng(number).standard_normal((rows, width)).astype(np.float32)


def put(cache: HiddenStateCache, number: int, rows: int = 5) -> bool:
    return cache.put(key_of(number), rows_of(number, rows), CacheRecord(f"s{number}", "teacher", number))


def holds(cache: HiddenStateCache, number: int, rows: int = 5) -> bool:
    """Whether the cache has `number`; if so, it must be right in every bit."""
    lease = cache.get(key_of(number))
    if lease is None:
        return False
    with lease:
        assert np.array_equal(lease.rows, rows_of(number, rows))
        assert (lease.record.uid, lease.record.version) == (f"s{number}", number)
    return True


@contextmanager
def index_of(folder: Path) -> Iterator[SegmentIndex]:
    index = SegmentIndex.of(folder / "v2")
    try:
        yield index
    finally:
        index.close()


def keys(folder: Path) -> list[str]:
    """Of all blobs, in hex."""
    with index_of(folder) as index:
        return sorted(key.hex() for key, _ in index.entries())


def unfinished(folder: Path) -> list[Place]:
    """What is being written, or was evicted and is still in use."""
    with index_of(folder) as index, index.env.begin() as txn:
        return [*index.listed(txn, b"p"), *index.listed(txn, b"d")]


def disk_bytes(folder: Path) -> int:
    """Bytes of all blobs in whole blocks, those being written too, as the quota counts them."""
    with index_of(folder) as index, index.env.begin() as txn:
        cursor = txn.cursor()
        places = [Place._make(struct.unpack("<QQQ", value)) for key, value in cursor if key[:1] in b"kp"]
        return sum(place.footprint for place in places)


def taken_bytes(folder: Path) -> int:
    """Bytes of disk that the segments take."""
    return sum(path.stat().st_blocks * 512 for path in (folder / "v2" / "segments").iterdir())


def blob_of(folder: Path, number: int) -> tuple[Path, int, int]:
    """The segment of a blob, its first byte and its size."""
    with index_of(folder) as index:
        place = index.find(key_of(number))
        assert place is not None
        return index.path(place.segment), place.blob, place.size


def flip(folder: Path, number: int, offset: int, mask: int) -> Path:
    """Change a byte of a blob; returns the segment's file."""
    path, start, _ = blob_of(folder, number)
    with path.open("r+b") as file:
        file.seek(start + offset)
        byte = file.read(1)[0]
        file.seek(start + offset)
        file.write(bytes([byte ^ mask]))
    return path
