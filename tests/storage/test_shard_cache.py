"""A node's copies of published weights: read once from the store, right whatever happens to them."""

import logging
import os
import random
import shutil
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
from checkpoints import copy_of
from child_python import child_python
from full import FULL
from shard_copies import copies_of, opened, published, read, url_of

from opd.errors import StorageError
from opd.storage import shard_cache
from opd.storage.leases import LeaseTable
from opd.storage.object_store import ObjectStore
from opd.storage.published import PublishedModel
from opd.storage.shard_cache import ShardCache

_python = partial(child_python, "shard_copies")


def size_of(folder: Path, name: str = "a") -> int:
    with PublishedModel.open(url_of(folder, name)) as model:
        return model.manifest.nbytes


def keys_of(model: PublishedModel) -> list[bytes]:
    """What every block of the model is known and claimed by."""
    room = memoryview(bytearray(model.manifest.nbytes))
    pieces = [piece for unit in model.manifest.units for piece in model._rank_blocks(unit, 0, 1, room)]
    return [shard_cache._block_key(model.manifest.digest, piece) for piece in pieces]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of the copies."""
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 1), (3, 2)])
def test_what_was_read_once_comes_from_the_node(tmp_path: Path, first: int, second: int) -> None:
    """Whatever the number of ranks: what is kept are blocks."""
    expected, whole = published(tmp_path), size_of(tmp_path)
    found, store, copies = read(tmp_path, world=first)
    assert found == expected
    assert (copies, store >= whole) == (0, True)
    assert read(tmp_path, world=second) == (expected, 0, whole)


def test_another_process_takes_them_too(tmp_path: Path) -> None:
    expected, whole = published(tmp_path), size_of(tmp_path)
    script = "print(*read(folder)[1:], flush=True); sys.stdin.readline()"
    with _python(script, tmp_path) as other:
        assert other.stdout is not None
        assert other.stdout.readline().split()[1] == "0"
        assert read(tmp_path) == (expected, 0, whole)


def test_of_a_folder_nothing_is_copied(tmp_path: Path) -> None:
    expected = published(tmp_path)
    for url in (tmp_path / "store" / "a", f"file://{tmp_path}/store/a"):
        with PublishedModel.open(url, cache=ShardCache(tmp_path / "copies")) as model:
            assert copy_of(model) == expected
            assert model.cached_bytes == 0
    assert not (tmp_path / "copies").exists()


def test_models_in_the_memory_of_a_process_are_copied(tmp_path: Path) -> None:
    expected, cache = published(tmp_path), ShardCache(tmp_path / "copies")
    with ObjectStore.open(f"memory://{tmp_path.name}") as store:
        for file in (tmp_path / "store" / "a").rglob("*"):
            if file.is_file():
                store.put(file.relative_to(tmp_path / "store" / "a").as_posix(), file.read_bytes())
        with PublishedModel.open(store, cache=cache) as model:
            assert copy_of(model) == copy_of(model) == expected
            assert model.cached_bytes == model.manifest.nbytes
    cache.close()


def test_a_tied_head_is_kept_once(tmp_path: Path) -> None:
    published(tmp_path, tied=True)
    with opened(tmp_path) as model:
        for unit in ("embedding", "head"):
            model.read_unit(unit, memoryview(bytearray(model.manifest.units[unit].nbytes)))
        assert model.cached_bytes == model.manifest.units["head"].nbytes
    with opened(tmp_path) as model:  # both at once
        buffers = [bytearray(model.manifest.units[unit].nbytes) for unit in ("embedding", "head")]
        model.read_parts(["embedding", "head"], 0, 1, [memoryview(one) for one in buffers])
        assert buffers[0] == buffers[1]


def test_models_of_one_shape_are_told_apart(tmp_path: Path) -> None:
    expected = [published(tmp_path, name, seed) for seed, name in enumerate("ab")]
    for _ in range(2):
        assert [read(tmp_path, name)[0] for name in "ab"] == expected


def test_a_flipped_bit_is_found_and_mended_from_the_store(tmp_path: Path, caplog) -> None:
    expected, whole = published(tmp_path), size_of(tmp_path)
    read(tmp_path)
    chooser, mended = random.Random(0), 0
    for _ in range(25):
        caplog.clear()
        copy = chooser.choice(copies_of(tmp_path))
        with copy.open("r+b") as file:
            offset = file.seek(chooser.randrange(copy.stat().st_size))
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([(byte or b"\0")[0] ^ 1 << chooser.randrange(8)]))
        found, store, copies = read(tmp_path)
        assert found == expected
        assert len(told(caplog)) <= 1
        mended += store > 0
        assert (store > 0) == (copies < whole)
        assert read(tmp_path) == (expected, 0, whole)
    assert mended > 10  # the others hit a header, which nobody reads here


def test_damage_done_while_the_copies_are_in_use_is_told_once(tmp_path: Path, caplog) -> None:
    expected = published(tmp_path)
    with opened(tmp_path) as model:
        copy_of(model)
        for copy in copies_of(tmp_path):
            copy.write_bytes(bytes(copy.stat().st_size))
        assert copy_of(model) == expected
        (warning,) = told(caplog)
        assert "holds what is not what was published, which is read from the store again" in warning
        before = model.bytes_read
        assert copy_of(model) == expected
        assert model.bytes_read == before


@pytest.mark.parametrize("harm", ["cut", "removed", "index"])
def test_files_that_are_cut_gone_or_forged_are_made_anew(tmp_path: Path, harm: str) -> None:
    expected, whole = published(tmp_path), size_of(tmp_path)
    read(tmp_path)
    copy, index = copies_of(tmp_path)[0], tmp_path / "copies" / "node" / "v3" / "index"
    if harm == "cut":
        os.truncate(copy, copy.stat().st_size // 2)
    elif harm == "removed":
        copy.unlink()
    else:
        index.write_bytes(index.read_bytes()[::-1])
    found, store, _ = read(tmp_path)
    assert found == expected
    assert (store > 0) == (harm != "index")
    assert read(tmp_path) == (expected, 0, whole)


def test_a_budget_that_is_too_small_keeps_what_fits_and_says_so(tmp_path: Path, caplog) -> None:
    """What is read in circles and does not fit would leave nothing of use if the oldest went first."""
    expected, whole = published(tmp_path), size_of(tmp_path)
    budget = 500_000
    with opened(tmp_path, budget=budget) as model:
        assert copy_of(model) == expected
        for _ in range(3):
            before = model.cached_bytes
            assert copy_of(model) == expected
            assert 0 < model.cached_bytes - before < whole
    (warning,) = told(caplog)
    assert "runtime.weights_cache_mb" in warning
    assert sum(path.stat().st_blocks * 512 for path in copies_of(tmp_path)) <= budget


def test_the_least_recently_used_goes_when_another_stage_begins(tmp_path: Path) -> None:
    expected = [published(tmp_path, name, seed) for seed, name in enumerate("abc")]
    read(tmp_path, "a")
    one = sum(path.stat().st_blocks * 512 for path in copies_of(tmp_path))
    budget = 2 * one + 4096
    read(tmp_path, "b", budget=budget)
    read(tmp_path, "a", budget=budget)
    for name, tensors in zip("cab", [expected[2], *expected[:2]], strict=True):
        found, store, _ = read(tmp_path, name, budget=budget)
        assert found == tensors
        assert (store == 0) == (name == "a")  # b was not used for longest when c came


@pytest.mark.slow
def test_two_processes_that_want_the_same_fetch_it_once(tmp_path: Path) -> None:
    published(tmp_path)
    whole = size_of(tmp_path)
    script = "print('ready', flush=True); sys.stdin.readline(); print(read(folder)[2], flush=True)"
    for _ in range(5):
        shutil.rmtree(tmp_path / "copies", ignore_errors=True)
        with _python(script, tmp_path) as one, _python(script, tmp_path) as two:
            for process in (one, two):
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            for process in (one, two):
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            copies = [int(process.stdout.readline()) for process in (one, two) if process.stdout is not None]
        assert sum(copies) == whole


def test_what_another_is_fetching_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, fetching, go_on = published(tmp_path), threading.Event(), threading.Event()
    monkeypatch.setattr(shard_cache, "_PATIENCE", 1e9)
    with opened(tmp_path) as first, opened(tmp_path) as second:
        ask = first.store.read_ranges

        def slowly(pieces, arrived) -> None:
            fetching.set()
            assert go_on.wait(60)
            ask(pieces, arrived)

        monkeypatch.setattr(first.store, "read_ranges", slowly)
        monkeypatch.setattr(second.store, "read_ranges", lambda pieces, arrived: pytest.fail("fetched twice"))
        found: list[bytearray] = []

        def read_layer(model: PublishedModel) -> None:
            buffer = bytearray(model.manifest.units["layer.0"].nbytes)
            model.read_unit("layer.0", memoryview(buffer))
            found.append(buffer)

        threads = [threading.Thread(target=read_layer, args=[model]) for model in (first, second)]
        threads[0].start()
        assert fetching.wait(60)
        monkeypatch.setattr(shard_cache.time, "sleep", lambda seconds: go_on.set())  # the second one waits
        threads[1].start()
        for thread in threads:
            thread.join()
    assert found[0] == found[1]
    assert read(tmp_path)[0] == expected


_FETCHES = """
with opened(folder) as model:
    def hang(pieces, arrived):
        print("fetching", flush=True)
        sys.stdin.readline()
    model.store.read_ranges = hang
    unit = model.manifest.units["layer.0"]
    model.read_unit("layer.0", memoryview(bytearray(unit.nbytes)))
"""


@pytest.mark.parametrize("ending", ["killed", "stopped"])
def test_nobody_waits_for_ever_for_a_process_that_does_not_fetch(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = published(tmp_path)
    monkeypatch.setattr(shard_cache, "_PATIENCE", 0.1 if ending == "stopped" else 1e9)
    with _python(_FETCHES, tmp_path) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "fetching\n"
        if ending == "killed":
            other.kill()
            other.wait()
        else:
            os.kill(other.pid, signal.SIGSTOP)
        assert read(tmp_path)[0] == expected
    assert read(tmp_path)[:2] == (expected, 0)


# For every number on stdin: a child that reads the model through the copies, and kills itself at its call of
# that number among those that change a file, or ends well; prints which.
_KILLS = """
import signal

def counting(call, left):
    def counted(*words, **more):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*words, **more)
    return counted

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        left = [int(line)]
        for name in ("pwrite", "mkdir", "unlink", "preadv"):
            setattr(os, name, counting(getattr(os, name), left))
        read(folder)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_kill_9_while_it_fills_leaves_nothing_that_is_used_and_no_lock(tmp_path: Path, caplog) -> None:
    expected, whole, event, kills = published(tmp_path), size_of(tmp_path), 0, 0
    with PublishedModel.open(url_of(tmp_path)) as model:
        keys = keys_of(model)
    with _python(_KILLS, tmp_path) as killer:
        assert killer.stdin is not None
        assert killer.stdout is not None
        while True:
            event += 1 + event // (8 if FULL else 3)
            shutil.rmtree(tmp_path / "copies", ignore_errors=True)
            print(event, file=killer.stdin, flush=True)
            status = int(killer.stdout.readline())
            if (tmp_path / "copies" / "node").is_dir():
                claims = LeaseTable(tmp_path / "copies" / "node" / "claims")
                assert all(map(claims.claim, keys))
                claims.close()
            assert read(tmp_path)[0] == expected, event
            assert read(tmp_path) == (expected, 0, whole), event
            if status == 0:
                break
            assert status == -signal.SIGKILL
            kills += 1
        killer.stdin.close()
        assert killer.wait() == 0
    assert kills > (10 if FULL else 5)
    assert told(caplog) == []


_FULL_DISK = """
import logging, resource
logging.basicConfig(format="%(message)s", stream=sys.stdout)
with opened(folder) as model:
    model.read_unit("norm", memoryview(bytearray(model.manifest.units["norm"].nbytes)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    for _ in range(2):
        found = copy_of(model)
print(sum(map(len, found.values())), 0 < model.cached_bytes < 2 * model.manifest.nbytes, flush=True)
"""


def test_a_disk_that_is_full_is_one_warning(tmp_path: Path) -> None:
    expected = published(tmp_path)
    with _python(_FULL_DISK, tmp_path) as process:
        said, _ = process.communicate()
    warning, result = said.splitlines()
    assert "has no room for all of them" in warning
    assert result == f"{sum(map(len, expected.values()))} True"


def not_ours(folder: Path, outside: Path, how: str) -> None:
    """Let the folder of the copies be what nobody here has made."""
    inner = {"linked inside": "v3", "linked blobs": "v3/blobs", "linked new": "v3/new"}
    files = {"linked claims": "claims", "linked users": "v3/users", "linked leases": "v3/leases"}
    if how == "a link":
        folder.parent.mkdir()
        folder.symlink_to(outside, target_is_directory=True)
        return
    if how == "a file":
        folder.parent.mkdir()
        folder.write_bytes(b"")
        return
    folder.mkdir(parents=True, mode=0o700)
    (folder / "v3").mkdir()
    if how == "open to others":
        folder.chmod(0o777)
    elif how == "of another user":
        os.chown(folder, 12345, 12345)
    elif how in inner:
        place = folder / inner[how]
        if place.exists():
            place.rmdir()
        place.symlink_to(outside, target_is_directory=True)
    else:
        (folder / files[how]).symlink_to(outside / "000001")


@pytest.mark.parametrize(
    "how",
    [
        *("a link", "a file", "open to others", "of another user", "linked inside", "linked blobs"),
        *("linked new", "linked claims", "linked users", "linked leases"),
    ],
)
def test_a_folder_that_is_not_ours_is_not_used(tmp_path: Path, how: str, caplog) -> None:
    if how == "of another user" and os.geteuid() != 0:
        pytest.skip("needs root")
    expected, outside = published(tmp_path), tmp_path / "outside"
    outside.mkdir()
    (outside / "000001").write_bytes(b"not to be touched" * 1000)
    (outside / "index").write_bytes(b"nor this")
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in outside.iterdir()}
    not_ours(tmp_path / "copies" / "node", outside, how)
    with opened(tmp_path) as model:
        assert copy_of(model) == copy_of(model) == expected
        assert model.cached_bytes == 0
    (warning,) = told(caplog)
    assert "is not used" in warning
    assert warning.endswith("; they are read from the store each time")
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in outside.iterdir()} == before


@pytest.mark.parametrize("odd", ["link", "linked folder", "linked index", "pipe", "name"])
def test_odd_things_among_the_blobs_are_not_followed(tmp_path: Path, odd: str, caplog) -> None:
    expected = published(tmp_path)
    read(tmp_path)
    copy, outside = copies_of(tmp_path)[0], tmp_path / "elsewhere" / "outside"
    outside.parent.mkdir()
    outside.write_bytes(copy.read_bytes())
    before = outside.read_bytes(), outside.stat().st_mtime_ns
    copy.unlink()
    if odd == "link":
        copy.symlink_to(outside)
    elif odd == "linked folder":
        shutil.rmtree(copy.parent)
        copy.parent.symlink_to(outside.parent)
    elif odd == "linked index":
        index = tmp_path / "copies" / "node" / "v3" / "index"
        index.unlink()
        index.symlink_to(outside)
    elif odd == "pipe":
        os.mkfifo(copy)
    else:
        copy.with_name("9" * 30).write_bytes(before[0])
    for _ in range(2):
        assert read(tmp_path)[0] == expected
    assert (outside.read_bytes(), outside.stat().st_mtime_ns) == before
    assert list(outside.parent.iterdir()) == [outside]
    assert read(tmp_path)[1] == 0
    assert told(caplog) == []


def test_a_store_that_fails_fails_as_without_copies(tmp_path: Path) -> None:
    published(tmp_path)
    with opened(tmp_path) as model:
        shutil.rmtree(tmp_path / "store")
        with pytest.raises(StorageError, match="does not exist"):
            model.read_unit("norm", memoryview(bytearray(model.manifest.units["norm"].nbytes)))
        claims = LeaseTable(tmp_path / "copies" / "node" / "claims")
        assert all(map(claims.claim, keys_of(model)))
        assert not any(map(claims.claim, keys_of(model)))  # no other thread of this process either


def test_reading_goes_on_after_the_copies_were_closed(tmp_path: Path, caplog) -> None:
    expected = published(tmp_path)
    cache = ShardCache(tmp_path / "copies" / "node")
    with PublishedModel.open(url_of(tmp_path), cache=cache) as model:
        assert copy_of(model) == expected
        cache.close()
        assert copy_of(model) == expected
        assert model.cached_bytes == 0
    assert told(caplog) == []


def test_a_folder_that_its_group_may_write_is_refused(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(0o770)
    with pytest.raises(StorageError, match="others may write"):
        shard_cache._make_own(tmp_path / "c")
