"""The tables and the figure of study 1, from `results/noise/`.

.venv/bin/python examples/when_on_policy/noise_table.py            # prints the tables
.venv/bin/python examples/when_on_policy/noise_table.py --draw     # writes results/noise/places.png, too
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from cells import ARMS, RESULTS, results, whole

from opd.pipelines.evaluation.statistics import paired

Seeds = dict[int, dict[str, Any]]
OPD, SOFT = "student/reverse", "teacher/forward"
PLACES = (4, 8, 16)


def share(arm: dict[str, Any], way: str, place: int) -> float:
    """Right digits at `place` (from 1), in %."""
    return 100 * arm[way][place - 1] / arm["of"]


def lead(seeds: Seeds, condition: str, over: str, way: str, place: int) -> str:
    """By how many points OPD is ahead, with its interval over seeds."""
    found = [seeds[seed][condition] for seed in whole(seeds)[condition]]
    differences = [share(arms[OPD], way, place) - share(arms[over], way, place) for arms in found]
    value, low, high = paired(differences)
    return f"{value:+.1f}" if len(found) < 2 else f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def cells(seeds: Seeds, way: str) -> Iterator[str]:
    """Lines of Markdown: every arm at the last place, by condition."""
    yield "| condition | seeds | start | teacher | samples | soft labels | reverse | k1 | forward | **OPD** |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, having in whole(seeds).items():
        numbers = [f"{mean(share(seeds[s][name][arm], way, PLACES[-1]) for s in having):.1f}" for arm in ARMS]
        yield f"| {name} | {len(having)} | {' | '.join(numbers)} |"


def leads(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: OPD's lead over soft labels at every horizon, and over samples at the last one."""
    of = " | ".join(f"soft labels, {place}" for place in PLACES)
    last = PLACES[-1]
    more = (f"soft labels, {last}, greedy", f"samples, {last}", f"samples, {last}, greedy", f"k1, {last}")
    yield f"| condition | {of} | {' | '.join(more)} |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in whole(seeds):
        found = [lead(seeds, name, SOFT, "sampled", place) for place in PLACES]
        found.append(lead(seeds, name, SOFT, "greedy", last))
        found += [lead(seeds, name, "teacher/sampled", way, last) for way in ("sampled", "greedy")]
        found.append(lead(seeds, name, "student/sampled", "sampled", last))
        yield f"| {name} | {' | '.join(found)} |"


def tables(seeds: Seeds) -> str:
    """All of it."""
    parts = [
        ["Right digits at place 16 in %, sampled; on the teacher's answers, then on the student's:", ""],
        list(cells(seeds, "sampled")),
        ["", "The same, greedy:", ""],
        list(cells(seeds, "greedy")),
        ["", "Points by which OPD is ahead (paired by seed, 95 % interval), of what, at which place:", ""],
        list(leads(seeds)),
    ]
    return "\n".join(line for part in parts for line in part)


def draw(seeds: Seeds, path: Path) -> None:
    """Right digits against the place, a panel a condition."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    lines = {
        "teacher": ("its teacher", "#444444", ":"),
        OPD: ("OPD: the student's answers", "#2f6fc8", "-"),
        SOFT: ("soft labels: the teacher's answers", "#c8442f", "-"),
        "teacher/sampled": ("supervised: the teacher's answers", "#c8442f", "--"),
        "start": ("the student before", "#999999", ":"),
    }
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    conditions = whole(seeds)
    figure, panels = plt.subplots(
        1, len(conditions), figsize=(1 + 2.9 * len(conditions), 3.2), sharey=True, squeeze=False
    )
    for panel, (name, having) in zip(panels[0], conditions.items(), strict=True):
        for arm, (label, colour, style) in lines.items():
            places = range(1, PLACES[-1] + 1)
            values = [mean(share(seeds[s][name][arm], "sampled", p) for s in having) for p in places]
            panel.plot(places, values, style, color=colour, label=label, linewidth=1.7)
        panel.set(title=name, xlabel="steps of work", ylim=(0, 101), xticks=(1, *PLACES))
    panels[0][0].set_ylabel("right after so many steps (%)")
    panels[0][0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="write the figure")
    options = parser.parse_args()
    seeds = results("noise")
    if options.draw:
        draw(seeds, RESULTS / "noise" / "places.png")
    print(tables(seeds))


if __name__ == "__main__":
    main()
