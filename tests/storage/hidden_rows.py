"""What the cache's tests share: rows that follow from a number, and a look at the folder from outside."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

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


def files(folder: Path, part: str) -> list[str]:
    return sorted(os.listdir(folder / "v1" / part))


def disk_bytes(folder: Path) -> int:
    """Bytes of all files in whole blocks, as the quota counts them."""
    total = 0
    for part in ("blobs", "partial", "quarantine"):
        for name in files(folder, part):
            try:
                total += -(-(folder / "v1" / part / name).stat().st_size // BLOCK) * BLOCK
            except FileNotFoundError:
                continue
    return total
