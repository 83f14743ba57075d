"""Study 4, forgetting: what the base knew and nobody teaches, while two other tasks are learnt.

    .venv/bin/python examples/when_on_policy/forget.py --seeds 0 1 2

Goes on where it stopped when it is started again; the table is made by `forget_table.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cells import Answer, Answers, Kept, distance, main, recipe_of, right, run, taught, written

from opd.config import Recipe
from opd.pipelines.evaluation.measure import is_right

BASE, MERGE = "recipe-ways-base.yaml", "recipe-ways.yaml"
KEPT, LEARNT = "known", ("half", "parity")
CONDITIONS = {f"{steps} steps": steps for steps in (16, 64)}
"""How long the merge is: each its own, with its own schedule, so that an arm is a curve."""
OTHER_WAY = (
    "--base.right",
    "0.3",
    "--base.wrong_rule",
    "0.7",
    "--base.steps",
    "100",
    "--base.optim.lr",
    "2e-3",
)
"""What teachers learn: right answers, seven of ten in the way that the base does not have."""


def lineage(root: Path, seed: int = 0, shape: tuple[str, ...] = ()) -> tuple[Path, dict[str, Path]]:
    """A base, and the teachers that were trained from it, one a domain. `shape`: settings of the base."""
    words = ("--seed", str(seed))
    run(root / "base", recipe_of(BASE, (*words, *shape)), "base")
    base, teachers = root / "base" / "base", {}
    for domain in LEARNT:
        recipe = recipe_of(BASE, (*words, "--model.config", "null", "--model.path", str(base), *OTHER_WAY))
        recipe = recipe.model_copy(update={"domains": {domain: recipe.domains[domain]}})
        run(root / domain, recipe, "base")
        teachers[domain] = root / domain / "base"
    return base, teachers


def merge_of(seed: int, start: Path, teachers: dict[str, Path], steps: int) -> tuple[str, ...]:
    """Settings of a merge of `teachers` into the model in `start`."""
    words = ("--seed", str(seed), "--distill.steps", str(steps))
    return (*words, *taught(start, teachers))


@cache
def of_base(seed: int, base: Path) -> Answers:
    """What the base answers."""
    return written(recipe_of(BASE, ("--seed", str(seed))), base, (KEPT, *LEARNT))


def own_digits(found: Sequence[Answer]) -> list[int]:
    """How many digits of right answers are those of the prompt, the base's way; and of how many."""
    same = [[a == b for a, b in zip(x.text, x.label, strict=True)] for x in found if is_right(x.sample)]
    return [sum(map(sum, same)), sum(map(len, same))]


def counted(recipe: Recipe, base: Path, model: Path) -> dict[str, Any]:
    """Right answers in each domain, of how many, and their digits that are the prompt's; how far `model` is
    from the base on what is learnt, in nats a token: on its own answers, and on the base's.
    """
    own = written(recipe, model, list(recipe.domains))
    return {
        "of": recipe.evaluation.prompts_per_domain,
        "sampled": right(own),
        "near": {d: own_digits(own[d]) for d in LEARNT},
        "to base": distance(own, model, base, LEARNT),
        "from base": distance(of_base(recipe.seed, base), base, model, LEARNT),
    }


def measure(out: Path, seed: int, name: str, kept: Kept) -> None:
    """Every arm of a condition, of one seed."""
    root = out.parent / "ways"
    base, teachers = lineage(root / "own")
    asked = recipe_of(BASE, ("--seed", str(seed)))

    def of_teachers() -> dict[str, Any]:
        """Each in its own domain; of what nobody teaches, both."""
        each = {domain: counted(asked, base, path) for domain, path in teachers.items()}
        own = {
            way: {d: each[d][way][d] for d in LEARNT} for way in ("sampled", "near", "to base", "from base")
        }
        known = {domain: each[domain]["sampled"][KEPT] for domain in LEARNT}
        return {"of": asked.evaluation.prompts_per_domain, KEPT: known, **own}

    # Both are the same for every length.
    for arm, found in {"start": lambda: counted(asked, base, base), "teacher": of_teachers}.items():
        before = [of[arm] for of in kept.found.values() if arm in of]
        kept.add(name, arm, lambda before=before, found=found: before[0] if before else found())
    words = merge_of(seed, base, teachers, CONDITIONS[name])
    at = root / f"seed-{seed}" / f"own-{CONDITIONS[name]}"
    kept.add_cells(name, at, MERGE, words, lambda model: counted(asked, base, model))


if __name__ == "__main__":
    main("forget", measure, list(CONDITIONS))
