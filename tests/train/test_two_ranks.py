"""What several ranks do, on two of them and small, in one launch; the files of each kind have more."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import backend_ranks
import context_step
import pytest
import ring_ranks
import sharded_engine_ranks
import sharded_ranks
import tiny
import torch
import two_ranks
from backend_ranks import assert_same, assert_same_gradients, read_state
from rank_processes import run_ranks
from safetensors.torch import load_file

from opd.models.checkpoint import save_checkpoint
from opd.storage.checkpoints import CheckpointStore
from opd.train.backend import TorchBackend

STEPS = 2
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BACKENDS: dict[str, dict] = {
    "fsdp": {"train": {}},
    "tensor": {"train": {"backend": "megatron", "tensor_parallel": 2}},
    "layers": {"train": {"backend": "megatron", "pipeline_parallel": 2}},
    "sequences": {"train": {"backend": "megatron", "context_parallel": 2}},
    "adapters": {"train": {"backend": "megatron", "tensor_parallel": 2}, "model": {"lora": ALL}},
}
ALIKE: dict[str, dict] = {
    "files": {"model": "files"},
    "megatron": {"model": "tied", "train": {"backend": "megatron", "tensor_parallel": 2}},
}
CASES = ("llama", "gemma2 in pieces", "again", *context_step.CHOSEN)
WRITES = {"model": "tied", "prompts": 5, "each": 2, "most": 9}
TASKS = [
    *({"kind": "backend", "name": name, "first": 0, "last": STEPS, "gradients": name != "fsdp"} | task
      for name, task in BACKENDS.items()),
    *({"kind": "step", "name": name, "case": name} for name in CASES),
    *({"kind": "ring", "name": f"ring {name}", "case": name} for name in ring_ranks.CASES),
    *({"kind": "sharded", "name": f"alike {name}", "does": "alike"} | task for name, task in ALIKE.items()),
    {"kind": "sharded", "name": "saved", "does": "saves", "into": "checkpoints", "model": "tied"},
    {"kind": "sharded", "name": "altered", "does": "limited", "model": "altered"},
    {"kind": "engine", "name": "writes"} | WRITES,
    {"kind": "engine", "name": "raises", "stops": "raises"} | WRITES,
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Models, and what two ranks have said of each task."""
    root = tmp_path_factory.mktemp("ranks")
    save_checkpoint(tiny.model(), tiny.tokenizer(), root / "tied", {})
    save_checkpoint(tiny.model(), tiny.tokenizer(), root / "files", {}, max_shard_bytes=20_000)
    shutil.copytree(root / "tied", root / "altered")
    weights = root / "altered" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    (root / "tasks.json").write_text(json.dumps(TASKS))
    run_ranks(two_ranks.__file__, 2, root)
    return root


def said(place: Path, name: str) -> list[dict]:
    """What each rank said of a task."""
    return [json.loads((place / f"{name}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", BACKENDS)
def test_steps_and_state_are_those_of_one_process(place, name):
    alone = TorchBackend(backend_ranks.student(**BACKENDS[name].get("model", {})), backend_ranks.training())
    folder = place / name
    if name != "fsdp":  # whose gradients are cut as its weights are
        expected = backend_ranks.gradients_of(alone)
        assert_same_gradients(load_file(folder / "gradients.safetensors"), expected)
    result = json.loads((folder / "result.json").read_text())
    assert_same(result["metrics"], backend_ranks.train(alone, 0, STEPS))
    weights = load_file(folder / "weights.safetensors")
    assert weights.keys() == dict(alone.weights()).keys()
    for key, tensor in alone.weights():
        torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=2e-5)
    state = read_state(folder)
    again = TorchBackend(backend_ranks.student(**BACKENDS[name].get("model", {})), backend_ranks.training())
    again.load_state(state)
    assert_same(backend_ranks.train(again, STEPS, STEPS + 1), backend_ranks.train(alone, STEPS, STEPS + 1))


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_sequences_or_weights_make_the_step_of_one(place, case):
    expected, metrics = context_step.step(case, TorchBackend, whole=True)
    first, other = (load_file(place / f"{case}-{rank}.safetensors") for rank in range(2))
    assert first.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=2e-5 * max(scale, 0.1), msg=name)
    found, _ = said(place, case)
    assert found.pop("context_parallel", None) == context_step.CHOSEN.get(case, (None, None))[1]
    assert found == pytest.approx(metrics, rel=1e-3, abs=1e-6)
    assert all(torch.equal(other[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("case", ring_ranks.CASES)
def test_the_ring_attends_as_ranks_with_all_keys_and_values_do(place, case):
    for differences in said(place, f"ring {case}"):
        assert differences.keys() == {"output", "query", "key", "value"}
        assert max(differences.values()) <= 1e-5


@pytest.mark.parametrize("name", ALIKE)
def test_a_model_that_is_read_in_parts_is_the_one_that_is_read_whole(place, name):
    for result in said(place, f"alike {name}"):
        assert result["differing"] == []
        assert result["tensors"] > 4
        assert result["kept"] < 0.1  # of the model, once a back end is closed
        one, other = result["metrics"]
        assert one == other
        assert len(set(result["digests"])) == 1


def test_one_process_goes_on_with_the_pieces_of_two(place):
    checkpoint = CheckpointStore(place / "checkpoints").latest()
    assert checkpoint is not None
    files = sorted(path.name for path in checkpoint.folder.glob("model*"))
    assert files == [f"model-{rank:05d}-of-00002.safetensors" for rank in range(2)]
    alone = TorchBackend(tiny.model(seed=5), sharded_ranks.plain_training())
    alone.load_state({file: checkpoint.load(file) for file in ("model", "optimizer")})
    for mine, theirs in zip(
        sharded_ranks.learn(alone, 3, 5), said(place, "saved")[0]["metrics"], strict=True
    ):
        assert mine == pytest.approx(theirs, rel=5e-5, abs=5e-5)


@pytest.mark.parametrize("damage", ["remove", "truncate", "flip"])
def test_a_piece_that_is_missing_or_changed_is_named(place, tmp_path, damage, caplog):
    shutil.copytree(place / "checkpoints", tmp_path / "c")
    victim = tmp_path / "c" / "step_3" / "optimizer-00001-of-00002.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.unlink()
    if damage != "remove":
        victim.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    assert CheckpointStore(tmp_path / "c").latest() is None
    [message] = caplog.messages
    assert "optimizer-00001-of-00002.safetensors" in message


def test_a_changed_file_is_refused_by_both(place):
    sentences = [result["message"] for result in said(place, "altered")]
    [own] = {sentence for sentence in sentences if not sentence.startswith("on rank ")}
    assert "altered/model.safetensors does not have the sha256" in own
    assert {*sentences} == {own, f"on rank {sentences.index(own)}: {own}"}


def test_ranks_that_share_a_model_write_the_tokens_of_one_process(place):
    alone = sharded_engine_ranks.whole_engine(place, WRITES)
    given = sharded_engine_ranks.prompts(WRITES["prompts"])
    answered = sharded_engine_ranks.answered(alone, given, WRITES["each"], WRITES["most"])
    expected = sharded_engine_ranks.told(answered)
    results = said(place, "writes")
    for result in results:
        for mine, theirs in zip(result["said"], expected, strict=True):
            assert (mine["uid"], mine["ids"]) == (theirs["uid"], theirs["ids"])
            for a, b in zip(mine["logprobs"], theirs["logprobs"], strict=True):
                assert math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-4)
    assert sum(result["held"] for result in results) == results[0]["of"]


def test_a_rank_that_fails_stops_the_other_with_a_sentence(place):
    other, failed = said(place, "raises")
    assert failed == {"error": "RolloutError", "message": "rank 1 has had enough."}
    assert other["error"] == "RanksError"
    assert other["message"].startswith("a rank has stopped writing, and no other goes on alone with")
