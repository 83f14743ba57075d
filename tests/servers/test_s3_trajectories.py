"""A trajectory store in a real object store: uploaded, read through a folder that processes share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))

from trajectory_data import FIELDS, assert_right, disk_bytes, record, values

from opd.errors import StorageError
from opd.retry import Retry
from opd.storage.object_store import ObjectStore
from opd.storage.store_faults import StoreOptions
from opd.storage.trajectories import Field, TrajectoryRecord, TrajectoryStore, TrajectoryWriter, upload

MIB = 1 << 20
QUICK = StoreOptions(retry=Retry(attempts=5, pause=0.02), stall_seconds=0.5, connect_seconds=1.0, rereads=2)
BIG = (Field("hidden", "float32", 256),)


def _opened(url: str, cache: Path, **more) -> TrajectoryStore:
    return TrajectoryStore.open(url, cache=cache, options=QUICK, **more)


def _big(number: int) -> np.ndarray:
    """[2048, 256] float32: 2 MiB."""
    return np.random.default_rng(number).standard_normal((2048, 256)).astype(np.float32)


def _write_big(folder: Path, count: int) -> TrajectoryStore:
    """Trajectories of 2 MiB, two in a segment."""
    with TrajectoryWriter(folder, fields=BIG, segment_bytes=4 * MIB, durable=False) as writer:
        for n in range(count):
            writer.put(TrajectoryRecord(str(n), 0, 2048), hidden=_big(n))
    return TrajectoryStore.open(folder)


def _files(cache: Path, kind: str) -> list[Path]:
    return sorted(cache.glob(f"*/segments/*.{kind}"))


def test_what_is_uploaded_is_read_back_and_once_a_node(url: str, tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path / "local", fields=FIELDS, segment_bytes=30_000, block_bytes=512) as writer:
        for n in range(30):
            writer.begin(record(n).uid, record(n).prompt_tokens, 5000)  # leaves holes
        for n in range(30):
            writer.append(record(n).uid, **values(n, hidden=n % 2 == 0))
            writer.seal(record(n))
        writer.retire([record(n).uid for n in range(3)])
        local = TrajectoryStore.open(tmp_path / "local")
        upload(local, url, options=QUICK)
    with ObjectStore.open(url, options=QUICK) as store:
        stored = sum(store.size(name) for name in store.list())
    assert stored < 1.3 * local.heavy_bytes().sum() + 20_000
    with _opened(url, tmp_path / "cache") as remote:
        assert list(remote.table.uid) == [f"run/{n}" for n in range(3, 30)]
        assert not remote.refresh()
        assert _files(tmp_path / "cache", "hidden") == []  # nothing heavy yet
        assert assert_right(remote) == list(range(3, 30))
    script = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from trajectory_data import *
with TrajectoryStore.open(sys.argv[1], cache=sys.argv[2]) as store:
    before = store._segments.bytes_fetched
    assert assert_right(store) == list(range(3, 30))
    print(store._segments.bytes_fetched - before)
"""
    helpers = str(Path(__file__).parents[1] / "storage")
    command = [sys.executable, "-c", script, url, str(tmp_path / "cache"), helpers]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("0\n", "")
    with pytest.raises(StorageError, match="exists already; choose another URL"):
        upload(local, url, options=QUICK)


def test_a_range_fetches_only_its_blocks(url: str, tmp_path: Path) -> None:
    upload(_write_big(tmp_path / "local", 4), url, options=QUICK)
    with _opened(url, tmp_path / "cache") as store, store.lease([1]) as batch:
        light = disk_bytes(tmp_path / "cache")
        assert light < 50_000
        assert np.array_equal(batch.read(1, "hidden", 10, 20), _big(1)[10:20])
        assert disk_bytes(tmp_path / "cache") <= light + 2 * MIB + 50_000
        assert np.array_equal(batch.read(1, "hidden"), _big(1))


def test_the_cache_stays_within_its_quota_and_evicted_blocks_come_back(url: str, tmp_path: Path) -> None:
    upload(_write_big(tmp_path / "local", 16), url, options=QUICK)
    with _opened(url, tmp_path / "cache", cache_bytes=10 * MIB) as store:
        for _ in range(2):
            for batch in store.batches(np.arange(16).reshape(8, 2), ["hidden"], ahead=False):
                for row in batch.rows:
                    assert np.array_equal(batch.read(row, "hidden"), _big(row))
                assert disk_bytes(tmp_path / "cache") <= 11 * MIB
        with store.lease([0]) as held:
            view = held.read(0, "hidden")
            for batch in store.batches(np.arange(2, 16).reshape(7, 2), ["hidden"]):
                assert np.array_equal(batch.read(batch.rows[0], "hidden"), _big(batch.rows[0]))
            assert "000001.hidden" in [path.name for path in _files(tmp_path / "cache", "hidden")]
            assert np.array_equal(view, _big(0))  # leased: not evicted


def test_damage_in_the_cache_is_mended_and_in_the_store_is_told(url: str, tmp_path: Path) -> None:
    upload(_write_big(tmp_path / "local", 2), url, options=QUICK)
    with _opened(url, tmp_path / "cache") as store, store.lease([0]) as batch:
        batch.load(["hidden"])
    (path,) = _files(tmp_path / "cache", "hidden")
    with open(path, "r+b") as file:
        file.seek(5000)
        file.write(b"wrong")
    with _opened(url, tmp_path / "cache") as store, store.lease([0]) as batch:
        assert np.array_equal(batch.read(0, "hidden"), _big(0))
    with ObjectStore.open(url, options=QUICK) as store:
        data = bytearray(store.get("segments/000001.hidden"))
        data[5000] ^= 1
        store.put("segments/000001.hidden", bytes(data))
    with _opened(url, tmp_path / "other") as store, store.lease([0, 1]) as batch:
        with pytest.raises(StorageError, match=r"000001.hidden bytes 0-1048576 are corrupt"):
            batch.read(0, "hidden")
        assert np.array_equal(batch.read(1, "hidden"), _big(1))
    metadata = next((tmp_path / "other").glob("*/metadata"))
    metadata.write_bytes(metadata.read_bytes()[:-1])
    assert len(_opened(url, tmp_path / "other").table) == 2  # fetched again


_READS = """
import sys
import numpy as np
from opd.storage.trajectories import TrajectoryStore
store = TrajectoryStore.open(sys.argv[1], cache=sys.argv[2])
print("open", flush=True)
for batch in store.batches(np.arange(len(store.table)).reshape(-1, 1), ["hidden"]):
    print(batch.rows[0], flush=True)
"""


def test_a_killed_reader_leaves_a_cache_that_is_right(url: str, tmp_path: Path) -> None:
    upload(_write_big(tmp_path / "local", 12), url, options=QUICK)
    for stop in (1, 4):
        command = [sys.executable, "-c", _READS, url, str(tmp_path / "cache")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            for _ in range(stop + 1):
                reader.stdout.readline()
            reader.kill()
        with _opened(url, tmp_path / "cache") as store:
            for row in range(stop, min(stop + 3, 12)):
                with store.lease([row]) as batch:
                    assert np.array_equal(batch.read(row, "hidden"), _big(row))
            # Nobody else holds a segment: all of them can be evicted.
            assert os.path.exists(store.folder / "leases")
    with _opened(url, tmp_path / "cache", cache_bytes=1) as store, store.lease([11]) as batch:
        assert np.array_equal(batch.read(11, "hidden"), _big(11))
        assert {path.name for path in _files(tmp_path / "cache", "hidden")} == {"000006.hidden"}


def test_a_broken_upload_is_no_store(url: str, tmp_path: Path) -> None:
    local = _write_big(tmp_path / "local", 4)
    path = tmp_path / "local" / "segments" / "000002.hidden"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"000002.hidden bytes \d+-\d+ are corrupt"):
        upload(local, url, options=QUICK)
    with pytest.raises(StorageError, match="there is no trajectory store at s3://"):
        _opened(url, tmp_path / "cache")
