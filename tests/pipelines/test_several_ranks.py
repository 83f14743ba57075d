"""A whole merge on two ranks, from the command line: the student that one process makes."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from attempts import run_only
from recipes import tiny_recipe, write_recipe
from safetensors.torch import load_file

from opd.config import BatchConfig, OptimConfig, TrainConfig
from opd.errors import ConfigError
from opd.metrics import read_metrics
from opd.pipelines.launch.local import check_ranks
from opd.ranks import Ranks
from opd.train.backend import TrainingSettings
from opd.train.backends import open_backend

SECONDS = 400
MERGE = {"steps": 4, "prompts_per_domain": 4, "checkpoint_every": 3}
LAUNCHES = {
    "fsdp": {"backend": "torch"},
    "context": {"backend": "torch", "context_parallel": 2},
    "mesh": {"backend": "torch", "context_parallel": 2, "ranks": 4},
    "auto": {"backend": "torch", "context_parallel": "auto"},
    "megatron": {"backend": "megatron", "tensor_parallel": 2},
    "megatron stages": {"backend": "megatron", "pipeline_parallel": 2},
    "megatron context": {"backend": "megatron", "context_parallel": 2},
    "deepspeed": {"backend": "deepspeed", "zero_stage": 3},
}
DISK = {"trajectories": "disk"}
LOSSES = {
    "kl": {},
    "reward": {"rl_coef": 0.5, "samples_per_prompt": 2},
    "soft labels": {"prefixes": "teacher", "loss": {"type": "full", "kind": "forward"}},
    "k1": {"loss": {"type": "k1", "discount": 0.5}, "rl_coef": 0.5, "samples_per_prompt": 2},
}
more = pytest.mark.long


def merge(tiny_run: Path, loss: str = "kl") -> dict:
    """What a recipe says that merges these specialists."""
    return {
        "model": {"path": str(tiny_run / "base")},
        "base": None,
        "teachers": {name: {"path": str(tiny_run / "specialists" / name)} for name in ("sort", "add3")},
        "distill": MERGE | LOSSES[loss],
        "baselines": {"methods": []},
    }


@pytest.fixture(scope="module")
def alone(tiny_run, tmp_path_factory):
    """The student of one process with samples in memory, by the loss."""

    @functools.cache
    def student(loss: str) -> dict[str, torch.Tensor]:
        path = tmp_path_factory.mktemp(f"alone-{loss}") / "run"
        recipe = tiny_recipe(**merge(tiny_run, loss))
        run_only(recipe, path, "merge")
        return load_file(path / "merged" / "model.safetensors")

    return student


@pytest.mark.parametrize(
    ("launch", "loss", "storage"),
    [
        ("fsdp", "kl", {}),
        pytest.param("context", "kl", {}, marks=pytest.mark.slow),
        pytest.param("megatron", "kl", {}, marks=more),  # there with adapters
        pytest.param("megatron context", "kl", {}, marks=more),
        pytest.param("megatron stages", "kl", {}, marks=more),
        pytest.param("megatron stages", "reward", DISK, marks=more),
        pytest.param("fsdp", "soft labels", {}, marks=more),
        pytest.param("fsdp", "reward", DISK, marks=more),
        pytest.param("fsdp", "kl", DISK, marks=more),
        pytest.param("megatron", "reward", DISK, marks=more),
        pytest.param("deepspeed", "k1", DISK, marks=more),
        pytest.param("fsdp", "k1", DISK, marks=more),
        pytest.param("context", "k1", DISK, marks=more),
        pytest.param("mesh", "kl", {}, marks=more),
        pytest.param("auto", "kl", {}, marks=more),
        pytest.param("mesh", "reward", DISK, marks=more),
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("trajectories", "memory"),
)
def test_ranks_make_the_student_of_one(tiny_run, alone, tmp_path, launch, loss, storage):
    skip_without(launch)
    train = {"ranks": 2, **LAUNCHES[launch]}
    away = launch in ("context", "megatron", "megatron stages", "deepspeed")
    offload = {"offload": {"engine": True, "trainer": True}} if away else {}
    changes = merge(tiny_run, loss) | {"train": train, "storage": storage, "runtime": offload}
    if launch == "auto":  # in which one rank has room for half of a response
        changes["distill"] |= {"batch": {"max_tokens": 6}}
    recipe = write_recipe(tmp_path / "recipe.yaml", **changes)
    out = tmp_path / "run"
    command(recipe, out, "distill")
    ours, expected = load_file(out / "merged" / "model.safetensors"), alone(loss)
    start = load_file(tiny_run / "base" / "model.safetensors")
    tiny.assert_learnt_alike(ours, expected, start)
    rows = read_metrics(out / "stages/merge/metrics.jsonl")
    if away:
        for row in rows:
            kinds = ("weights", "gradients", "moments")
            there, left = ([row[f"memory/{p}/trainer_{k}"] for k in kinds] for p in ("train", "rollout"))
            assert left[0] < there[0] / 50  # buffers of the model alone
            assert left[1:] == [0, 0]
            assert all(there)
            assert not row["memory/train/engine_kv"]
    if launch == "auto":
        assert {row["context_parallel"] for row in rows} == {2.0}
    assert not list((out / "stages" / "merge").glob("trajectories*"))


@pytest.mark.slow
@pytest.mark.long  # FSDP2 in test_stages_on_ranks, too
@pytest.mark.parametrize("storage", [{}, DISK], ids=["memory", "disk"])
@pytest.mark.parametrize("loss", ["k1", "full"])
@pytest.mark.parametrize("launch", [name for name in LAUNCHES if name not in ("fsdp", "auto")])
def test_two_ranks_make_a_specialist_that_follows_a_teacher(tiny_run, tmp_path, launch, loss, storage):
    skip_without(launch)
    found = []
    opd = {"teacher": "old", "coef": 0.5, "loss": {"type": loss}}
    specialist = {"steps": 3, "prompts_per_step": 7, "group_size": 4, "minibatches": 2, "opd": opd}
    specialist["refill"] = {"limit": 2}
    for train in ({}, {"ranks": 2, **LAUNCHES[launch]}):
        changes = merge(tiny_run) | {"teachers": {"old": {"path": str(tiny_run / "specialists" / "sort")}}}
        changes |= {"specialist": specialist, "train": train, "storage": storage}
        recipe = write_recipe(tmp_path / "recipe.yaml", **changes)
        out = tmp_path / ("ranks" if train else "alone")
        command(recipe, out, "specialist", "--domain", "add3")
        found.append(load_file(out / "specialists" / "add3" / "model.safetensors"))
    start = load_file(tiny_run / "base" / "model.safetensors")
    expected, ours = found
    assert ours.keys() == expected.keys()
    moved = max(float((expected[name] - start[name]).abs().max()) for name in expected)
    assert moved > 0
    assert max(float((ours[name] - expected[name]).abs().max()) for name in expected) <= 1e-2 * moved


def skip_without(launch: str) -> None:
    """Skip the test where an extra is missing."""
    extra = launch.split()[0]
    if extra in ("megatron", "deepspeed"):
        module = {"megatron": "megatron.core"}.get(extra, extra)
        pytest.importorskip(module, reason=f"needs the extra {extra}", exc_type=ImportError)


def command(recipe: Path, out: Path, *words: str) -> None:
    """`opd` in a process of its own."""
    line = [sys.executable, "-m", "opd.pipelines.cli", words[0], str(recipe), "--out", str(out), *words[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]


def test_ranks_that_cannot_be_divided_are_refused():
    recipe = tiny_recipe(train={"context_parallel": 2})
    check_ranks(recipe, 2)
    check_ranks(recipe, 6)
    refused = (
        r"3 ranks cannot be divided into groups of train.context_parallel 2; set it to 1 or 3, or start 2"
    )
    with pytest.raises(ConfigError, match=refused):
        check_ranks(recipe, 3)
    with pytest.raises(ValueError, match=refused):
        TrainConfig(ranks=3, context_parallel=2)
    training = TrainingSettings(OptimConfig(), BatchConfig(), 1.0, [])
    with (
        pytest.raises(ConfigError, match=r"1 rank cannot be divided"),
        open_backend(_never, recipe.train, training, Ranks()),
    ):
        pass
    with pytest.raises(ValueError, match=r"context_parallel has no effect with backend deepspeed"):
        TrainConfig(backend="deepspeed", context_parallel=2)
    with pytest.raises(ValueError, match=r"overlap has no effect with backend torch"):
        TrainConfig(overlap=True)
    with pytest.raises(ValueError, match=r"pipeline_parallel has no effect with backend deepspeed"):
        TrainConfig(backend="deepspeed", pipeline_parallel=2)
    with pytest.raises(
        ValueError, match=r"3 ranks cannot be divided into groups of train.pipeline_parallel 2"
    ):
        TrainConfig(ranks=3, backend="megatron", pipeline_parallel=2)
    with pytest.raises(ValueError, match=r"teacher sort is of type megatron.* set its type to streamed"):
        tiny_recipe(
            train={"backend": "megatron", "pipeline_parallel": 2}, distill={"teachers": {"type": "megatron"}}
        )
    with pytest.raises(
        ValueError, match=r"tensor_parallel 1 and whole sequences, .* has train.tensor_parallel 2"
    ):
        tiny_recipe(
            train={"backend": "megatron", "tensor_parallel": 2}, distill={"teachers": {"type": "megatron"}}
        )
    shared = {"backend": "megatron", "tensor_parallel": 2, "context_parallel": 2}
    with pytest.raises(
        ValueError,
        match=r"6 ranks cannot be divided into groups of train.tensor_parallel 2 x train.context_parallel 2 ="
        " 4; start 4 ranks or a multiple",
    ):
        TrainConfig(ranks=6, **shared)
    with pytest.raises(ValueError, match=r"context_parallel auto is for backend torch, not megatron"):
        TrainConfig(backend="megatron", context_parallel="auto")
    for given in ({"deepspeed": {"zero_optimization": {}}}, {"zero_stage": 2}):
        with pytest.raises(ValueError, match=r"(deepspeed|zero_stage) has no effect with backend torch; set"):
            TrainConfig(**given)
    with pytest.raises(ValueError, match=r"deepspeed.zero_stage is none of .*; set train.zero_stage"):
        TrainConfig(backend="deepspeed", deepspeed={"zero_stage": 2})
    for odd in ([], "stage3", 3, None):
        with pytest.raises(ValueError, match=r"deepspeed.zero_optimization holds settings by name"):
            TrainConfig(backend="deepspeed", deepspeed={"zero_optimization": odd})
    with pytest.raises(
        ValueError, match=r"looks at all lengths of a step, but with storage.trajectories disk"
    ):
        tiny_recipe(train={"context_parallel": "auto"}, storage=DISK)


def test_experts_that_cannot_be_shared_are_refused():
    recipe = tiny_recipe(train={"expert_parallel": 2})
    check_ranks(recipe, 2)
    refused = (
        r"train.expert_parallel is 2 with 4 ranks, all of which share experts or none do; set it to auto"
    )
    with pytest.raises(ConfigError, match=refused):
        check_ranks(recipe, 4)
    with pytest.raises(ValueError, match=refused):
        TrainConfig(ranks=4, expert_parallel=2)
    with pytest.raises(ValueError, match="expert_parallel has no effect with backend deepspeed; set"):
        TrainConfig(backend="deepspeed", expert_parallel=2)
    pieces = {"batch": {"sequence_chunk": 8}}
    with pytest.raises(
        ValueError, match=r"distill.batch.sequence_chunk has no effect with train.backend meg"
    ):
        tiny_recipe(train={"backend": "megatron"}, distill=pieces)
    with pytest.raises(ValueError, match=r"model.lora trains adapters, which do not hold what routers add"):
        tiny_recipe(train={"balance_rate": 0.001}, model=tiny_recipe().model.model_dump() | {"lora": {}})
    for where, parts in {
        "distill": {"distill": pieces},
        "specialist": {"specialist": pieces},
        "base": {"base": {"steps": 8} | pieces},
    }.items():
        tiny_recipe(**parts)
        with pytest.raises(ValueError, match=f"equally often, but {where}.batch.sequence_chunk has them run"):
            tiny_recipe(train={"expert_parallel": 2}, **parts)


def _never(dtype, *, empty=False):
    raise AssertionError("no model is loaded for settings that do not fit")
