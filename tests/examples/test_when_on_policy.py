"""The studies of when on-policy distillation wins: tables are of their results, and arms what they say."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "when_on_policy"


@pytest.fixture
def module(monkeypatch):
    """Imports a module of the example by its name."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(FOLDER)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_readme_has_the_tables_of_the_results(module):
    readme = (FOLDER / "README.md").read_text("utf-8")
    for study in {file.parent.name for file in (FOLDER / "results").rglob("*.json")}:
        seeds = module("study_tables").results(study)
        assert module(f"{study}_table").tables(seeds) in readme, f"run {study}_table.py"


def test_a_cell_is_whose_answers_times_which_loss(module):
    arms = module("cells")
    for cell, settings in arms.CELLS.items():
        who, loss = cell.split("/")
        distill = arms.recipe_of("recipe-noise.yaml", settings).distill
        kind = "sampled" if distill.loss.type == "k1" else distill.loss.kind
        # What the teacher drew is learnt by the baseline that comes with the merge.
        assert (distill.prefixes, kind) == (("student", "reverse") if cell == arms.SAMPLED else (who, loss))


def test_a_running_sum_goes_on_from_what_was_written(module):
    task = module("tasks").Follow()
    prompt = task.prompt("37273")
    assert task.right("37273") == "30242"
    assert task.demonstration(prompt, np.random.default_rng(0), 1.0, 0.0) == "30242"
    written = task.demonstration(prompt, np.random.default_rng(0), 0.0, 0.0)
    before = [0, *map(int, written[:-1])]
    assert all((b + int(x)) % 5 != int(w) for b, x, w in zip(before, "37273", written, strict=True))
