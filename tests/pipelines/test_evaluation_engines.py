"""Models are measured with the recipe's engine where they have its student's form, to the same answers."""

import json
from pathlib import Path

import pytest
from attempts import run_only
from recipes import tiny_recipe

from opd.pipelines.evaluation.evaluate import evaluate_models
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.report import write_report
from opd.pipelines.run import record_results
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.student import embedded_pool
from opd.rollout.engine_pool import EnginePool

SETS = {"gen": {"source": "procedural:add3", "params": {"digits": 3}, "prompts": 6}}


class Elsewhere:
    """Implements `StageHelpers` with an engine that knows only the model it begins with, and what it is
    given.
    """

    def __init__(self, recipe) -> None:
        self.recipe, self.began = recipe, []

    def open_engines(self, model: Path, adapters: bool = False) -> EnginePool:
        self.began.append(model.name)
        return embedded_pool(self.recipe, model, adapters)

    def open_teachers(self, names, vocabulary):
        return None


def new_base(out: Path, seed: int, **config) -> Path:
    recipe = tiny_recipe(base=None, seed=seed)
    model = {"config": recipe.model.config | config}
    recipe = tiny_recipe(base=None, seed=seed, model=model)
    run_only(recipe, out, "base")
    return out / "base"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("models")
    return {
        "student": new_base(out / "student", 0),
        "alike": new_base(out / "alike", 1),
        "theta": new_base(out / "theta", 2, rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    }


def measured(out: Path, models: dict[str, Path], elsewhere: bool) -> tuple[dict, list[str]]:
    teachers = {"sort": {"path": str(models["alike"])}, "add3": {"path": str(models["theta"])}}
    recipe = tiny_recipe(
        base=None,
        model={"path": str(models["student"])},
        teachers=teachers,
        rollout={"max_new_tokens": 5, "max_sequence": 16, "stop": ["7"]},
        baselines={"methods": []},
        evaluation={"prompts_per_domain": 6, "sets": SETS},
    )
    with RunFolder.create(out, recipe) as folder:
        helpers = Elsewhere(recipe) if elsewhere else None
        context = StageContext.open(recipe, folder, "evaluate", lambda *told: None, helpers=helpers)
        evaluate_models(context)
        record_results(recipe, folder)
    results = json.loads((out / "results.json").read_text())
    return {entry["name"]: entry for entry in results["models"]}, helpers.began if helpers else []


@pytest.mark.slow
def test_the_recipes_engine_measures_what_fits_there_and_says_what_does_not(models, tmp_path):
    here, _ = measured(tmp_path / "here", models, elsewhere=False)
    there, began = measured(tmp_path / "there", models, elsewhere=True)
    assert began == ["base"], "one engine for all models, begun with the student"
    assert {name: found["engine"] for name, found in here.items()} == dict.fromkeys(here, "embedded")
    assert {name: found["engine"] for name, found in there.items()} == {
        "base": "ray",
        "teacher:sort": "ray",
        "teacher:add3": "embedded",
    }
    assert there["teacher:add3"]["engine_why"].startswith("its rope_")
    for name, found in here.items():
        assert found["domains"] == there[name]["domains"]
        assert found["sets"] == there[name]["sets"]
    assert here["base"]["domains"] != here["teacher:sort"]["domains"]
    page = write_report(tmp_path / "there").read_text()
    assert "Teacher, add3: its rope_" in page
    assert "so ray cannot hold it" in page
