"""Tiny models that a real server runs and this process runs too."""

import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from recipes import tiny_recipe

from opd.data.load import load_domain
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.stages.domains import student_tokenizer

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MODEL: dict[str, Any] = QWEN3 | {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
"""One that vLLM has on a CPU, where its attention knows heads of 32 and more."""
PADDED = 24
"""Rows of the head; the tokenizer has fewer tokens."""


@functools.cache
def recipe_tokenizer():
    """That of `tiny_recipe`."""
    recipe = tiny_recipe()
    domains = [
        load_domain(name, config, seed=0, held_out_prompts=4) for name, config in recipe.domains.items()
    ]
    return student_tokenizer(recipe, domains)


def write_model(path: Path, *, seed: int, broken: bool = False, kin: bool = False, **config) -> None:
    """A random model with the recipe's tokenizer; its head is far from uniform, so that a wrong model is far
    from the right one. `broken`: one weight of the head is not a number; `kin`: another specialist of the
    same base, whose attention alone differs.
    """
    tokenizer = recipe_tokenizer()
    model = CausalLM.from_config(config, tokenizer=tokenizer, seed=seed)
    with torch.no_grad():
        model.module.lm_head.weight.mul_(20.0)
        if broken:
            model.module.lm_head.weight[3, 0] = float("nan")
        for name, weight in model.module.named_parameters():
            weight.mul_(1.1 if kin and ".o_proj." in name else 1.0)
    save_checkpoint(model, tokenizer, path, {"base": "-", "method": "-", "results": {}})


def write_served_models(folder: Path) -> dict[str, Path]:
    """`a`, `b` and `bad` below `folder`."""
    paths = {name: folder / name for name in ("a", "b", "bad")}
    for seed, (name, path) in enumerate(paths.items()):
        write_model(path, seed=seed, broken=name == "bad", **QWEN3, vocab_size=PADDED)
    return paths


def write_vllm_models(folder: Path, **changes: Any) -> dict[str, Path]:
    """`a` and `b` below `folder`, whose heads have a row for each token and no more, but for `changes`."""
    paths = {name: folder / name for name in ("a", "b")}
    for seed, path in enumerate(paths.values()):
        write_model(path, seed=seed, **MODEL, **changes)
    return paths


VARIETY = "served_models:variety"
STOPS_AT = "served_models:stopping"
_stop: list[int] = [0, 0]
"""At which batch, and how many there have been."""
_at: dict[int, Callable[[], object]] = {}


def variety(sample) -> float:
    """A reward that differs within a group: how many different tokens were written."""
    return len(set(sample.text)) / 12


def stop_at(batch: int, at: Mapping[int, Callable[[], object]] | None = None) -> None:
    """Interrupt the stage before it learns from its `batch`-th batch from now on; 0 never. `at`: what else to
    do before it learns from a batch.
    """
    _stop[:] = [batch, 0]
    _at.clear()
    _at.update(at or {})


def stopping(batch):
    """A `to_batch` that changes nothing."""
    _stop[1] += 1
    _at.get(_stop[1], int)()
    if _stop[1] == _stop[0]:
        raise KeyboardInterrupt
    return batch


TOLD = "served_models:told"
TOLD_VARIABLE = "OPD_TEST_TOLD"
"""Of a run's environment: `fail`, or the file to make before waiting for what is done to the run."""


def told(batch):
    """A `to_batch` of a run in a process of its own, which does as it is told from the second batch on."""
    what = os.environ.get(TOLD_VARIABLE)
    _stop[1] += 1
    if what is None or _stop[1] < 2:
        return batch
    if what == "fail":
        raise ValueError("the second batch is not to be learnt from")
    Path(what).touch()
    time.sleep(600)
    raise TimeoutError("nothing was done to the run")
