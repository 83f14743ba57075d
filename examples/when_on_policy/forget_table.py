"""The tables and the figure of study 4, from `results/forget/`.

.venv/bin/python examples/when_on_policy/forget_table.py            # prints the tables
.venv/bin/python examples/when_on_policy/forget_table.py --draw     # writes results/forget/kept.png, too
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import correlation, mean
from typing import Any

from cells import CELLS
from matplotlib.figure import Figure
from study_tables import LABELS, OPD, Seeds, figure, joined, lead, main, whole

KEPT, LEARNT = "known", ("half", "parity")
NEVER_THERE = "student/sampled"
"""The arm that does not set the level at which the others are compared."""


def share(arm: dict[str, Any], domains: Sequence[str]) -> float:
    """Right answers in %, sampled, mean over `domains`."""
    return mean(100 * arm["sampled"][domain] / arm["of"] for domain in domains)


def curves(seeds: Seeds) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """Seed -> arm -> what was measured after no step and after each number of steps, in their order."""
    found = whole(seeds)
    shared = [seed for seed in seeds if all(seed in having for having in found.values())]
    return {
        seed: {
            cell: [seeds[seed][next(iter(found))]["start"], *(seeds[seed][name][cell] for name in found)]
            for cell in CELLS
        }
        for seed in shared
    }


def kept_at(curve: Sequence[dict[str, Any]], level: float) -> float | None:
    """What is left of the task that nobody teaches where the others first are at `level`, on the straight
    line between two lengths of training; `None`: they never are.
    """
    points = [(share(arm, LEARNT), share(arm, [KEPT])) for arm in curve]
    for (x, y), (next_x, next_y) in pairwise(points):
        if x < level <= next_x:
            return y + (next_y - y) * (level - x) / (next_x - x)
    return None


def level_of(arms: dict[str, list[dict[str, Any]]]) -> float:
    """The highest accuracy on what is learnt that all arms but k1 reach."""
    tops = {cell: max(share(arm, LEARNT) for arm in curve) for cell, curve in arms.items()}
    return min(top for cell, top in tops.items() if cell != NEVER_THERE)


def own_way(arm: dict[str, Any]) -> float:
    """Digits of right answers that are the prompt's, as the base writes them, in %."""
    return mean(100 * arm["near"][domain][0] / max(arm["near"][domain][1], 1) for domain in LEARNT)


def rows(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: every arm, after every number of steps."""
    found = whole(seeds)
    head = [f"{what}, {name}" for what in ("known", "learnt") for name in found]
    told = ("digits of the base's way", "KL to the base", "KL from the base")
    count = ", ".join(str(len(having)) for having in found.values())
    yield f"| seeds: {count} | {' | '.join((*head, *told))} |"
    yield f"|---|{'---|' * (len(head) + len(told))}"
    for arm in ("start", "teacher", *CELLS):
        of = [[seeds[seed][name][arm] for seed in having] for name, having in found.items()]
        if arm in ("start", "teacher"):  # the same for every length
            of = of[:1]
        known = (
            [""] if arm == "teacher" else [f"{mean(share(one, [KEPT]) for one in each):.1f}" for each in of]
        )
        cells = [*known, *[""] * (len(found) - len(of))]
        cells += [f"{mean(share(one, LEARNT) for one in each):.1f}" for each in of]
        cells += [""] * (len(found) - len(of))
        cells.append(", ".join(f"{mean(own_way(one) for one in each):.0f} %" for each in of))
        for way in ("to base", "from base"):
            far = [mean(mean(one[way][d] for d in LEARNT) for one in each) for each in of]
            cells.append(", ".join(f"{value:.2f}" for value in far))
        yield f"| {LABELS[arm]} | {' | '.join(cells)} |"


def leads(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: OPD against each other arm after as many steps."""
    found = whole(seeds)
    head = [f"{what}, {name}" for what in ("known", "learnt") for name in found]
    yield f"| OPD is ahead of | {' | '.join(head)} |"
    yield f"|---|{'---|' * len(head)}"
    for cell in CELLS:
        if cell == OPD:
            continue
        cells = [
            lead([share(seeds[s][name][OPD], of) - share(seeds[s][name][cell], of) for s in having])
            for of in ([KEPT], LEARNT)
            for name, having in found.items()
        ]
        yield f"| {LABELS[cell]} | {' | '.join(cells)} |"


def matched(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: what is left at equal accuracy on what is learnt, and by how much OPD keeps more."""
    found = curves(seeds)
    levels = {seed: level_of(arms) for seed, arms in found.items()}
    yield f"| {len(found)} seeds, at {mean(levels.values()):.1f} % learnt | known | OPD keeps more by |"
    yield "|---|---|---|"
    for cell in CELLS:
        left = {seed: kept_at(arms[cell], levels[seed]) for seed, arms in found.items()}
        both = [
            (own, other)
            for seed, arms in found.items()
            if (other := left[seed]) is not None and (own := kept_at(arms[OPD], levels[seed])) is not None
        ]
        if len(both) < len(found):
            yield f"| {LABELS[cell]} | does not get there | |"
            continue
        ahead = "" if cell == OPD else lead([own - other for own, other in both])
        yield f"| {LABELS[cell]} | {mean(other for _, other in both):.1f} | {ahead} |"


def ranks(values: Sequence[float]) -> list[float]:
    """The place of each among all, from 0; equal ones share the middle of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def predicted(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: how well the KL ranks what is left."""
    yield "| rank correlation with what is left, over arms and steps | a seed each |"
    yield "|---|---|"
    for told, measure in {
        "KL to the base": lambda arm: mean(arm["to base"][d] for d in LEARNT),
        "KL from the base": lambda arm: mean(arm["from base"][d] for d in LEARNT),
        "accuracy on what is learnt": lambda arm: share(arm, LEARNT),
    }.items():
        each = []
        for arms in curves(seeds).values():
            points = [arm for curve in arms.values() for arm in curve[1:]]
            left = [share(arm, [KEPT]) for arm in points]
            each.append(correlation(ranks([measure(arm) for arm in points]), ranks(left)))
        yield f"| {told} | {', '.join(f'{value:+.2f}' for value in each)} |"


def tables(seeds: Seeds) -> str:
    """All of it."""
    return joined(
        "Right answers in %, sampled, on the task that nobody teaches and on the two that are learnt:",
        rows(seeds),
        "Points after equal steps (95 % interval, paired by seed):",
        leads(seeds),
        "What is left of that task where all have learnt as much of the others:",
        matched(seeds),
        "What tells how much is left:",
        predicted(seeds),
    )


def draw(seeds: Seeds) -> Figure:
    """What is left against what is learnt, a line an arm."""
    found = list(curves(seeds).values())

    def points(cell: str) -> list[tuple[float, float]]:
        steps = zip(*(arms[cell] for arms in found), strict=True)
        return [
            (mean(share(a, LEARNT) for a in each), mean(share(a, [KEPT]) for a in each)) for each in steps
        ]

    drawn = {cell: points(cell) for cell in CELLS}
    axes = ("two tasks that are taught: right answers (%)", "the task nobody teaches (%)")
    made = figure({"": drawn}, LABELS, axes, width=5.0)
    for name, point in zip(["before", *whole(seeds)], drawn[OPD], strict=True):
        made.axes[0].annotate(name, point, xytext=(6, 4), textcoords="offset points", fontsize=8)
    return made


if __name__ == "__main__":
    main("forget", tables, draw, "kept.png")
