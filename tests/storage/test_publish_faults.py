"""kill -9 while publishing, and wrong bytes in what was published."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import copy_of, write_checkpoint

from opd.errors import StorageError
from opd.retry import Retry
from opd.storage.manifest import FORMAT_VERSION, parse_manifest, seal_document
from opd.storage.object_store import ObjectStore, StoreOptions
from opd.storage.publish import ModelForm, publish
from opd.storage.published import PublishedModel

FORM = ModelForm(layers=2)
FAST = StoreOptions(retry=Retry(attempts=2, pause=0.001), rereads=2)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model")
    with ObjectStore.open(tmp_path / "store") as store:
        publish(tmp_path / "model", store, shards=2, form=FORM)
    return tmp_path / "store"


def read_all(store: Path) -> dict[str, bytes]:
    with PublishedModel.open(store, options=FAST) as model:
        return copy_of(model, 2) | model.tokenizer_files()


def refusal(store: Path, whole: dict[str, bytes]) -> str | None:
    """What reading everything says; `None` if every byte is right."""
    try:
        found = read_all(store)
    except StorageError as error:
        return str(error)
    assert found == whole
    return None


def test_a_publisher_killed_anywhere_leaves_all_or_nothing(tmp_path):
    write_checkpoint(tmp_path / "old", seed=1)
    write_checkpoint(tmp_path / "new", seed=2)
    script = Path(__file__).with_name("publish_kills.py")
    result = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, check=False, timeout=500
    )
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen["killed"] >= 40
    assert min(seen.values()) > 0


@pytest.mark.slow
def test_a_flipped_bit_in_a_shard_is_never_served(published):
    whole = read_all(published)
    rng = random.Random(0)
    caught = 0
    shards = sorted(published.glob("*/shard-*.bin"))
    for shard in shards:
        data = bytearray(shard.read_bytes())
        for at in rng.sample(range(len(data)), 300):
            bit = 1 << rng.randrange(8)
            data[at] ^= bit
            shard.write_bytes(data)
            problem = refusal(published, whole)
            if problem is not None:  # else it was a byte between two units, which nobody reads
                assert f"{shard} bytes" in problem
                assert "corrupt: the checksum differs in each of 3 reads" in problem
                caught += 1
            data[at] ^= bit
        shard.write_bytes(data)
    assert read_all(published) == whole
    assert caught >= 0.95 * 300 * len(shards)


@pytest.mark.parametrize("name", ["latest", "manifest.json", "tokenizer.json"])
def test_a_flipped_bit_in_a_small_file_is_always_noticed(published, name):
    (path,) = [found for found in published.rglob("*") if found.name == name]
    data = bytearray(path.read_bytes())
    rng = random.Random(1)
    offsets = range(len(data)) if len(data) < 1000 else rng.sample(range(len(data)), 200)
    for at in offsets:
        bit = 1 << rng.randrange(8)
        data[at] ^= bit
        path.write_bytes(data)
        with pytest.raises(StorageError, match=name):
            PublishedModel.open(published).tokenizer_files()
        data[at] ^= bit
    for size in range(0, len(data), 1 + len(data) // 50):
        path.write_bytes(data[:size])
        with pytest.raises(StorageError, match=name):
            PublishedModel.open(published).tokenizer_files()


def test_every_byte_of_the_manifest_counts(published):
    (path,) = published.glob("*/manifest.json")
    data = bytearray(path.read_bytes())
    parse_manifest(bytes(data), "here")
    rng = random.Random(2)
    for at in range(len(data)):
        bit = 1 << rng.randrange(8)
        data[at] ^= bit
        with pytest.raises(StorageError, match="here"):
            parse_manifest(bytes(data), "here")
        data[at] ^= bit
    parse_manifest(bytes(data), "here")


def test_a_truncated_or_missing_shard_is_named(published):
    shard = sorted(published.glob("*/shard-*.bin"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-10])
    with pytest.raises(StorageError, match=r"shard-00001-of-00002.bin has \d+ bytes where its manifest"):
        read_all(published)
    shard.unlink()
    with pytest.raises(StorageError, match=r"shard-00001-of-00002.bin does not exist"):
        read_all(published)


def test_wrong_bytes_in_every_block_at_once_do_not_stop_the_reader(tmp_path):
    """All threads read a block again at the same time, and none waits for another."""
    write_checkpoint(tmp_path / "large", hidden=512, vocabulary=12_000)
    with ObjectStore.open(tmp_path / "store") as store:
        publish(tmp_path / "large", store, shards=1, form=FORM)
    (shard,) = tmp_path.glob("store/*/shard-*.bin")
    shard.write_bytes(bytes(shard.stat().st_size))
    with PublishedModel.open(tmp_path / "store") as model:
        unit = model.manifest.units["head"]
        assert unit.block_count > model.store.options.threads
        assert unit.block_bytes > model.store.request_bytes(unit.block_bytes)
        with pytest.raises(StorageError, match=r"\(head, block \d\) are corrupt"):
            model.read_unit("head", memoryview(bytearray(unit.nbytes)))


def test_a_shard_of_another_version_is_refused(published, tmp_path):
    write_checkpoint(tmp_path / "other", seed=9)
    with ObjectStore.open(tmp_path / "elsewhere") as store:
        publish(tmp_path / "other", store, shards=2, form=FORM)
    (mine,), (other,) = (list(root.glob("*/shard-00000*")) for root in (published, tmp_path / "elsewhere"))
    mine.write_bytes(other.read_bytes())
    with pytest.raises(StorageError, match=r"shard-00000-of-00002.bin bytes .* are corrupt"):
        read_all(published)


def test_a_manifest_of_another_version_is_refused(published, tmp_path):
    write_checkpoint(tmp_path / "other", seed=9)
    with ObjectStore.open(tmp_path / "elsewhere") as store:
        manifest = publish(tmp_path / "other", store, shards=2, form=FORM).manifest
    (mine,) = published.glob("*/manifest.json")
    mine.write_bytes((tmp_path / "elsewhere" / manifest.version_name / "manifest.json").read_bytes())
    with pytest.raises(StorageError, match="describes another version"):
        PublishedModel.open(published)


def test_a_newer_format_is_named_as_such(published):
    (path,) = published.glob("*/manifest.json")
    document = json.loads(path.read_bytes())
    del document["sha256"]
    path.write_bytes(seal_document(document | {"format_version": FORMAT_VERSION + 1}))
    with pytest.raises(
        StorageError,
        match=f"is of format {FORMAT_VERSION + 1} and this release reads format {FORMAT_VERSION}; update opd",
    ):
        PublishedModel.open(published)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(StorageError, match="holds no published model; write one with `opd publish`"):
        PublishedModel.open(tmp_path)
