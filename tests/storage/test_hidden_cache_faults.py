"""Damaged, missing and unwritable files: never an answer from wrong bytes, nothing left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hidden_rows import BLOCK, disk_bytes, files, holds, key_of, put
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.storage.hidden_cache import HiddenStateCache


def _only_blob(folder: Path) -> Path:
    (name,) = files(folder, "blobs")
    return folder / "v1" / "blobs" / name


def _assert_refused(cache: HiddenStateCache, folder: Path, path: Path, data: bytes, case: object) -> None:
    """With `data` in the blob's place the lookup is a counted miss, and the blob is out of the way."""
    path.write_bytes(data)
    cache.take_counters()
    assert cache.get(key_of(1)) is None, case
    assert (cache.counters.corrupt, cache.counters.misses, cache.counters.hits) == (1, 1, 0), case
    (name,) = files(folder, "quarantine")
    assert name.startswith(path.name)
    assert not path.exists()
    (folder / "v1" / "quarantine" / name).unlink()


def test_a_flipped_bit_at_any_offset_is_a_miss(tmp_path: Path) -> None:
    cache = HiddenStateCache(tmp_path, quota_bytes=1 << 20, durable=False)
    assert put(cache, 1, rows=3)
    path = _only_blob(tmp_path)
    whole = path.read_bytes()
    for offset in range(len(whole)):
        flipped = bytearray(whole)
        flipped[offset] ^= 1 << offset % 8
        _assert_refused(cache, tmp_path, path, bytes(flipped), offset)
    path.write_bytes(whole)
    assert holds(cache, 1, rows=3)


def test_any_other_length_is_a_miss(tmp_path: Path) -> None:
    cache = HiddenStateCache(tmp_path, quota_bytes=1 << 20, durable=False)
    assert put(cache, 1, rows=3)
    path = _only_blob(tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        _assert_refused(cache, tmp_path, path, whole[:length], length)
    for extra in (1, 64, 5000):
        _assert_refused(cache, tmp_path, path, whole + bytes(extra), extra)


@settings(max_examples=60)
@given(st.data())
def test_flips_anywhere_in_a_large_blob_are_a_miss(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    folder = tmp_path_factory.mktemp("cache")
    with HiddenStateCache(folder, quota_bytes=1 << 20, durable=False) as cache:
        assert put(cache, 1, rows=200)
        path = _only_blob(folder)
        damaged = bytearray(path.read_bytes())
        for offset in data.draw(st.sets(st.integers(0, len(damaged) - 1), min_size=1, max_size=4)):
            damaged[offset] ^= data.draw(st.integers(1, 255))
        _assert_refused(cache, folder, path, bytes(damaged), None)
    shutil.rmtree(folder)


def test_a_blob_under_another_name_is_a_miss(tmp_path: Path) -> None:
    cache = HiddenStateCache(tmp_path, quota_bytes=1 << 20)
    assert put(cache, 2)
    path = _only_blob(tmp_path)
    os.rename(path, path.with_name(key_of(1).hex()))
    assert cache.get(key_of(1)) is None
    assert cache.counters.corrupt == 1


def test_a_corrupt_blob_is_told_and_can_be_put_again(tmp_path: Path) -> None:
    told: list[str] = []
    cache = HiddenStateCache(tmp_path, quota_bytes=2 * BLOCK, on_warning=told.append)
    assert put(cache, 1)
    path = _only_blob(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert not holds(cache, 1)
    assert len(told) == 1
    assert str(path) in told[0]
    assert put(cache, 1)
    assert holds(cache, 1)
    # Set aside it still takes disk, so it counts, and it is the first to go.
    assert cache.used_bytes() == disk_bytes(tmp_path) == 2 * BLOCK
    assert put(cache, 2)
    assert files(tmp_path, "quarantine") == []
    assert [holds(cache, n) for n in (1, 2)] == [True, True]


def test_verifying_the_first_map_only_sees_damage_from_before_it(tmp_path: Path) -> None:
    with HiddenStateCache(tmp_path, quota_bytes=1 << 20, verify="first") as cache:
        assert put(cache, 1)
        assert holds(cache, 1)
    path = _only_blob(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with HiddenStateCache(tmp_path, quota_bytes=1 << 20, verify="first") as cache:
        assert not holds(cache, 1)
        assert cache.counters.corrupt == 1


def test_a_flipped_bit_in_the_sum_of_bytes_costs_only_a_recount(tmp_path: Path) -> None:
    cache = HiddenStateCache(tmp_path, quota_bytes=3 * BLOCK, durable=False)
    assert put(cache, 1)
    assert put(cache, 2)
    path = tmp_path / "v1" / "usage"
    whole = path.read_bytes()
    for offset in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[offset] ^= 1 << bit
            path.write_bytes(flipped)
            assert cache.used_bytes() == 2 * BLOCK, (offset, bit)
    path.unlink()
    assert put(cache, 3)
    assert put(cache, 4)
    assert cache.used_bytes() == disk_bytes(tmp_path) == 3 * BLOCK


def test_removed_files_are_misses(tmp_path: Path) -> None:
    cache = HiddenStateCache(tmp_path, quota_bytes=1 << 20)
    assert put(cache, 1)
    _only_blob(tmp_path).unlink()
    assert cache.get(key_of(1)) is None
    assert cache.counters.corrupt == 0
    assert put(cache, 1)
    assert holds(cache, 1)


_LIMITED = """
import resource, sys
from hidden_rows import *
from pathlib import Path
folder = Path(sys.argv[1])
cache = HiddenStateCache(folder, quota_bytes=1 << 30)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
sizes = {1: 5, 2: 5000, 3: 5}
items = [(key_of(n), rows_of(n, rows), CacheRecord(f"s{n}", "t", n)) for n, rows in sizes.items()]
assert cache.put_many(items) == [True, False, True]
assert cache.counters.rejected == 1
assert [holds(cache, n) for n in (1, 2, 3)] == [True, False, True]
assert files(folder, "partial") == []
assert cache.used_bytes() == disk_bytes(folder) == 2 * BLOCK
print("ok")
"""

_FULL_DISK = """
import os, sys
from hidden_rows import *
from pathlib import Path
folder = Path(sys.argv[1])
before = len(os.listdir("/proc/self/fd"))
with HiddenStateCache(folder, quota_bytes=1 << 30) as cache:
    kept = [put(cache, n, rows=500) for n in range(30)]
    assert 5 < sum(kept) < 25, kept
    assert cache.counters.rejected == 30 - sum(kept)
    assert [holds(cache, n, rows=500) for n in range(30)] == kept
    assert files(folder, "partial") == []
    assert cache.used_bytes() == disk_bytes(folder)
assert len(os.listdir("/proc/self/fd")) == before
with HiddenStateCache(folder, quota_bytes=10 * 100_000) as cache:  # evicting makes room again
    assert put(cache, 100, rows=500)
    assert holds(cache, 100, rows=500)
print("ok")
"""

_READ_ONLY = """
import os, sys
from hidden_rows import *
from opd.errors import StorageError
with HiddenStateCache(sys.argv[1], quota_bytes=1 << 30) as cache:
    assert put(cache, 1)
assert os.system(f"mount -o remount,ro {sys.argv[1]}") == 0
try:
    HiddenStateCache(sys.argv[1], quota_bytes=1 << 30)
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


@pytest.mark.parametrize("script", [_FULL_DISK, _READ_ONLY], ids=["full", "read-only"])
def test_a_disk_that_takes_no_more(tmp_path: Path, script: str) -> None:
    """Full: puts are rejected and nothing half-written stays. Read-only: opening says so."""
    mount = 'mount -t tmpfs -o size=1500k tmpfs "$0" && exec "$@"'
    own_mounts = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, str(tmp_path)]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*own_mounts, "true"], capture_output=True).returncode
    ):
        pytest.skip("this system lets a test mount no file system of its own")
    command = [sys.executable, "-W", "error", "-c", script, str(tmp_path)]
    result = subprocess.run([*own_mounts, *command], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("ok\n", "")
