"""The study of budgets: its table is of its results, and its arms are what they are called."""

import json
from pathlib import Path

from loaded import load_example

from opd.config.load import load_recipe

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "budget"


def test_the_readme_has_the_table_of_the_results():
    written = "\n".join(load_example("budget/study.py").tables())
    assert written in (FOLDER / "README.md").read_text("utf-8"), "run study.py --table, and put it there"


def test_every_arm_has_its_budget():
    study, found = load_example("budget/study.py"), {}
    for name, words in study.ARMS.items():
        recipe = load_recipe([FOLDER / "recipe.yaml"], list(words))
        budget = recipe.distill.budget
        found[name] = (budget.type, getattr(budget, "moves", None), recipe.domains["sort"].weight)
    assert found == {
        "static": ("static", None, 1),
        "by hand": ("static", None, 2),
        "gap": ("gap", "loss", 1),
        "gap, prompts": ("gap", "prompts", 1),
        "progress": ("progress", "loss", 1),
        "gradient": ("gradient", "loss", 1),
    }


def test_the_table_compares_by_seed(tmp_path, monkeypatch):
    study = load_example("budget/study.py")
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    even = dict.fromkeys(study.DOMAINS, 0.9)
    for seed, worst in enumerate((0.75, 0.65)):
        arms = {name: {"accuracy": even | {"sort": 0.7}, "tokens": 5000, "shares": {}} for name in study.ARMS}
        arms["gap"] = arms["gap"] | {
            "accuracy": even | {"sort": worst},
            "shares": {"sort": 0.5, "reverse": 0.25, "add3": 0.25},
        }
        found = {"base": even, "specialists": even, "arms": arms}
        (tmp_path / f"seed-{seed}.json").write_text(json.dumps(found))
    lines = study.tables()
    gap = next(line for line in lines if line.startswith("| gap |"))
    assert "| 70.0 (7.1) | +5.0, -5.0 | 83.3 (2.4) |" in gap
    assert gap.endswith("| 50 %, 25 %, 25 % | 5,000 |")
    assert next(line for line in lines if line.startswith("| static |")).startswith(
        "| static | 70.0 (0.0) |  |"
    )
