"""The studies of when on-policy distillation wins: tables are of their results, and arms what they say."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from opd.data import procedural

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "when_on_policy"


@pytest.fixture
def module(monkeypatch):
    """Imports a module of the example by its name."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(procedural, "TASKS", dict(procedural.TASKS))

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


@pytest.mark.parametrize(("name", "reward"), [("ParityLike", "same_parity"), ("HalfLike", "same_half")])
def test_both_ways_of_a_task_are_right_and_differ_at_every_place(module, name, reward):
    tasks = module("tasks")
    task, judge, prompt = getattr(tasks, name)(), getattr(tasks, reward), "0123456789"
    other = task.wrong_rule(prompt)
    for text, worth in (
        (prompt, 1.0),
        (other, 1.0),
        (prompt[::-1], 0.0),
        (other[:-1], 0.0),
        (other + "=", 0.0),
    ):
        assert judge(SimpleNamespace(text=text, label=task.right(prompt))) == worth
    assert all(a != b for a, b in zip(prompt, other, strict=True))


def test_two_domains_want_the_other_ones_style_and_one_is_paid_a_tenth(module):
    tasks = module("tasks")
    brief, full, rounds = tasks.Brief(), tasks.Full(), tasks.Rounds()
    assert (brief.right("2901"), full.right("29")) == ("0789", "293041526374859607")
    assert (brief.wrong_rule("2901"), full.wrong_rule("2901")) == (full.right("2901"), brief.right("2901"))
    assert (rounds.right("29")[:6], rounds.wrong_rule("29")[:6]) == ("293041", "291807")
    assert [len(task.right("2901")) for task in (brief, full, rounds)] == [4, 36, 64]
    assert [tasks.tenth(SimpleNamespace(text=text, label="12")) for text in ("12", "21")] == [0.1, 0.0]


def test_a_figure_has_a_panel_a_title_and_a_line_an_arm(module):
    tables, points = module("study_tables"), [(0, 10.0), (1, 20.0)]
    arms = {"start": points, tables.OPD: points[::-1]}
    made = tables.figure({"one": arms, "two": {"start": points}}, tables.LABELS, ("x", "y"), ticks="ab")
    first, second = made.axes
    assert [panel.get_title() for panel in made.axes] == ["one", "two"]
    assert [line.get_ydata().tolist() for line in first.lines] == [[10.0, 20.0], [20.0, 10.0]]
    assert len(second.lines) == 1
    assert [text.get_text() for text in made.legends[0].get_texts()] == ["the student before", "OPD"]


def test_what_is_left_is_read_where_a_level_is_first_reached(module):
    table = module("forget_table")
    pairs = [(20, 90), (10, 80), (30, 60), (50, 20)]
    curve = [{"of": 100, "sampled": {"half": x, "parity": x, "known": y}} for x, y in pairs]
    assert [table.kept_at(curve, level) for level in (15, 25, 40, 51)] == [75, 65, 40, None]
    assert table.ranks([3.0, 1.0, 3.0, 7.0]) == [1.5, 0, 1.5, 3]
