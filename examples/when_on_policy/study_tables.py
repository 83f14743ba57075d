"""What the tables and figures of all studies share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cells import ARMS, RESULTS
from matplotlib.figure import Figure

from opd.pipelines.evaluation.statistics import paired_interval

Seeds = dict[int, dict[str, Any]]
"""Seed -> condition -> arm -> what was measured."""
OPD, SOFT = "student/reverse", "teacher/forward"
LABELS = {
    "start": "the student before",
    "teacher": "the teachers",
    "teacher/sampled": "samples",
    SOFT: "soft labels",
    "teacher/reverse": "reverse KL on the teachers' answers",
    "student/sampled": "k1",
    "student/forward": "forward KL on the student's answers",
    OPD: "**OPD**",
}
"""What arms are called in tables."""


STYLES = {
    "start": ("#999999", ":", ""),
    "teacher": ("#333333", ":", ""),
    "teacher/sampled": ("#c8442f", ":", "v"),
    SOFT: ("#c8442f", "--", "s"),
    "teacher/reverse": ("#c8442f", "-", "o"),
    "student/sampled": ("#2f6fc8", ":", "v"),
    "student/forward": ("#2f6fc8", "--", "s"),
    OPD: ("#2f6fc8", "-", "o"),
    "warmed": ("#7a4fb5", "-", "D"),
    "dear": ("#2f6fc8", "none", "o"),
    "cheap": ("#2f6fc8", "none", "^"),
    "mixed": ("#3a8f4d", "-", ""),
    "token": ("#3a8f4d", "-", "o"),
    "response": ("#3a8f4d", "--", "s"),
    "undivided": ("#3a8f4d", ":", "v"),
}
"""Arm -> colour, line and mark of its curve. Red: on the teacher's answers, blue: on the student's own,
green: from rewards alone.
"""


def results(study: str) -> Seeds:
    """Of all that are there."""
    files = sorted((RESULTS / study).glob("seed-*.json"))
    return {int(file.stem.removeprefix("seed-")): json.loads(file.read_text("utf-8")) for file in files}


def whole(seeds: Mapping[int, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Condition -> the seeds of which every arm is there."""
    conditions = dict.fromkeys(name for found in seeds.values() for name in found)
    of = {
        name: [seed for seed, found in seeds.items() if set(ARMS) <= found.get(name, {}).keys()]
        for name in conditions
    }
    return {name: having for name, having in of.items() if having}


def lead(differences: Sequence[float]) -> str:
    """Points, one a seed: their mean with its interval over seeds."""
    value, low, high = paired_interval(differences)
    return f"{value:+.1f}" if len(differences) < 2 else f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def joined(*parts: str | Iterable[str]) -> str:
    """Headings, and the lines of the tables below them."""
    blocks = [[part, ""] if isinstance(part, str) else [*part, ""] for part in parts]
    return "\n".join(line for block in blocks for line in block).rstrip("\n")


Panels = Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
"""Title -> arm -> its points."""


def figure(
    drawn: Panels,
    told: Mapping[str, str],
    axes: tuple[str, str],
    *,
    width: float = 4.6,
    ticks: Sequence[str] | None = None,
) -> Figure:
    """The figure of a study: a line an arm, or its points where its style has no line.

    Args:
        drawn: What is drawn; values are in %.
        told: Arm -> what the legend calls it, in its order.
        axes: What is counted along the two.
        width: Of a panel, in inches.
        ticks: Names of 0, 1, ... along the first axis.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    size = (2.4 + width * len(drawn), 3.4)
    made, panels = plt.subplots(1, len(drawn), figsize=size, sharey=True, squeeze=False, layout="constrained")
    known: dict[str, Any] = {}
    for panel, (title, arms) in zip(panels[0], drawn.items(), strict=True):
        for arm, points in arms.items():
            colour, line, mark = STYLES[arm]
            at, values = zip(*points, strict=True)
            (known[arm],) = panel.plot(
                at, values, line, marker=mark, color=colour, markersize=4, linewidth=1.5
            )
        panel.set(title=title, xlabel=axes[0], ylim=(-1, 101))
        if ticks is not None:
            panel.set_xticks(range(len(ticks)), list(ticks))
    panels[0][0].set_ylabel(axes[1])
    named = {told[arm].strip("*"): known[arm] for arm in told if arm in known}
    whose = "red: on the teachers' answers\nblue: on the student's own" if OPD in known else None
    made.legend(named.values(), named.keys(), title=whose, loc="outside right center", frameon=False)
    return made


def main(study: str, tables: Callable[[Seeds], str], draw: Callable[[Seeds], Figure], file: str) -> None:
    """Print the tables of `study`; with `--draw` write its figure beside its results."""
    parser = argparse.ArgumentParser(description=f"The tables of the study {study}.")
    parser.add_argument("--draw", action="store_true", help=f"write results/{study}/{file}")
    options, seeds = parser.parse_args(), results(study)
    if options.draw:
        draw(seeds).savefig(Path(RESULTS) / study / file, dpi=120)
    print(tables(seeds))
