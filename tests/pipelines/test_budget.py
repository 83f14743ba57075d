"""Shares of domains in a merge: scheduled, steered by what was measured, stopped, killed and bad state."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attempts import interrupted_merge, killed_merge, merged, run_distill, write_recipe_of
from hypothesis import given
from hypothesis import strategies as st
from recipes import NO_CURVE, tiny_recipe
from safetensors.torch import load_file

from opd.config import Recipe
from opd.config.distill import SteeredBudget
from opd.errors import CheckpointError
from opd.metrics import read_metrics
from opd.pipelines.stages.domain_steering import DomainBudget, moved_factors, share_out

NAMES = ("sort", "add3")
KINDS: dict[str, dict[str, Any]] = {
    "schedule": {"weights": {"sort": [[0, 1.0], [4, 5.0]]}, "moves": "both"},
    "gap": {"moves": "prompts", "gain": 0.7, "goals": {"sort": 0.5}},
    "progress": {"moves": "both", "gain": 0.5, "strength": 3.0},
    "gradient": {"gain": 0.5},
}


def recipe_of(models: Path, kind: str, **changes) -> Recipe:
    distill = {"steps": 6, "prompts_per_domain": 6, "checkpoint_every": 2}
    settings = {
        "model": {"path": str(models / "base")},
        "base": None,
        "teachers": {name: {"path": str(models / name)} for name in NAMES},
        "distill": distill | {"budget": {"type": kind} | KINDS.get(kind, {})},
        "baselines": {"methods": []},
        "evaluation": NO_CURVE | ({"every": 1, "curve_prompts": 10} if kind == "gap" else {}),
    }
    return tiny_recipe(**settings | changes)


def budget_of(recipe: Recipe) -> DomainBudget:
    return DomainBudget(recipe, dict.fromkeys(NAMES, recipe.distill.prompts_per_domain), "merge")


def step_of(index: int, memory: dict[str, Any]) -> Any:
    return SimpleNamespace(index=index, memory=memory)


needs = st.lists(st.floats(0, 50), min_size=1, max_size=5)


@given(
    needs, st.floats(0.01, 1), st.floats(1.5, 50), st.floats(0.2, 5), st.lists(st.floats(-1, 1), min_size=5)
)
def test_a_decision_is_its_formula(values, gain, limit, strength, before):
    config = SteeredBudget(type="progress", gain=gain, limit=limit, strength=strength)
    bound = np.log(np.float64(limit))
    start = np.clip(np.array(before[: len(values)]), -bound, bound)
    factors = {str(i): float(value) for i, value in enumerate(start)}
    found = moved_factors(factors, {str(i): value for i, value in enumerate(values)}, config)
    mean = np.mean(np.float64(values))
    with np.errstate(divide="ignore"):
        wanted = strength * np.log(np.float64(values) / mean) if mean > 1e-9 else np.zeros(len(values))
    expected = (1 - gain) * start + gain * np.clip(wanted, -bound, bound)
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-9, atol=1e-9)
    assert all(abs(value) <= bound + 1e-12 for value in found.values())


def test_shares_of_a_gradient_come_to_the_weights():
    """Whatever a gradient is per unit of weight, its share ends at the wanted one."""
    config, per_unit = SteeredBudget(type="gradient", gain=0.3, limit=100), {"a": 0.1, "b": 2.0, "c": 0.7}
    factors = dict.fromkeys(per_unit, 0.0)
    for _ in range(60):
        pulls = {name: np.exp(factors[name]) * size for name, size in per_unit.items()}
        shares = {name: pull / sum(pulls.values()) for name, pull in pulls.items()}
        factors = moved_factors(factors, {name: 1 / 3 / share for name, share in shares.items()}, config)
    assert list(shares.values()) == pytest.approx([1 / 3] * 3, abs=1e-3)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.integers(0, 200))
def test_prompts_are_shared_out_exactly(weights, more):
    total, named = len(weights) + more, {str(i): weight for i, weight in enumerate(weights)}
    counts = share_out(total, named)
    assert sum(counts.values()) == total
    low, high = 0.0, total / min(weights)
    for _ in range(200):
        scale = (low + high) / 2
        below = sum(max(1.0, scale * weight) for weight in weights) < total
        low, high = (scale, high) if below else (low, scale)
    for name, weight in named.items():
        assert abs(counts[name] - max(1.0, high * weight)) < 1 + 1e-6
    assert share_out(total, counts) == counts


def test_a_schedule_is_linear_between_its_points(models):
    budget, seen = budget_of(recipe_of(models, "schedule")), []
    for index in range(6):
        step = step_of(index, {})
        budget.begin_step(step)
        seen.append((budget.weights["sort"], budget.weights["add3"], budget.prompts_of(index)["sort"][1]))
        budget.finish_step(step, {})
    assert [one[:2] for one in seen] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (5, 1)]
    assert [one[2] for one in seen] == [6, 8, 9, 10, 10, 10]


@pytest.mark.parametrize(
    "state",
    [
        [],
        {"factors": {"sort": 0.0}, "first": {}, "taken": {"sort": 0, "add3": 0}},
        {"factors": {"sort": float("nan"), "add3": 0.0}, "first": {}, "taken": {"sort": 0, "add3": 0}},
        {"factors": {"sort": 0.0, "add3": 0.0}, "first": {"sort": -1.0}, "taken": {"sort": 0, "add3": 0}},
        {"factors": {"sort": 0.0, "add3": 0.0}, "first": {"x": 1.0}, "taken": {"sort": 0, "add3": 0}},
        {"factors": {"sort": 0.0, "add3": 0.0}, "first": {}, "taken": {"sort": 0.5, "add3": 0}},
        {"factors": {"sort": 0.0, "add3": 0.0}, "first": {}, "taken": {"sort": -1, "add3": 0}},
        {"factors": {"sort": True, "add3": 0.0}, "first": {}, "taken": {"sort": 0, "add3": 0}},
        "state",
    ],
)
def test_a_state_of_no_step_is_refused(models, state):
    budget = budget_of(recipe_of(models, "progress"))
    with pytest.raises(CheckpointError, match="the checkpoint of merge holds what no step has left"):
        budget.begin_step(step_of(0, {"budget": state}))


def decisions(recipe: Recipe, rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """What a budget decides on the metrics of `rows`, made anew at every step, as by a resume."""
    memory, found = {}, []
    for index, row in enumerate(rows):
        budget, step = budget_of(recipe), step_of(index, memory)
        budget.begin_step(step)
        found.append(budget.finish_step(step, row))
    return found


@pytest.mark.parametrize(
    "kind",
    ["progress", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("schedule", "gap", "gradient"))],
)
def test_a_merge_moves_its_shares_and_a_stopped_run_goes_on(models, tmp_path, kind):
    recipe = recipe_of(models, kind)
    weights, rows = merged(recipe, tmp_path / "whole")
    assert rows[0]["budget_weight/sort"] == pytest.approx(0.5)
    moves = recipe.distill.budget.moves
    if moves != "prompts":
        assert len({row["budget_weight/sort"] for row in rows}) > 2
    if moves != "loss":
        assert len({row["budget_prompts/sort"] for row in rows}) > 1
        assert all(row["budget_prompts/sort"] + row["budget_prompts/add3"] == 12 for row in rows)
    logged = [{key: value for key, value in row.items() if key.startswith("budget_")} for row in rows]
    assert decisions(recipe, rows) == logged
    stopped = interrupted_merge(recipe, tmp_path / "stopped")
    assert all(torch.equal(weights[name], stopped[name]) for name in weights)


def test_a_static_budget_logs_nothing(models, tmp_path):
    _, rows = merged(recipe_of(models, "static"), tmp_path / "run")
    assert not any(key.startswith("budget_") for row in rows for key in row)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_shares(models, tmp_path):
    recipe = recipe_of(models, "progress")
    raw = recipe.model_dump(mode="json", exclude_none=True)
    raw["distill"] |= {"steps": 40, "checkpoint_every": 3}
    runs = killed_merge(Recipe.model_validate(raw), tmp_path)
    ours, others = (load_file(one / "merged" / "model.safetensors") for one in runs)
    assert all(torch.equal(ours[name], others[name]) for name in others)
    logged = [
        [
            {k: v for k, v in row.items() if k.startswith("budget_")}
            for row in read_metrics(folder / "stages/merge/metrics.jsonl")
        ]
        for folder in runs
    ]
    assert logged[0] == logged[1]


@pytest.mark.slow
def test_samples_on_disk_and_two_ranks_decide_the_same(models, tmp_path):
    _, rows = merged(recipe_of(models, "progress"), tmp_path / "memory")
    _, on_disk = merged(recipe_of(models, "progress", storage={"trajectories": "disk"}), tmp_path / "disk")
    recipe = recipe_of(models, "progress", train={"ranks": 2})
    out = tmp_path / "ranks"
    run_distill(write_recipe_of(recipe, tmp_path / "recipe.yaml"), out)
    shared = read_metrics(out / "stages" / "merge" / "metrics.jsonl")
    for name in ("budget_weight/sort", "budget_prompts/sort", "budget_need/add3"):
        expected = [row[name] for row in rows]
        assert [row[name] for row in on_disk] == pytest.approx(expected, rel=1e-4)
        assert [row[name] for row in shared] == pytest.approx(expected, rel=1e-4)
