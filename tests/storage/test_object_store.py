import errno
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.errors import StorageError
from opd.retry import Retry
from opd.storage import object_store
from opd.storage.object_store import (
    LEAST_BYTES,
    MAX_GAP,
    MIB,
    ObjectStore,
    Range,
    StoreOptions,
    TransientError,
    join_ranges,
    skip_bytes,
    with_retries,
)
from opd.storage.s3_store import _endpoint_url

FAST = StoreOptions(retry=Retry(attempts=3, pause=0.001), chunk_bytes=1000)


@pytest.fixture(params=["path", "file", "local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path):
    folder = str(tmp_path / "s")
    url = folder if request.param == "path" else f"{request.param}://{folder}"
    with ObjectStore.open(url, options=FAST) as opened:
        yield opened


def test_what_is_put_is_read_back(store):
    data = os.urandom(12_345)
    store.put("a/b.bin", data)
    store.put("a/c.bin", lambda: iter([data[:5000], memoryview(data)[5000:]]))
    assert store.get("a/b.bin") == store.get("a/c.bin") == data
    assert store.get_range("a/b.bin", 100, 7000) == data[100:7000]
    assert store.size("a/b.bin") == 12_345
    assert store.exists("a/b.bin")
    assert not store.exists("a")
    assert not store.exists("a/none")
    assert store.bytes_read == 2 * 12_345 + 6900
    store.put("a/b.bin", b"")
    assert store.get("a/b.bin") == b""
    store.delete("a/b.bin")
    store.delete("a/b.bin")
    assert not store.exists("a/b.bin")
    assert store.exists("a/c.bin")


def test_errors_name_object_and_range(store):
    store.put("a", b"12345")
    with pytest.raises(StorageError, match=r"s/none does not exist"):
        store.get("none")
    with pytest.raises(StorageError, match=r"s/none"):
        store.get_range("none", 0, 5)
    with pytest.raises(StorageError, match=r"s/a.*3-9"):
        store.get_range("a", 3, 9)


@pytest.mark.parametrize("name", ["a b", "ä", "100%", "a#b"])
def test_a_folder_is_found_by_its_path_and_by_its_url(tmp_path, name):
    folder = tmp_path / name
    with ObjectStore.open(folder.as_uri(), options=FAST) as opened:
        opened.put("x", b"1")
    assert (folder / "x").read_bytes() == b"1"
    with ObjectStore.open(folder, options=FAST) as opened:
        assert opened.get("x") == b"1"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_comes_into_the_place_of_a_file_is_not_waited_for(tmp_path, make):
    with ObjectStore.open(tmp_path, options=FAST) as opened:
        make(tmp_path / "shard")
        for reading in (lambda: opened.size("shard"), lambda: opened.get_range("shard", 0, 8)):
            with pytest.raises(StorageError, match=r"shard is no file; publish the model again"):
                reading()


def test_a_folder_in_the_place_of_an_object_is_not_asked_for_again(tmp_path):
    with ObjectStore.open(f"local://{tmp_path}", options=FAST) as opened:
        (tmp_path / "shard").mkdir()
        with pytest.raises(StorageError, match=r"shard is no file; publish the model again"):
            opened.read_into("shard", 0, memoryview(bytearray(8)))


@pytest.mark.parametrize("store", ["path"], indirect=True)
def test_an_interrupted_put_leaves_the_old_object(store):
    store.put("a", b"old")

    def breaks():
        yield b"new"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.put("a", breaks)
    assert store.get("a") == b"old"


def test_threads_share_a_store(store):
    data = os.urandom(50_000)
    store.put("a", data)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: store.get_range("a", i * 500, i * 500 + 9000), range(80)))
    assert found == [data[i * 500 : i * 500 + 9000] for i in range(80)]
    assert store.bytes_read == 80 * 9000


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(2, 1, 4), (16, 1, 8), (96, 1, 16), (96, 8, 6)])
def test_a_folder_is_read_by_half_of_the_cores_of_its_rank(tmp_path, monkeypatch, cores, ranks, threads):
    monkeypatch.setattr(object_store, "core_count", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert ObjectStore.open(tmp_path).options.threads == threads
    assert ObjectStore.open(tmp_path, options=StoreOptions(threads=2)).options.threads == 2


def test_an_error_is_raised_only_when_no_read_is_running(tmp_path):
    store = ObjectStore.open(tmp_path, options=StoreOptions(threads=4))
    store.put("a", bytes(100))
    buffer = memoryview(bytearray(400))
    started, first, ended = threading.Barrier(4), threading.Semaphore(1), []

    def arrived(piece: Range) -> None:
        started.wait(120)
        if first.acquire(blocking=False):
            raise StorageError("broken")
        time.sleep(0.2)
        ended.append(piece)

    with pytest.raises(StorageError, match="broken"):
        store.read_ranges([Range("a", 0, buffer[i * 100 : i * 100 + 100]) for i in range(4)], arrived)
    assert len(ended) == 3
    store.close()


def test_an_unknown_protocol_is_refused():
    with pytest.raises(StorageError, match="nonsense://x cannot be opened"):
        ObjectStore.open("nonsense://x")


@pytest.mark.parametrize(
    ("number", "mend"),
    [
        (errno.EMFILE, r"raise the limit \(`ulimit -n`\), then run"),
        (errno.ENOSPC, "free disk space or check"),
    ],
)
def test_a_limit_of_the_process_is_not_blamed_on_the_disk(number, mend, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("opd.storage.object_store.atomic_file", refuse)
    with pytest.raises(StorageError, match=rf"a cannot be written \(.*\); {mend}"):
        ObjectStore.open(tmp_path).put("a", b"")


class RefusedError(Exception):
    """What a library raises of its own: ftplib and paramiko do."""


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (
            NotImplementedError(),
            r"memory://x/a cannot be deleted: a store of its protocol cannot do that; give",
        ),
        (RefusedError("550  no\nsuch"), r"memory://x/a cannot be deleted: 550 no such; check the URL"),
        (RefusedError(), r"memory://x/a cannot be deleted: RefusedError; check the URL"),
    ],
)
def test_what_a_library_raises_of_its_own_is_one_sentence(raised, told, monkeypatch):
    store = ObjectStore.open("memory://x")

    def rm_file(_: str) -> None:
        raise raised

    monkeypatch.setattr(store, "_made", SimpleNamespace(rm_file=rm_file))
    with pytest.raises(StorageError, match=told):
        store.delete("a")


def test_the_endpoint_of_s3_comes_before_that_of_all_services(monkeypatch):
    session = SimpleNamespace(get_scoped_config=lambda: {"endpoint_url": "http://file"})
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    found = [_endpoint_url(session)]
    for name in reversed(names):
        monkeypatch.setenv(name, name)
        found.append(_endpoint_url(session))
    assert found == ["http://file", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"]


def test_retries_are_bounded_and_pauses_grow(monkeypatch):
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    options = StoreOptions(retry=Retry(attempts=8, pause=1.0, longest=20.0))
    calls = []

    def fails() -> None:
        calls.append(1)
        raise TransientError("503 SlowDown")

    with pytest.raises(StorageError, match=r"x cannot be read: 503 SlowDown, 8 times in .* s; check"):
        with_retries(options, "x cannot be read", fails)
    assert len(calls) == 8
    for pause, full in zip(pauses, [1, 2, 4, 8, 16, 20, 20], strict=True):
        assert full / 2 <= pause <= full
    outcomes = iter([TransientError("no"), TransientError("no"), 5])

    def at_last() -> int:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert with_retries(options, "x", at_last) == 5


def test_the_default_pauses_outlast_ten_seconds_away():
    retry = StoreOptions().retry
    assert sum(min(retry.pause * 2**i, retry.longest) for i in range(retry.attempts - 1)) / 2 > 10


@given(
    lengths=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=12),
    size=st.integers(1, 200),
    start=st.integers(0, 30),
    done=st.integers(0, 100),
)
def test_joined_ranges_read_the_same_bytes(lengths, size, start, done):
    content, ranges, at = random.Random(0).randbytes(1000), [], start
    for length, gap in lengths:
        ranges.append(Range("a", at, memoryview(bytearray(length))))
        at += length + gap
    requests = join_ranges(ranges, size)
    assert [wanted for request in requests for wanted in request.ranges] == ranges
    for request in requests:
        longest = max(len(wanted.into) for wanted in request.ranges)
        assert request.stop - request.start <= size + longest
        views = request.target_views()
        assert sum(map(len, views)) == request.stop - request.start
        data, skipped = content[request.start : request.stop], min(done, request.stop - request.start)
        for part, position in ((skip_bytes(views, skipped), skipped), (views, 0)):
            for view in part:
                view[:] = data[position : position + len(view)]
                position += len(view)
            assert position == len(data)
    assert all(bytes(wanted.into) == content[wanted.start : wanted.stop] for wanted in ranges)


@given(pieces=st.integers(1, 200), threads=st.integers(1, 8), chunk=st.integers(2, 32))
def test_every_thread_gets_as_many_requests_as_the_others(tmp_path_factory, pieces, threads, chunk):
    options = StoreOptions(threads=threads, chunk_bytes=chunk * MIB)
    store = ObjectStore.open(tmp_path_factory.getbasetemp(), options=options)
    piece = 3 * MIB
    size = store.request_bytes(pieces * piece)
    assert size <= max(chunk * MIB, LEAST_BYTES)
    content = memoryview(mmap(-1, pieces * piece))
    requests = join_ranges(
        [Range("a", i * piece, content[i * piece : (i + 1) * piece]) for i in range(pieces)], size
    )
    assert all(request.stop - request.start <= size + piece for request in requests)
    if size >= 2 * piece:
        assert len(requests) % threads == 0


def test_ranges_far_apart_or_of_other_objects_are_not_joined(tmp_path):
    def wanted(path: str, at: int) -> Range:
        return Range(path, at, memoryview(bytearray(10)))

    far = [wanted("a", 0), wanted("a", 10 + MAX_GAP), wanted("a", 21 + 2 * MAX_GAP), wanted("b", 31)]
    assert [len(request.ranges) for request in join_ranges([*far, wanted("b", 0)], 2**30)] == [2, 1, 1, 1]
