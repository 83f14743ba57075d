"""The tables and the figure of study 2, from `results/modes/`.

.venv/bin/python examples/when_on_policy/modes_table.py            # prints the tables
.venv/bin/python examples/when_on_policy/modes_table.py --draw     # writes results/modes/right.png, too
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from cells import ARMS, CELLS, RESULTS, results, whole

from opd.pipelines.evaluation.statistics import paired

Seeds = dict[int, dict[str, Any]]
OPD = "student/reverse"


def share(arm: dict[str, Any], way: str) -> float:
    """Right answers in %; of `ascend`, neighbours in right answers that ascend."""
    right, of = arm["ascend"] if way == "ascend" else (arm[way], arm["of"])
    return 100 * right / max(of, 1)


def lead(seeds: Seeds, condition: str, over: str, way: str) -> str:
    """By how many points OPD is ahead, with its interval over seeds."""
    found = [seeds[seed][condition] for seed in whole(seeds)[condition]]
    value, low, high = paired([share(arms[OPD], way) - share(arms[over], way) for arms in found])
    return f"{value:+.1f}" if len(found) < 2 else f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


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
        found = [lead(seeds, name, over, "sampled") for over in others]
        yield f"| {name} | {len(having)} | {' | '.join(found)} |"


def tables(seeds: Seeds) -> str:
    """All of it."""
    parts = [
        ["Right answers in %; on the teacher's answers, then on the student's:", ""],
        list(rows(seeds)),
        ["", "Points by which OPD is ahead, sampled (paired by seed, 95 % interval):", ""],
        list(leads(seeds)),
    ]
    return "\n".join(line for part in parts for line in part)


def draw(seeds: Seeds, path: Path) -> None:
    """A bar an arm, a dot a seed, a panel a condition."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    labels = {
        "teacher/sampled": "samples",
        "teacher/forward": "soft labels",
        "teacher/reverse": "reverse KL",
        "student/sampled": "k1",
        "student/forward": "forward KL",
        OPD: "OPD",
    }
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    conditions = whole(seeds)
    figure, panels = plt.subplots(
        1, len(conditions), figsize=(1 + 3.6 * len(conditions), 3.2), sharey=True, squeeze=False
    )
    for panel, (name, having) in zip(panels[0], conditions.items(), strict=True):
        for x, arm in enumerate(labels):
            values = [share(seeds[s][name][arm], "sampled") for s in having]
            panel.bar(x, mean(values), color="#2f6fc8" if arm.startswith("student") else "#c8442f", alpha=0.6)
            panel.plot([x] * len(values), values, "o", color="black", markersize=3)
        teacher = mean(share(seeds[s][name]["teacher"], "sampled") for s in having)
        panel.axhline(teacher, color="#444444", linestyle=":", linewidth=1)
        panel.set_xticks(range(len(labels)), list(labels.values()), rotation=40, ha="right")
        panel.set_title(f"{name} (dotted: the teacher)")
    panels[0][0].set_ylabel("right answers, sampled (%)")
    figure.suptitle("red: loss on the teacher's answers; blue: on the student's own", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="write the figure")
    options = parser.parse_args()
    seeds = results("modes")
    if options.draw:
        draw(seeds, RESULTS / "modes" / "right.png")
    print(tables(seeds))


if __name__ == "__main__":
    main()
