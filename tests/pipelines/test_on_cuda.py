"""A whole merge on a device: given teachers, engine, cache and training as a run has them."""

from pathlib import Path

import pretend_cuda
import pytest
import tiny
import torch
from recipes import tiny_recipe

from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage


def save(folder: Path, seed: int) -> None:
    tokenizer = character_tokenizer("0123456789=", ["<sort>", "<add3>"])
    config = tiny.LLAMA | {"num_key_value_heads": 2}
    save_checkpoint(CausalLM.from_config(config, tokenizer=tokenizer, seed=seed), tokenizer, folder, {})


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0, 8], ids=["cache on disk", "rows in memory"])
def test_a_merge(tmp_path: Path, memory: int) -> None:
    for seed, name in enumerate(("base", "sort", "add3")):
        save(tmp_path / name, seed)
    models = []
    for device in ("cpu", "cuda:1"):
        recipe = tiny_recipe(
            model={"path": str(tmp_path / "base"), "device": device},
            base=None,
            teachers={name: {"path": str(tmp_path / name)} for name in ("sort", "add3")},
            distill={"steps": 2, "prompts_per_domain": 4, "checkpoint_every": 1, "optim": {"lr": 1e-3}},
            storage={"hidden_memory_mb": memory},
            baselines={"methods": []},
        )
        out = tmp_path / device.replace(":", "-")
        with pretend_cuda.on(device), RunFolder.create(out, recipe) as folder:
            run_stage(recipe, folder, "merge")
        models.append(CausalLM.from_pretrained(out / "merged"))
    ours, theirs = (torch.cat([x.flatten() for _, x in model.weights()]) for model in models)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
