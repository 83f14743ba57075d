"""The figure of `tests/crash/episode_loop.py`: how long episodes are with and without kills.

python tests/bench/kills_plot.py RESULTS.json FIGURE.png
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ARMS = {
    "undisturbed": ("undisturbed", "#3b6ea8", "o"),
    "resumed": ("killed and resumed", "#b3502d", "x"),
    "restarted": ("killed and restarted from scratch", "#999999", "s"),
}


def draw(found: dict[str, Any], path: Path) -> None:
    """Write the figure."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name, (label, colour, marker) in ARMS.items():
        counts = np.array(found["turns"][name][1:], dtype=float)
        share, number = counts / counts.sum(), int(counts.sum())
        error = 1.96 * np.sqrt(share * (1 - share) / number)
        places = np.arange(1, len(counts) + 1)
        axes.errorbar(
            places, share, error, label=f"{label} ({number:,} episodes)", color=colour, marker=marker
        )
    axes.set_yscale("log")
    axes.set_xlabel("turns of an episode")
    axes.set_ylabel("share of episodes")
    axes.set_title(f"{found['counts']['kills']:,} kills in the middle of episodes", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
