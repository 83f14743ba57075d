"""Study 5, teachers of another lineage: begun from another model than the student, or of another width.

    .venv/bin/python examples/when_on_policy/foreign.py --seeds 0 1 2

Base and teachers of the student's own lineage are those of study 4 (`forget.py`), and so are their merges.
Goes on where it stopped when it is started again; the table is made by `foreign_table.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cells import Kept, distance, main, recipe_of, right, run_cell, written
from forget import BASE, LEARNT, MERGE, lineage, merge_of

CONDITIONS: dict[str, tuple[int, tuple[str, ...]]] = {
    "own": (0, ()),
    "another": (101, ("--model.config.hidden_size", "96", "--model.config.intermediate_size", "288")),
}
"""Seed of a lineage, and what is said of its base."""
STEPS = 16
FIRST, THEN = "teacher/forward", "student/reverse"


def measure(out: Path, seed: int, name: str, kept: Kept) -> None:
    """Every arm of a condition, of one seed; and OPD after a warm-up on the teachers' answers, each for half
    the steps.
    """
    root = out.parent / "ways"
    base, _ = lineage(root / "own")
    _, teachers = lineage(root / name, *CONDITIONS[name])
    asked = recipe_of(BASE, ("--seed", str(seed)))

    def counted(model: Path) -> dict[str, Any]:
        return {"of": asked.evaluation.prompts_per_domain, "sampled": right(written(asked, model, LEARNT))}

    def before() -> dict[str, Any]:
        """Also how far each teacher is from the student, in nats a token of the student's answers."""
        own = written(asked, base, LEARNT)
        far = {domain: distance(own, base, path, [domain])[domain] for domain, path in teachers.items()}
        return counted(base) | {"to teacher": far}

    def of_teachers() -> dict[str, Any]:
        each = {d: right(written(asked, path, [d]))[d] for d, path in teachers.items()}
        return {"of": asked.evaluation.prompts_per_domain, "sampled": each}

    def warmed() -> dict[str, Any]:
        at, half = root / f"seed-{seed}", STEPS // 2
        first, spent = run_cell(at / f"{name}-{half}", MERGE, FIRST, merge_of(seed, base, teachers, half))
        model, done = run_cell(
            at / f"{name}-warmed", MERGE, THEN, merge_of(seed + 1000, first, teachers, half)
        )
        return counted(model) | {"tokens": spent["student_tokens"] + done["student_tokens"]}

    kept.add(name, "start", before)
    kept.add(name, "teacher", of_teachers)
    at = root / f"seed-{seed}" / f"{name}-{STEPS}"
    kept.add_cells(name, at, MERGE, merge_of(seed, base, teachers, STEPS), counted)
    kept.add(name, "warmed", warmed)


if __name__ == "__main__":
    main("foreign", measure, list(CONDITIONS))
