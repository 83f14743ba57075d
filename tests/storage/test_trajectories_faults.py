"""Damaged, missing and unwritable files of a trajectory store: one clear sentence, or correct data."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from full import cases
from trajectory_data import FIELDS, SMALL, assert_right, disk_bytes, record, values, write

from opd.errors import StorageError
from opd.storage.framed_log import FRAME_MAGIC, HEADER_BYTES
from opd.storage.trajectories import Field, TrajectoryRecord, TrajectoryStore, TrajectoryWriter


def _all_files(folder: Path) -> list[Path]:
    """Those that hold something; a closed store's last segment of the table says only that it was closed."""
    idle = ("leases", "writer")
    found = [path for path in folder.rglob("*") if path.is_file() and path.name not in idle]
    return sorted(path for path in found if path.suffix != ".wal")


def _right_or_refused(folder: Path, case: object) -> bool:
    """Whether everything could be read; what could be read was right in every bit."""
    try:
        with TrajectoryStore.open(folder) as store:
            assert store.fields == FIELDS, case
            assert assert_right(store, hidden=True) == list(range(4)), case
    except StorageError as error:
        return "\n" in str(error)  # one sentence
    return True


def test_a_flipped_bit_anywhere_is_refused_or_does_not_matter(tmp_path: Path) -> None:
    """All 4 trajectories are right, or the error says so: never a wrong value, never fewer trajectories."""
    write(tmp_path, range(4))
    chooser, refused, tried = random.Random(0), 0, 0
    for path in _all_files(tmp_path):
        whole = path.read_bytes()
        for place in chooser.sample(range(len(whole)), min(cases(40), len(whole))):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << chooser.randrange(8)
            path.write_bytes(flipped)
            tried += 1
            refused += not _right_or_refused(tmp_path, (path.name, place))
        path.write_bytes(whole)
    assert _right_or_refused(tmp_path, "mended")
    assert refused > 0.8 * tried  # the rest is between trajectories, or in names only


def test_a_file_cut_short_or_lost_is_refused(tmp_path: Path) -> None:
    write(tmp_path, range(4))
    chooser = random.Random(1)
    for path in _all_files(tmp_path):
        whole = path.read_bytes()
        for length in {0, 1, len(whole) - 1, *(chooser.randrange(len(whole)) for _ in range(cases(20)))}:
            path.write_bytes(whole[:length])
            assert not _right_or_refused(tmp_path, (path.name, length))
        path.unlink()
        assert not _right_or_refused(tmp_path, path.name)
        path.write_bytes(whole)
    assert _right_or_refused(tmp_path, "mended")


def test_damage_names_the_file_and_the_way_out(tmp_path: Path) -> None:
    write(tmp_path, range(4))
    path = tmp_path / "segments" / "000001.token_ids"
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    with TrajectoryStore.open(tmp_path) as store, store.lease(range(4)) as batch:
        with pytest.raises(StorageError, match=r"000001.token_ids bytes 0-\d+ are corrupt.* restore"):
            batch.read(0, "token_ids")
        assert np.array_equal(batch.read(3, "token_ids"), values(3)["token_ids"])  # others are served
    path.write_bytes(data[:100])
    cut = pytest.raises(StorageError, match=r"000001.token_ids is cut short: it has 100 bytes")
    with TrajectoryStore.open(tmp_path) as store, store.lease([3]) as batch, cut:
        batch.read(3, "token_ids")


def test_what_is_not_a_store_or_newer_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no trajectory store in"):
        TrajectoryStore.open(tmp_path)
    write(tmp_path / "a", range(2))
    header = tmp_path / "a" / "store.json"
    document = json.loads(header.read_text())
    header.write_text(json.dumps(document | {"format": 3}))
    with pytest.raises(StorageError, match="has format 3 of trajectory stores, this version reads 2; update"):
        TrajectoryStore.open(tmp_path / "a")
    with pytest.raises(StorageError, match="format 3"):
        TrajectoryWriter(tmp_path / "a", fields=FIELDS)
    header.write_text("{}")
    with pytest.raises(StorageError, match="is not the header of a trajectory store"):
        TrajectoryStore.open(tmp_path / "a")


@pytest.mark.slow
def test_a_write_cut_short_is_dropped_and_damage_before_it_is_not(tmp_path: Path) -> None:
    """The state of a killed writer: the folder as it was while the store was open."""
    with TrajectoryWriter(tmp_path / "live", fields=FIELDS, **SMALL) as writer:
        for n in range(6):
            writer.put(record(n), **values(n))
        shutil.copytree(tmp_path / "live", tmp_path / "killed")
    (segment,) = (tmp_path / "killed" / "metadata").glob("*.wal")
    whole = segment.read_bytes()
    starts = [i for i in range(len(whole)) if whole.startswith(FRAME_MAGIC.to_bytes(4, "little"), i)]
    ends = [*starts[1:], len(whole)]
    for cut in sorted({*ends, *random.Random(2).sample(range(HEADER_BYTES, len(whole)), 40)}):
        segment.write_bytes(whole[:cut])
        kept = sum(end <= cut for end in ends)
        with TrajectoryStore.open(tmp_path / "killed") as store:
            assert assert_right(store) == list(range(kept))
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "killed", copy)
        with TrajectoryWriter(copy, fields=FIELDS, **SMALL) as writer:
            assert writer.uids == [record(n).uid for n in range(kept)]
            writer.put(record(7), **values(7))
        with TrajectoryStore.open(copy) as store:
            assert assert_right(store) == [*range(kept), 7]
        shutil.rmtree(copy)


@pytest.mark.parametrize("durable", [True, False])
def test_a_damaged_frame_of_a_killed_writer_is_not_taken_for_a_write_cut_short(
    tmp_path: Path, durable: bool
) -> None:
    """Also where no frame proves that it was acknowledged: what came later is there."""
    with TrajectoryWriter(tmp_path / "live", fields=FIELDS, **SMALL | {"durable": durable}) as writer:
        for n in range(4):
            writer.put(record(n), **values(n))
        shutil.copytree(tmp_path / "live", tmp_path / "killed")
    (segment,) = (tmp_path / "killed" / "metadata").glob("*.wal")
    damaged = bytearray(segment.read_bytes())
    starts = [i for i in range(len(damaged)) if damaged.startswith(FRAME_MAGIC.to_bytes(4, "little"), i)]
    damaged[starts[2] + 60] ^= 1
    segment.write_bytes(damaged)
    for opening in (TrajectoryStore.open, lambda folder: TrajectoryWriter(folder, fields=FIELDS)):
        with pytest.raises(
            StorageError, match=rf"at byte {starts[2]}: (a frame|frame 3) is damaged.* acknowl"
        ):
            opening(tmp_path / "killed")


def test_a_writer_killed_before_the_store_was_made_is_no_hindrance(tmp_path: Path) -> None:
    for made in ("segments", "metadata"):
        (tmp_path / made).mkdir(exist_ok=True)
        with pytest.raises(StorageError, match="there is no trajectory store"):
            TrajectoryStore.open(tmp_path)
    (tmp_path / "metadata" / "000000000001.wal.tmp").write_bytes(b"half")
    write(tmp_path, range(3))
    header = (tmp_path / "store.json").read_bytes()
    (tmp_path / "store.json").unlink()
    with pytest.raises(StorageError, match=r"store.json is missing, but there are 3 trajectories; restore"):
        write(tmp_path, range(3, 4))
    (tmp_path / "store.json").write_bytes(header)
    write(tmp_path, range(3, 4))
    with TrajectoryStore.open(tmp_path) as store:
        assert assert_right(store) == [0, 1, 2, 3]


def test_what_a_killed_writer_left_is_given_back(tmp_path: Path) -> None:
    fields = (Field("hidden", "float32", 256),)
    rows = np.ones((1000, 256), np.float32)
    with TrajectoryWriter(tmp_path / "live", fields=fields, durable=False) as writer:
        writer.put(TrajectoryRecord("kept", 0, 1000), hidden=rows)
        for uid in ("lost", "too"):
            writer.begin(uid, 0, 5000)
            writer.append(uid, hidden=rows)
        subprocess.run(["cp", "-a", "--sparse=always", tmp_path / "live", tmp_path / "killed"], check=True)
    before = disk_bytes(tmp_path / "killed")
    assert before >= 3 * rows.nbytes
    with TrajectoryWriter(tmp_path / "killed", fields=fields) as writer:
        assert disk_bytes(tmp_path / "killed") < before - 2 * rows.nbytes + 50_000
        with TrajectoryStore.open(tmp_path / "killed") as store, store.lease([0]) as batch:
            assert np.array_equal(batch.read(0, "hidden"), rows)
        writer.put(TrajectoryRecord("lost", 0, 1000), hidden=rows)  # can be written again


@pytest.mark.parametrize("durable", [True, False])
def test_rows_are_on_the_disk_before_the_table_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """The order of the calls tells what a power cut could lose; each is passed on to the system."""
    unsynced: set[str] = set()
    acknowledged: list[set[str]] = []

    def noted(name: str, after):
        real = getattr(os, name)

        def call(file: int, *rest):
            result = real(file, *rest)
            after(os.readlink(f"/proc/self/fd/{file}"))
            return result

        monkeypatch.setattr(os, name, call)

    def written(path: str) -> None:
        if "/metadata/" in path:
            acknowledged.append(set(unsynced))
        unsynced.add(path)

    with TrajectoryWriter(tmp_path, fields=FIELDS, **SMALL | {"durable": durable}) as writer:
        for name in ("writev", "write", "pwrite"):
            noted(name, written)
        for name in ("fsync", "fdatasync"):
            noted(name, unsynced.discard)
        for n in range(6):
            writer.put(record(n), **values(n))
            assert not durable or not unsynced
        writer.reopen("run/1")
        writer.append("run/1", hidden=values(1, hidden=True)["hidden"])
        writer.seal(record(1))
        assert not durable or not unsynced
        monkeypatch.undo()
    assert len(acknowledged) == 7
    assert any(acknowledged) != durable


_FULL_DISK = """
import os, sys
import pytest
from pathlib import Path
from trajectory_data import *
from opd.errors import StorageError
folder = Path(sys.argv[1]) / "store"
fields = (Field("hidden", "float32", 64),)
rows = np.ones((1000, 64), np.float32)
descriptors = len(os.listdir("/proc/self/fd"))
kept = []
with TrajectoryWriter(folder, fields=fields, segment_bytes=1 << 20) as writer:
    writer.begin("slow", 0, 1000)
    writer.append("slow", hidden=rows[:200])
    for i in range(40):
        try:
            writer.put(TrajectoryRecord(str(i), 0, 1000), hidden=rows * i)
            kept.append(str(i))
        except StorageError as error:
            assert f"trajectory {i} cannot be written to {folder} (No space left" in str(error), error
            break
    assert 5 < len(kept) < 20, kept
    writer.retire(kept[:3])                      # makes room
    writer.append("slow", hidden=rows[200:])     # what was begun goes on
    writer.seal(TrajectoryRecord("slow", 0, 1000))
    left = os.statvfs(folder)
    with open(folder.parent / "ballast", "wb", buffering=0) as file:  # not a byte is left
        try:
            while file.write(bytes(4096)): pass
        except OSError: pass
        try:
            while file.write(b"x"): pass
        except OSError: pass
    try:
        writer.put(TrajectoryRecord("x" * 5000, 0, 0))
    except StorageError as error:
        assert "takes nothing more; free some space, and open it again" in str(error), error
    else:
        raise AssertionError("no error")
    try:
        writer.begin("next", 0, 1)
    except StorageError as error:
        assert "takes nothing more" in str(error)
os.unlink(folder.parent / "ballast")
with TrajectoryWriter(folder, fields=fields) as writer:
    assert writer.uids[-1] == "slow"
    writer.retire([uid for uid in writer.uids if uid != "slow"])
with TrajectoryStore.open(folder) as store, store.lease([0]) as batch:
    assert store.table.uid[0] == "slow" and np.array_equal(batch.read(0, "hidden"), rows)
del batch, store
assert disk_bytes(folder) < 400_000, disk_bytes(folder)
assert len(os.listdir("/proc/self/fd")) == descriptors
print("ok")
"""


def test_a_full_disk_gives_up_one_trajectory_and_its_space(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=4m tmpfs "$0" && exec "$@"'
    own_mounts = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, str(tmp_path)]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*own_mounts, "true"], capture_output=True).returncode
    ):
        pytest.skip("this system lets a test mount no file system of its own")
    command = [sys.executable, "-W", "error", "-c", _FULL_DISK, str(tmp_path)]
    result = subprocess.run([*own_mounts, *command], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("ok\n", "")


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot be opened for writing \(Not a directory\)"):
        TrajectoryWriter(tmp_path / "file" / "store")
