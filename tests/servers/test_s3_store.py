"""The S3 store against a real server, and through a proxy that breaks requests."""

import os
import time
from dataclasses import replace

import pytest
from seaweedfs import aws_environment

from opd.errors import StorageError
from opd.retry import Retry
from opd.storage.object_store import ObjectStore, StoreOptions
from opd.storage.s3_store import PART_BYTES

QUICK = StoreOptions(retry=Retry(attempts=4, pause=0.01), connect_seconds=1.0, chunk_bytes=100_000, threads=3)
DATA = os.urandom(400_000)


@pytest.fixture(scope="module")
def shared(s3):
    """A place that holds DATA under the name "a", for tests that only read."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in aws_environment(s3.endpoint).items():
            patch.setenv(name, value)
        with ObjectStore.open("s3://models/shared-data") as store:
            store.put("a", DATA)
    return "s3://models/shared-data"


@pytest.fixture
def fault():
    return {}


@pytest.fixture
def store(shared, proxy, fault):
    stalls = fault.get("kind") == "stall"
    with ObjectStore.open(shared, options=replace(QUICK, stall_seconds=0.5) if stalls else QUICK) as opened:
        yield opened


@pytest.fixture
def empty(url):
    with ObjectStore.open(url, options=QUICK) as opened:
        yield opened


def test_what_is_put_is_read_back(empty):
    store = empty
    store.put("a", DATA)
    assert store.get("a") == DATA
    assert store.get_range("a", 1000, 250_001) == DATA[1000:250_001]
    assert store.bytes_read == 400_000 + 249_001
    store.put("folder/with space+%.bin", b"x")
    assert store.get("folder/with space+%.bin") == b"x"
    assert store.exists("a")
    assert not store.exists("folder")
    store.put("a", b"")
    assert store.size("a") == 0
    assert store.get("a") == b""
    store.delete("a")
    store.delete("a")
    assert not store.exists("a")


def test_large_objects_are_uploaded_in_parts(empty, proxy):
    store = empty
    piece = os.urandom(PART_BYTES // 4 + 1)
    proxy.inject("status", method="PUT", path="partNumber=2", times=2)
    store.put("large", lambda: iter([piece] * 5))
    assert store.size("large") == 5 * len(piece)
    assert store.get_range("large", 4 * len(piece), 5 * len(piece)) == piece
    assert store.get_range("large", len(piece) - 3, len(piece) + 5) == piece[-3:] + piece[:5]
    assert proxy.faults[0].times == 0


def test_an_interrupted_upload_is_not_visible(empty):
    piece = bytes(PART_BYTES)

    def breaks():
        yield piece
        yield piece
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        empty.put("large", breaks)
    assert not empty.exists("large")


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status"},
        {"kind": "status", "status": 500, "code": "InternalError"},
        {"kind": "status", "status": 403, "code": "ExpiredToken"},
        {"kind": "reset"},
        {"kind": "reset", "after": 70_000},
        {"kind": "short", "after": 99_999},
        {"kind": "stall"},
        {"kind": "stall", "after": 1234},
    ],
    ids=str,
)
def test_a_passing_fault_is_survived(store, proxy, fault):
    proxy.faults.clear()
    proxy.inject(**fault, times=2)
    assert store.get_range("a", 0, 400_000) == DATA
    assert proxy.faults[0].times == 0
    assert 400_000 <= store.bytes_read <= 400_000 + 200_000


def test_a_resumed_read_does_not_start_again(store, proxy):
    proxy.inject("reset", after=90_000, times=3)
    before = proxy.body_bytes
    assert store.get_range("a", 0, 100_000) == DATA[:100_000]
    assert proxy.body_bytes - before <= 100_000


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ({"kind": "status"}, "the store answered 503 SlowDown, 4 times in"),
        ({"kind": "reset"}, "after 0 of 100000 bytes, 4 times in"),
        ({"kind": "short"}, "the connection ended after 0 of 100000 bytes, 4 times in"),
        ({"kind": "stall"}, "no answer in time after 0 of 100000 bytes, 4 times in"),
        (
            {"kind": "status", "status": 403, "code": "ExpiredToken"},
            "403 ExpiredToken, also with credentials",
        ),
        ({"kind": "status", "status": 403, "code": "AccessDenied"}, "403 AccessDenied; check AWS_ACCESS_KEY"),
        ({"kind": "status", "status": 404, "code": "NoSuchKey"}, "does not exist"),
        ({"kind": "status", "status": 301, "code": "PermanentRedirect"}, "check endpoint and region"),
    ],
    ids=str,
)
def test_a_lasting_fault_ends_with_object_range_and_cause(store, proxy, fault, cause):
    proxy.inject(**fault, times=1000)
    begin = time.monotonic()
    with pytest.raises(StorageError) as caught:
        store.get_range("a", 100_000, 200_000)
    assert time.monotonic() - begin < 60
    message = str(caught.value)
    assert store.object_address("a") in message
    assert cause in message
    if "does not exist" not in cause:
        assert "bytes 100000-200000" in message
    assert "\n" not in message
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in message


def test_a_trickle_counts_as_a_stall(shared, proxy):
    slow = StoreOptions(retry=Retry(attempts=2, pause=0.01), stall_seconds=0.6, least_bytes_per_second=10**6)
    with ObjectStore.open(shared, options=slow) as store:
        proxy.bytes_per_second = 400_000
        with pytest.raises(StorageError, match=r"only \d+ bytes came in .* s, 2 times"):
            store.get_range("a", 0, 400_000)


def test_a_store_that_is_away_is_waited_for(shared, proxy):
    patient = StoreOptions(retry=Retry(attempts=60, pause=0.05, longest=0.5))
    with ObjectStore.open(shared, options=patient) as store:
        proxy.away_for(0.6)
        assert store.get_range("a", 0, 400_000) == DATA
        proxy.away_for(0.6)
        store.put("b", DATA)
        proxy.away_for(0.6)
        assert store.size("b") == 400_000


@pytest.mark.slow
def test_the_default_options_wait_for_ten_seconds(shared, proxy):
    with ObjectStore.open(shared) as store:
        assert store.get_range("a", 0, 400_000) == DATA
        proxy.away_for(10.0)
        assert store.get_range("a", 0, 400_000) == DATA


def test_a_store_that_stays_away_is_named(store, proxy):
    proxy.stop()
    for call in (lambda: store.get_range("a", 0, 5), lambda: store.size("a"), lambda: store.put("b", b"x")):
        with pytest.raises(StorageError, match=r"cannot be .*4 times in .* s; check that the store is"):
            call()


def test_wrong_credentials_are_not_retried(store, proxy, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    with ObjectStore.open(store.url, options=QUICK) as refused:
        before = proxy.requests
        with pytest.raises(StorageError, match="403 SignatureDoesNotMatch; check AWS_ACCESS_KEY_ID"):
            refused.get_range("a", 0, 5)
        with pytest.raises(StorageError, match="403 Forbidden, also with credentials looked up anew"):
            refused.size("a")
        with pytest.raises(StorageError, match="access was refused"):
            refused.put("b", b"x")
        assert proxy.requests - before <= 5


def test_credentials_that_changed_are_found(store, proxy, monkeypatch):
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "expired")
    with ObjectStore.open(store.url, options=QUICK) as renewed:
        with pytest.raises(StorageError, match="SignatureDoesNotMatch"):
            renewed.get_range("a", 0, 5)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        proxy.inject("status", status=403, code="ExpiredToken")
        assert renewed.get_range("a", 0, 5) == DATA[:5]
        proxy.inject("status", status=403, code="ExpiredToken", method="HEAD")  # whose code nobody sees
        assert renewed.size("a") == len(DATA)
        assert all(fault.times == 0 for fault in proxy.faults)


def test_a_connection_the_server_closed_meanwhile_is_no_fault(shared, proxy):
    with ObjectStore.open(shared, options=StoreOptions(retry=Retry(attempts=1))) as store:
        assert store.get_range("a", 0, 10) == DATA[:10]
        proxy.stop()
        proxy.start()
        assert store.get_range("a", 0, 10) == DATA[:10]
