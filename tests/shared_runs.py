"""Runs that are made once for all processes of the tests, and runs that go on from what they have made."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from recipes import tiny_recipe

from opd.config import Recipe
from opd.pipelines import run
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.report import write_report
from opd.pipelines.stages.pipeline_plan import plan_stages

SPECIALISTS = ("specialist-sort", "specialist-add3")
SAME = ("seed", "model", "base", "domains", "rollout", "specialist")
"""What a recipe says of a base and of specialists."""


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name`, which the first of all processes that asks for it makes: to be read."""
    own = factory.getbasetemp()
    shared = own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own
    made, draft = shared / name, shared / f"{name}-draft"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits, and ends with the file
        if not made.exists():
            shutil.rmtree(draft, ignore_errors=True)
            make(draft)
            draft.rename(made)
    return made


def train_specialists(path: Path) -> None:
    """A run of `tiny_recipe()` with its base and specialists, of which no report is drawn."""
    recipe = tiny_recipe()
    with pytest.MonkeyPatch.context() as patch, RunFolder.create(path, recipe) as folder:
        patch.setattr(run, "write_report", lambda path: path / "report.html")
        for stage in SPECIALISTS:
            run.run_stage(recipe, folder, stage)


def finish(begun: Path, path: Path) -> None:
    """The run `begun` to its end, and its report, whoever asks for it first."""
    shutil.copytree(begun, path)
    recipe = tiny_recipe()
    with pytest.MonkeyPatch.context() as patch, RunFolder.resume(path, recipe) as folder:
        patch.setattr(run, "write_report", write_report)
        run.run_pipeline(recipe, folder)


def go_on(given: Path, path: Path, recipe: Recipe, *stages: str) -> Path:
    """A run of `recipe` at `path` that has copies of what `given`, a run of a recipe that says the same of
    them, has made in `stages` and what these need. Returns `path`.
    """
    source, order = RunFolder.attach(given), plan_stages(recipe)
    asked = Recipe.model_validate(source.read_config())
    known = SAME if set(stages) - {"base"} else SAME[:4]
    assert all(getattr(asked, key) == getattr(recipe, key) for key in known), "this makes other models"
    wanted = {name: order[name] for stage in stages for name in (*order[stage].needs, stage)}
    with RunFolder.create(path, recipe) as folder:
        for name, stage in wanted.items():
            done = source.stage_done(name)
            assert done is not None
            shutil.copytree(given / "stages" / name, path / "stages" / name)
            (path / "stages" / name / "done.json").unlink()
            model = "base" if name == "base" else name.replace("specialist-", "specialists/")
            shutil.copytree(given / model, path / model)
            files = [path / model / "checksums.json", folder.metrics_path(name), folder.flags_path(name)]
            folder.mark_done(name, done, files, stage.needs)
    return path
