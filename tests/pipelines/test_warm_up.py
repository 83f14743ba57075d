"""A warm-up goes on, round by round, until every domain's sampled accuracy is above its floor."""

import json
from pathlib import Path

import pytest
from recipes import tiny_recipe

from opd.config import Recipe
from opd.errors import TrainingError
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages import supervised as warm_up

STEPS = 40


def recipe(floor: float, rounds: int) -> Recipe:
    base = tiny_recipe().model_dump()["base"]
    return tiny_recipe(base={**base, "steps": STEPS, "min_accuracy": floor, "rounds": rounds})


def run(recipe: Recipe, out: Path, how=RunFolder.create) -> dict:
    """The finished base stage."""
    with how(out, recipe) as folder:
        run_stage(recipe, folder, "base")
    return json.loads((out / "stages" / "base" / "done.json").read_text())


def rates(out: Path) -> list[float]:
    lines = (out / "stages" / "base" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["lr"] for line in lines]


@pytest.mark.slow
def test_further_rounds_until_the_floor_and_the_same_after_a_stop_in_one(tmp_path, monkeypatch):
    wanted = recipe(0.02, 5)
    whole = run(wanted, tmp_path / "whole")
    rounds = 1 + int(whole["counters"]["rounds_more"])
    assert 1 < rounds < 5
    assert whole["steps"] == rounds * STEPS
    assert all(whole[f"accuracy/{domain}"] >= 0.02 for domain in wanted.domains)
    of_steps = rates(tmp_path / "whole")
    assert of_steps == of_steps[:STEPS] * rounds

    made = warm_up._step_demonstrations

    def stop(*arguments):
        if arguments[-1] == whole["steps"] - STEPS // 3:
            raise KeyboardInterrupt
        return made(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(warm_up, "_step_demonstrations", stop)
        with pytest.raises(KeyboardInterrupt):
            run(wanted, tmp_path / "stopped")
    assert run(wanted, tmp_path / "stopped", RunFolder.resume)["digest"] == whole["digest"]


@pytest.mark.slow
def test_one_round_where_the_floor_is_met(tmp_path):
    done = run(recipe(0.0, 5), tmp_path / "run")
    assert done["steps"] == STEPS
    assert "rounds_more" not in done["counters"]


def test_the_last_round_below_the_floor_is_an_error(tmp_path):
    with pytest.raises(TrainingError, match=r"after 2 rounds .* base\.min_accuracy = 99\.0%: .* in sort"):
        run(recipe(0.99, 2), tmp_path / "run")
    assert (found := rates(tmp_path / "run")) == found[:STEPS] * 2
