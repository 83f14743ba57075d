"""New weights: an engine proves that it holds what was sent; a folder holds a version whole or not at all."""

import json
import weakref

import numpy as np
import pytest
import tiny
import torch
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from opd.errors import RolloutError
from opd.models import causal_lm
from opd.models.causal_lm import WeightsDigest, weights_digest
from opd.models.hf_folder import INDEX
from opd.ranks import host_store
from opd.rollout.forward import LeanLayer
from opd.rollout.sglang_engine import GroupMember, weight_group
from opd.rollout.torch_engine import TorchEngine
from opd.rollout.weight_sync import WeightFolder, sync_weights
from opd.types import RolloutRequest, SamplingParams

PROMPT = np.array([3, 1, 4, 1, 5], np.int32)


def written(engine: TorchEngine) -> list[bytes]:
    """What the engine writes after `PROMPT`, always the most likely token."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=8)
    return [part.token_ids.tobytes() for part in engine.generate([RolloutRequest("r", PROMPT, sampling)])]


def test_an_engine_writes_with_the_new_weights_and_nothing_is_copied_on_the_way():
    engine, seen = TorchEngine(tiny.model(seed=9)), []
    for version in (1, 2):
        model = tiny.model(seed=version)
        given = [(name, tensor) for name, tensor in model.weights()]
        assert sync_weights(engine, ((seen.append(t.data_ptr()), (n, t))[1] for n, t in given), version)
        assert seen[-len(given) :] == [tensor.data_ptr() for _, tensor in given]
        assert written(engine) == written(TorchEngine(model))
        assert engine.policy_version == version


def takes_others(engine: TorchEngine, weights, version: int) -> str:
    """The last tensor is left out."""
    *taken, _ = weights
    return weights_digest(taken, quick=True)


def test_weights_that_differ_are_found_out_and_nothing_is_resumed(monkeypatch):
    engine = TorchEngine(tiny.model(seed=9))
    monkeypatch.setattr(TorchEngine, "update_weights", takes_others)
    with pytest.raises(RolloutError, match="after the push of version 1 the engine holds other"):
        sync_weights(engine, tiny.model(seed=3).weights(), 1)
    with pytest.raises(RolloutError, match="paused"):
        written(engine)
    monkeypatch.undo()
    sync_weights(engine, tiny.model(seed=3).weights(), 2)
    assert written(engine) == written(TorchEngine(tiny.model(seed=3)))


class BadMemory:
    """Memory of which one byte, `place`, changes a bit when it is written."""

    def __init__(self, memory: memoryview, place: int) -> None:
        self._memory, self._place = memory, place

    def __len__(self) -> int:
        return len(self._memory)

    def __getitem__(self, part: slice) -> memoryview:
        return self._memory[part]

    def __setitem__(self, part: slice, content: memoryview) -> None:
        self._memory[part] = content
        if self._place in range(*part.indices(len(self))):
            self._memory[self._place] ^= 1 << self._place % 8


@pytest.mark.parametrize("nbytes", [64, 1 << 18])
def test_one_bit_that_a_copy_has_flipped_is_found_in_any_tensor(monkeypatch, nbytes):
    """Wherever it is, in whichever part of a tensor; the weights that were sent are not touched."""
    monkeypatch.setattr(causal_lm, "PART_BYTES", nbytes)
    trained, engine, real = tiny.model(seed=3), TorchEngine(tiny.model(seed=9)), causal_lm.bytes_of
    before, rng = trained.digest(), np.random.default_rng(0)
    for version, (name, tensor) in enumerate(engine.model.weights(), start=1):
        bad, place = tensor.data_ptr(), int(rng.integers(tensor.nbytes))

        def memory(tensor, bad=bad, place=place):
            found = real(tensor)
            return BadMemory(found, place) if tensor.data_ptr() == bad else found

        monkeypatch.setattr(causal_lm, "bytes_of", memory)
        with pytest.raises(RolloutError, match=f"after the push of version {version} the engine holds other"):
            sync_weights(engine, trained.weights(), version)
        monkeypatch.setattr(causal_lm, "bytes_of", real)
        own = dict(engine.model.weights())
        unlike = [n for n, sent in trained.weights() if not torch.equal(own[n], sent)]
        assert unlike == [name]
    assert trained.digest() == before
    assert sync_weights(engine, trained.weights(), version + 1) == trained.quick_digest()


def test_one_bit_that_is_flipped_on_the_way_is_found(monkeypatch):
    """Between the trainer and an engine that copies."""
    push = TorchEngine.update_weights

    def flipped(weights):
        for place, (name, tensor) in enumerate(weights):
            tensor = tensor.clone()
            if place == 2:
                tensor.view(torch.uint8).view(-1)[5] ^= 4
            yield name, tensor

    monkeypatch.setattr(TorchEngine, "update_weights", lambda e, weights, v: push(e, flipped(weights), v))
    with pytest.raises(RolloutError, match="holds other weights"):
        sync_weights(TorchEngine(tiny.model(seed=9)), tiny.model(seed=3).weights(), 1)


def test_a_tensor_is_copied_and_both_its_digests_taken_part_by_part(monkeypatch):
    """What is sent is read while it is near: sent, copied, held, of one part after another."""
    monkeypatch.setattr(causal_lm, "PART_BYTES", 16)
    order: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def update(self, content) -> None:
            if isinstance(content, memoryview):
                order.append(f"{self.name} {bytes(content).hex()}")

    held, sent = WeightsDigest(), WeightsDigest()
    held._hash, sent._hash = Noted("held"), Noted("sent")
    source, target = torch.arange(10.0), torch.zeros(10)
    held.add_copied("t", target, source, sent)
    parts = [part.numpy().tobytes().hex() for part in source.split(4)]
    assert order == [f"{who} {part}" for part in parts for who in ("sent", "held")]
    assert torch.equal(target, source)


@pytest.mark.parametrize("way", ["other order", "other dtype"])
def test_what_cannot_be_copied_as_bytes_is_digested_whole(way):
    source = torch.arange(12.0).reshape(3, 4)
    target = torch.zeros(4, 3).t() if way == "other order" else torch.zeros(3, 4, dtype=torch.bfloat16)
    held, sent = WeightsDigest(quick=True), WeightsDigest(quick=True)
    held.add_copied("t", target, source, sent)
    assert sent.hex_digest() == weights_digest([("t", source)], quick=True)
    assert held.hex_digest() == weights_digest([("t", source.to(target.dtype))], quick=True)


def test_the_layout_of_decode_is_made_anew_in_the_memory_of_the_old_one():
    """One layer after another: no layer's old copy is there when its new one is made."""
    engine, seen = TorchEngine(tiny.model(seed=9, num_hidden_layers=3)), []
    old = [weakref.ref(layer.gate_up.laid_out) for layer in engine._runner.lean._layers]
    read = LeanLayer.from_layer

    def noted(*args):
        seen.append([ref() is not None for ref in old])
        return read(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeanLayer, "from_layer", noted)
        sync_weights(engine, tiny.model(seed=3, num_hidden_layers=3).weights(), 1)
    assert seen == [[False, True, True], [False, False, True], [False, False, False]]


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def any_weights(draw):
    tensors = {}
    for index in range(draw(st.integers(0, 6))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        content = torch.arange(torch.Size(shape).numel()) * 7 % 251 + index
        tensors[f"t.{index}"] = content.reshape(shape).to(dtype)
    return tensors


def read(folder):
    """As a server reads it."""
    placed = json.loads((folder / INDEX).read_text())["weight_map"]
    for name, file in placed.items():
        with safe_open(folder / file, framework="pt") as opened:
            yield name, opened.get_tensor(name)


@settings(max_examples=cases(40), deadline=None)
@given(weights=any_weights(), shard=st.integers(1, 400))
def test_a_folder_gives_back_the_same_bytes(weights, shard, tmp_path_factory):
    folder = WeightFolder(tmp_path_factory.mktemp("weights"), shard_bytes=shard)
    found = dict(read(folder.write_version(weights.items(), 1)))
    assert list(found) == list(weights)
    assert weights_digest(found.items()) == weights_digest(weights.items())
    folder.close()
    assert not list(folder.root.iterdir())


def test_half_a_version_is_never_read(tmp_path):
    """A sender that dies while it writes leaves the version before, and its own rest goes with the next."""

    def dying():
        yield from list(tiny.model(seed=1).weights())[:3]
        raise KeyboardInterrupt

    first = WeightFolder(tmp_path)
    kept = first.write_version(tiny.model(seed=0).weights(), 1)
    with pytest.raises(KeyboardInterrupt):
        first.write_version(dying(), 2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [".version-2", "version-1"]
    assert weights_digest(read(kept)) == tiny.model(seed=0).digest()
    WeightFolder(tmp_path).write_version(tiny.model(seed=2).weights(), 2)
    assert [p.name for p in tmp_path.iterdir()] == ["version-2"]


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "others/version-7").mkdir(parents=True)
    (tmp_path / "weights").symlink_to(tmp_path / "others")
    for use in (lambda folder: folder.write_version([], 1), lambda folder: folder.close()):
        with pytest.raises(RolloutError, match="is a link"):
            use(WeightFolder(tmp_path / "weights"))
    assert (tmp_path / "others/version-7").is_dir()


def test_a_version_that_is_read_outlives_later_ones(tmp_path):
    """And is gone when nobody reads it any more; one that has gone is not there to be read."""
    folder = WeightFolder(tmp_path / "weights")
    one = folder.write_version(tiny.model(seed=1).weights(), 1)
    with folder.lease_version(one) as there, folder.lease_version(one) as again:
        assert (there, again) == (True, True)
        two = folder.write_version(tiny.model(seed=2).weights(), 2)
        three = folder.write_version(tiny.model(seed=3).weights(), 3)
        assert weights_digest(read(one)) == tiny.model(seed=1).digest()
        assert not two.exists()
        with pytest.raises(RolloutError, match="version-1 is still being read"):
            folder.write_version(tiny.model(seed=1).weights(), 1)
        with folder.lease_version(two) as there:
            assert not there
    assert not one.exists()
    with folder.lease_version(three) as there:
        assert there
    assert weights_digest(read(three)) == tiny.model(seed=3).digest()
    folder.close()


def test_a_member_that_stays_away_is_said():
    with pytest.raises(RolloutError, match="not every member"):
        weight_group(host_store("127.0.0.1", timeout=0.5)[0], GroupMember("alone", 0, 2), timeout=0.5)
