"""What the cache's tests share: rows that follow from a number, and a look at the folder from outside."""

from pathlib import Path

import numpy as np

from opd.storage.cache_files import on_disk
from opd.storage.node_cache import CacheRecord, NodeCache, cache_key

BLOCK = 4096


def key_of(number: int) -> bytes:
    return cache_key("digest", np.array([number, number + 1], dtype=np.int32), 0)


def rows_of(number: int, rows: int = 5, width: int = 48) -> np.ndarray:
    """[R, D] float32 that no other number gives."""
    return np.random.default_rng(number).standard_normal((rows, width)).astype(np.float32)


def put(cache: NodeCache, number: int, rows: int = 5) -> bool:
    return cache.put(key_of(number), rows_of(number, rows), CacheRecord(f"s{number}", "teacher", number))


def holds(cache: NodeCache, number: int, rows: int = 5) -> bool:
    """Whether the cache has `number`; if so, it must be right in every bit."""
    lease = cache.get(key_of(number))
    if lease is None:
        return False
    with lease:
        assert np.array_equal(lease.rows, rows_of(number, rows))
        assert (lease.record.uid, lease.record.version) == (f"s{number}", number)
    return True


def blobs(folder: Path) -> list[Path]:
    """The files of all blobs."""
    return sorted(folder.glob("v3/blobs/*/*"))


def keys(folder: Path) -> list[str]:
    """Of all blobs, in hex."""
    return [path.name for path in blobs(folder)]


def unfinished(folder: Path) -> list[Path]:
    """What is being written."""
    return list(folder.glob("v3/new/*"))


def disk_bytes(folder: Path) -> int:
    """Bytes of all blobs in whole blocks, those being written too, as the quota counts them."""
    total = 0
    for path in [*blobs(folder), *unfinished(folder)]:
        try:
            total += on_disk(path.stat().st_size)
        except FileNotFoundError:
            continue
    return total


def blob_of(folder: Path, number: int) -> Path:
    """The file of the blob of a number."""
    return file_of(folder, key_of(number))


def file_of(folder: Path, key: bytes) -> Path:
    """The file of the blob of `key`, there or not."""
    name = key.hex()
    return folder / "v3" / "blobs" / name[:2] / name


def flip(folder: Path, number: int, offset: int, mask: int) -> Path:
    """Change a byte of a blob; returns its file."""
    path = blob_of(folder, number)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
    return path
