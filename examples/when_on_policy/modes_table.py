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
from study_tables import OPD, Seeds, joined, lead, main, panels, whole


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
    """A bar an arm, a dot a seed, a panel a condition."""
    labels = {
        "teacher/sampled": "samples",
        "teacher/forward": "soft labels",
        "teacher/reverse": "reverse KL",
        "student/sampled": "k1",
        "student/forward": "forward KL",
        OPD: "OPD",
    }
    conditions = whole(seeds)
    figure, found = panels(len(conditions), 3.6)
    for panel, (name, having) in zip(found, conditions.items(), strict=True):
        for x, arm in enumerate(labels):
            values = [share(seeds[s][name][arm], "sampled") for s in having]
            panel.bar(x, mean(values), color="#2f6fc8" if arm.startswith("student") else "#c8442f", alpha=0.6)
            panel.plot([x] * len(values), values, "o", color="black", markersize=3)
        teacher = mean(share(seeds[s][name]["teacher"], "sampled") for s in having)
        panel.axhline(teacher, color="#444444", linestyle=":", linewidth=1)
        panel.set_xticks(range(len(labels)), list(labels.values()), rotation=40, ha="right")
        panel.set_title(f"{name} (dotted: the teacher)")
    found[0].set_ylabel("right answers, sampled (%)")
    figure.suptitle("red: loss on the teacher's answers; blue: on the student's own", fontsize=9)
    return figure


if __name__ == "__main__":
    main("modes", tables, draw, "right.png")
