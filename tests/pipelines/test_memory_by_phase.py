"""Who holds how much memory in which phase of a step: what the counters say is what is there."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from attempts import run_only
from recipes import tiny_recipe

from opd.config import Recipe
from opd.metrics import MemoryMeter, PhaseTimer, read_metrics
from opd.models.causal_lm import CausalLM
from opd.pipelines.report.figures import KINDS, memory_per_phase
from opd.pipelines.report.load import load_run
from opd.pipelines.report.page import render_report
from opd.pipelines.stages.loop import step_costs

PHASES = ("rollout", "score", "train", "sync")


def recipe_of(models: Path, **changes: Any) -> Recipe:
    """A merge of two teachers in three steps, or a specialist beside it."""
    settings = {
        "base": None,
        "model": {"path": str(models / "base")},
        "teachers": {"sort": {"path": str(models / "sort")}, "add3": {"path": str(models / "add3")}},
        "distill": {"steps": 3, "prompts_per_domain": 4, "checkpoint_every": 2},
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 8, "every": 2, "curve_prompts": 4},
    }
    return tiny_recipe(**settings | changes)


def run(path: Path, recipe: Recipe, stage: str = "merge") -> list[dict[str, Any]]:
    """The metrics of a stage that has run."""
    run_only(recipe, path, stage)
    return read_metrics(path / "stages" / stage / "metrics.jsonl")


OFFLOAD = {"offload": {"engine": True, "trainer": True}}


class Ran(NamedTuple):
    """A merge of `recipe_of`."""

    path: Path
    rows: list[dict[str, Any]]
    """Its metrics."""
    seen: list[dict[str, int]]
    """Every sample that it took of what is held."""


@pytest.fixture(scope="module")
def ran(models, tmp_path_factory) -> Callable[[bool], Ran]:
    """The merge in which everything stays, or everything is handed over."""

    @functools.cache
    def merged(away: bool) -> Ran:
        path, seen = tmp_path_factory.mktemp("merged") / "run", []
        sample = MemoryMeter.sample

        def noted(self: MemoryMeter) -> dict[str, int]:
            seen.append(sample(self))
            return seen[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryMeter, "sample", noted)
            rows = run(path, recipe_of(models, runtime=OFFLOAD if away else {}))
        return Ran(path, rows, seen)

    return merged


def held(row: dict[str, Any], phase: str) -> dict[str, int]:
    """Bytes by kind, as a line of the metrics has them."""
    return {kind: row[f"memory/{phase}/{kind}"] for kind, _ in KINDS}


def test_each_phase_tells_what_is_there(models, ran):
    _, rows, seen = ran(False)
    student = CausalLM.from_pretrained(models / "base")
    weights = sum(p.nbytes for p in student.module.parameters())
    buffers = sum(b.nbytes for b in student.module.buffers())
    for row in rows[1:]:
        found = {phase: held(row, phase) for phase in PHASES}
        assert all(one["trainer_weights"] == weights + buffers for one in found.values())
        # The two moments of each weight, and of each tensor its count of steps.
        counts = 4 * len(list(student.module.parameters()))
        assert all(one["trainer_moments"] == 2 * weights + counts for one in found.values())
        assert found["train"]["trainer_gradients"] == weights
        assert all(found[phase]["trainer_gradients"] == 0 for phase in PHASES if phase != "train")
        # Nothing is handed over, so the engine keeps its own weights, and what decode laid out.
        assert all(one["engine_weights"] >= weights + buffers for one in found.values())
        assert all(one["engine_kv"] > 0 for one in found.values())
        assert found["score"]["hidden_states"] > 0 == found["rollout"]["hidden_states"]
        assert found["score"]["teacher_weights"] > 0
    head = student.head().weight.nbytes
    assert {one["teacher_heads"] for one in seen if "teacher_heads" in one} == {0, head}


@pytest.mark.slow
def test_a_report_shows_each_phase(ran):
    found = load_run(ran(False).path)
    panel = memory_per_phase(found)
    assert panel is not None
    assert "Merge: train" in panel.svg
    assert "Memory by phase" in render_report(found)


def test_a_phase_keeps_its_largest_sample_and_parts_of_one_name_are_added():
    size = {"a": 3, "b": 0}
    meter = MemoryMeter()
    meter.add_source(lambda: size)
    meter.add_source(lambda: {"b": 1})
    timer = PhaseTimer(meter)
    with timer("first"):
        size["a"] = 10
        meter.sample()
        size["a"] = 2
    with timer("second"):
        pass
    found = {key: value for key, value in timer.add_to({}).items() if key.startswith("memory/")}
    assert found == {"memory/first/a": 10, "memory/first/b": 1, "memory/second/a": 2, "memory/second/b": 1}


AWAY = {
    "rollout": ("trainer_weights", "trainer_gradients", "trainer_moments"),
    "score": ("trainer_weights", "trainer_gradients", "trainer_moments", "engine_weights", "engine_kv"),
    "train": ("engine_weights", "engine_kv"),
    "sync": ("trainer_gradients", "trainer_moments", "engine_kv"),
}
"""What must hold nothing in a phase when everything is handed over."""


def test_who_has_nothing_to_do_holds_nothing(models, ran):
    _, rows, seen = ran(True)
    student = CausalLM.from_pretrained(models / "base").module
    buffers = sum(buffer.nbytes for buffer in student.buffers())  # which nobody pushes
    for row in rows:
        for phase, kinds in AWAY.items():
            found = held(row, phase)
            left = {kind: found[kind] for kind in kinds if found[kind]}
            assert all(kind.endswith("weights") and size == buffers for kind, size in left.items()), left
    # The largest phase is the update: weights, gradients, two moments, and the teachers' buffer, which holds
    # the layers of the next. Nothing at any time is more, be it between two phases.
    weights = sum(parameter.nbytes for parameter in student.parameters())
    largest = 5 * weights
    assert max(sum(one.values()) for one in seen) <= 1.1 * largest
    both = [one for one in seen if one["engine_weights"] > buffers and one["trainer_moments"]]
    assert not both
    assert max(sum(one.values()) for one in ran(False).seen) > 1.1 * largest


def gae() -> dict[str, Any]:
    return {"advantage": {"type": "gae"}, "filter_zero_variance": False}


STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "adapters": ("merge", {"model": {"lora": {"rank": 2}}}),
    "answers of teachers": ("merge", {"distill": {"prefixes": "teacher"}}),
    "samples on disk": (
        "merge",
        {"storage": {"trajectories": "disk"}, "distill": {"rl_coef": 0.5, "samples_per_prompt": 2}},
    ),
    "bfloat16": ("merge", {"model": {"dtype": "bfloat16"}, "train": {"precision": "pure"}}),
    "specialist": ("specialist-sort", {"specialist": {"reference_kl": {"coef": 0.1}}}),
    "critic": ("specialist-sort", {"specialist": gae()}),
    "off policy": ("baseline-off_policy", {"baselines": {"methods": ["off_policy"]}}),
}
LONG = {"answers of teachers", "bfloat16", "off policy"}
"""With `--full` alone."""


def test_weights_of_a_merge_stay_the_same_bit_for_bit(models, ran):
    there, away = (CausalLM.from_pretrained(ran(kind).path / "merged").digest() for kind in (False, True))
    assert there == away != CausalLM.from_pretrained(models / "base").digest()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in STAGES]
)
def test_weights_stay_the_same_bit_for_bit(models, tmp_path, kind):
    stage, changes = STAGES[kind]
    plain = recipe_of(models).model_dump(mode="json", exclude_none=True)
    settings = {key: plain[key] | value for key, value in changes.items() if key in plain}
    if stage.startswith("specialist"):
        few = {"steps": 3, "prompts_per_step": 4, "group_size": 4, "minibatches": 2, "checkpoint_every": 2}
        settings |= {"teachers": {}, "specialist": few | changes["specialist"]}
        settings["domains"] = {"sort": plain["domains"]["sort"] | {"reward": "recipes:varied"}}
        settings["domains"]["add3"] = plain["domains"]["add3"]
    digests = []
    for runtime in ({}, OFFLOAD):
        out = tmp_path / ("away" if runtime else "there")
        recipe = recipe_of(models, **(changes | settings), runtime=runtime)
        run(out, recipe, stage)
        files = sorted(out.glob("specialists/*" if stage.startswith("specialist") else "merged"))
        folder = files[0] if files else out / "baselines" / "off_policy"
        digests.append(CausalLM.from_pretrained(folder).digest())
    assert digests[0] == digests[1] != CausalLM.from_pretrained(models / "base").digest()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout": {"schedule": "ahead"}}, "engine needs rollout.schedule in_turn: with ahead the student"),
        (
            {"rollout": {"engine": {"type": "sglang", "urls": ["http://127.0.0.1:1"]}}},
            r"would still sleep after it; name servers that the run starts \(rollout.engine.servers\)",
        ),
        (
            {
                "train": {
                    "backend": "deepspeed",
                    "deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
                }
            },
            r"trainer puts away what train.deepspeed lets DeepSpeed keep in the host's memory",
        ),
    ],
)
def test_what_cannot_be_handed_over_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        tiny_recipe(**changes, runtime=OFFLOAD)


def test_engines_elsewhere_that_end_with_the_run_may_sleep():
    assert tiny_recipe(launch="ray", runtime=OFFLOAD).runtime.offload.engine
    rollout = {"engine": {"type": "sglang", "servers": "written"}}
    assert tiny_recipe(rollout=rollout, servers={"written": {}}, runtime=OFFLOAD).runtime.offload.engine


def test_a_step_says_what_it_costs():
    timer = PhaseTimer(MemoryMeter())
    timer.seconds = {"rollout": 1.5, "train": 0.5}
    assert step_costs({"grad_norm": 0.4321}, 3_000, timer) == "grad 0.432  1,500 tok/s  0.0 MB"
    assert step_costs({}, 0, PhaseTimer(MemoryMeter())) == "0 tok/s  0.0 MB"
    meter = MemoryMeter()
    meter.add_source(lambda: {"trainer_weights": 2_500_000_000})
    timer = PhaseTimer(meter)
    with timer("train"):
        pass
    timer.seconds = {"train": 1.0}
    assert step_costs({}, 10, timer) == "10 tok/s  2.5 GB"
