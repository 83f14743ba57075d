"""The hidden-state cache in one process: values, keys, quota and order, leases, tensors, counters."""

import gc
import itertools
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import numpy as np
import pytest
import torch
from cached_rows import BLOCK, disk_bytes, holds, key_of, keys, put, rows_of, unfinished
from hypothesis import given
from hypothesis import strategies as st

from opd.errors import StorageError
from opd.storage.cache_files import CacheFiles
from opd.storage.node_cache import CacheRecord, NodeCache, cache_key
from opd.storage.tensors import rows_array, rows_tensor

RECORD = CacheRecord("u/0", "math", "v1")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize("shape", [(3, 7), (0, 7), (1, 1), (700, 33)])
def test_what_is_put_is_got_with_its_record(tmp_path: Path, dtype: type, shape: tuple[int, int]) -> None:
    rows = np.random.default_rng(0).integers(0, 30_000, shape).astype(dtype)
    with NodeCache(tmp_path, quota_bytes=1 << 20) as cache:
        assert cache.get(key_of(1)) is None
        assert cache.put(key_of(1), rows, RECORD)
    with NodeCache(tmp_path, quota_bytes=1 << 20) as cache:
        lease = cache.get(key_of(1))
        assert lease is not None
        assert np.array_equal(lease.rows, rows)
        assert lease.rows.dtype == rows.dtype
        record = lease.record
        assert (record.uid, record.teacher, record.version) == ("u/0", "math", "v1")
        assert (record.rows, record.width) == shape
        assert record.dtype == {"f4": "float32", "f2": "float16", "u2": "bfloat16"}[rows.dtype.str[1:]]
        assert len(record.checksum) == 32
        assert lease.rows.ctypes.data % 64 == 0
        with pytest.raises(ValueError, match="read-only"):
            lease.rows[...] = 0


def test_rows_that_are_not_contiguous_are_put_in_order(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, quota_bytes=1 << 20)
    rows = rows_of(1, 8, 6)
    assert cache.put(key_of(1), rows.T[::2], RECORD)
    lease = cache.get(key_of(1))
    assert lease is not None
    assert np.array_equal(lease.rows, rows.T[::2])


@given(
    st.tuples(st.text(max_size=4), st.lists(st.integers(0, 3), max_size=4), st.text(max_size=4)),
    st.tuples(st.text(max_size=4), st.lists(st.integers(0, 3), max_size=4), st.text(max_size=4)),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_keys_differ_exactly_when_their_parts_do(one, other, first, second) -> None:
    first, second = min(first, len(one[1])), min(second, len(other[1]))
    keys = [
        cache_key(digest, np.array(tokens, dtype=np.int32), row, variant)
        for (digest, tokens, variant), row in ((one, first), (other, second))
    ]
    assert (keys[0] == keys[1]) == ((one, first) == (other, second))
    assert len(keys[0]) == 32


def test_a_key_does_not_depend_on_the_integers_width_or_layout() -> None:
    tokens = np.arange(10, dtype=np.int64)
    assert cache_key("d", tokens, 2) == cache_key("d", tokens.astype(np.int32), 2)
    assert cache_key("d", tokens[::2], 2) == cache_key("d", tokens[::2].copy(), 2)
    for wrong in (tokens.astype(float), tokens.reshape(2, 5)):
        with pytest.raises(ValueError, match="token ids"):
            cache_key("d", wrong, 0)
    with pytest.raises(ValueError, match="row within"):
        cache_key("d", tokens, 11)


def test_misuse_is_refused_and_keeps_nothing(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, quota_bytes=1 << 20)
    for rows in (np.zeros(3, np.float32), np.zeros((3, 2), np.float64), np.zeros((3, 2), ">f4")):
        with pytest.raises(ValueError, match=r"give \[R, D\]"):
            cache.put_many([(key_of(1), rows_of(1), RECORD), (key_of(2), rows, RECORD)])
    with pytest.raises(ValueError, match="32"):
        cache.get(b"short")
    with pytest.raises(ValueError, match="quota"):
        NodeCache(tmp_path, quota_bytes=0)
    assert keys(tmp_path) == unfinished(tmp_path) == []
    assert cache.used_bytes() == 0


def test_the_first_array_under_a_key_stays(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, quota_bytes=1 << 20)
    assert cache.put_many([(key_of(1), rows_of(1), CacheRecord("s1", "t", 1))] * 2) == [True, True]
    assert cache.put(key_of(1), rows_of(2), RECORD)
    assert holds(cache, 1)
    assert len(keys(tmp_path)) == 1
    assert cache.used_bytes() == disk_bytes(tmp_path) == BLOCK


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, quota_bytes=3 * BLOCK)
    for number in (1, 2, 3):
        assert put(cache, number)
    assert holds(cache, 1)
    assert put(cache, 2)  # there already: counts as a use
    assert put(cache, 4)
    assert [holds(cache, n) for n in (1, 2, 3, 4)] == [True, True, False, True]
    assert put(cache, 5)
    assert [holds(cache, n) for n in (1, 2, 4, 5)] == [False, True, True, True]
    assert cache.counters.evictions == 2
    assert cache.used_bytes() == disk_bytes(tmp_path) == 3 * BLOCK


def test_what_is_leased_stays_and_what_finds_no_room_is_not_kept(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, quota_bytes=2 * BLOCK)
    assert put(cache, 1)
    assert put(cache, 2)
    leases = [cache.get(key_of(n)) for n in (1, 2, 2)]
    assert not put(cache, 3)
    assert not put(cache, 4, rows=1000)  # larger than the quota
    assert cache.counters.rejected == 2
    second = leases[2]
    assert second is not None
    second.release()
    second.release()
    assert not put(cache, 3)  # its other lease holds it
    leases[1] = None  # the last reference ends a lease as well
    gc.collect()
    assert put(cache, 3)
    assert [holds(cache, n) for n in (1, 2, 3)] == [True, False, True]
    assert np.array_equal(second.rows, rows_of(2))  # evicted, and still there to be read
    del second, leases
    gc.collect()
    assert put(cache, 4)


def test_rows_stay_right_after_release_and_eviction(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, quota_bytes=BLOCK)
    assert put(cache, 1)
    with cache.get(key_of(1)) as lease:  # type: ignore[union-attr]
        rows = lease.rows[1:, ::2]
    del lease
    assert put(cache, 2)
    assert not holds(cache, 1)
    gc.collect()
    assert np.array_equal(rows, rows_of(1)[1:, ::2])
    assert disk_bytes(tmp_path) == BLOCK


def test_opening_with_a_smaller_quota_evicts_down_to_it(tmp_path: Path) -> None:
    with NodeCache(tmp_path, quota_bytes=1 << 20) as cache:
        assert all(put(cache, n) for n in range(6))
    with NodeCache(tmp_path, quota_bytes=2 * BLOCK) as cache:
        assert [holds(cache, n) for n in range(6)] == [False] * 4 + [True] * 2
        assert cache.used_bytes() == 2 * BLOCK


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_share_the_map_and_cannot_change_the_cache(tmp_path: Path, dtype: torch.dtype) -> None:
    cache = NodeCache(tmp_path, quota_bytes=1 << 20)
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert cache.put(key_of(1), rows_array(rows), RECORD)
    lease = cache.get(key_of(1))
    assert lease is not None
    tensor = rows_tensor(lease)
    assert tensor.dtype == dtype
    assert torch.equal(tensor, rows)
    assert tensor.data_ptr() == lease.rows.ctypes.data
    tensor.zero_()
    lease.release()
    del lease
    gc.collect()
    assert not tensor.any()
    again = cache.get(key_of(1))
    assert again is not None
    assert torch.equal(rows_tensor(again), rows)


def test_counters_say_what_happened_and_start_again(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, quota_bytes=2 * BLOCK)
    size = rows_of(0).nbytes
    for number in range(4):
        put(cache, number)
    assert [holds(cache, n) for n in range(4)] == [False, False, True, True]
    assert cache.take_counters() == {
        "hits": 2,
        "misses": 2,
        "bytes_read": 2 * size,
        "bytes_written": 4 * size,
        "evictions": 2,
        "corrupt": 0,
        "rejected": 0,
    }
    assert set(cache.take_counters().values()) == {0}


def test_blobs_used_after_the_look_for_room_still_make_some(tmp_path: Path, monkeypatch) -> None:
    cache = NodeCache(tmp_path, quota_bytes=2 * BLOCK)
    assert put(cache, 1)
    assert put(cache, 2)
    look, looks = CacheFiles._by_last_use, itertools.count()

    def used_meanwhile(files: CacheFiles, txn: lmdb.Transaction) -> object:
        found = look(files, txn)
        if next(looks) < 3:
            assert files.has_blob(key_of(1))
            assert files.has_blob(key_of(2))
        return found

    monkeypatch.setattr(CacheFiles, "_by_last_use", used_meanwhile)
    assert put(cache, 3)
    assert len(keys(tmp_path)) == 2


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.some(4)
@pytest.mark.usefixtures("many_switches")
@pytest.mark.parametrize("_", range(12))
def test_threads_share_one_cache(tmp_path: Path, _: int) -> None:
    cache = NodeCache(tmp_path, quota_bytes=5 * BLOCK)

    def work(seed: int) -> int:
        chooser = np.random.default_rng(seed)
        hits = 0
        for number in chooser.integers(0, 8, 120):
            if chooser.random() < 0.4:
                assert put(cache, int(number))
            else:
                hits += holds(cache, int(number))
        return hits

    with ThreadPoolExecutor(4) as pool:
        hits = sum(pool.map(work, range(4)))
    counters = cache.counters
    assert counters.hits == hits > 0
    assert counters.evictions > 0
    assert cache.used_bytes() == disk_bytes(tmp_path) <= 5 * BLOCK
    assert unfinished(tmp_path) == []


_MANY_LEASES = """
import gc, os, resource, sys
from cached_rows import *
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
cache = NodeCache(sys.argv[1], quota_bytes=1 << 30)
open_files = lambda: len(os.listdir("/proc/self/fd"))
maps = lambda: sum("/blobs/" in line for line in open("/proc/self/maps"))
assert put(cache, 0, rows=1)
before = open_files()
assert all(put(cache, n, rows=1) for n in range(300))
leases = [cache.get(key_of(n)) for n in range(300)]
assert open_files() == before
held = maps()
leases.clear()
gc.collect()
print(held, maps(), open_files() - before)
cache.close()
"""


def test_leases_cost_no_descriptors_and_end_without_a_trace(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", _MANY_LEASES, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["300", "0", "0"]


def test_a_folder_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"file cannot be opened \(Not a directory\)"):
        NodeCache(tmp_path / "file", quota_bytes=1 << 20)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    NodeCache(tmp_path, quota_bytes=BLOCK).close()
    other = tmp_path / "v3" / "blobs" / "README"
    other.write_bytes(b"x" * 10_000)
    cache = NodeCache(tmp_path, quota_bytes=BLOCK)
    assert cache.used_bytes() == 0
    assert put(cache, 1)
    assert put(cache, 2)
    assert other.exists()
