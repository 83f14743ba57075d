"""A model published to a real S3 server: read back by ranks, through faults, and after kills."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import copy_of, write_checkpoint
from seaweedfs import aws_environment

from opd.errors import StorageError
from opd.retry import Retry
from opd.storage.object_store import ObjectStore, StoreOptions
from opd.storage.publish import ModelForm, publish
from opd.storage.published import PublishedModel

FORM = ModelForm(layers=2)
QUICK = StoreOptions(retry=Retry(attempts=5, pause=0.02), stall_seconds=0.5, connect_seconds=1.0, rereads=2)
SCRIPT = """
import sys
from opd.storage.object_store import ObjectStore
from opd.storage.publish import ModelForm, publish
with ObjectStore.open(sys.argv[2]) as store:
    print("ready", flush=True)
    publish(sys.argv[1], store, shards=2, form=ModelForm(layers=2))
"""


def put(checkpoint: Path, url: str, options: StoreOptions = QUICK):
    with ObjectStore.open(url, options=options) as store:
        return publish(checkpoint, store, shards=2, form=FORM)


@pytest.fixture(scope="module")
def shared(s3, checkpoint):
    """A model published once; tests that change what is published make their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in aws_environment(s3.endpoint).items():
            patch.setenv(name, value)
        assert put(checkpoint, "s3://models/shared").written
    return "s3://models/shared"


@pytest.fixture
def model(shared, proxy):
    with PublishedModel.open(shared, options=QUICK) as opened:
        yield opened


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    put(checkpoint, str(folder))
    with PublishedModel.open(folder) as opened:
        return copy_of(opened) | opened.tokenizer_files()


def test_ranks_read_what_was_published(model, whole, checkpoint):
    for world in (1, 2, 3):
        assert copy_of(model, world) | model.tokenizer_files() == whole
    assert not put(checkpoint, model.store.url).written


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status"},
        {"kind": "reset", "after": 5000},
        {"kind": "short", "after": 5000},
        {"kind": "stall", "after": 5000},
        {"kind": "flip", "after": 5000},
        {"kind": "flip", "after": 0},
    ],
    ids=str,
)
def test_a_passing_fault_leaves_the_right_bytes(model, whole, proxy, fault, caplog):
    for _ in range(2):  # so often a wrong block is read again
        proxy.inject(**fault, path="shard-00001")
    assert copy_of(model, 2) | model.tokenizer_files() == whole
    assert all(one.times == 0 for one in proxy.faults)
    assert ("came with a wrong checksum and are read again" in caplog.text) == (fault["kind"] == "flip")


def test_bytes_that_stay_wrong_are_never_served(model, whole, proxy):
    rng = random.Random(0)
    unit = model.manifest.units["layer.0"]
    start, stop = unit.rank_range(1, 2)
    right = bytearray(stop - start)
    model.read_part("layer.0", 1, 2, memoryview(right))
    for at in rng.sample(range(stop - start), 25):
        proxy.faults.clear()
        proxy.inject("flip", after=at, times=2)
        buffer = bytearray(stop - start)
        model.read_part("layer.0", 1, 2, memoryview(buffer))
        assert buffer == right
    proxy.inject("flip", after=0, times=1000, path="shard-00001")
    with pytest.raises(StorageError, match=r"shard-00001-of-00002.bin bytes \d+-\d+ \(layer.0, block 1\)"):
        model.read_part("layer.0", 1, 2, memoryview(bytearray(stop - start)))


def test_a_missing_shard_and_one_of_another_version_are_named(checkpoint, tmp_path, url):
    put(checkpoint, url)
    model = PublishedModel.open(url)
    write_checkpoint(tmp_path / "other", hidden=128, vocabulary=700, seed=5)
    stranger = put(tmp_path / "other", f"{url}/elsewhere").manifest
    first, second = (model.manifest.shard_path(shard) for shard in range(2))
    with ObjectStore.open(f"{url}/elsewhere") as store:
        data = store.get(stranger.shard_path(0))
    model.store.put(first, data)
    model.store.delete(second)
    with pytest.raises(StorageError, match=r"shard-00000-of-00002.bin bytes .* are corrupt"):
        model.read_part("head", 0, 2, memoryview(bytearray(model.part_bytes("head", 2))))
    with pytest.raises(StorageError, match=r"shard-00001-of-00002.bin does not exist"):
        model.read_part("head", 1, 2, memoryview(bytearray(model.part_bytes("head", 2))))
    model.close()


def test_publishing_through_faults(checkpoint, whole, url, proxy):
    for kind in ({"status": 503}, {"status": 500, "code": "InternalError"}):
        for _ in range(4):
            proxy.inject("status", method="PUT", **kind)
    proxy.inject("status", method="HEAD", times=2)
    patient = replace(QUICK, retry=Retry(attempts=11, pause=0.02))  # one upload may meet all of them
    assert put(checkpoint, url, patient).written
    assert all(fault.times == 0 for fault in proxy.faults)
    with PublishedModel.open(url) as model:
        assert copy_of(model) | model.tokenizer_files() == whole


def test_publishing_to_a_store_that_refuses_leaves_no_model(checkpoint, url, proxy):
    proxy.inject("status", method="PUT", path="shard-00001", times=1000)
    with pytest.raises(StorageError, match=r"shard-00001-of-00002.bin cannot be written: .* 5 times"):
        put(checkpoint, url)
    with pytest.raises(StorageError, match="holds no published model"):
        PublishedModel.open(url)
    proxy.faults.clear()
    assert put(checkpoint, url).written


def is_published(url: str, whole: dict[str, bytes]) -> bool:
    """Whether a model is there; if one is, it must be whole."""
    with ObjectStore.open(url) as store:
        if not store.exists("latest"):
            return False
        model = PublishedModel.open(store)
        assert copy_of(model) | model.tokenizer_files() == whole
        return True


@pytest.mark.slow
def test_a_publisher_killed_at_any_time_leaves_all_or_nothing(checkpoint, whole, url, proxy):
    rng = random.Random(3)
    proxy.bytes_per_second = None
    found = {"none": 0, "whole": 0}
    for number in range(8):
        target = f"{url}/{number}"
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(checkpoint), target], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
            time.sleep(rng.uniform(0.0, 0.35))
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        found["whole" if is_published(target, whole) else "none"] += 1
        put(checkpoint, target)
        assert is_published(target, whole)
    assert found["none"] > 0
