"""The tables of the comparison, and its figure, from what `study.py` has kept.

.venv/bin/python examples/which_estimator/table.py --draw
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from opd.pipelines.evaluation.statistics import Interval, paired_interval

RESULTS = Path(__file__).resolve().parent / "results"
TASKS = ("sort", "unique")
DEFAULT = "grpo"

Seeds = dict[int, dict[str, Any]]
"""Seed -> arm -> task -> what was measured."""


def results() -> Seeds:
    """Of all seeds that are there."""
    files = sorted(RESULTS.glob("seed-*.json"))
    return {int(file.stem.removeprefix("seed-")): json.loads(file.read_text("utf-8")) for file in files}


def arms(seeds: Seeds) -> list[str]:
    """In the order in which they were run first."""
    return list(dict.fromkeys(arm for found in seeds.values() for arm in found))


def having(seeds: Seeds, arm: str) -> list[int]:
    """The seeds of which an arm, and the default, are there."""
    return [seed for seed, found in seeds.items() if arm in found and DEFAULT in found]


def points(seeds: Seeds, seed: int, arm: str, task: str, what: str = "reward") -> float:
    """Mean of 100 times what was measured of a specialist."""
    return 100 * float(seeds[seed][arm][task][what])


def ahead(seeds: Seeds, arm: str, task: str | None = None) -> Interval:
    """Points of held-out reward by which an arm is ahead of the default, paired by seed; of the mean over
    tasks where none is named.
    """
    tasks = TASKS if task is None else (task,)
    return paired_interval(
        [
            fmean(points(seeds, seed, arm, of) - points(seeds, seed, DEFAULT, of) for of in tasks)
            for seed in having(seeds, arm)
        ]
    )


def told(interval: Interval) -> str:
    """The mean with its bounds; alone, of one seed."""
    value, low, high = interval
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})" if abs(low) < 1e6 else f"{value:+.1f}"


def table(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown."""
    yield "| arm | seeds | `sort` | ahead | `unique` | all right | ahead | both, ahead |"
    yield "|---|---|---|---|---|---|---|---|"
    for arm in arms(seeds):
        own = having(seeds, arm)
        cells = [f"`{arm}`" if "," not in arm else arm, str(len(own))]
        for task in TASKS:
            cells.append(f"{fmean(points(seeds, seed, arm, task) for seed in own):.1f}")
            if task == "unique":
                cells.append(f"{fmean(points(seeds, seed, arm, task, 'right') for seed in own):.1f}")
            cells.append("" if arm == DEFAULT else told(ahead(seeds, arm, task)))
        cells.append("" if arm == DEFAULT else told(ahead(seeds, arm)))
        yield f"| {' | '.join(cells)} |"


def draw(seeds: Seeds, out: Path) -> None:
    """By how much each arm is ahead of the default: its interval, and a dot a seed; a panel a task."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    rows = [arm for arm in arms(seeds) if arm not in (DEFAULT, "base")]
    size = (9, 0.33 * len(rows) + 1)
    figure, panels = plt.subplots(1, len(TASKS), figsize=size, sharey=True, layout="constrained")
    for panel, task in zip(panels, TASKS, strict=True):
        for y, arm in enumerate(reversed(rows)):
            value, low, high = ahead(seeds, arm, task)
            if abs(low) < 1e6:
                panel.plot([low, high], [y, y], color="tab:blue")
            panel.plot(value, y, "o", color="tab:blue")
            own = having(seeds, arm)
            dots = [points(seeds, s, arm, task) - points(seeds, s, DEFAULT, task) for s in own]
            panel.plot(dots, [y + 0.2] * len(dots), ".", color="gray", markersize=4)
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set(title=task, xlabel="points ahead of GRPO (held-out reward)")
        panel.set_yticks(range(len(rows)), list(reversed(rows)), fontsize=8)
    figure.savefig(out, dpi=120)


def main() -> None:
    """Print the table; with `--draw` write the figure beside the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="write results/ahead.png")
    options, seeds = parser.parse_args(), results()
    if options.draw:
        draw(seeds, RESULTS / "ahead.png")
    print("\n".join(table(seeds)))


if __name__ == "__main__":
    main()
