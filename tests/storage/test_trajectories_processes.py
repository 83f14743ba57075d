"""One trajectory store, several processes: `kill -9` of writers and readers, shared pages, bounded memory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from child_python import child_python
from trajectory_data import FIELDS, SMALL, assert_right, disk_bytes, write

from opd.storage.trajectories import Field, TrajectoryRecord, TrajectoryStore, TrajectoryWriter

_KILLS = int(os.environ.get("OPD_TRAJECTORY_KILLS", "8"))
_GIB = [float(size) for size in os.environ.get("OPD_TRAJECTORY_GIB", "").split()]
"""Sizes of data sets for the test of memory, which takes some ten seconds a GiB: `1 4 8`."""
_MIB = 1 << 20
_python = partial(child_python, "trajectory_data")


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


_WRITES = """
import random
chooser = random.Random(int(sys.argv[2]))
with TrajectoryWriter(folder, fields=FIELDS, **SMALL) as writer:
    number = 1 + max([int(uid.removeprefix("run/")) for uid in writer.uids], default=-1)
    print("open", flush=True)
    while True:
        group = [number + i for i in range(chooser.randrange(1, 4))]
        for n in group:
            writer.begin(record(n).uid, *lengths(n))
        for n in chooser.sample(group, len(group)):
            for name, array in values(n, hidden=n % 2 == 0).items():
                for start in range(0, len(array), 100):
                    writer.append(record(n).uid, **{name: array[start : start + 100]})
        writer.seal_many([record(n) for n in group])
        print(*group, flush=True)
        if chooser.random() < 0.1:
            writer.reopen(record(group[-1]).uid)
            if group[-1] % 2:
                writer.append(record(group[-1]).uid, hidden=values(group[-1], hidden=True)["hidden"])
            writer.seal(record(group[-1]))
        number += len(group)
"""


@pytest.mark.slow
def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    """After each kill the store holds what was acknowledged, or one more call; a reader never sees less."""
    acknowledged: list[int] = []
    chooser = random.Random(3)
    for attempt in range(_KILLS):
        with _python(_WRITES, tmp_path, str(attempt)) as writer:
            assert _line(writer) == "open"
            reader = TrajectoryStore.open(tmp_path)
            for _ in range(chooser.randrange(1, 8)):
                acknowledged += map(int, _line(writer).split())
                reader.refresh()
                assert list(reader.table.uid)[: len(acknowledged)] == [f"run/{n}" for n in acknowledged]
            time.sleep(chooser.random() * 0.01)
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            acknowledged += [int(word) for line in writer.stdout for word in line.split()]
            reader.close()
        with TrajectoryStore.open(tmp_path) as store:
            found = assert_right(store)
        assert found[: len(acknowledged)] == acknowledged
        assert len(found) <= len(acknowledged) + 3
        acknowledged = found
    with TrajectoryWriter(tmp_path, fields=FIELDS, **SMALL) as last:
        last.retire(last.uids)
    assert disk_bytes(tmp_path / "segments") == 0


_HOLDS = """
store = TrajectoryStore.open(folder)
batch = store.lease([0]).load(["hidden"])
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_killed_reader_holds_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    fields = (Field("hidden", "float32", 256),)
    rows = np.ones((1000, 256), np.float32)
    with TrajectoryWriter(tmp_path, fields=fields, durable=False) as writer:
        writer.put(TrajectoryRecord("a", 0, 1000), hidden=rows)
    with _python(_HOLDS, tmp_path) as reader:
        assert _line(reader) == "held"
        with TrajectoryWriter(tmp_path, fields=fields, durable=False) as writer:
            writer.retire(["a"])
            assert disk_bytes(tmp_path) >= rows.nbytes  # it may still be read
            maps = Path(f"/proc/{reader.pid}/maps").read_text()
            assert "000001.hidden" in maps
            opened = [os.readlink(link) for link in Path(f"/proc/{reader.pid}/fd").iterdir()]
            assert not [name for name in [*opened, maps] if "/dev/shm" in name or "SYSV" in name]
            reader.kill()
            reader.wait()
            writer.retire([])
            assert disk_bytes(tmp_path) < 50_000


_READS = """
store = TrajectoryStore.open(folder)
batch = store.lease(range(len(store.table))).load(["hidden"])
print(sum(int(batch.read(row, "hidden").view(np.uint8).sum()) for row in batch.rows), flush=True)
sys.stdin.readline()
batch.release()
print("released", flush=True)
sys.stdin.readline()
"""


def _shared_size(pid: int, folder: Path, kind: str = "Pss") -> int:
    """Bytes of the maps of files below `folder` that process `pid` accounts for."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if not line.split(maxsplit=1)[0].endswith(":"):
            inside = str(folder) in line
        elif inside and line.startswith(f"{kind}:"):
            total += 1024 * int(line.split()[1])
    return total


def test_two_readers_share_every_page(tmp_path: Path) -> None:
    field = Field("hidden", "float32", 256)
    rows = np.random.default_rng(0).standard_normal((8000, 256)).astype(np.float32)
    with TrajectoryWriter(tmp_path, fields=(field,), durable=False) as writer:
        writer.put_many([(TrajectoryRecord(str(i), 0, 8000), {"hidden": rows}) for i in range(4)])
    with _python(_READS, tmp_path) as one, _python(_READS, tmp_path) as two:
        readers = (one, two)
        assert _line(one) == _line(two)
        alone = _shared_size(one.pid, tmp_path, "Rss")
        assert alone >= 4 * rows.nbytes
        assert sum(_shared_size(process.pid, tmp_path) for process in readers) <= 1.1 * alone
        for process in readers:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert _line(process) == "released"
            assert _shared_size(process.pid, tmp_path / "segments", "Rss") == 0


_ITERATES = """
import json, time
batch_rows = int(sys.argv[2])
store = TrajectoryStore.open(folder)
plan = np.random.default_rng(0).permutation(len(store.table)).reshape(-1, batch_rows)
before, total, begin = resident(), 0, time.perf_counter()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
assert store.counters.bytes_mapped == 0
for batch in store.batches(plan, ["hidden"], ahead=sys.argv[3] == "ahead"):
    for row in batch.rows:
        total += int(batch.read(row, "hidden")[:, 0].sum())
print(json.dumps({"growth": resident("HWM") - before, "total": total, "read": store.counters.bytes_checked}))
"""


@pytest.mark.parametrize("ahead", ["ahead", "one"])
@pytest.mark.parametrize("gib", _GIB or [0.125])
def test_memory_does_not_grow_with_the_data(tmp_path: Path, gib: float, ahead: str) -> None:
    """At most two mini-batches (or one) and 64 MiB; in the small case, which is under that, and 16 MiB."""
    field = Field("hidden", "int32", 64)
    count = int(gib * 1024)
    rows = np.random.default_rng(0).integers(0, 1 << 20, (4096, 64)).astype(np.int32)  # 1 MiB
    with TrajectoryWriter(tmp_path, fields=(field,), durable=False) as writer:
        for i in range(count):
            writer.put(TrajectoryRecord(str(i), 0, len(rows)), hidden=rows)
    size = 4 if gib < 1 else 32
    with _python(_ITERATES, tmp_path, str(size), ahead) as process:
        result = json.loads(_line(process))
    slack = 16 if gib < 1 else 64
    print(f"{gib} GiB, mini-batches of {size} MiB, {ahead}: grew by {result['growth'] / _MIB:.1f} MiB")
    assert result["growth"] <= ((2 if ahead == "ahead" else 1) * size + slack) * _MIB
    assert result["total"] == count * int(rows[:, 0].sum())
    assert result["read"] == count * rows.nbytes


_READS_IN_PIECES = """
store = TrajectoryStore.open(folder)
before, total = resident(), 0
Path("/proc/self/clear_refs").write_text("5")
with store.lease([0]) as batch:
    for start in range(0, 1 << 19, 1 << 12):
        total += int(batch.read(0, "hidden", start, start + (1 << 12)).sum())
        batch.forget(0, "hidden", start, start + (1 << 12))
print(resident("HWM") - before, total)
"""


def test_one_long_trajectory_is_read_in_the_memory_of_a_piece(tmp_path: Path) -> None:
    """128 MiB in pieces of 1 MiB that are given back as they are used."""
    rows = np.ones((1 << 12, 64), np.int32)
    with TrajectoryWriter(tmp_path, fields=(Field("hidden", "int32", 64),), durable=False) as writer:
        writer.begin("long", 0, 1 << 19)
        for _ in range(128):
            writer.append("long", hidden=rows)
        writer.seal(TrajectoryRecord("long", 0, 1 << 19))
    with _python(_READS_IN_PIECES, tmp_path) as process:
        growth, total = map(int, _line(process).split())
    assert growth < 16 * _MIB
    assert total == 128 * rows.size


def test_readers_in_a_fork_lease_for_themselves(tmp_path: Path) -> None:
    write(tmp_path, range(8))
    script = """
store = TrajectoryStore.open(folder)
held = store.lease(range(8))
if os.fork() == 0:
    held.release()                 # the parent's: stays
    assert assert_right(store) == list(range(8))
    os._exit(0)
_, status = os.wait()
with TrajectoryWriter(folder, fields=FIELDS) as writer:
    writer.retire(writer.uids)
    assert disk_bytes(folder / "segments") > 0
    held.release()
    writer.retire([])
    assert disk_bytes(folder / "segments") == 0
print("ok" if status == 0 else status, flush=True)
"""
    with _python(script, tmp_path) as process:
        assert _line(process) == "ok"
