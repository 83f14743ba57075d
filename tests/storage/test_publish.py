"""Publishing and reading back on the local file system: layout, no-op, refusals, corruption."""

import dataclasses
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import copy_of, expected_bytes, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from opd.errors import CheckpointError, StorageError
from opd.storage.manifest import MAX_BLOCK_BYTES, TensorEntry, Unit, block_size, manifest_digest, unit_of
from opd.storage.object_store import ObjectStore, StoreOptions
from opd.storage.publish import ModelForm, UnitSource, publish
from opd.storage.published import PublishedModel
from opd.storage.weight_folder import TensorSource

FORM = ModelForm(scale=0.5, softcap=30.0, tied=False, layers=2, fingerprint={"vocab_size": 50})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model")
    return tmp_path / "model"


def put(checkpoint: Path, target: Path, shards: int = 3, form: ModelForm = FORM, **options):
    with ObjectStore.open(target) as store:
        return publish(checkpoint, store, shards=shards, form=form, **options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [1, 3, 7])
def test_every_world_reads_every_byte(tmp_path, shards, tied):
    tensors = write_checkpoint(tmp_path / "model", layers=3, tied=tied)
    form = dataclasses.replace(FORM, layers=3, tied=tied)
    assert put(tmp_path / "model", tmp_path / "store", shards, form).written
    with PublishedModel.open(tmp_path / "store") as model:
        assert list(model.manifest.units) == ["embedding", "layer.0", "layer.1", "layer.2", "norm", "head"]
        for world in (1, 2, 3, 5, 7, 100):
            assert copy_of(model, world) == expected_bytes(tensors, tied)
        for unit in model.manifest.units.values():
            assert all(entry.offset % 64 == 0 for entry in unit.tensors.values())
            for key, entry in unit.tensors.items():
                source = tensors["model.embed_tokens.weight" if tied and key == "lm_head.weight" else key]
                assert entry.shape == source.shape
                assert entry.dtype == {"float16": "F16", "float32": "F32"}[source.dtype.name]


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_a_tied_head_is_published_once_and_read_from_there(tmp_path, shards):
    tensors = write_checkpoint(tmp_path / "model", layers=2, tied=True)
    form = dataclasses.replace(FORM, tied=True)
    manifest = put(tmp_path / "model", tmp_path / "store", shards, form).manifest
    stored = sum(path.stat().st_size for path in (tmp_path / "store").rglob("shard-*"))
    weights = sum(tensor.nbytes for tensor in tensors.values())
    assert weights <= stored == sum(manifest.sizes) <= weights + 64 * (len(tensors) + 8 * shards)
    assert not put(tmp_path / "model", tmp_path / "store", shards, form).written
    embedding = tensors["model.embed_tokens.weight"].tobytes()
    with PublishedModel.open(tmp_path / "store") as model:
        both = [memoryview(bytearray(len(embedding))) for _ in range(2)]
        model.read_parts(["embedding", "head"], 0, 1, both)
        assert [bytes(one) for one in both] == [embedding] * 2
    path = tmp_path / "store" / manifest.shard_path(0)
    damaged = bytearray(path.read_bytes())
    damaged[manifest.shard_offset("head", 0)] ^= 1
    path.write_bytes(damaged)
    for unit in ("embedding", "head"):
        with PublishedModel.open(tmp_path / "store") as model, pytest.raises(StorageError, match="corrupt"):
            model.read_unit(unit, memoryview(bytearray(len(embedding))))


def test_a_rank_reads_one_range_of_one_file_and_its_share_of_the_bytes(tmp_path):
    write_checkpoint(tmp_path / "model", hidden=128)
    manifest = put(tmp_path / "model", tmp_path / "store", 4).manifest
    for rank in range(4):
        with PublishedModel.open(tmp_path / "store") as model:
            small = model.bytes_read
            for name in manifest.units:
                assert len(manifest.rank_extents(name, rank, 4)) <= 1
                assert all(extent.shard == rank for extent in manifest.rank_extents(name, rank, 4))
                model.read_part(name, rank, 4, memoryview(bytearray(model.part_bytes(name, 4))))
            assert model.bytes_read - small <= 1.01 * manifest.nbytes / 4 + 64 * len(manifest.units)
    files = [tmp_path / "store" / manifest.shard_path(shard) for shard in range(4)]
    assert [file.stat().st_size for file in files] == manifest.sizes


def test_what_the_manifest_tells(checkpoint, tmp_path):
    put(checkpoint, tmp_path / "store")
    with PublishedModel.open(tmp_path / "store") as model:
        manifest = model.manifest
        assert model.tokenizer_files() == {
            name: (checkpoint / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")
        }
    assert manifest.config == json.loads((checkpoint / "config.json").read_text())
    assert manifest.generation_config == {"eos_token_id": 1}
    head = manifest.head
    assert (head.scale, head.softcap, head.bias, head.tied) == (0.5, 30.0, False, False)
    assert (head.vocabulary, head.hidden) == (50, 32)
    assert manifest.fingerprint == {"vocab_size": 50}
    with PublishedModel.open(tmp_path / "store" / manifest.version_name) as model:
        assert model.manifest == manifest
        assert len(model.tokenizer_files()) == 2


def test_publishing_again_is_a_no_op(checkpoint, tmp_path):
    assert put(checkpoint, tmp_path / "store").written
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}
    assert not put(checkpoint, tmp_path / "store").written
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")} == before


def test_the_digest_is_the_models_whatever_the_shards_and_files(checkpoint, tmp_path):
    tensors = {}
    for path in checkpoint.glob("*.safetensors"):
        tensors |= load_file(path)
    digest = put(checkpoint, tmp_path / "store", 1).manifest.digest
    assert put(checkpoint, tmp_path / "store", 5).manifest.digest == digest
    for path in (checkpoint / "model.safetensors.index.json", *checkpoint.glob("*.safetensors")):
        path.unlink()
    save_file(dict(reversed(tensors.items())), checkpoint / "model.safetensors")
    assert put(checkpoint, tmp_path / "store", 1).manifest.digest == digest
    digests = {digest}
    for change in (FORM.scale, "softcap", "tokenizer", "config", "weight"):
        form = FORM
        if change == FORM.scale:
            form = dataclasses.replace(FORM, scale=0.25)
        elif change == "softcap":
            form = dataclasses.replace(FORM, softcap=None)
        elif change == "tokenizer":
            (checkpoint / "tokenizer.json").write_text("{}")
        elif change == "config":
            (checkpoint / "config.json").write_text('{"model_type": "qwen3"}')
        else:
            tensors["model.norm.weight"][3] = np.nextafter(tensors["model.norm.weight"][3], 9)
            save_file(tensors, checkpoint / "model.safetensors")
        digests.add(put(checkpoint, tmp_path / "store", 1, form).manifest.digest)
    assert len(digests) == 6


def test_latest_follows_the_last_published(checkpoint, tmp_path):
    first = put(checkpoint, tmp_path / "store").manifest
    second = put(checkpoint, tmp_path / "store", form=dataclasses.replace(FORM, scale=2.0)).manifest
    assert PublishedModel.open(tmp_path / "store").manifest == second
    assert not put(checkpoint, tmp_path / "store").written
    assert PublishedModel.open(tmp_path / "store").manifest == first


@pytest.mark.parametrize("damage", ["missing", "short", "{}"])
@pytest.mark.parametrize("what", ["shard", "manifest.json", "files/tokenizer.json"])
def test_publishing_again_mends_what_is_not_whole(checkpoint, tmp_path, what, damage):
    manifest = put(checkpoint, tmp_path / "store").manifest
    name = manifest.shard_path(1) if what == "shard" else f"{manifest.version_name}/{what}"
    file = tmp_path / "store" / name
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(whole[:-1] if damage == "short" else damage.encode())
    index, seen = tmp_path / "store" / manifest.version_name / "manifest.json", set()

    def look(stage: str, done: int, total: int) -> None:
        seen.add((stage, index.exists()))

    assert put(checkpoint, tmp_path / "store", progress=look).written
    assert ("upload", False) in seen
    assert ("upload", True) not in seen, "nobody reads what is being written"
    assert file.read_bytes() == whole
    with PublishedModel.open(tmp_path / "store") as model:
        assert len(copy_of(model)) == 9


MEMORY = """
import resource, sys
from opd.storage.object_store import ObjectStore
from opd.storage.publish import ModelForm, publish
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def put(name):
    with ObjectStore.open(sys.argv[1] + "/store") as store:
        return publish(sys.argv[1] + "/" + name, store, shards=2, form=ModelForm(layers=2)).manifest.nbytes
small = put("small")
before = peak()
print(put("large") - small, peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    write_checkpoint(tmp_path / "small", hidden=1024, vocabulary=5000)
    write_checkpoint(tmp_path / "large", hidden=1024, vocabulary=25_000)
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    more_bytes, more_memory = map(int, result.stdout.split())
    assert more_bytes > 150 * 2**20
    assert more_memory < 16 * 2**20


def change_tensors(checkpoint: Path, out: str | None, more: dict[str, np.ndarray]) -> None:
    """Take one tensor out of the checkpoint, or put some in; its index tells of it."""
    index = checkpoint / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    file = placed.pop(out) if out else max(placed.values())
    tensors = load_file(checkpoint / file) | more
    if out:
        del tensors[out]
    save_file(tensors, checkpoint / file)
    index.write_text(json.dumps({"weight_map": placed | dict.fromkeys(more, file)}))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda c: change_tensors(c, "lm_head.weight", {}), "no tensors for the head"),
        (lambda c: change_tensors(c, "model.embed_tokens.weight", {}), "no tensors for the embedding"),
        (lambda c: change_tensors(c, None, {"vision.w": np.zeros(3)}), "vision.w belongs to no known part"),
        (
            lambda c: (c / "model-00001-of-00002.safetensors").unlink(),
            "00001-of-00002.safetensors is missing",
        ),
        (
            lambda c: (c / "model-00001-of-00002.safetensors").write_bytes(b"12345678"),
            "is truncated or is no",
        ),
        (lambda c: (c / "config.json").write_text("{"), "config.json cannot be read as JSON"),
    ],
)
def test_a_broken_checkpoint_is_refused_and_nothing_written(checkpoint, tmp_path, break_it, message):
    break_it(checkpoint)
    with pytest.raises(StorageError, match=message):
        put(checkpoint, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_truncated_weight_file_is_refused(checkpoint, tmp_path):
    path = checkpoint / "model-00002-of-00002.safetensors"
    data = path.read_bytes()
    for size in random.Random(0).sample(range(len(data)), 40):
        path.write_bytes(data[:size])
        with pytest.raises(StorageError, match="truncated or is no safetensors"):
            put(checkpoint, tmp_path / "store")


def test_a_checkpoint_that_changes_meanwhile_is_refused(checkpoint, tmp_path):
    path = checkpoint / "model-00002-of-00002.safetensors"

    def change(stage: str, done: int, total: int) -> None:
        if stage == "checksums" and done == total:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)

    with (
        ObjectStore.open(tmp_path / "store") as store,
        pytest.raises(StorageError, match=r"changed while its .* was published"),
    ):
        publish(checkpoint, store, shards=2, form=FORM, progress=change)
    with pytest.raises(StorageError, match="holds no published model"):
        PublishedModel.open(tmp_path / "store")


def test_names_of_tensors():
    assert unit_of("model.layers.11.mlp.experts.3.w") == "layer.11"
    assert unit_of("model.final_layernorm.bias") == "norm"
    assert unit_of("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    for name in ("transformer.h.0.w", "model.layers.x.w", "model.embed", "lm_headweight"):
        with pytest.raises(StorageError, match="belongs to no known part"):
            unit_of(name)


@given(nbytes=st.integers(0, 2**37), shards=st.integers(1, 64), world=st.integers(1, 70))
def test_blocks_are_small_and_parts_cover_the_unit_evenly(nbytes, shards, world):
    size = block_size(nbytes, shards)
    unit = Unit("layer.0", nbytes, {}, size, "", b"")
    assert 64 <= size <= MAX_BLOCK_BYTES
    assert size % 64 == 0
    for ranks in (shards, world):
        parts = [unit.rank_range(rank, ranks) for rank in range(ranks)]
        assert parts[0][0] == 0
        assert parts[-1][1] == nbytes
        assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
        assert all(start % size == 0 for start, stop in parts if start < stop)
    largest = max(stop - start for start, stop in (unit.rank_range(rank, shards) for rank in range(shards)))
    if nbytes >= 10_000 * shards:
        assert largest <= 1.01 * nbytes / shards


@given(data=st.data())
def test_extents_are_the_part(data):
    nbytes, shards = data.draw(st.integers(0, 10_000)), data.draw(st.integers(1, 9))
    world = data.draw(st.integers(1, 9))
    rank = data.draw(st.integers(0, world - 1))
    from opd.storage.manifest import shard_extents

    unit = Unit("layer.0", nbytes, {}, block_size(nbytes, shards), "", b"")
    found = list(shard_extents(unit, rank, world, shards, [0] * shards))
    start, stop = unit.rank_range(rank, world)
    assert [at for one in found for at in range(one.start, one.stop)] == list(range(start, stop))
    for one in found:
        low, high = unit.rank_range(one.shard, shards)
        assert low + one.offset == one.start
        assert one.stop <= high
    if world == shards:
        assert len(found) <= 1


def test_the_buffer_may_be_larger_and_of_any_type(checkpoint, tmp_path):
    put(checkpoint, tmp_path / "store", 2)
    with PublishedModel.open(tmp_path / "store", options=StoreOptions(chunk_bytes=1)) as model:
        start, stop = model.manifest.unit("head").rank_range(1, 2)
        buffer = np.full(stop - start + 64, 7, dtype=np.uint8)
        wide = buffer.view(np.uint16)
        model.read_part("head", 1, 2, memoryview(wide))
        assert (buffer[stop - start :] == 7).all()
        assert model.read_unit("norm", memoryview(bytearray(128))) is None
        with pytest.raises(StorageError, match="use part_bytes"):
            model.read_part("head", 1, 2, memoryview(bytearray(10)))
        with pytest.raises(StorageError, match=r"no unit layer\.9; it has embedding"):
            model.manifest.unit("layer.9").rank_range(0, 1)
        with pytest.raises(StorageError, match="no rank 2 among 2"):
            model.manifest.unit("head").rank_range(2, 2)


@pytest.mark.parametrize("key", ["config", "generation_config", "head", "tokenizer"])
def test_each_part_of_a_model_counts_in_its_identity(key):
    document = {name: {} for name in ("config", "generation_config", "head", "tokenizer", "units")}
    assert manifest_digest(document | {key: {"x": 2}}) != manifest_digest(document)


@pytest.mark.parametrize("bad", [None, "first", "second", "third"])
@pytest.mark.parametrize("begin", [0, 4, 8, 12])
def test_the_tensor_that_is_no_number_is_named_by_each_piece_that_holds_it(bad, begin):
    """Neighbours of another type are not read as of its own: half of a number can be a NaN in bfloat16."""
    tensors = {
        "first": np.array([1.0, -2.0], np.float32),
        "second": np.array([0x3F80, 0xC000, 0x4040, 0x4080], np.uint16),  # bfloat16
        "third": np.array([0x3F80FF81, 0x3F800000], np.uint32).view(np.float32),
    }
    if bad is not None:
        tensors[bad][-1] = 0x7FC0 if bad == "second" else np.nan
    buffer = bytearray(b"".join(tensor.tobytes() for tensor in tensors.values()))
    entries = {
        name: TensorEntry("BF16" if tensor.itemsize == 2 else "F32", tensor.shape, 8 * place, tensor.nbytes)
        for place, (name, tensor) in enumerate(tensors.items())
    }
    path = Path("model", "model.safetensors")
    sources = {name: TensorSource(path, one.dtype, one.shape, 0, 8) for name, one in entries.items()}
    source = UnitSource(entries, sources, len(buffer))
    if bad is None or begin >= entries[bad].offset + 8:
        source.require_numbers(begin, buffer[begin:])
        return
    with pytest.raises(CheckpointError, match=f"^model holds NaN or infinity in .?{bad}.?,"):
        source.require_numbers(begin, buffer[begin:])
