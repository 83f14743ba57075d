"""Study 2, many right answers: a teacher, and a student that was damaged.

    .venv/bin/python examples/when_on_policy/modes.py --seeds 0 1 2

Goes on where it stopped when it is started again; the table is made by `modes_table.py`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from cells import Kept, answers, damaged, main, recipe_of, run, taught

from opd.config import Recipe

CONDITIONS = {
    "any order": (),
    "ascending": ("--domains.digits.source", "procedural:sort", "--domains.digits.reward", "null"),
}
"""What is said of the one domain."""
TEACHER, MERGE = "recipe-modes-teacher.yaml", "recipe-modes.yaml"


def teacher(root: Path) -> Path:
    """The teacher of both conditions."""
    if not (root / "teacher" / "base").exists():
        run(root / "teacher", recipe_of(TEACHER, ()), "base")
    return root / "teacher" / "base"


def counted(recipe: Recipe, model: Path, *, any_order: bool) -> dict[str, Any]:
    """How many answers are right, sampled and greedily, and of how many; and of neighbours in the right ones
    that were sampled and are different digits, how many ascend, and of how many.
    """
    found: dict[str, Any] = {}
    for way in ("sampled", "greedy"):
        pairs = answers(recipe, model, "digits", greedy=way == "greedy")
        right = [a for a, b in pairs if (sorted(a) == sorted(b) if any_order else a == b)]
        found |= {way: len(right), "of": len(pairs)}
        if way == "sampled":
            steps = [(x, y) for text in right for x, y in pairwise(text) if x != y]
            found["ascend"] = [sum(x < y for x, y in steps), len(steps)]
    return found


def measure(root: Path, seed: int, name: str, kept: Kept) -> None:
    """Every arm of a condition, of one seed."""
    taught_by = teacher(root)
    begin = damaged(taught_by, root / f"seed-{seed}" / "student", seed)
    words = (*CONDITIONS[name], "--seed", str(seed), *taught(begin, {"digits": taught_by}))
    recipe = recipe_of(MERGE, words)

    def count(model: Path) -> dict[str, Any]:
        return counted(recipe, model, any_order=name == "any order")

    kept.add(name, "start", lambda: count(begin))
    kept.add(name, "teacher", lambda: count(taught_by))
    kept.add_cells(name, root / f"seed-{seed}" / name.replace(" ", "-"), MERGE, words, count)


if __name__ == "__main__":
    main("modes", measure, list(CONDITIONS))
