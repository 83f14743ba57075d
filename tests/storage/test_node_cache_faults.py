"""Damaged, missing and unwritable files: never an answer from wrong bytes, nothing left behind."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cached_rows import BLOCK, blob_of, disk_bytes, flip, holds, key_of, keys, put
from child_python import python_on_small_disk
from full import FULL, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.storage import cache_files
from opd.storage.node_cache import NodeCache


def _assert_refused(cache: NodeCache, folder: Path, case: object) -> None:
    """The lookup of the damaged blob 1 is a counted miss, and the blob is gone."""
    cache.take_counters()
    assert cache.get(key_of(1)) is None, case
    assert (cache.counters.corrupt, cache.counters.misses, cache.counters.hits) == (1, 1, 0), case
    assert key_of(1).hex() not in keys(folder)


def test_a_flipped_bit_at_any_offset_is_a_miss(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, quota_bytes=1 << 20)
    assert put(cache, 1, rows=3)
    for offset in range(0, blob_of(tmp_path, 1).stat().st_size, 1 if FULL else 7):
        flip(tmp_path, 1, offset, 1 << offset % 8)
        _assert_refused(cache, tmp_path, offset)
        assert put(cache, 1, rows=3)
    assert holds(cache, 1, rows=3)


def test_a_blob_cut_short_is_a_miss(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, quota_bytes=1 << 20)
    assert put(cache, 2, rows=3)
    for cut in range(0, 800, 19):
        assert put(cache, 1, rows=3)
        size = blob_of(tmp_path, 1).stat().st_size
        if cut % 2:
            assert holds(cache, 1, rows=3)
        os.truncate(blob_of(tmp_path, 1), size - 1 - cut % size)
        _assert_refused(cache, tmp_path, cut)
    assert holds(cache, 2, rows=3)


@settings(max_examples=cases(60))
@given(st.data())
def test_flips_anywhere_in_a_large_blob_are_a_miss(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    folder = tmp_path_factory.mktemp("cache")
    with NodeCache(folder, quota_bytes=1 << 20) as cache:
        assert put(cache, 1, rows=200)
        size = blob_of(folder, 1).stat().st_size
        for offset in data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=4)):
            flip(folder, 1, offset, data.draw(st.integers(1, 255)))
        _assert_refused(cache, folder, None)
    shutil.rmtree(folder)


def test_a_blob_under_another_key_is_a_miss(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, quota_bytes=1 << 20)
    assert put(cache, 2)
    blob_of(tmp_path, 1).parent.mkdir(exist_ok=True)
    shutil.copy(blob_of(tmp_path, 2), blob_of(tmp_path, 1))
    assert cache.get(key_of(1)) is None
    assert cache.counters.corrupt == 1


def test_a_corrupt_blob_is_told_and_can_be_put_again(tmp_path: Path, caplog) -> None:
    cache = NodeCache(tmp_path, quota_bytes=2 * BLOCK)
    assert put(cache, 1)
    path = flip(tmp_path, 1, blob_of(tmp_path, 1).stat().st_size - 1, 1)
    assert not holds(cache, 1)
    assert len(caplog.messages) == 1
    assert str(path) in caplog.messages[0]
    assert put(cache, 1)
    assert holds(cache, 1)
    assert cache.used_bytes() == disk_bytes(tmp_path) == BLOCK
    assert put(cache, 2)
    assert [holds(cache, n) for n in (1, 2)] == [True, True]


def test_verifying_the_first_use_only_sees_damage_from_before_it(tmp_path: Path) -> None:
    with NodeCache(tmp_path, quota_bytes=1 << 20, verify="first") as cache:
        assert put(cache, 1)
        assert holds(cache, 1)
    flip(tmp_path, 1, blob_of(tmp_path, 1).stat().st_size - 1, 1)
    with NodeCache(tmp_path, quota_bytes=1 << 20, verify="first") as cache:
        assert not holds(cache, 1)
        assert cache.counters.corrupt == 1


def test_a_damaged_index_is_made_anew_from_the_blobs(tmp_path: Path) -> None:
    """Nobody has the cache open meanwhile; LMDB itself would read past its end, and end the process."""
    with NodeCache(tmp_path, quota_bytes=5 * BLOCK) as cache:
        assert all(put(cache, n) for n in range(7))
    path, chooser = tmp_path / "v3" / "index", random.Random(0)
    for case in range(40):
        data = bytearray(path.read_bytes())
        if case < 30:
            for _ in range(case):
                data[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
        path.write_bytes(data if case < 30 else data[: chooser.randrange(len(data))])
        if case == 35:
            path.unlink()
        with NodeCache(tmp_path, quota_bytes=5 * BLOCK) as cache:
            assert [holds(cache, n) for n in range(7)] == [False] * 2 + [True] * 5, case
            assert cache.used_bytes() == disk_bytes(tmp_path) == 5 * BLOCK


def test_an_index_that_is_full_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "_INDEX_BYTES", 16 * 4096)
    with NodeCache(tmp_path, quota_bytes=1 << 30) as cache:
        kept = [put(cache, n, rows=1) for n in range(400)]
        assert 20 < sum(kept) < 400
        assert cache.counters.rejected == 400 - sum(kept)
        assert [holds(cache, n, rows=1) for n in range(400)] == kept
        assert cache.used_bytes() == disk_bytes(tmp_path)


def test_removed_blobs_are_misses(tmp_path: Path) -> None:
    with NodeCache(tmp_path, quota_bytes=1 << 20) as cache:
        assert put(cache, 1)
    blob_of(tmp_path, 1).unlink()
    with NodeCache(tmp_path, quota_bytes=1 << 20) as cache:
        assert cache.get(key_of(1)) is None
        assert put(cache, 1)
        assert holds(cache, 1)


_LIMITED = """
import resource, sys
from cached_rows import *
from pathlib import Path
folder = Path(sys.argv[1])
cache = NodeCache(folder, quota_bytes=1 << 30)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
sizes = {1: 5, 2: 5000, 3: 5}
items = [(key_of(n), rows_of(n, rows), CacheRecord(f"s{n}", "t", n)) for n, rows in sizes.items()]
assert cache.put_many(items) == [True, False, True]
assert cache.counters.rejected == 1
assert [holds(cache, n) for n in (1, 2, 3)] == [True, False, True]
assert unfinished(folder) == []
assert cache.used_bytes() == disk_bytes(folder) == 2 * BLOCK
print("ok")
"""

_FULL_DISK = """
import os, sys
from cached_rows import *
from pathlib import Path
folder = Path(sys.argv[1])
before = len(os.listdir("/proc/self/fd"))
with NodeCache(folder, quota_bytes=1 << 30) as cache:
    kept = [put(cache, n, rows=500) for n in range(30)]
    assert 5 < sum(kept) < 25, kept
    assert cache.counters.rejected == 30 - sum(kept)
    assert [holds(cache, n, rows=500) for n in range(30)] == kept
    assert unfinished(folder) == []
    assert cache.used_bytes() == disk_bytes(folder)
assert len(os.listdir("/proc/self/fd")) == before
with NodeCache(folder, quota_bytes=10 * 100_000) as cache:  # evicting makes room again
    assert put(cache, 100, rows=500)
    assert holds(cache, 100, rows=500)
print("ok")
"""

_NO_ROOM = """
import os, shutil, sys
from pathlib import Path
from cached_rows import *
from opd.errors import StorageError
folder, opened = Path(sys.argv[1]), []
for left in (0, 4, 16, 60, *range(68, 128, 4), 400):  # KiB
    with (folder / "fill").open("wb") as fill:
        stat = os.statvfs(folder)
        fill.write(bytes(stat.f_bavail * stat.f_frsize - left * 1024))
    try:
        cache = NodeCache(folder / f"cache-{left}", quota_bytes=1 << 22)
        opened.append(left)
    except StorageError as error:
        assert "No space left on device" in str(error), error
    else:
        kept = [put(cache, n, rows=1) for n in range(60)]
        assert [holds(cache, n, rows=1) for n in range(60)] == kept, left
        cache.close()
    os.unlink(folder / "fill")
    shutil.rmtree(folder / f"cache-{left}")
assert opened[-1:] == [400] and 0 not in opened, opened
print("ok")
"""

_READ_ONLY = """
import os, sys
from cached_rows import *
from opd.errors import StorageError
with NodeCache(sys.argv[1], quota_bytes=1 << 30) as cache:
    assert put(cache, 1)
assert os.system(f"mount -o remount,ro {sys.argv[1]}") == 0
try:
    NodeCache(sys.argv[1], quota_bytes=1 << 30)
except StorageError as error:
    assert f"{sys.argv[1]} cannot be opened (Read-only file system)" in str(error), error
else:
    raise AssertionError("no error")
print("ok")
"""


def test_a_file_size_limit_rejects_one_item_and_keeps_the_others(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", _LIMITED, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("ok\n", "")


@pytest.mark.parametrize("script", [_FULL_DISK, _NO_ROOM, _READ_ONLY], ids=["full", "no room", "read-only"])
def test_a_disk_that_takes_no_more(tmp_path: Path, script: str) -> None:
    """Full: puts are rejected and nothing half-written stays. No room, read-only: opening says so."""
    result = python_on_small_disk(script, tmp_path, "1500k")
    assert (result.stdout, result.stderr) == ("ok\n", "")
