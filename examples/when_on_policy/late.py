"""Study 3, a domain that comes later: merge again, or mixed GRPO, from the student of the first three.

    .venv/bin/python examples/when_on_policy/late.py --seeds 0 1 2

Goes on where it stopped when it is started again; the table is made by `late_table.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cells import Kept, answers, main, mixed_grpo, recipe_of, run, taught

from opd.config import Recipe

RECIPE = "recipe-late.yaml"
DOMAINS = ("sort", "reverse", "add3", "rotate")
LATE = "rotate"
TIMES = 3
"""How many times the extra tokens of the new merge mixed GRPO is given."""
CONDITION = "late"


def counted(recipe: Recipe, model: Path) -> dict[str, Any]:
    """Right answers in each domain, sampled and greedily, and of how many."""
    found: dict[str, Any] = {"of": recipe.evaluation.prompts_per_domain}
    for way in ("sampled", "greedy"):
        found[way] = {
            domain: sum(
                text == label for text, label in answers(recipe, model, domain, greedy=way == "greedy")
            )
            for domain in DOMAINS
        }
    return found


def settings(root: Path, seed: int, start: Path, domains: Sequence[str]) -> tuple[str, ...]:
    """What is said of a merge of the specialists of `domains` into the model in `start`."""
    own = {domain: root / "specialists" / domain for domain in domains}
    return ("--seed", str(seed), *taught(start, own))


def specialists(root: Path, seed: int) -> int:
    """Train base and specialists in `root`; returns the tokens of the late one."""
    recipe = recipe_of(RECIPE, ("--seed", str(seed)))
    return [run(root, recipe, f"specialist-{domain}")["student_tokens"] for domain in DOMAINS][-1]


def first_merge(root: Path, seed: int) -> Path:
    """The student of the three older domains. (The fourth has no prompt in it.)"""
    recipe = recipe_of(RECIPE, settings(root, seed, root / "base", DOMAINS[:-1]))
    recipe = recipe.model_copy(update={"domains": {d: recipe.domains[d] for d in DOMAINS[:-1]}})
    run(root / "first", recipe, "merge")
    return root / "first" / "merged"


def mixed(root: Path, recipe: Recipe, start: Path, tokens: int) -> dict[str, Any]:
    """Mixed-domain GRPO from `start` for so many tokens: what was measured, and tokens and reward of the late
    domain step by step.
    """
    model, rows = mixed_grpo(root / "mixed", recipe, start, tokens)
    # The last step ends with the tokens, maybe before a prompt of the late domain.
    rewarded = [row for row in rows if f"reward/{LATE}" in row]
    curve = [[row["tokens/student"], round(row[f"reward/{LATE}"], 4)] for row in rewarded]
    return counted(recipe, model) | {"curve": curve, "tokens": curve[-1][0]}


def measure(out: Path, seed: int, condition: str, kept: Kept) -> None:
    """All of one seed."""
    root = out / f"seed-{seed}"
    told = f"seed {seed}"
    print(f"{told}: base and specialists", flush=True)
    late_tokens = specialists(root, seed)
    print(f"{told}: the first merge", flush=True)
    start = first_merge(root, seed)
    words = settings(root, seed, start, DOMAINS)
    recipe = recipe_of(RECIPE, words)
    kept.add(CONDITION, "start", lambda: counted(recipe, start))
    late = root / "specialists" / LATE
    kept.add(CONDITION, "teacher", lambda: counted(recipe, late) | {"tokens": late_tokens})
    kept.add_cells(CONDITION, root / "again", RECIPE, words, lambda model: counted(recipe, model))
    extra = late_tokens + kept.found[CONDITION]["student/reverse"]["tokens"]
    print(f"{told}: mixed GRPO, {TIMES * extra:,} tokens", flush=True)
    kept.add(CONDITION, "mixed", lambda: mixed(root, recipe, start, TIMES * extra))


if __name__ == "__main__":
    main("late", measure, [CONDITION])
