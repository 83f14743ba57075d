"""The figure of `async_gain.py`: seconds a step, and who was at work when.

python tests/bench/async_plot.py RESULTS.json FIGURE.png
"""

import json
import sys
from pathlib import Path
from typing import Any

COLOURS = {
    "decode": "#3b6ea8",
    "score": "#c9a227",
    "train": "#b3502d",
    "sync": "#6a8f4e",
    "evaluate": "#999999",
}
IDLE = "#ececec"


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the figure."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    schedules = result["schedules"]
    figure, (bars, strips) = plt.subplots(
        1, 2, figsize=(12, 0.9 + 0.75 * len(schedules)), width_ratios=[1, 2.2], layout="constrained"
    )
    _bars(bars, schedules)
    _strips(strips, schedules)
    lengths = result["lengths"]
    figure.suptitle(
        f"Response lengths: mean {lengths['mean']:.0f}, 99 % below {lengths['p99']:.0f},"
        f" longest {lengths['longest']} tokens",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _bars(axes: Any, schedules: dict[str, Any]) -> None:
    names = list(schedules)
    means = [schedules[name]["mean_seconds_per_step"] for name in names]
    axes.barh(names, means, color="#8aa9c9", height=0.6)
    for place, (name, mean) in enumerate(zip(names, means, strict=True)):
        rounds = schedules[name]["of_each_round"]
        axes.plot(rounds, [place] * len(rounds), "k.", markersize=4)
        axes.text(0.03 * max(means), place, f"{mean:.2f} s", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("seconds a step (dots: rounds)")
    axes.spines[["top", "right"]].set_visible(False)


def _strips(axes: Any, schedules: dict[str, Any]) -> None:
    shown: dict[str, Any] = {}
    for place, one in enumerate(schedules.values()):
        strip = one["strip"]
        end = strip["steps"][-1]
        for offset, who in ((-0.2, "engine"), (0.2, "trainer")):
            axes.barh(place + offset, end, height=0.34, color=IDLE)
            for kind, begin, stop in strip[who]:
                colour = COLOURS.get(kind, "#555555")
                bar = axes.barh(place + offset, stop - begin, left=begin, height=0.34, color=colour)
                shown.setdefault(kind, bar)
            axes.text(-0.01, place + offset, who, ha="right", va="center", fontsize=7, transform=_mixed(axes))
        axes.vlines(strip["steps"], place - 0.42, place + 0.42, color="black", linewidth=0.7)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlabel("seconds (lines: steps of the trainer; grey: waits)")
    axes.legend(
        list(shown.values()),
        list(shown),
        ncols=len(shown),
        fontsize=8,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        frameon=False,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)


def _mixed(axes: Any) -> Any:
    """Horizontal places as shares of the axes, vertical ones as data."""
    return axes.get_yaxis_transform()


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
