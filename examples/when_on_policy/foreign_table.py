"""The tables and the figure of study 5, from `results/foreign/`.

.venv/bin/python examples/when_on_policy/foreign_table.py            # prints the tables
.venv/bin/python examples/when_on_policy/foreign_table.py --draw     # writes results/foreign/right.png, too
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

from cells import CELLS
from matplotlib.figure import Figure
from study_tables import LABELS, OPD, SOFT, Seeds, figure, joined, lead, main, whole

LEARNT, WARMED, OWN = ("half", "parity"), "warmed", "own"
TOLD = LABELS | {WARMED: "soft labels, then OPD"}


def share(arm: dict[str, Any]) -> float:
    """Right answers in %, sampled, mean over the domains."""
    return mean(100 * arm["sampled"][domain] / arm["of"] for domain in LEARNT)


def done(seeds: Seeds) -> dict[str, list[int]]:
    """Condition -> the seeds of which every arm is there, the one with the warm-up, too."""
    every = {name: [s for s in having if WARMED in seeds[s][name]] for name, having in whole(seeds).items()}
    return {name: every[name] for name in sorted(every, key=lambda name: name != OWN) if every[name]}


def rows(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: every arm, a column a lineage."""
    found = done(seeds)
    yield f"| {max(map(len, found.values()))} seeds; teachers are of | {' | '.join(found)} |"
    yield f"|---|{'---|' * len(found)}"
    far = [
        mean(mean(seeds[s][name]["start"]["to teacher"].values()) for s in having)
        for name, having in found.items()
    ]
    yield f"| KL of the student before to its teacher, nats a token | {' | '.join(f'{x:.3f}' for x in far)} |"
    for arm in ("start", "teacher", *CELLS, WARMED):
        cells = [f"{mean(share(seeds[s][name][arm]) for s in having):.1f}" for name, having in found.items()]
        yield f"| {TOLD[arm]} | {' | '.join(cells)} |"


def leads(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: what the comparisons come to."""
    found = done(seeds)
    yield f"| points | {' | '.join(found)} |"
    yield f"|---|{'---|' * len(found)}"
    for told, one, other in (
        ("OPD over soft labels", OPD, SOFT),
        ("OPD over samples", OPD, "teacher/sampled"),
        ("soft labels, then OPD over OPD", WARMED, OPD),
        ("soft labels, then OPD over soft labels", WARMED, SOFT),
    ):
        cells = [
            lead([share(seeds[s][name][one]) - share(seeds[s][name][other]) for s in having])
            for name, having in found.items()
        ]
        yield f"| {told} | {' | '.join(cells)} |"
    for told, arm in (("OPD, against teachers of one's own", OPD), ("soft labels, the same", SOFT)):
        cells = []
        for name, having in found.items():
            both = [seed for seed in having if name != OWN and seed in found.get(OWN, [])]
            against = [share(seeds[s][name][arm]) - share(seeds[s][OWN][arm]) for s in both]
            cells.append(lead(against) if against else "")
        yield f"| {told} | {' | '.join(cells)} |"


def tables(seeds: Seeds) -> str:
    """All of it."""
    return joined(
        "Right answers in %, sampled, mean over both tasks:",
        rows(seeds),
        "Differences (paired by seed, 95 % interval):",
        leads(seeds),
    )


def draw(seeds: Seeds) -> Figure:
    """A line an arm, from teachers of one's own to foreign ones."""
    found = done(seeds)
    drawn = {
        arm: [(x, mean(share(seeds[s][name][arm]) for s in found[name])) for x, name in enumerate(found)]
        for arm in (*CELLS, WARMED)
    }
    axes = ("the lineage of the teachers", "right answers, sampled (%)")
    return figure({"": drawn}, TOLD, axes, ticks=list(found))


if __name__ == "__main__":
    main("foreign", tables, draw, "right.png")
