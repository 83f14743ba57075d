"""Samples on disk under damage, full disks, kills and many readers: one clear sentence, or right data."""

import json
import os
import random
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from child_python import child_python, python_on_small_disk
from full import cases
from sample_data import assert_right, items, record, write

from opd.errors import StorageError
from opd.storage import files
from opd.storage.sample_lot import SampleRecord, decode_records, encode_records
from opd.storage.sample_store import SampleStore, SampleWriter

_KILLS = int(os.environ.get("OPD_TRAJECTORY_KILLS", "8"))
_GIB = [float(size) for size in os.environ.get("OPD_TRAJECTORY_GIB", "").split()]
"""Sizes of data sets for the test of memory, which takes some ten seconds a GiB: `1 4 8`."""
_MIB = 1 << 20
_python = partial(child_python, "sample_data")


def _refusal(folder: Path, numbers: range = range(4)) -> str | None:
    """What reading everything says; None if it was right in every bit."""
    try:
        assert assert_right(SampleStore.open([folder])) == list(numbers)
    except StorageError as error:
        said = str(error)
    else:
        return None
    assert "\n" not in said
    return said


def test_a_flipped_bit_anywhere_is_refused(tmp_path):
    """Never a wrong value, never fewer samples."""
    write(tmp_path, range(4))
    (path,) = tmp_path.glob("*.safetensors")
    whole, chooser = path.read_bytes(), random.Random(0)
    for place in [*range(0, 8), *chooser.sample(range(len(whole)), cases(400))]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << chooser.randrange(8)
        path.write_bytes(flipped)
        said = _refusal(tmp_path)
        assert said is not None, place
        assert str(path) in said
        assert "restore it from a copy, or remove it" in said
    path.write_bytes(whole)
    assert _refusal(tmp_path) is None


def test_a_file_cut_short_is_refused_and_one_that_is_lost_is_missing(tmp_path):
    write(tmp_path, range(4))
    write(tmp_path, range(4, 6))
    path = min(tmp_path.glob("*.safetensors"))
    whole, chooser = path.read_bytes(), random.Random(1)
    for length in {0, 1, 7, len(whole) - 1, *(chooser.randrange(len(whole)) for _ in range(cases(40)))}:
        path.write_bytes(whole[:length])
        assert _refusal(tmp_path), length
    path.write_bytes(whole + b"more")
    assert "it goes on after its end" in str(_refusal(tmp_path))
    path.unlink()
    assert _refusal(tmp_path, range(4, 6)) is None


@pytest.mark.parametrize("what", ["renamed", "a link", "a folder", "a pipe", "newer"])
def test_what_is_no_lot_of_this_name_is_refused(tmp_path, what):
    write(tmp_path, range(4))
    (path,) = tmp_path.glob("*.safetensors")
    if what == "renamed":
        path.rename(tmp_path / "00000003-00000001.safetensors")
    elif what == "newer":
        data = path.read_bytes()
        path.write_bytes(data.replace(b'"opd.samples":"2"', b'"opd.samples":"9"'))
    else:
        path.rename(tmp_path / "elsewhere")
        if what == "a link":
            path.symlink_to(tmp_path / "elsewhere")
        elif what == "a folder":
            path.mkdir()
        else:
            os.mkfifo(path)
    expected = {"renamed": "was written as 00000000-00000001", "newer": "has format 9 of samples"}
    assert expected.get(what, "cannot be read") in str(_refusal(tmp_path))


def test_a_lot_whose_name_may_not_be_on_the_disk_is_not_there(tmp_path, monkeypatch):
    def refuse(folder: object) -> None:
        raise OSError(5, "Input/output error")

    with SampleWriter(tmp_path) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(files, "fsync_folder", refuse)
            with pytest.raises(StorageError, match="cannot be written"):
                writer.put(items([0]))
        assert not SampleStore.open([tmp_path]).records
        writer.put(items([1]))
    assert assert_right(SampleStore.open([tmp_path])) == [1]


_FULL_DISK = """
from opd.errors import StorageError
kept = []
big = {"token_ids": np.arange(100_000, dtype=np.int32)}
with SampleWriter(folder / "store") as writer:
    for i in range(40):
        try:
            writer.put([(SampleRecord(str(i), 0, 100_000), big)], i)
            kept.append(i)
        except StorageError as error:
            assert "cannot be written (No space left" in str(error), error
            break
    assert 5 < len(kept) < 20, kept
    assert not list((folder / "store").glob(".*"))
    writer.retire_before(3)  # makes room
    writer.put([(SampleRecord("last", 0, 100_000), big)], 50)
store = SampleStore.open([folder / "store"])
assert [one.uid for one in store.records] == [*map(str, kept[3:]), "last"]
print("ok")
"""


def test_a_full_disk_takes_nothing_of_what_was_written(tmp_path):
    code = "import sys\nfrom pathlib import Path\nfrom sample_data import *\nfolder = Path(sys.argv[1])\n"
    result = python_on_small_disk(code + _FULL_DISK, tmp_path, "4m")
    assert (result.stdout, result.stderr) == ("ok\n", "")


def _of_length(number: int, tokens: int) -> SampleRecord:
    return replace(record(number), prompt_tokens=0, response_tokens=tokens, trainable_tokens=0)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


_WRITES = """
import random
chooser = random.Random(int(sys.argv[2]))
with SampleWriter(folder, durable=False) as writer:
    known = [one.uid for one in SampleStore.open([folder]).records]
    number = 1 + max([int(uid.removeprefix("run/")) for uid in known], default=-1)
    print("open", flush=True)
    while True:
        group = [number + i for i in range(chooser.randrange(1, 4))]
        writer.put(items(group))
        print(*group, flush=True)
        number += len(group)
        sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path):
    """After each kill what was acknowledged is there, or one more lot; a reader never sees less."""
    acknowledged: list[int] = []
    chooser = random.Random(3)
    for attempt in range(_KILLS):
        with _python(_WRITES, tmp_path, str(attempt)) as writer:
            assert _line(writer) == "open"
            assert writer.stdin is not None
            for _ in range(chooser.randrange(1, 8)):
                acknowledged += map(int, _line(writer).split())
                writer.stdin.write("\n")
                writer.stdin.flush()
                found = [int(o.uid.removeprefix("run/")) for o in SampleStore.open([tmp_path]).records]
                assert found[: len(acknowledged)] == acknowledged
            time.sleep(chooser.random() * 0.01)
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            acknowledged += [int(word) for line in writer.stdout for word in line.split()]
        found = assert_right(SampleStore.open([tmp_path]))
        assert found[: len(acknowledged)] == acknowledged
        assert len(found) <= len(acknowledged) + 3
        acknowledged = found
    with SampleWriter(tmp_path) as last:
        last.retire_before(1)
    assert os.listdir(tmp_path) == ["writer"]


_READS = """
store = SampleStore.open([folder])
batch = store.lease(range(len(store.records))).load(["token_ids"])
print(sum(int(batch.read(row, "token_ids").sum()) for row in batch.rows), flush=True)
sys.stdin.readline()
batch.release()
print("released", flush=True)
sys.stdin.readline()
"""


def _mapped(pid: int, folder: Path, kind: str) -> int:
    """Bytes of the maps of files below `folder` that process `pid` accounts for."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if not line.split(maxsplit=1)[0].endswith(":"):
            inside = str(folder) in line
        elif inside and line.startswith(f"{kind}:"):
            total += 1024 * int(line.split()[1])
    return total


def test_two_readers_share_every_page_and_a_killed_one_holds_no_disk(tmp_path):
    rows = np.random.default_rng(0).integers(0, 9, 1 << 20).astype(np.int32)
    with SampleWriter(tmp_path, durable=False) as writer:
        for i in range(4):
            writer.put([(_of_length(i, len(rows)), {"token_ids": rows})], i)
    with _python(_READS, tmp_path) as one, _python(_READS, tmp_path) as two:
        assert _line(one) == _line(two) == str(4 * rows.sum())
        alone = _mapped(one.pid, tmp_path, "Rss")
        assert alone >= 4 * rows.nbytes
        assert sum(_mapped(process.pid, tmp_path, "Pss") for process in (one, two)) <= 1.1 * alone
        with SampleWriter(tmp_path, durable=False) as writer:
            writer.retire_before(4)
        assert _mapped(two.pid, tmp_path, "Rss") == alone  # who has it open keeps it
        one.kill()
        assert two.stdin is not None
        two.stdin.write("\n")
        two.stdin.flush()
        assert _line(two) == "released"
        assert _mapped(two.pid, tmp_path, "Rss") == 0


_ITERATES = """
import json
from watched import own_bytes
store = SampleStore.open([folder])
plan = np.random.default_rng(0).permutation(len(store.records)).reshape(-1, int(sys.argv[2]))
before, total = own_bytes("VmRSS"), 0
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
for batch in store.lease_batches(plan, ["token_ids"], ahead=sys.argv[3] == "ahead"):
    for row in batch.rows:
        total += int(batch.read(row, "token_ids").sum())
print(json.dumps({"growth": own_bytes() - before, "total": total, "read": store.counters.bytes_checked}))
"""


@pytest.mark.parametrize("ahead", ["ahead", "one"])
@pytest.mark.parametrize("gib", _GIB or [0.125])
def test_memory_does_not_grow_with_the_data(tmp_path, gib: float, ahead: str):
    """At most two mini-batches (or one) and 64 MiB; in the small case, which is under that, and 16 MiB.
    Samples of several mini-batches lie in one lot.
    """
    count = int(gib * 1024)
    rows = np.random.default_rng(0).integers(0, 1 << 20, 1 << 18).astype(np.int32)  # 1 MiB
    with SampleWriter(tmp_path, durable=False) as writer:
        for first in range(0, count, 8):
            own = [_of_length(i, len(rows)) for i in range(first, first + 8)]
            writer.put([(one, {"token_ids": rows}) for one in own])
    size = 4 if gib < 1 else 32
    with _python(_ITERATES, tmp_path, str(size), ahead) as process:
        result = json.loads(_line(process))
    slack = 16 if gib < 1 else 64
    assert result["growth"] <= ((2 if ahead == "ahead" else 1) * size + slack) * _MIB
    assert result["total"] == count * int(rows.sum())
    assert result["read"] == count * rows.nbytes


@pytest.mark.parametrize("durable", [True, False])
def test_a_lot_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, durable):
    """The order of the calls tells what a power cut could lose; each is passed on to the system."""
    told: list[str] = []
    fsync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (told.append("fsync"), fsync(file))[1])
    monkeypatch.setattr(os, "replace", lambda *names: (told.append("named"), rename(*names))[1])
    with SampleWriter(tmp_path / "store", durable=durable) as writer:
        told.clear()
        writer.put(items([0]))
    assert told == (["fsync", "named", "fsync"] if durable else ["named"])


def test_what_a_killed_writer_left_half_is_removed(tmp_path):
    write(tmp_path, [0])
    (tmp_path / ".00000000-00000002.safetensors.0badcafe.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path, [1])
    assert sorted(os.listdir(tmp_path))[-2:] == ["notes.txt", "writer"]
    assert assert_right(SampleStore.open([tmp_path])) == [0, 1]


@pytest.mark.parametrize(("name", "values"), [("uid", ["a", "b", "a"]), ("reward", ["1", 1, None])])
def test_records_that_no_writer_makes_are_refused(name, values):
    columns = json.loads(encode_records([SampleRecord(uid, 0, 0) for uid in "abc"]))
    with pytest.raises(ValueError, match=r"two records of one sample|valid number"):
        decode_records(json.dumps(columns | {name: values}).encode())


@pytest.mark.parametrize(
    "extra",
    [
        {"reward_parts": 5},
        {"reward_parts": {"a": "b"}},
        {"reward_parts": {"a": "1"}},
        {"metadata": [1]},
        {"branch_of": 7},
        {"failure": {}},
    ],
)
def test_what_a_sample_carries_has_the_type_that_its_readers_take(tmp_path, extra):
    with SampleWriter(tmp_path) as writer:
        writer.put([(SampleRecord("a", 0, 0, extra=extra), {})])
    with pytest.raises(StorageError, match="is damaged, or holds no samples"):
        SampleStore.open([tmp_path])
