"""What several ranks do, on two of them and small, in one launch; the files of each kind have more."""

import json
import shutil
from functools import partial
from pathlib import Path

import backend_ranks
import context_step
import pytest
import ring_ranks
import sharded_ranks
import tiny
import torch
import two_ranks
import vocab_parallel_worker
from backend_ranks import assert_same, assert_same_gradients, read_state
from rank_processes import run_ranks
from safetensors.torch import load_file
from test_context_parallel import assert_step_of_one
from test_expert_parallel import EACH, assert_cut_alike, assert_learnt_alike, assert_shared, write_mixtures
from test_sharded import assert_read_alike, assert_refused_by_all
from test_sharded import said as said_by
from test_sharded_checkpoints import assert_alike, assert_damage_is_named
from test_sharded_engine import assert_written

from opd.models.checkpoint import save_checkpoint
from opd.storage.checkpoints import CheckpointStore
from opd.train.torch_backend import TorchBackend

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
EXPERTS: dict[str, dict] = {
    "experts": {"model": "qwen3_moe"},
    "losses of routers": {"model": "qwen3_moe"} | EACH,
    "experts again": {"model": "deepseek_v3", "batch": {"recompute_layers": True}, "batches": "uneven"},
}
CUT: dict[str, dict] = {
    "megatron shares": {"model": "qwen3_moe", "train": {"backend": "megatron", "expert_parallel": 2}},
    "megatron cuts": {"model": "mixtral", "train": {"backend": "megatron", "tensor_parallel": 2}},
    "olmoe": {"model": "olmoe", "train": {"backend": "megatron", "tensor_parallel": 2}},
    "glm": {"model": "glm4_moe", "train": {"backend": "megatron", "expert_parallel": 2}},
    "deepseek": {"model": "deepseek_v3", "train": {"backend": "megatron", "tensor_parallel": 2}},
}
CASES = ("llama", "gemma2 in pieces", "again", *context_step.CHOSEN)
WRITES = {"model": "tied", "prompts": 5, "each": 2, "most": 9}
TASKS = [
    *({"kind": "backend", "name": name, "first": 0, "last": STEPS, "gradients": name != "fsdp"} | task
      for name, task in BACKENDS.items()),
    *({"kind": "step", "name": name, "case": name} for name in CASES),
    *({"kind": "ring", "name": f"ring {name}", "case": name} for name in ring_ranks.CASES),
    *({"kind": "head", "name": f"head {form}", "form": form} for form in vocab_parallel_worker.FORMS),
    *({"kind": "sharded", "name": f"alike {name}", "does": "alike"} | task for name, task in ALIKE.items()),
    *({"kind": "experts", "name": name} | task for name, task in EXPERTS.items()),
    *({"kind": "experts", "name": name, "does": "cut"} | task for name, task in CUT.items()),
    {"kind": "experts", "name": "idle experts", "does": "idle", "model": "qwen3_moe"},
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
    write_mixtures(root, {task["model"] for task in (EXPERTS | CUT).values()})
    (root / "tasks.json").write_text(json.dumps(TASKS))
    run_ranks(two_ranks.__file__, 2, root)
    return root


said = partial(said_by, world=2)


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
    assert_step_of_one(place, 2, case)


@pytest.mark.parametrize("case", ring_ranks.CASES)
def test_the_ring_attends_as_ranks_with_all_keys_and_values_do(place, case):
    for differences in said(place, f"ring {case}"):
        assert differences.keys() == {"blocks", "output", "query", "key", "value"}
        assert max(differences.values()) <= 1e-5


@pytest.mark.parametrize("form", vocab_parallel_worker.FORMS)
def test_parts_of_a_head_give_what_the_whole_one_gives(place, form):
    for differences in said(place, f"head {form}"):
        assert len(differences) == 17
        assert {case: value for case, value in differences.items() if not value <= 1e-13} == {}


@pytest.mark.parametrize("name", ALIKE)
def test_a_model_that_is_read_in_parts_is_the_one_that_is_read_whole(place, name):
    for result in said(place, f"alike {name}"):
        assert_read_alike(result)
        assert result["kept"] < 0.1  # of the model, once a back end is closed


def test_one_process_goes_on_with_the_pieces_of_two(place):
    checkpoint = CheckpointStore(place / "checkpoints").latest()
    assert checkpoint is not None
    files = sorted(path.name for path in checkpoint.folder.glob("model*"))
    assert files == [f"model-{rank:05d}-of-00002.safetensors" for rank in range(2)]
    alone = TorchBackend(tiny.model(seed=5), sharded_ranks.plain_training())
    alone.load_state({file: checkpoint.load(file) for file in ("model", "optimizer")})
    assert_alike(sharded_ranks.learn(alone, 3, 5), said(place, "saved")[0]["metrics"])


@pytest.mark.parametrize("name", EXPERTS)
def test_ranks_that_share_experts_learn_what_one_process_does(place, name):
    assert_learnt_alike(place, name, EXPERTS[name], said(place, name))


@pytest.mark.parametrize("name", EXPERTS)
def test_a_rank_has_and_reads_its_experts_and_gathers_no_others(place, name):
    assert_shared(place / EXPERTS[name]["model"], said(place, name))


@pytest.mark.parametrize("name", CUT)
def test_mixtures_on_megatron_are_read_in_parts_resumed_and_exported(place, name):
    assert_cut_alike(place, name, CUT[name], said(place, name))


def test_a_rank_whose_experts_no_token_is_routed_to_takes_part(place):
    first, second = said(place, "idle experts")
    assert max(*first["differences"], *second["differences"]) < 1e-5
    assert first["largest"] > 0 == second["largest"]


@pytest.mark.parametrize("damage", ["remove", "truncate", "flip"])
def test_a_piece_that_is_missing_or_changed_is_named(place, tmp_path, damage, caplog):
    assert_damage_is_named(
        place / "checkpoints", "optimizer-00001-of-00002.safetensors", damage, tmp_path, caplog
    )


def test_a_changed_file_is_refused_by_both(place):
    assert_refused_by_all(said(place, "altered"))


def test_ranks_that_share_a_model_write_the_tokens_of_one_process(place):
    results = said(place, "writes")
    assert_written(place, WRITES, results)
    assert sum(result["held"] for result in results) == results[0]["of"]


def test_a_rank_that_fails_stops_the_other_with_a_sentence(place):
    other, failed = said(place, "raises")
    assert failed == {"error": "RolloutError", "message": "rank 1 has had enough."}
    assert other["error"] == "RanksError"
    assert other["message"].startswith("a rank has stopped writing, and no other goes on alone with")
