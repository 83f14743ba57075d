"""The example of mixtures: its page has the tables of its results, and its students differ in the model."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from loaded import load_example

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "mixtures"


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return load_example("mixtures/table.py")


def test_the_page_has_the_tables_of_the_results(table):
    page, seeds = (FOLDER / "README.md").read_text("utf-8"), table.load()
    assert seeds
    for lines in (table.accuracies(seeds), table.routing(seeds), table.divergences(seeds)):
        assert "\n".join(lines) in page, "run table.py, and put it into the README"


def test_the_two_students_learn_alike():
    mixture, dense = (
        yaml.safe_load((FOLDER / name).read_text("utf-8")) for name in ("recipe.yaml", "recipe-dense.yaml")
    )
    apart = ("name", "model", "baselines")
    assert {key: mixture[key] for key in mixture if key not in apart} == {
        key: dense[key] for key in dense if key not in apart
    }
    model = mixture["model"]["config"]
    active = model["num_experts_per_tok"] * model["moe_intermediate_size"]
    assert active == dense["model"]["config"]["intermediate_size"]


def test_a_kept_gain_is_that_of_the_teachers_of_the_run(table):
    run = {
        "models": {
            "base": {"a": 0.1, "b": 0.3},
            "merged": {"a": 0.5, "b": 0.7},
            "specialist:a": {"a": 0.8, "b": 0.0},
            "specialist:b": {"a": 0.0, "b": 1.0},
        }
    }
    assert table.level(run["models"], "specialists") == pytest.approx(90.0)
    other = json.loads(json.dumps(run))
    other["models"]["specialist:a"]["a"] = 0.6
    seed = {"seed": 0, "runs": dict.fromkeys(table.RUNS, run) | {"-dense": other}}
    _, _, *rows = table.accuracies([seed])
    assert "| mixture, its own specialists | **OPD, full vocabulary** | 60.0 | 57.1 |" in rows
    assert "| mixture, dense specialists | **OPD, full vocabulary** | 60.0 | 66.7 |" in rows
