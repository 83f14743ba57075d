"""Mixtures whose experts ranks share: what one process computes, learns and saves."""

import json
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
from torch import Tensor
from transformers import AutoModelForCausalLM

from opd.models.causal_lm import CausalLM
from opd.train.backend import TorchBackend

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe")
SIZES = {"moe_intermediate_size": 64, "intermediate_size": 64}
TASKS: dict[str, dict] = {name: {"model": name} for name in FAMILIES} | {
    "adapters": {"model": "qwen3_moe", "lora": True},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    for name in FAMILIES:
        expert_folder(name, root / name)
    (root / "tasks.json").write_text(json.dumps([{"name": name} | task for name, task in TASKS.items()]))
    run_ranks(expert_ranks.__file__, 2, root)
    return root


def expert_folder(family: str, folder: Path) -> Path:
    """A tiny mixture, written by transformers alone."""
    tiny_types.tiny_model(family, **SIZES).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder

def said(place: Path, name: str, world: int = 2) -> list[dict]:
    """What each rank said of a task."""
    return [json.loads((place / f"{name}-{rank}.json").read_text()) for rank in range(world)]

@pytest.mark.parametrize("name", TASKS)
def test_x(place, name):
    for r in said(place, name):
        print({k: v for k, v in r.items()})
    assert "error" not in r
