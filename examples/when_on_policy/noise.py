"""Study 1, noise and horizon: teachers of running sums who write more or fewer wrong digits.

    .venv/bin/python examples/when_on_policy/noise.py --seeds 0 1 2

Goes on where it stopped when it is started again; the table is made by `noise_table.py`.
"""

from __future__ import annotations

from pathlib import Path

from cells import Kept, by_place, changed, damaged, main, recipe_of, run, taught

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


def measure(root: Path, seed: int, name: str, kept: Kept) -> None:
    """Every arm of a condition, of one seed."""
    noise, prompts = CONDITIONS[name]
    begin = damaged(teacher(root, 10), root / f"seed-{seed}" / "student", seed)
    taught_by = teacher(root, noise)
    words = ("--domains.sum.prompts", str(prompts), "--seed", str(seed), *taught(begin, {"sum": taught_by}))
    recipe = recipe_of(MERGE, words)
    kept.add(name, "start", lambda: by_place(recipe, begin, "sum"))
    kept.add(name, "teacher", lambda: by_place(recipe, taught_by, "sum"))
    out = root / f"seed-{seed}" / name.replace(" % ", "-").replace(", ", "-").replace(" ", "-")
    kept.add_cells(name, out, MERGE, words, lambda model: by_place(recipe, model, "sum"))


if __name__ == "__main__":
    main("noise", measure, list(CONDITIONS))
