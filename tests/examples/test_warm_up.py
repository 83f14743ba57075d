"""The study of warm-ups: its tables are of its results, its arms and formats are what they are called."""

from pathlib import Path

import numpy as np
from loaded import load_example

from examples.warm_up.tasks import MarkedAdd3, MarkedSort
from opd.config.load import load_recipe

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "warm_up"


def test_the_readme_has_the_tables_of_the_results():
    study = load_example("warm_up/study.py")
    written = "\n".join(study.tables(study.read_results()))
    assert written in (FOLDER / "README.md").read_text("utf-8"), "run study.py --table, and put it there"
    assert (FOLDER / "results" / "curves.png").stat().st_size > 1000


def test_every_arm_begins_as_it_is_called():
    study, found = load_example("warm_up/study.py"), {}
    for name, words in study.ARMS.items():
        distill = load_recipe([FOLDER / "recipe.yaml"], list(words)).distill
        begins = None if distill.warm_up is None else (distill.warm_up.steps, distill.warm_up.min_kl)
        found[name] = (distill.steps, begins, distill.prefixes, distill.loss.kind)  # pyright: ignore[reportAttributeAccessIssue]
    assert found == {
        "none": (60, None, "student", "reverse"),
        "warm-up, 10 steps": (60, (10, 1.0), "student", "reverse"),
        "warm-up, 20 steps": (60, (20, 1.0), "student", "reverse"),
        "soft labels": (60, None, "teacher", "forward"),
        "none, 180 steps": (180, None, "student", "reverse"),
        "warm-up, 20 of 180 steps": (180, (20, 1.0), "student", "reverse"),
    }


def test_the_formats_share_no_token_at_any_place():
    task, rng = MarkedSort(), np.random.default_rng(0)
    theirs = task.demonstration(task.prompt("3142"), rng, 1.0, 0.0)
    ours = task.demonstration(task.prompt("3142"), rng, 1.0, 1.0)
    assert (theirs, ours) == (task.right("3142"), task.wrong_rule("3142")) == ("1=2=3=4=", "=1=2=3=4")
    assert MarkedAdd3().demonstration("<marked_add3>3142=", rng, 1.0, 1.0) == "6=4=7=5="
