"""A model that no rank holds whole: four processes, each with less memory than the model takes."""

import json
import math
from pathlib import Path

import pytest
import sharded_ranks
import tiny
import torch
from full import FULL
from rank_processes import run_ranks
from safetensors.torch import save_file
from sharded_ranks import MIB

from opd.errors import CheckpointError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.peft_folder import PREFIX
from opd.models.sharded import compare_together, fill_shards, open_empty
from opd.ranks import Ranks
from opd.train.torch_backend import TorchBackend

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # one launch of all ranks

MODELS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "experts": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}
BFLOAT16 = {"dtype": "bfloat16"}
ALIKE = {
    "several files": {"model": "files"},
    "adapters": {"model": "tied", "lora": True},
    "experts": {"model": "experts"},
}
MORE = {
    "sequences": {"model": "tied", "train": {"context_parallel": 4}},
    "masters": {"model": "files"} | BFLOAT16,
    "values on a head of its own": {"model": "untied", "values": True},
    "an adapter's folder": {"model": "adapter"},
    "tied": {"model": "tied"},
    "untied": {"model": "untied"},
    "pure": {"model": "tied", "train": {"precision": "pure"}} | BFLOAT16,
    "adapters on bfloat16": {"model": "tied", "lora": True} | BFLOAT16,
    "values": {"model": "tied", "values": True},
}
BATCH = {"max_tokens": 4096}
LIMIT = 88 * MIB  # RLIMIT_DATA, beside what libraries took before
"""What a rank may take to load and try the model of 130 MiB: its quarter, layers that are gathered."""

EXPORT = 60 * MIB
"""What it may take to write it: files of 8 MiB, twice, and what libraries need."""
LARGEST = 3 * MIB
"""Bytes of a tensor of it."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Models, and what four ranks have said of each task."""
    asked = ALIKE | (MORE if FULL else {})
    root = tmp_path_factory.mktemp("sharded")
    for name, changes in MODELS.items():
        save_checkpoint(tiny.model(**changes), tiny.tokenizer(), root / name, {})
    save_checkpoint(tiny.model(), tiny.tokenizer(), root / "files", {}, max_shard_bytes=20_000)
    assert len(list((root / "files").glob("*.safetensors"))) > 2
    save_checkpoint(tiny.model(**sharded_ranks.BIG), tiny.tokenizer(), root / "big", {})
    save_checkpoint(tiny.model(), tiny.tokenizer(), root / "altered", {})
    flip(root / "altered" / "model.safetensors")
    adapter_of(root / "tied", root / "adapter")
    tasks = [{"name": f"alike {name}", "does": "alike"} | task for name, task in asked.items()]
    limited = {"does": "limited", "model": "big", "limit": LIMIT, "batch": BATCH}
    tasks += [
        {"name": "altered", "does": "limited", "model": "altered"},
        {"name": "whole"} | limited | {"does": "at once"},
        {"name": "too small"} | limited | {"limit": 16 * MIB},
        {"name": "limited"} | limited | {"export": EXPORT},
    ]
    (root / "tasks.json").write_text(json.dumps(tasks))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sharded_ranks.RETURNED.items():
            patch.setenv(name, value)
        run_ranks(sharded_ranks.__file__, 4, root, seconds=2000)
    return root


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def adapter_of(base: Path, folder: Path) -> None:
    """An adapter on `base`, as peft writes one."""
    drawn, tensors = torch.Generator().manual_seed(1), {}
    for name, weight in CausalLM.from_pretrained(base).weights():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            layer = PREFIX + name.removesuffix(".weight")
            tensors[f"{layer}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=drawn)
            tensors[f"{layer}.lora_B.weight"] = 0.1 * torch.randn(weight.shape[0], 4, generator=drawn)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(described))


def said(place: Path, name: str, world: int = 4) -> list[dict]:
    """What each rank said of a task."""
    return [json.loads((place / f"{name}-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("name", [*ALIKE, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_a_model_that_is_read_in_parts_is_the_one_that_is_read_whole(place, name):
    for result in said(place, f"alike {name}"):
        assert_read_alike(result)


def assert_read_alike(result: dict) -> None:
    """A rank that has read a model in parts has the one that is read whole."""
    assert result.get("error") is None, result
    assert result["differing"] == []
    assert result["tensors"] > 4
    one, other = result["metrics"]
    assert one == other
    assert len(set(result["digests"])) == 1


def test_ranks_load_and_train_a_model_larger_than_the_memory_of_each(place):
    size = sum(file.stat().st_size for file in (place / "big").glob("*.safetensors"))
    assert 0.7 * size > LIMIT
    alone = TorchBackend(CausalLM.from_pretrained(place / "big"), sharded_ranks.plain_training(**BATCH))
    expected = sharded_ranks.learn(alone, 0, 3)
    for result in said(place, "limited"):
        assert result.get("error") is None, result
        filled, tried = result["peaks"]  # by VmHWM
        assert filled <= 1.1 * size / 4 + LARGEST
        assert tried <= LIMIT
        for mine, theirs in zip(result["metrics"], expected, strict=True):
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():
                assert math.isclose(value, theirs[key], rel_tol=1e-5, abs_tol=1e-5), key
    assert all(result["peak"] > LIMIT for result in said(place, "whole"))
    assert size > 2 * EXPORT
    [digest, exported], *others = (result["digests"] for result in said(place, "limited"))
    assert exported == digest
    assert [other for _, other in others] == [""] * 3
    folder = place / "limited exported"
    assert CausalLM.from_pretrained(folder).digest() == digest
    sharded = {"model.safetensors.index.json"}
    assert {file.name for file in folder.iterdir() if "model-" not in file.name} == sharded | {
        file.name for file in (place / "big").iterdir() if file.name != "model.safetensors"
    }
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (place / "big" / name).read_bytes()
    assert not [file for file in place.iterdir() if file.name.startswith(".")]


def test_memory_that_does_not_hold_a_share_is_one_sentence(place):
    for result in said(place, "too small"):
        assert result["error"] in ("ModelError", "CheckpointError")
        assert "no memory for its share of" in result["message"]
        assert "start more ranks" in result["message"]


def test_a_changed_file_is_refused_by_every_rank(place):
    assert_refused_by_all(said(place, "altered"))


def assert_refused_by_all(results: list[dict]) -> None:
    """The rank that has read it says so, and the others name that rank."""
    sentences = [result["message"] for result in results]
    [own] = {sentence for sentence in sentences if not sentence.startswith("on rank ")}
    assert "altered/model.safetensors does not have the sha256" in own
    rank = sentences.index(own)
    assert {*sentences} == {own, f"on rank {rank}: {own}"}


def test_a_file_that_changes_after_it_was_compared_is_refused(tmp_path, monkeypatch):
    save_checkpoint(tiny.model(), tiny.tokenizer(), tmp_path / "model", {})
    weights = tmp_path / "model" / "model.safetensors"

    def then_changed(*args):
        compare_together(*args)
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)

    monkeypatch.setattr("opd.models.sharded.compare_together", then_changed)
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed while it was read"):
        fill_shards(open_empty(tmp_path / "model"), Ranks())
