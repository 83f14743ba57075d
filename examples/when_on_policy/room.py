"""Study 2, room: students that are narrower than their teacher, of many right answers and of one.

    .venv/bin/python examples/when_on_policy/room.py --seeds 0 1 2

Goes on where it stopped when it is started again; the table is made by `room_table.py`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from cells import Kept, main, recipe_of, run, run_cell, taught
from modes import CONDITIONS as TASKS
from modes import MERGE, TEACHER, counted

WIDTH = 96
"""Of the teacher."""
WIDTHS = (96, 32, 24, 16)
"""Of the students."""
CONDITIONS = {f"{task}, width {width}": (task, width) for task in TASKS for width in WIDTHS}
STEPS = 160
SHORT = ("--base.steps", "200", "--base.checkpoint_every", "200")
"""How long a student has seen demonstrations before the merge."""
FIRST, THEN = "teacher/forward", "student/reverse"


def shaped(width: int) -> tuple[str, ...]:
    """Settings of a model of this width."""
    return ("--model.config.hidden_size", str(width), "--model.config.intermediate_size", str(3 * width))


def trained(out: Path, seed: int, width: int, *settings: str) -> Path:
    """A model of this width, trained on demonstrations of both tasks."""
    run(out, recipe_of(TEACHER, ("--seed", str(seed), *shaped(width), *settings)), "base")
    return out / "base"


def measure(root: Path, seed: int, name: str, kept: Kept) -> None:
    """Every arm of a condition, of one seed; and OPD after soft labels, each for half the steps."""
    task, width = CONDITIONS[name]
    taught_by = trained(root / "teacher", 0, WIDTH)
    start = trained(root / f"seed-{seed}" / f"start-{width}", seed, width, *SHORT)

    def settings(begin: Path, steps: int, more: int = 0) -> tuple[str, ...]:
        long = ("--distill.steps", str(steps), "--distill.checkpoint_every", str(steps))
        return (*TASKS[task], "--seed", str(seed + more), *long, *taught(begin, {"digits": taught_by}))

    count = partial(counted, recipe_of(MERGE, settings(start, STEPS)), any_order=task == "any order")
    at = root / f"seed-{seed}" / f"{task.replace(' ', '-')}-{width}"

    def warmed() -> dict[str, Any]:
        half = STEPS // 2
        first, spent = run_cell(at / "warm-up", MERGE, FIRST, settings(start, half))
        model, done = run_cell(at / "warmed", MERGE, THEN, settings(first, half, 1000))
        return {**count(model), "tokens": spent["student_tokens"] + done["student_tokens"]}

    kept.add(name, "start", lambda: count(start))
    kept.add(name, "teacher", lambda: count(taught_by))
    kept.add_cells(name, at, MERGE, settings(start, STEPS), count)
    kept.add(name, "warmed", warmed)


if __name__ == "__main__":
    main("room", measure, list(CONDITIONS))
