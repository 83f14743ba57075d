"""What plan and doctor say of the memory of each phase is what a run holds; what does not fit is refused."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoConfig

from opd.config import Recipe
from opd.config.train import LoRAConfig
from opd.models.architecture import empty_model
from opd.pipelines.check import memory, resources
from opd.pipelines.check.checks import Finding
from opd.pipelines.check.memory import sizes_of
from opd.pipelines.check.models import Models
from opd.pipelines.check.resources import check_resources
from opd.pipelines.check.shapes import shape_of
from opd.rollout.torch_engine import TorchEngine
from opd.train.offload import OffloadBuffer
from opd.train.terms import CrossEntropyTerm
from opd.train.torch_backend import TorchBackend

BOTH = {"engine": True, "trainer": True}
ENGINE = {"engine copy", "KV cache", "weights laid out for decode"}


def recipe_of(offload: dict[str, bool] | None = None, **changes: Any) -> Recipe:
    settings = {
        "name": "demo",
        "model": {"config": tiny.LLAMA},
        "domains": {"sort": {"source": "procedural:sort", "prompts": 50}},
        "rollout": {"max_new_tokens": 5, "max_sequence": 64, "max_running": 16},
        "specialist": {"batch": {"max_tokens": 16}},
        "distill": {"batch": {"max_tokens": 16}},
        "runtime": {"offload": offload or {}},
    }
    return Recipe.model_validate(settings | changes)


def shape():
    return shape_of(tiny.model().module.config, tiny.model().module)


def memory_parts(*given: Any) -> dict[str, int]:
    return sizes_of(memory.memory_parts(*given))


def memory_by_phase(*given: Any) -> dict[str, dict[str, int]]:
    return {phase: sizes_of(held) for phase, held in memory.memory_by_phase(*given).items()}


def disk_parts(*given: Any) -> dict[str, int]:
    return sizes_of(resources.disk_parts(*given))


def total(parts: dict[str, int]) -> int:
    return sum(parts.values())


def test_ranks_share_the_copy_of_the_start():
    alone, together = (
        memory_parts(recipe_of(evaluation={"base_kl_every": 5}, train={"ranks": ranks}), shape(), {})
        for ranks in (1, 2)
    )
    assert alone["frozen copy of the start"] == 2 * together["frozen copy of the start"] > 0


def test_parts_are_in_the_phases_that_use_them():
    phases = memory_by_phase(recipe_of(BOTH), shape(), {})
    assert phases["rollout"].keys() >= ENGINE
    assert not {"weights", "AdamW", "gradients", "activations"} & phases["rollout"].keys()
    assert not {"weights", "AdamW", "gradients", *ENGINE} & phases["score"].keys()
    assert {"weights", "AdamW", "gradients", "activations"} <= phases["train"].keys()
    assert not ENGINE & phases["train"].keys()
    assert {"weights", "engine copy"} <= phases["sync"].keys()
    assert not {"AdamW", "KV cache"} & phases["sync"].keys()
    assert all("teachers" in held for held in phases.values())
    stays = memory_by_phase(recipe_of(), shape(), {})
    assert {"weights", "AdamW", *ENGINE} <= set.intersection(*(set(held) for held in stays.values()))
    assert stays["train"] == memory_parts(recipe_of(), shape(), {})
    assert memory_parts(recipe_of(BOTH), shape(), {}) == phases["train"]
    for backend in ("torch", "megatron", "deepspeed"):
        ranks = memory_by_phase(recipe_of(BOTH, train={"ranks": 2, "backend": backend}), shape(), {})
        assert not {"weights", "AdamW"} & ranks["rollout"].keys()
    # What the engine writes with stays, where it is the trainer's.
    shared = {
        "train": {"ranks": 2},
        "rollout": {"max_new_tokens": 5, "engine": {"type": "torch", "sharded": True}},
    }
    ranks = memory_by_phase(recipe_of(BOTH, **shared), shape(), {})
    assert "weights" in ranks["rollout"]
    assert "AdamW" not in ranks["rollout"]


def test_the_estimate_of_a_phase_is_what_is_held(tmp_path):
    model = tiny.model()
    phases = memory_by_phase(recipe_of(BOTH), shape_of(model.module.config, model.module), {})
    buffers = sum(buffer.nbytes for buffer in model.module.buffers())
    training = tiny.training([CrossEntropyTerm()])
    backend = TorchBackend(model, training)
    for parameter in model.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    held = backend.resident()
    assert held["trainer_weights"] - buffers == phases["train"]["weights"]
    assert held["trainer_gradients"] == phases["train"]["gradients"]
    backend.step(1e-3)
    counts = 4 * len(list(model.module.parameters()))
    assert backend.resident()["trainer_moments"] - counts == phases["train"]["AdamW"]
    engine = TorchEngine(tiny.model())
    rotary = engine._runner.lean._rotary.nbytes if engine._runner.lean else 0
    copies = phases["rollout"]["engine copy"] + phases["rollout"]["weights laid out for decode"]
    # Weights too small to gain by another layout stay as they are.
    assert phases["rollout"]["engine copy"] < engine.resident()["engine_weights"] - buffers - rotary <= copies
    put_away = disk_parts(recipe_of(BOTH), shape_of(model.module.config, model.module), {})[
        "what the trainer puts away"
    ]
    shelf = OffloadBuffer(tmp_path)
    shelf.put("all", [*model.module.parameters(), *(m for _, m in backend._named_moments())])
    file = shelf._away["all"][2]._file  # type: ignore[attr-defined]
    assert file.seek(0, 2) - counts == put_away
    shelf.close()


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("offload", "free", "level", "said"),
    [
        ({}, "both", "error", r"does not fit, but at most .* with runtime\.offload \{engine: true, trainer"),
        (BOTH, "both", "warning", "about"),
        (BOTH, "little", "error", "does not fit, lower batch.max_tokens or .*model, or free some"),
        ({}, "little", "error", "does not fit, lower batch.max_tokens or .*model, or free some"),
        ({}, "much", "ok", "about"),
    ],
)
def test_a_device_that_cannot_hold_the_largest_phase_is_refused(monkeypatch, offload, free, level, said):
    whole = total(memory_parts(recipe_of(), shape(), {}))
    largest = max(map(total, memory_by_phase(recipe_of(BOTH), shape(), {}).values()))
    assert largest < whole
    sizes = {"both": largest, "little": largest - 1, "much": 2 * whole}
    monkeypatch.setattr(resources, "available_memory", lambda device: sizes[free])
    findings = check_resources(recipe_of(offload), Models(student=shape()), Path())
    found = {finding.title: finding for finding in findings}
    assert found["memory"].level == level
    assert re.search(said, found["memory"].detail), found["memory"].detail
    phases = found["memory by phase"]
    assert ("with runtime.offload" in phases.detail) == (not offload)
    assert phases.numbers["train"] == (largest if offload else whole)


def test_what_leaves_a_gpu_is_compared_with_the_hosts_memory(monkeypatch):
    monkeypatch.setattr(resources, "on_cuda", lambda device: device == "cuda")
    put_away = 3 * 4 * shape().parameters
    sizes = {"cuda": 1 << 40, "cpu": put_away - 1}
    monkeypatch.setattr(resources, "available_memory", lambda device: sizes[device])
    recipe = recipe_of(BOTH, model={"config": tiny.LLAMA, "device": "cuda"})

    def host() -> Finding:
        findings = check_resources(recipe, Models(student=shape()), Path())
        return next(finding for finding in findings if finding.title == "memory of the host")

    assert host().level == "error"
    sizes["cpu"] = 2 * put_away
    assert host().level == "ok"
    assert host().numbers["needed"] == put_away


@pytest.mark.parametrize(
    ("arguments", "room", "level"),
    [({}, 0, "warning"), ({}, -1, "error"), ({"enable-memory-saver": False}, -1, None)],
    ids=["just fits", "does not fit", "without the saver"],
)
def test_the_host_needs_room_for_servers_that_sleep(monkeypatch, arguments, room, level):
    """Each of two servers of a teacher leaves its whole model there."""
    group = {"count": 2, "arguments": arguments}
    recipe = recipe_of(
        {"teachers": True},
        servers={"own": group},
        teachers={"sort": {"type": "sglang", "path": "sort", "servers": "own"}},
    )
    teacher = replace(shape(), stored=10**15)
    monkeypatch.setattr(resources, "available_memory", lambda device: 2 * 10**15 + room)
    models = Models(student=shape(), teachers={"sort": teacher})
    found = {finding.title: finding for finding in check_resources(recipe, models, Path())}
    told = found.get("memory of the host")
    assert (told and told.level) == level
    if told:
        assert "weights of servers that sleep" in told.detail


def test_hidden_states_are_counted_where_they_wait():
    streamed = {"teachers": {"sort": {"path": "sort"}}, "domains": {"sort": {"source": "procedural:sort"}}}
    step = 64 * 5 * shape().hidden_size * 4  # prompts, their longest answers, float32
    for storage, kind, held in (
        ({}, "streamed", step),
        ({"hidden_memory_mb": 0}, "streamed", 0),
        ({"hidden_memory_mb": 0}, "local", step),
        ({"hidden_memory_mb": 0, "cache_mb": 0}, "streamed", step),
    ):
        distill = {"teachers": kind, "prompts_per_domain": 64}
        recipe = recipe_of(**streamed, storage=storage, distill=distill)
        phases = memory_by_phase(recipe, shape(), {})
        assert {name: held["hidden states"] for name, held in phases.items() if "hidden states" in held} == {
            "score": held,
            "train": held,
        }


LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def test_adapters_on_eight_billion_weights_take_one_base(monkeypatch):
    """Beside keys and values, activations and logits; and as it is where the engine merges."""
    monkeypatch.setattr(memory, "free_on_cuda", lambda device: None)  # planned elsewhere
    config = AutoConfig.for_model(**LLAMA_8B, vocab_size=128_256)
    model = LLAMA_8B | {"tie_word_embeddings": False}
    lora = LoRAConfig()
    large = shape_of(config, empty_model(config, "here"), lora)
    large = replace(large, origin=frozenset({"base"}))
    teacher = replace(large, delta=2 * large.adapters, on=frozenset({"base"}))
    teachers = {name: {"path": name} for name in ("a", "b")}
    sizes = {}
    for way in ("adapters", "merged"):
        recipe = recipe_of(
            model={"config": model, "dtype": "bfloat16", "device": "cuda", "lora": lora.model_dump()},
            rollout={"engine": {"type": "torch", "lora": way}},
            domains={name: {"source": "procedural:sort", "prompts": 50} for name in teachers},
            teachers=teachers,
            distill={"teachers": "local"},
            evaluation={"base_kl_every": 1},
        )
        parts = memory_parts(recipe, large, dict.fromkeys(teachers, teacher))
        passing = (
            "KV cache",
            "activations",
            "logits of a chunk",
            "decode buffers and graphs",
            "hidden states",
        )
        sizes[way] = sum(size for name, size in parts.items() if name not in passing)
        assert parts["base"] == 2 * large.parameters
        assert parts["teachers"] == 2 * teacher.delta
    assert large.parameters > 8 * 10**9
    assert 16 * 10**9 < sizes["adapters"] < 18 * 10**9
    assert sizes["merged"] - sizes["adapters"] == 2 * (large.adapted + large.fused)
