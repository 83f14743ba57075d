"""Mixtures whose experts four ranks share: what one process computes, learns and saves. Of two ranks:
test_two_ranks.py.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import backend_ranks
import expert_ranks
import pytest
import sharded_ranks
import tiny
import tiny_types
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file
from test_sharded import said
from torch import Tensor
from transformers import AutoModelForCausalLM

from opd.models.causal_lm import CausalLM
from opd.train.torch_backend import TorchBackend

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # one launch of all ranks

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe")
SIZES = {"moe_intermediate_size": 64, "intermediate_size": 64}
"""Experts that have more numbers than all else in a layer."""
EXPERTS = 4 * 3 * 64 * 32
"""Numbers of a layer's experts."""
LOSSES = {"balance_loss": 0.3, "router_z_loss": 0.02}
EACH = {"batch": {"max_tokens": 1}, "losses": LOSSES}
"""Every sample is a micro-batch, on any number of ranks."""
TASKS: dict[str, dict] = {name: {"model": name} for name in FAMILIES} | {
    "adapters": {"model": "glm4_moe", "lora": True},
    "bfloat16": {"model": "qwen3_moe", "dtype": "bfloat16"},
    "losses of routers": {"model": "mixtral"} | EACH,
    "computed again": {"model": "qwen3_moe", "batch": {"recompute_layers": True}, "batches": "uneven"},
    "shared sequences": {"model": "qwen3_moe", "train": {"context_parallel": 2}},
    "each has all": {"model": "qwen3_moe", "train": {"expert_parallel": 1}},
    "in pieces": {"model": "qwen3_moe", "batch": {"sequence_chunk": 8}},
}
APART = ("each has all", "in pieces")
"""Tasks whose ranks gather all experts."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Mixtures, and what four ranks have said of each task."""
    root = write_mixtures(tmp_path_factory.mktemp("experts"), FAMILIES)
    (root / "tasks.json").write_text(json.dumps([{"name": name} | task for name, task in TASKS.items()]))
    run_ranks(expert_ranks.__file__, 4, root, seconds=900)
    return root


def write_mixtures(root: Path, families: Iterable[str]) -> Path:
    """`root`, in which transformers has written a tiny mixture of each family."""
    for name in families:
        tiny_types.tiny_model(name, **SIZES).save_pretrained(root / name)
        tiny.tokenizer().save_pretrained(root / name)
    return root


def plain_logits(folder: Path) -> Tensor:
    """[11, V] by transformers' own forward."""
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return module(input_ids=expert_ranks.IDS[None], use_cache=False).logits[0]


def alone(place: Path, task: dict) -> TorchBackend:
    """The same student in one process. With losses of routers it has the same micro-batches, too."""
    batch = task["batch"] if "losses" in task else {}
    training = replace(sharded_ranks.plain_training(**batch), **task.get("losses", {}))
    backend = TorchBackend(sharded_ranks.whole_model(place, task), training)
    backend.replay_experts("losses" in task and "auto")
    return backend


def close(found: Tensor, expected: Tensor, name: str = "") -> None:
    """Both agree within 1e-4 of the largest entry."""
    difference = float((found - expected).abs().max())
    assert difference <= 1e-4 * max(float(expected.abs().max()), 1e-3), (name, difference)


@pytest.mark.parametrize("name", [name for name in TASKS if name != "bfloat16"])
def test_ranks_that_share_experts_learn_what_one_process_does(place, name):
    assert_learnt_alike(place, name, TASKS[name], said(place, name))


def assert_learnt_alike(place: Path, name: str, task: dict, results: list[dict]) -> None:
    """Logits, gradients, steps, checkpoint and the exported folder are those of one process."""
    assert {result.get("message") for result in results} == {None}
    computed = load_file(place / f"{name} out" / "computed.safetensors")
    close(computed.pop("logits"), plain_logits(place / task["model"]))
    close(computed.pop("after"), plain_logits(place / f"{name} exported"))
    batch, backend = backend_ranks.BATCHES[task.get("batches", "new")], alone(place, task)
    backend.forward_backward(batch(0))
    expected = expert_ranks.gradients_of(backend)
    assert computed.keys() == expected.keys()
    for key, gradient in expected.items():
        close(computed[key], gradient, key)
    metrics = backend_ranks.train(backend, 0, 2, batch)
    again = alone(place, task)  # another number of ranks goes on
    again.load_state(backend_ranks.read_state(place / f"{name} out"))
    metrics += backend_ranks.train(again, 2, 3, batch)
    for result in results:
        assert len({*result["digests"]}) == 1
        for mine, theirs in zip(result["metrics"], metrics, strict=True):
            assert {key: mine[key] for key in theirs} == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", TASKS)
def test_a_rank_has_and_reads_its_experts_and_gathers_no_others(place, name):
    assert_shared(place / TASKS[name]["model"], said(place, name), name not in APART)


def assert_shared(folder: Path, results: list[dict], shared: bool = True) -> None:
    """Each rank has its part of the experts, has read no more, and gathers none while it learns."""
    whole = {n: t.numel() for n, t in CausalLM.from_pretrained(folder).weights()}
    for result in results:
        assert result["shared"] == shared
        assert (result["gathered"] < EXPERTS) == shared
        shares = {key.replace(".base_layer.", "."): size for key, size in result["shares"].items()}
        experts = [key for key in whole if ".experts." in key]
        assert len(experts) > 1
        assert all(shares[key] * len(results) == whole[key] for key in experts)
        assert result["read"] == sum(size for key, size in shares.items() if key in whole)


def test_layers_in_bfloat16_share_float32_masters(place):
    for result in said(place, "bfloat16"):
        assert result.get("message") is None
        assert len({*result["digests"]}) == 1
    computed = load_file(place / "bfloat16 out" / "computed.safetensors")
    assert computed["model.layers.0.mlp.experts.down_proj"].dtype == torch.float32
    model = CausalLM.from_pretrained(place / "qwen3_moe", dtype="bfloat16")
    one = TorchBackend(model, sharded_ranks.plain_training())
    close(computed["logits"].float(), expert_ranks.logits_of(one).float())


def assert_cut_alike(place: Path, name: str, task: dict, results: list[dict]) -> None:
    """A mixture on Megatron-Core has its experts once in `results` of all ranks, computes what transformers
    does, goes on bit for bit, and is exported as one process would.
    """
    folder = place / task["model"]
    assert {result.get("message") for result in results} == {None}
    whole = {n: t.numel() for n, t in CausalLM.from_pretrained(folder).weights()}
    experts = sum(size for key, size in whole.items() if ".experts." in key)
    for result in results:
        assert result["held"] * len(results) == experts
        assert result["metrics"][0] == result["metrics"][1]  # bit for bit
    assert len({digest for result in results for digest in result["digests"]}) == 1
    tensor = task["train"].get("tensor_parallel", 1)
    rows = [load_file(place / f"{name} out" / f"rows-{rank}.safetensors")["rows"] for rank in range(tensor)]
    logits, expected = torch.cat(rows, -1), plain_logits(folder)
    close(logits, expected)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    alone = TorchBackend(CausalLM.from_pretrained(folder), sharded_ranks.plain_training())
    backend_ranks.train(alone, 0, 4)
    close(plain_logits(place / f"{name} exported"), expert_ranks.logits_of(alone))
