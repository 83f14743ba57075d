"""What the tables and figures of all studies share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cells import ARMS, RESULTS
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from opd.pipelines.evaluation.statistics import paired

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
    value, low, high = paired(differences)
    return f"{value:+.1f}" if len(differences) < 2 else f"{value:+.1f} ({low:+.1f} to {high:+.1f})"


def joined(*parts: str | Iterable[str]) -> str:
    """Headings, and the lines of the tables below them."""
    blocks = [[part, ""] if isinstance(part, str) else [*part, ""] for part in parts]
    return "\n".join(line for block in blocks for line in block).rstrip("\n")


def panels(count: int, width: float) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, each `width` inches wide, that share what they count."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, found = plt.subplots(
        1, count, figsize=(1 + width * count, 3.2), sharey=True, squeeze=False, layout="constrained"
    )
    return figure, list(found[0])


def main(study: str, tables: Callable[[Seeds], str], draw: Callable[[Seeds], Figure], figure: str) -> None:
    """Print the tables of `study`; with `--draw` write its figure beside its results."""
    parser = argparse.ArgumentParser(description=f"The tables of the study {study}.")
    parser.add_argument("--draw", action="store_true", help=f"write results/{study}/{figure}")
    options, seeds = parser.parse_args(), results(study)
    if options.draw:
        draw(seeds).savefig(Path(RESULTS) / study / figure, dpi=120)
    print(tables(seeds))
