"""Weights between the teachers of one domain that go by steps: logged, resumed, and constant as before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attempts import interrupted_merge, merged
from recipes import NO_CURVE, tiny_recipe

from opd.config import Recipe
from opd.pipelines.stages.supervised import new_base

MOVING = {"sort": [[1, 3.0], [5, 1.0]], "add3": 1.0}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A student and two teachers, all of them noise that is large enough for answers of their own."""
    folder, config = tmp_path_factory.mktemp("models"), tiny_recipe().model.config or {}
    for seed, name in enumerate(("base", "sort", "add3")):
        noise = {"config": config | {"initializer_range": 0.5}}
        new_base(tiny_recipe(base=None, seed=seed, model=noise), folder / name)
    return folder


def recipe_of(models: Path, teacher: Any, mixture: str, **distill) -> Recipe:
    return tiny_recipe(
        model={"path": str(models / "base")},
        base=None,
        teachers={name: {"path": str(models / name)} for name in ("sort", "add3")},
        domains={
            "sort": {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 200, "teacher": teacher}
        },
        distill={"steps": 7, "prompts_per_domain": 8, "checkpoint_every": 2, "mixture": mixture} | distill,
        baselines={"methods": []},
        evaluation=NO_CURVE,
    )


@pytest.mark.parametrize("mixture", ["one_hot", pytest.param("geometric", marks=pytest.mark.slow)])
def test_weights_move_are_logged_and_go_on_after_a_stop(models, tmp_path, mixture):
    recipe = recipe_of(models, MOVING, mixture)
    weights, rows = merged(recipe, tmp_path / "whole")
    expected = [x / (x + 1) for x in (3.0, 3.0, 2.5, 2.0, 1.5, 1.0, 1.0)]
    assert [row["teacher_weight/sort/sort"] for row in rows] == pytest.approx(expected)
    assert [row["teacher_weight/sort/add3"] for row in rows] == pytest.approx([1 - x for x in expected])
    stopped = interrupted_merge(recipe, tmp_path / "stopped")
    assert all(torch.equal(weights[name], stopped[name]) for name in weights)
    still, plain = merged(recipe_of(models, {"sort": 3.0, "add3": 1.0}, mixture), tmp_path / "still")
    assert rows[1]["kl/mean"] == plain[1]["kl/mean"], "until they move, they are constant"
    assert not all(torch.equal(weights[name], still[name]) for name in weights)
    assert not any(key.startswith("teacher_weight/") for row in plain for key in row)


@pytest.mark.slow
@pytest.mark.parametrize("mixture", ["one_hot", "arithmetic"])
def test_a_schedule_that_stays_is_the_constant_weight(models, tmp_path, mixture):
    points, _ = merged(recipe_of(models, {"sort": [[0, 3.0]], "add3": 1.0}, mixture), tmp_path / "points")
    plain, _ = merged(recipe_of(models, {"sort": 3.0, "add3": 1.0}, mixture), tmp_path / "plain")
    assert all(torch.equal(points[name], plain[name]) for name in plain)


@pytest.mark.slow
def test_teachers_write_by_the_weights_of_each_step(models, tmp_path):
    """The writer of a mixture is the teacher of the largest weight, which changes: so do its answers."""
    of_sort = {"crossing": [[3, 3.0], [4, 0.5]], "sort": 3.0, "add3": 0.5}
    found = {}
    for name, weight in of_sort.items():
        recipe = recipe_of(models, {"sort": weight, "add3": 1.0}, "geometric", prefixes="teacher")
        _, rows = merged(recipe, tmp_path / name)
        found[name] = [row["length/mean"] for row in rows]
    assert found["crossing"] == [*found["sort"][:4], *found["add3"][4:]]
    assert found["sort"] != found["add3"]
