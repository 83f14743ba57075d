"""The tables and the figure of the second part of study 2, from `results/room/`.

.venv/bin/python examples/when_on_policy/room_table.py            # prints the tables
.venv/bin/python examples/when_on_policy/room_table.py --draw     # writes results/room/right.png, too
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

from cells import ARMS, CELLS
from matplotlib.figure import Figure
from modes_table import share
from room import CONDITIONS, TASKS, WIDTHS
from study_tables import LABELS, OPD, SOFT, Seeds, figure, joined, lead, main, whole

WARMED = "warmed"
TOLD = LABELS | {WARMED: "soft labels, then OPD"}
COMPARED = {
    "OPD over soft labels": (OPD, SOFT),
    "OPD over samples": (OPD, "teacher/sampled"),
    "OPD over the reverse KL on the teacher's answers": (OPD, "teacher/reverse"),
    "OPD over forward KL on the student's answers": (OPD, "student/forward"),
    "OPD over k1": (OPD, "student/sampled"),
    "soft labels, then OPD over OPD": (WARMED, OPD),
}


def done(seeds: Seeds) -> dict[str, list[int]]:
    """Condition -> the seeds of which every arm is there, the one with the warm-up, too."""
    every = {name: [s for s in having if WARMED in seeds[s][name]] for name, having in whole(seeds).items()}
    return {name: every[name] for name in CONDITIONS if every.get(name)}


def of_task(seeds: Seeds, task: str) -> dict[int, tuple[str, list[int]]]:
    """Width -> its condition of this task, and the seeds of that."""
    return {CONDITIONS[name][1]: (name, s) for name, s in done(seeds).items() if CONDITIONS[name][0] == task}


def rows(seeds: Seeds, task: str, way: str) -> Iterator[str]:
    """Lines of Markdown: every arm, a column a width."""
    found = of_task(seeds, task)
    count = ", ".join(sorted({str(len(having)) for _, having in found.values()}))
    yield f"| {count} seeds; width | {' | '.join(map(str, found))} |"
    yield f"|---|{'---|' * len(found)}"
    for arm in (*ARMS, WARMED):
        values = [mean(share(seeds[s][name][arm], way) for s in having) for name, having in found.values()]
        yield f"| {TOLD[arm]} | {' | '.join(f'{value:.1f}' for value in values)} |"


def ahead(arms: dict[str, Any], one: str, other: str) -> float:
    """By how many points of right answers, sampled."""
    return share(arms[one], "sampled") - share(arms[other], "sampled")


def leads(seeds: Seeds, task: str) -> Iterator[str]:
    """Lines of Markdown: what the comparisons come to, sampled."""
    found = of_task(seeds, task)
    yield f"| points; width | {' | '.join(map(str, found))} |"
    yield f"|---|{'---|' * len(found)}"
    for told, (one, other) in COMPARED.items():
        cells = [lead([ahead(seeds[s][name], one, other) for s in having]) for name, having in found.values()]
        yield f"| {told} | {' | '.join(cells)} |"


def tables(seeds: Seeds) -> str:
    """All of it."""
    parts: list[str | Iterator[str]] = []
    for task in TASKS:
        parts += [f"Right answers in %, {task}, sampled:", rows(seeds, task, "sampled")]
        parts += [f"The same, {task}, greedy:", rows(seeds, task, "greedy")]
        parts += [f"Differences, {task}, sampled (paired by seed, 95 % interval):", leads(seeds, task)]
    parts += [
        "Neighbours in right answers that ascend, in %, in any order (the teacher's: a half):",
        rows(seeds, "any order", "ascend"),
    ]
    return joined(*parts)


def draw(seeds: Seeds) -> Figure:
    """A line an arm over the widths, a panel a task."""

    def panel(task: str) -> dict[str, list[tuple[float, float]]]:
        found = of_task(seeds, task)
        places = {width: x for x, width in enumerate(sorted(found))}
        return {
            arm: sorted(
                (places[width], mean(share(seeds[s][name][arm], "sampled") for s in having))
                for width, (name, having) in found.items()
            )
            for arm in ("teacher", "start", *CELLS, WARMED)
        }

    axes = (f"the student's width; its teacher's is {max(WIDTHS)}", "right answers, sampled (%)")
    return figure({task: panel(task) for task in TASKS}, TOLD, axes, ticks=[str(w) for w in sorted(WIDTHS)])


if __name__ == "__main__":
    main("room", tables, draw, "right.png")
