"""Study 1, noise and horizon: teachers of running sums who write more or fewer wrong digits.

    .venv/bin/python examples/when_on_policy/noise.py --seeds 0 1 2

Goes on where it stopped when it is started again; the table is made by `noise_table.py`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from cells import CELLS, Kept, by_place, changed, recipe_of, run, run_cell

SHARPER = {0: 3.0, 2: 1.5, 10: 1.0}
"""Wrong digits in % -> what the head of a teacher that writes 10 % of them is multiplied by for that."""


CONDITIONS = {
    "10 % wrong": (10, 4000),
    "0 % wrong": (0, 4000),
    "0 % wrong, 128 prompts": (0, 128),
    "2 % wrong": (2, 4000),
}
"""In the order in which they are run: how many digits in % the teacher writes wrong, and how many prompts."""
TEACHER, MERGE = "recipe-noise-teacher.yaml", "recipe-noise.yaml"


def teacher(root: Path, noise: int) -> Path:
    """The teacher that writes `noise` % wrong digits."""
    out = root / "teacher"
    if not (out / "base").exists():
        run(out, recipe_of(TEACHER, ()), "base")
    about = f"The logits of another model times {SHARPER[noise]}."
    return changed(
        out / "base",
        out / f"noise-{noise}",
        about,
        lambda name, weight: weight * (SHARPER[noise] if "lm_head" in name else 1.0),
    )


def student(root: Path, seed: int) -> Path:
    """The model that all students of a seed begin from: the teacher as it was trained, damaged."""
    draws = torch.Generator().manual_seed(seed)

    def damage(name: str, weight: torch.Tensor) -> torch.Tensor:
        if weight.ndim < 2:  # norms
            return weight
        return weight + DAMAGE * weight.std() * torch.randn(weight.shape, generator=draws)

    about = f"Another model, with noise of {DAMAGE} standard deviations on its weights."
    return changed(teacher(root, 10), root / f"seed-{seed}" / "student", about, damage)


DAMAGE = 0.3
"""Of the weights' standard deviation, tensor by tensor."""


def measure(root: Path, seed: int, name: str, kept: Kept) -> None:
    """Every arm of a condition, of one seed."""
    noise, prompts = CONDITIONS[name]
    begin, taught_by = student(root, seed), teacher(root, noise)
    words = ("--domains.sum.prompts", str(prompts))
    words += ("--seed", str(seed), "--model.path", str(begin))
    words += ("--teachers", json.dumps({"sum": {"path": str(taught_by), "type": "local"}}))
    recipe = recipe_of(MERGE, words)
    kept.add(name, "start", lambda: by_place(recipe, begin, "sum"))
    kept.add(name, "teacher", lambda: by_place(recipe, taught_by, "sum"))
    for cell in CELLS:

        def arm(cell: str = cell) -> dict:
            print(f"seed {seed}, {name}: {cell}", flush=True)
            out = root / f"seed-{seed}" / name.replace(" % ", "-").replace(", ", "-").replace(" ", "-")
            model, done = run_cell(out, MERGE, cell, words)
            found = by_place(recipe, model, "sum")
            return found | {"tokens": done["student_tokens"], "seconds": round(done["seconds"], 1)}

        kept.add(name, cell, arm)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--out", type=Path, default=Path("runs/when-on-policy/noise"))
    options = parser.parse_args()
    for name in options.conditions:
        for seed in options.seeds:
            measure(options.out, seed, name, Kept("noise", seed))


if __name__ == "__main__":
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # who shares the cores waits without spinning
    main()
