"""The figures of the length-bias experiment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("agg")

from matplotlib import pyplot as plt

ARMS = {
    "undisturbed": ("undisturbed", "#444444", "-"),
    "restart": ("restart from scratch", "#c8442f", "--"),
    "resume": ("resume from the log", "#2f6fc8", ":"),
}


def draw(results: dict[str, Any], folder: Path) -> None:
    """Write lengths.png, means.png and next_token.png into `folder`."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    _lengths(results, folder / "lengths.png")
    _means(results, folder / "means.png")
    _next_token(results, folder / "next_token.png")


def _lengths(results: dict[str, Any], path: Path) -> None:
    hazards = results["hazards"]
    figure, panels = plt.subplots(
        1, len(hazards), figsize=(3.4 * len(hazards), 2.9), sharey=True, squeeze=False
    )
    for panel, (hazard, arms) in zip(panels[0], hazards.items(), strict=True):
        for arm, (label, colour, line) in ARMS.items():
            counts = np.array((results if arm == "undisturbed" else arms)[arm]["histogram"])
            longer = 1 - np.cumsum(counts) / counts.sum()
            panel.plot(longer, line, color=colour, label=label, linewidth=1.8)
        panel.set_title(f"hazard {hazard} per token")
        panel.set_xlabel("tokens")
    panels[0][0].set_ylabel("share of responses that are longer")
    panels[0][-1].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _means(results: dict[str, Any], path: Path) -> None:
    hazards = list(results["hazards"])
    places = np.arange(len(hazards))
    figure, panels = plt.subplots(1, 2, figsize=(8, 2.9))
    for panel, quantity in zip(panels, ("length", "reward"), strict=True):
        base = results["undisturbed"]
        label, colour, _ = ARMS["undisturbed"]
        half = 1.96 * base[f"{quantity}_error"]
        panel.axhspan(base[quantity] - half, base[quantity] + half, color=colour, alpha=0.2)
        panel.axhline(base[quantity], color=colour, label=label, linewidth=1)
        for shift, arm in ((-0.08, "restart"), (0.08, "resume")):
            label, colour, _ = ARMS[arm]
            found = [results["hazards"][hazard][arm] for hazard in hazards]
            panel.errorbar(
                places + shift,
                [numbers[quantity] for numbers in found],
                yerr=[1.96 * numbers[f"{quantity}_error"] for numbers in found],
                fmt="o",
                color=colour,
                label=label,
                capsize=3,
            )
        panel.set_xticks(places, hazards)
        panel.set_xlabel("hazard per token")
        panel.set_ylabel(f"mean {quantity} (95 % interval)")
        panel.set_ylim(bottom=0)
    panels[0].legend(frameon=False, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _next_token(results: dict[str, Any], path: Path) -> None:
    figure, panel = plt.subplots(figsize=(3.8, 3.4))
    for hazard, arms in results["hazards"].items():
        numbers = arms["next_token"]
        share = 1 / numbers["resumes"]
        seen, expected = np.array(numbers["counts"]) * share, np.array(numbers["expected"]) * share
        panel.plot(expected, seen, "o", markersize=4, alpha=0.7, label=f"hazard {hazard}")
    top = panel.get_xlim()[1]
    panel.plot([0, top], [0, top], color="#444444", linewidth=0.8)
    panel.set_xlabel("frequency by the model's probabilities")
    panel.set_ylabel("frequency found")
    panel.set_title("first token after a resume")
    panel.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "results"
    draw(json.loads((folder / "results.json").read_text()), folder)
