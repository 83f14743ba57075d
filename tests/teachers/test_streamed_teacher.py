"""A streamed teacher gives what the loaded one gives, whatever the family, dtype, packing and budget."""

import gc
import json
from pathlib import Path

import pytest
import tiny
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.errors import ModelError, StorageError, TeacherError
from opd.kernels import projection
from opd.storage.published import PublishedModel
from opd.teachers.kinds import Placement
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.streamed_teacher import streamed_teachers

SAMPLES = tiny.samples([(3, 4), (5, 6), (2, 0), (7, 12), (1, 1), (4, 9)])


def stream(url, *, prefetch_bytes=4096, **placement):
    """One streamed teacher with a stream of its own."""
    return streamed_teachers({"t": str(url)}, Placement(**placement), prefetch_bytes=prefetch_bytes)["t"]


@pytest.mark.some(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float32 by oneDNN"])
def test_every_family_streams_to_the_same_bits(published_family, dtype, monkeypatch):
    checkpoint, url = published_family
    if dtype == "float32 by oneDNN":  # as for large weights where it is the faster library
        monkeypatch.setattr(projection, "onednn_is_faster", lambda: True)
        monkeypatch.setattr(projection, "LARGE", 1)
        dtype = "float32"
    loaded = LocalTeacher("t", checkpoint, max_tokens=16, dtype=dtype, vocabulary=13)
    streamed = stream(url, max_tokens=16, dtype=dtype, vocabulary=13)
    expected, found = loaded.score(SAMPLES).rows, streamed.score(SAMPLES).rows
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert torch.equal(streamed.score(SAMPLES).rows, expected)
    theirs, ours = loaded.load_head(), streamed.load_head()
    assert (ours.scale, ours.softcap, ours.vocabulary) == (theirs.scale, theirs.softcap, theirs.vocabulary)
    assert torch.equal(ours.logits(found), theirs.logits(expected))
    streamed.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(loaded teacher, published folder) of a three-layer Llama in float32."""
    from opd.models.checkpoint import save_checkpoint
    from opd.pipelines.stages.publishing import publish_checkpoint

    folder = tmp_path_factory.mktemp("pair")
    checkpoint = save_checkpoint(tiny.model(num_hidden_layers=3), tiny.tokenizer(), folder / "c", {})
    publish_checkpoint(checkpoint, folder / "p", shards=2)
    return LocalTeacher("t", checkpoint), folder / "p"


@pytest.mark.slow
@settings(max_examples=cases(25))
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=6),
    max_tokens=st.integers(1, 40),
    prefetch_bytes=st.sampled_from([0, 1, 10_000, 100_000]),
)
def test_any_packing_and_any_budget(pair, lengths, max_tokens, prefetch_bytes):
    loaded, url = pair
    loaded._max_tokens = max_tokens
    samples = tiny.samples(lengths)
    streamed = stream(url, max_tokens=max_tokens, prefetch_bytes=prefetch_bytes)
    assert torch.equal(streamed.score(samples).rows, loaded.score(samples).rows)
    streamed.close()


def test_each_layer_is_read_once_and_the_head_only_when_asked_for(pair):
    streamed = stream(pair[1], max_tokens=8)
    units = streamed.published.manifest.units
    opened = streamed.bytes_read
    body = sum(unit.nbytes for name, unit in units.items() if name != "head")
    for times in (1, 2):
        streamed.score(SAMPLES)  # several micro-batches
        assert streamed.bytes_read - opened == times * body
    assert streamed.bytes_read - opened == 2 * body
    streamed.load_head()
    assert streamed.bytes_read - opened == 2 * body + units["head"].nbytes
    streamed.score([])
    assert streamed.bytes_read - opened == 2 * body + units["head"].nbytes
    streamed.close()


@pytest.mark.parametrize("prefetch_bytes", [0, 20_000])
def test_no_more_than_the_largest_unit_and_the_window_is_in_memory(pair, prefetch_bytes):
    streamed = stream(pair[1], prefetch_bytes=prefetch_bytes)
    units = streamed.published.manifest.units
    largest = max(unit.nbytes for unit in units.values())
    streamed.score(SAMPLES)
    # 2 shards: gathering needs room for equal parts, at most a block more.
    assert streamed.stream.nbytes <= largest + prefetch_bytes + 2 * 256
    assert streamed.take_weight_bytes_peak() == streamed.stream.nbytes
    streamed.close()
    assert streamed.stream.meter.current_bytes == 0


def test_converted_layers_and_heads_are_counted_while_they_live(pair):
    streamed = stream(pair[1], dtype="bfloat16", prefetch_bytes=0)
    units = streamed.published.manifest.units
    streamed.score(SAMPLES)
    largest = max(unit.nbytes for unit in units.values())
    assert streamed.take_weight_bytes_peak() >= largest * 3 // 2
    head = streamed.load_head()
    assert streamed.stream.meter.current_bytes == streamed.stream.nbytes + head.weight.nbytes
    del head
    gc.collect()
    assert streamed.stream.meter.current_bytes == streamed.stream.nbytes
    streamed.close()


def test_a_head_is_read_once_however_often_it_is_prefetched(pair):
    streamed = stream(pair[1], vocabulary=9)
    assert streamed.digest  # the manifest is read now
    before = streamed.bytes_read
    streamed.prefetch_head()
    streamed.prefetch_head()
    head = streamed.load_head()
    assert head.vocabulary == 9
    assert torch.equal(head.weight, pair[0].load_head().weight)
    assert streamed.bytes_read == before + head.weight.nbytes
    with pytest.raises(ModelError, match="fewer than the 1000 tokens"):
        stream(pair[1], vocabulary=1000).load_head()
    streamed.close()


def flip(url: Path, offset: int) -> None:
    """One wrong bit in the last shard."""
    shard = sorted(Path(url).rglob("shard-*"))[-1]
    data = bytearray(shard.read_bytes())
    data[offset % len(data)] ^= 4
    shard.write_bytes(data)


def test_a_flipped_bit_never_becomes_a_hidden_state(published):
    _, url = published("a", shards=2)
    size = sorted(Path(url).rglob("shard-*"))[-1].stat().st_size
    noticed = 0
    for offset in range(0, size, size // cases(24)):
        flip(Path(url), offset)
        streamed = stream(url)
        try:
            with pytest.raises(StorageError, match="corrupt"):
                streamed.score(SAMPLES)
            noticed += 1
        except pytest.fail.Exception:  # the bit lies in the head or in padding: the states are right
            with pytest.raises(StorageError, match="corrupt"):
                streamed.load_head()
        flip(Path(url), offset)
        assert torch.isfinite(
            streamed.score(SAMPLES).rows
        ).all()  # the same teacher goes on once it is mended
        streamed.close()
    assert noticed > cases(24) // 2


def test_a_missing_shard_and_a_missing_model_are_named(published, tmp_path):
    _, url = published("a")
    next(Path(url).rglob("shard-*")).unlink()
    streamed = stream(url)
    with pytest.raises(StorageError, match="shard-00000-of-00001"):
        streamed.score(SAMPLES)
    streamed.close()
    with pytest.raises(StorageError, match="nowhere"):
        stream(tmp_path / "nowhere").score(SAMPLES)


def test_a_checkpoint_of_another_form_is_refused(published):
    checkpoint, _ = published("a")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "checksums.json").unlink(missing_ok=True)
    for change, message in (
        ({"hidden_size": 64}, "has shape"),
        ({"attention_bias": True}, "no tensor self_attn"),
        ({"model_type": "nonsense"}, "nonsense"),
    ):
        (checkpoint / "config.json").write_text(json.dumps(config | change))
        url = checkpoint.parent / f"other-{len(message)}"
        _publish_as_is(checkpoint, url)
        streamed = stream(url)
        with pytest.raises(TeacherError, match=message):
            streamed.score(SAMPLES)
        streamed.close()


def _publish_as_is(checkpoint: Path, url: Path) -> None:
    from opd.storage.object_store import ObjectStore
    from opd.storage.publish import ModelForm
    from opd.storage.publish import publish as publish_units

    with ObjectStore.open(url) as store:
        publish_units(checkpoint, store, shards=1, form=ModelForm(tied=True))


def test_the_digest_is_the_published_one(pair):
    streamed = stream(pair[1])
    with PublishedModel.open(pair[1]) as model:
        assert streamed.digest == model.manifest.digest
    streamed.close()
