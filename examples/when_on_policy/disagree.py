"""Study 6, domains that disagree: answers of 4 and of 64 digits, unequal rewards, opposite styles.

    .venv/bin/python examples/when_on_policy/disagree.py --seeds 0 1 2

Goes on where it stopped when it is started again; the table is made by `disagree_table.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cells import CELLS, Kept, main, mixed_grpo, recipe_of, run, run_cell, taught, written

from opd.config import Recipe

RECIPE = "recipe-disagree.yaml"
DOMAINS = ("brief", "tenth", "full", "rounds")
MIXED, SOFT, OPD = "mixed GRPO", "teacher/forward", "student/reverse"
NORMALISED = {"each teacher alike": ("teacher", tuple(CELLS)), "each token alike": ("token", (SOFT, OPD))}
"""Condition -> `distill.normalise` of its merges, and which cells there are of them."""
FORMS = {
    "token": (),
    "response": ("--specialist.policy_loss", '{"aggregation": "sequence"}'),
    "undivided": ("--specialist.advantage", '{"type": "dr_grpo"}'),
}
"""Forms of mixed GRPO: every token weighs the same, which is the default; every response; every token, with
advantages that are not divided by the spread of a group's rewards.
"""


def counted(recipe: Recipe, model: Path, domains: tuple[str, ...] = DOMAINS) -> dict[str, Any]:
    """Right answers in each domain, sampled and greedily, and of how many; and of the sampled ones how many
    have the length that is right.
    """
    found: dict[str, Any] = {"of": recipe.evaluation.prompts_per_domain}
    for way in ("sampled", "greedy"):
        own = written(recipe, model, domains, greedy=way == "greedy")
        found[way] = {name: sum(x.text == x.label for x in own[name]) for name in domains}
        if way == "sampled":
            found["long"] = {name: sum(len(x.text) == len(x.label) for x in own[name]) for name in domains}
    return found


def begun(out: Path) -> Path:
    """The base of all seeds."""
    run(out / "base", recipe_of(RECIPE, ("--seed", "0")), "base")
    return out / "base" / "base"


def specialists(root: Path, seed: int, base: Path) -> tuple[dict[str, Path], int]:
    """Train specialists in `root`; returns them by domain, and their tokens."""
    recipe = recipe_of(RECIPE, ("--seed", str(seed), *taught(base, {})))
    tokens = sum(run(root, recipe, f"specialist-{domain}")["student_tokens"] for domain in DOMAINS)
    return {domain: root / "specialists" / domain for domain in DOMAINS}, tokens


def of_specialists(recipe: Recipe, teachers: dict[str, Path]) -> dict[str, Any]:
    """Each in its own domain."""
    each = {domain: counted(recipe, path, (domain,)) for domain, path in teachers.items()}
    ways = ("sampled", "greedy", "long")
    own = {way: {domain: each[domain][way][domain] for domain in teachers} for way in ways}
    return {"of": recipe.evaluation.prompts_per_domain, **own}


def measure(out: Path, seed: int, name: str, kept: Kept) -> None:
    """Every arm of a condition, of one seed."""
    root, base = out / f"seed-{seed}", begun(out)
    print(f"seed {seed}: specialists", flush=True)
    teachers, tokens = specialists(root, seed, base)
    merge = ("--seed", str(seed), *taught(base, teachers))
    recipe = recipe_of(RECIPE, merge)
    if name in NORMALISED:
        normalise, cells = NORMALISED[name]
        if cells == tuple(CELLS):
            kept.add(name, "start", lambda: counted(recipe, base))
            kept.add(name, "teacher", lambda: of_specialists(recipe, teachers) | {"tokens": tokens})
        words = (*merge, "--distill.normalise", normalise)
        kept.add_cells(name, root / normalise, RECIPE, words, lambda model: counted(recipe, model), cells)
        return
    # As many tokens as specialists and the merge, with its defaults, took together.
    _, done = run_cell(root / "teacher", RECIPE, OPD, (*merge, "--distill.normalise", "teacher"))
    for form, settings in FORMS.items():

        def arm(form: str = form, settings: tuple[str, ...] = settings) -> dict[str, Any]:
            print(f"seed {seed}: {MIXED}, {form}", flush=True)
            asked = recipe_of(RECIPE, (*merge, *settings))
            model, rows = mixed_grpo(root / f"mixed-{form}", asked, base, tokens + done["student_tokens"])
            return counted(recipe, model) | {"tokens": rows[-1]["tokens/student"], "steps": len(rows)}

        kept.add(name, form, arm)


if __name__ == "__main__":
    main("disagree", measure, [*NORMALISED, MIXED])
