"""New weights: an engine proves that it holds what was sent; a folder holds a version whole or not at all."""

import json

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from opd.errors import RolloutError
from opd.models.causal_lm import weights_digest
from opd.models.hf_folder import INDEX
from opd.ranks import host_store
from opd.rollout.sglang_workers import GroupMember, weight_group
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


@settings(max_examples=40, deadline=None)
@given(weights=any_weights(), shard=st.integers(1, 400))
def test_a_folder_gives_back_the_same_bytes(weights, shard, tmp_path_factory):
    folder = WeightFolder(tmp_path_factory.mktemp("weights"), shard_bytes=shard)
    found = dict(read(folder.write(weights.items(), 1)))
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
    kept = first.write(tiny.model(seed=0).weights(), 1)
    with pytest.raises(KeyboardInterrupt):
        first.write(dying(), 2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [".version-2", "version-1"]
    assert weights_digest(read(kept)) == tiny.model(seed=0).digest()
    WeightFolder(tmp_path).write(tiny.model(seed=2).weights(), 2)
    assert [p.name for p in tmp_path.iterdir()] == ["version-2"]


def test_a_member_that_stays_away_is_said():
    with pytest.raises(RolloutError, match="not every member"):
        weight_group(host_store("127.0.0.1", timeout=0.5)[0], GroupMember("alone", 0, 2), timeout=0.5)
