"""Table and plot of `rarely.yaml`'s arms, a row an arm, a curve a seed.

.venv/bin/python examples/self_distillation/table.py runs/self-distillation-rarely   # or more, a seed each
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from opd.metrics import read_metrics

RESULTS = Path(__file__).resolve().parent / "results"
ARMS = {
    "grpo": "GRPO",
    "sibling": "GRPO and sibling",
    "feedback": "GRPO and feedback",
    "label": "**GRPO and answer**",
}
STEPS = (10, 20, 30, 40)
"""After which held-out prompts are answered."""


def read_run(folder: Path) -> dict[str, Any]:
    """Return the held-out accuracy of a run by step, and for each step its share of groups that learn."""
    file = folder / "stages/specialist-sort/metrics.jsonl"
    if not file.is_file():
        raise SystemExit(f"there is no {file}; name what run.sh was given as --out, and -rarely behind it")
    rows = read_metrics(file)
    curve = {row["step"]: row["accuracy/sort"] for row in rows if "accuracy/sort" in row}
    return {"steps": len(rows), "curve": curve, "mixed": [1 - row["frac_reward_zero_std"] for row in rows]}


def after(run: dict[str, Any], step: int) -> float:
    """Return the accuracy in percent after a step, or where the run has stopped before."""
    return 100 * next((value for at, value in reversed(run["curve"].items()) if int(at) <= step), 0.0)


def table(kept: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield lines of Markdown: a row an arm, means of seeds."""
    steps = " | ".join(map(str, STEPS))
    yield f"| 300 held-out prompts, sampled, % right after step | {steps} | by seed at the end |"
    yield f"|---|{'---|' * (len(STEPS) + 1)}"
    for arm, label in ARMS.items():
        runs = kept.get(arm, {}).values()
        if not runs:
            continue
        cells = []
        for step in STEPS:
            values = [after(run, step) for run in runs]
            spread = f" (sd {stdev(values):.1f})" if len(values) > 1 and any(values) else ""
            cells.append(f"{mean(values):.1f}{spread}")
        ends = ", ".join(f"{after(run, STEPS[-1]):.1f}" for run in runs)
        last = max(run["steps"] for run in runs)
        stopped = f"; stops in step {last + 1}" if last < STEPS[-1] else ""
        yield f"| {label} | {' | '.join(cells)} | {ends}{stopped} |"


def plot(kept: dict[str, dict[str, Any]], out: Path) -> None:
    """Draw each seed's curve."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 3.6))
    for color, (arm, label) in zip(("C7", "C1", "C0", "C2"), ARMS.items(), strict=True):
        for number, run in enumerate(kept.get(arm, {}).values()):
            values = [0.0, *(after(run, step) for step in STEPS)]
            name = label.strip("*") if number == 0 else None
            axes.plot(
                [0, *STEPS],
                values,
                color=color,
                marker=".",
                label=name,
                linestyle="--" if arm == "sibling" else "-",
            )
    axes.set(xlabel="step of 64 answers", ylabel="held-out prompts right, %", ylim=(-3, 103))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    """Keep what the runs named on the command line say, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="*", help="`--out` of run.sh with -rarely, one a seed")
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / "rarely.json"
    kept: dict[str, dict[str, Any]] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    for seed, begin in enumerate(options.runs):
        for arm in ARMS:
            kept.setdefault(arm, {})[str(seed)] = read_run(Path(f"{begin}-{arm}"))
    if options.runs:
        file.write_text(json.dumps(kept) + "\n", "utf-8")
        plot(kept, RESULTS / "rarely.png")
    if not kept:
        parser.error(f"{file} is not there; name runs")
    print("\n".join(table(kept)))


if __name__ == "__main__":
    main()
