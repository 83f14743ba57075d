"""Study 2, many right answers: a teacher, and a student that was damaged.

    .venv/bin/python examples/when_on_policy/modes.py --seeds 0 1 2

Goes on where it stopped when it is started again; the table is made by `modes_table.py`.
"""

from __future__ import annotations

import argparse
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from cells import CELLS, Kept, answers, changed, recipe_of, run, run_cell

from opd.config import Recipe

CONDITIONS = {
    "any order": (),
    "ascending": ("--domains.digits.source", "procedural:sort", "--domains.digits.reward", "null"),
}
"""What is said of the one domain."""
TEACHER, MERGE = "recipe-modes-teacher.yaml", "recipe-modes.yaml"
DAMAGE = 0.3
"""Of the weights' standard deviation, tensor by tensor."""


def teacher(root: Path) -> Path:
    """The teacher of both conditions."""
    if not (root / "teacher" / "base").exists():
        run(root / "teacher", recipe_of(TEACHER, ()), "base")
    return root / "teacher" / "base"


def student(root: Path, seed: int) -> Path:
    """The teacher, damaged."""
    draws = torch.Generator().manual_seed(seed)

    def damage(name: str, weight: torch.Tensor) -> torch.Tensor:
        if weight.ndim < 2:  # norms
            return weight
        return weight + DAMAGE * weight.std() * torch.randn(weight.shape, generator=draws)

    about = f"Another model, with noise of {DAMAGE} standard deviations on its weights."
    return changed(teacher(root), root / f"seed-{seed}" / "student", about, damage)


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
    begin, taught_by = student(root, seed), teacher(root)
    words = (*CONDITIONS[name], "--seed", str(seed), "--model.path", str(begin))
    words += ("--teachers", json.dumps({"digits": {"path": str(taught_by), "type": "local"}}))
    recipe = recipe_of(MERGE, words)

    def count(model: Path) -> dict[str, Any]:
        return counted(recipe, model, any_order=name == "any order")

    kept.add(name, "start", lambda: count(begin))
    kept.add(name, "teacher", lambda: count(taught_by))
    for cell in CELLS:

        def arm(cell: str = cell) -> dict:
            print(f"seed {seed}, {name}: {cell}", flush=True)
            model, done = run_cell(root / f"seed-{seed}" / name.replace(" ", "-"), MERGE, cell, words)
            return count(model) | {"tokens": done["student_tokens"], "seconds": round(done["seconds"], 1)}

        kept.add(name, cell, arm)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--out", type=Path, default=Path("runs/when-on-policy/modes"))
    options = parser.parse_args()
    for name in options.conditions:
        for seed in options.seeds:
            measure(options.out, seed, name, Kept("modes", seed))


if __name__ == "__main__":
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # who shares the cores waits without spinning
    main()
