"""The tables and the figure of study 2, from `results/modes/`.

.venv/bin/python examples/when_on_policy/modes_table.py            # prints the tables
.venv/bin/python examples/when_on_policy/modes_table.py --draw     # writes results/modes/right.png, too
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

from cells import ARMS, CELLS
from matplotlib.figure import Figure
from study_tables import LABELS, OPD, Seeds, figure, joined, lead, main, whole


def share(arm: dict[str, Any], way: str) -> float:
    """Right answers in %; of `ascend`, neighbours in right answers that ascend."""
    right, of = arm["ascend"] if way == "ascend" else (arm[way], arm["of"])
    return 100 * right / max(of, 1)


def ahead(seeds: Seeds, condition: str, over: str, way: str) -> str:
    """By how many points OPD is ahead."""
    found = [seeds[seed][condition] for seed in whole(seeds)[condition]]
    return lead([share(arms[OPD], way) - share(arms[over], way) for arms in found])


def rows(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: every arm, by condition and way of counting."""
    yield "| condition | start | teacher | samples | soft labels | reverse | k1 | forward | **OPD** |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, having in whole(seeds).items():
        for way, told in {"sampled": "", "greedy": ", greedy", "ascend": ", ascending neighbours"}.items():
            if (name, way) == ("ascending", "ascend"):
                continue
            numbers = [f"{mean(share(seeds[s][name][arm], way) for s in having):.1f}" for arm in ARMS]
            yield f"| {name}{told} | {' | '.join(numbers)} |"


def leads(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: OPD's lead over each other arm, sampled."""
    others = [cell for cell in CELLS if cell != OPD]
    yield "| condition | seeds | samples | soft labels | reverse | k1 | forward |"
    yield "|---|---|---|---|---|---|---|"
    for name, having in whole(seeds).items():
        found = [ahead(seeds, name, over, "sampled") for over in others]
        yield f"| {name} | {len(having)} | {' | '.join(found)} |"


def tables(seeds: Seeds) -> str:
    """All of it."""
    return joined(
        "Right answers in %; on the teacher's answers, then on the student's:",
        rows(seeds),
        "Points by which OPD is ahead, sampled (paired by seed, 95 % interval):",
        leads(seeds),
    )


def draw(seeds: Seeds) -> Figure:
    """The seeds of every arm, a panel a condition; the teacher across."""

    def points(name: str, having: list[int]) -> dict[str, list[tuple[float, float]]]:
        found: dict[str, list[tuple[float, float]]] = {
            arm: [(x, share(seeds[s][name][arm], "sampled")) for s in having] for x, arm in enumerate(CELLS)
        }
        top = mean(share(seeds[s][name]["teacher"], "sampled") for s in having)
        return found | {"teacher": [(-0.3, top), (len(CELLS) - 0.7, top)]}

    drawn = {name: points(name, having) for name, having in whole(seeds).items()}
    ticks = ("samples", "soft", "reverse", "k1", "forward", "OPD")
    axes = ("arm; a mark a seed", "right answers, sampled (%)")
    return figure(drawn, LABELS, axes, width=3.6, ticks=ticks)


if __name__ == "__main__":
    main("modes", tables, draw, "right.png")
