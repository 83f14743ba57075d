"""The tables and the figure of study 6, from `results/disagree/`.

.venv/bin/python examples/when_on_policy/disagree_table.py            # prints the tables
.venv/bin/python examples/when_on_policy/disagree_table.py --draw     # writes its figure, too
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from cells import ARMS, CELLS
from matplotlib.figure import Figure
from study_tables import LABELS, OPD, SOFT, Seeds, figure, joined, lead, main

SHORT, LONG = ("brief", "tenth"), ("full", "rounds")
STYLED = ("brief", "full")
EVERY = (*SHORT, *LONG)
USUAL, ALIKE, MIXED = "each teacher alike", "each token alike", "mixed GRPO"
TOKEN_CELLS = (SOFT, OPD)
"""Merges with each token alike."""
FORMS = {
    "token": "mixed GRPO, each token alike",
    "response": "mixed GRPO, each response alike",
    "undivided": "mixed GRPO, advantages not divided",
}
TOLD = LABELS | {"teacher": "the specialists", "start": "the base"} | FORMS


def share(arm: dict[str, Any], domains: Sequence[str], way: str = "sampled") -> float:
    """Right answers in %, mean over `domains`; of `long`, answers of the right length."""
    return mean(100 * arm[way][domain] / arm["of"] for domain in domains)


def done(seeds: Seeds) -> list[dict[str, Any]]:
    """Condition -> arm, of each seed that is whole."""
    arms = {USUAL: ARMS, ALIKE: TOKEN_CELLS, MIXED: FORMS}
    return [
        found
        for found in seeds.values()
        if all(set(wanted) <= found.get(name, {}).keys() for name, wanted in arms.items())
    ]


def arms_of() -> Iterator[tuple[str, str, str]]:
    """(what it is called, condition, arm) of every row."""
    yield from ((TOLD[arm], USUAL, arm) for arm in ("start", "teacher"))
    yield from ((f"{TOLD[cell]}, {USUAL}", USUAL, cell) for cell in CELLS)
    yield from ((f"{TOLD[cell]}, {ALIKE}", ALIKE, cell) for cell in TOKEN_CELLS)
    yield from ((TOLD[form], MIXED, form) for form in FORMS)


def rows(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: right answers of every arm."""
    found = done(seeds)
    told = [f"`{domain}`" for domain in EVERY]
    more = ("mean", "lowest domain of a seed", "mean, greedy", "right length, `brief` and `full`")
    yield f"| {len(found)} seeds | {' | '.join((*told, *more))} |"
    yield f"|---|{'---|' * (len(told) + len(more))}"
    for label, name, arm in arms_of():
        own = [arms[name][arm] for arms in found]
        values = [mean(share(one, [domain]) for one in own) for domain in EVERY]
        values.append(mean(share(one, EVERY) for one in own))
        values.append(min(share(one, [domain]) for one in own for domain in EVERY))
        values.append(mean(share(one, EVERY, "greedy") for one in own))
        values.append(mean(share(one, STYLED, "long") for one in own))
        yield f"| {label} | {' | '.join(f'{value:.1f}' for value in values)} |"


def leads(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: by how much OPD, each teacher alike, is ahead of the other arms."""
    found = done(seeds)
    of = {"all four": EVERY, "the short two": SHORT, "the long two": LONG, "`tenth`": ("tenth",)}
    yield f"| OPD, {USUAL}, is ahead of | {' | '.join(of)} |"
    yield f"|---|{'---|' * len(of)}"
    for label, name, arm in arms_of():
        if (name, arm) in ((USUAL, OPD), (USUAL, "start")):
            continue
        cells = [
            lead([share(a[USUAL][OPD], domains) - share(a[name][arm], domains) for a in found])
            for domains in of.values()
        ]
        yield f"| {label} | {' | '.join(cells)} |"


def costs(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: student tokens, mean over seeds."""
    found = done(seeds)
    spent = {
        "the specialists": (USUAL, "teacher"),
        "the merge": (USUAL, OPD),
        "mixed GRPO": (MIXED, "token"),
    }
    yield f"| student tokens | {' | '.join(spent)} |"
    yield f"|---|{'---|' * len(spent)}"
    values = [f"{mean(arms[name][arm]['tokens'] for arms in found):,.0f}" for name, arm in spent.values()]
    yield f"| mean over seeds | {' | '.join(values)} |"


def tables(seeds: Seeds) -> str:
    """All of it."""
    return joined(
        "Right answers in %, sampled:",
        rows(seeds),
        "Points, sampled (paired by seed, 95 % interval):",
        leads(seeds),
        "What it took:",
        costs(seeds),
    )


def draw(seeds: Seeds) -> Figure:
    """A line an arm across the domains; a panel of merges each, and one of mixed GRPO."""
    found = done(seeds)

    def across(name: str, arm: str) -> list[tuple[float, float]]:
        return [(x, mean(share(a[name][arm], [domain]) for a in found)) for x, domain in enumerate(EVERY)]

    ends = {arm: across(USUAL, arm) for arm in ("start", "teacher")}
    shown = ("teacher/sampled", SOFT, "teacher/reverse", OPD)
    drawn = {
        f"merges, {name}": ends | {arm: across(name, arm) for arm in cells}
        for name, cells in ((USUAL, shown), (ALIKE, TOKEN_CELLS))
    }
    drawn[MIXED] = ends | {form: across(MIXED, form) for form in FORMS}
    ticks = ("brief\n4", "tenth\n4", "full\n36", "rounds\n64")
    return figure(
        drawn, TOLD, ("domain, digits of its answers", "right, sampled (%)"), width=3.3, ticks=ticks
    )


if __name__ == "__main__":
    main("disagree", tables, draw, "domains.png")
