"""Who chooses the tokens of a top-k loss: the teacher, the student, or both? Merges and gradients.

    .venv/bin/python examples/merge_study/support.py --seeds 0 1 2

Goes on where it stopped when it is started again. Writes `results/support.json`, `support.md` and
`support.png` beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import torch
from gradient_noise import gradients, signal_to_noise
from study import DOMAINS, HERE, opd_run, whole_run, words_of_merge

from opd.metrics import read_metrics
from opd.pipelines.evaluation.statistics import Interval, paired_interval

RESULTS = HERE / "results"
K = 2
"""Of 16 tokens: what each of those who choose brings."""
WHO = ("teacher", "student", "union")
FULL = "full vocabulary"
ARMS: dict[str, dict[str, Any]] = {FULL: {"type": "full"}} | {
    f"{form}, {who}": {"type": "topk", "k": K, "form": form, "support": who}
    for form, who in product(("tail", "hybrid"), WHO)
}
"""Name -> its `distill.loss`."""
AT = (40, 120, 480)
"""Steps after which accuracy is compared."""


def merge(root: Path, seed: int, arm: str) -> None:
    """Merge the specialists of `seed` with the loss of `arm`."""
    loss = ("--distill.loss", json.dumps(ARMS[arm]))
    opd_run(folder_of(root, seed, arm), *words_of_merge(root, seed), *loss)


def folder_of(root: Path, seed: int, arm: str) -> Path:
    """Of a merge; that of the whole run has the full vocabulary."""
    return root / (f"seed-{seed}" if arm == FULL else f"seed-{seed}-{arm.replace(', ', '-')}")


def curve(folder: Path) -> dict[int, float]:
    """Steps -> sampled accuracy in percent on held-out prompts, mean over domains."""
    rows = read_metrics(folder / "stages" / "merge" / "metrics.jsonl")
    return {
        int(row["step"]): 100 * fmean(row[f"accuracy/{domain}"] for domain in DOMAINS)
        for row in rows
        if f"accuracy/{DOMAINS[0]}" in row
    }


def against_full(whole: Path, start: Path, draws: int) -> dict[str, dict[str, float]]:
    """Arm -> noise of its gradient relative to the full vocabulary's, and how far its mean is from that of
    the full one, as a share of its length. All arms see the same responses, so that less of it is chance.
    """
    rows = {
        arm: gradients(whole, start, ["--distill.loss", json.dumps(loss)], draws)
        for arm, loss in ARMS.items()
    }
    full = signal_to_noise(rows[FULL])
    found = {}
    for arm, own in rows.items():
        away = signal_to_noise(own - rows[FULL])["signal"] if arm != FULL else 0.0
        found[arm] = {
            "noise": signal_to_noise(own)["noise"] / full["noise"],
            "bias": (away / full["signal"]) ** 0.5,
        }
    return found


def ahead(curves: dict[str, dict[str, dict[int, float]]], arm: str, step: int) -> Interval:
    """Points by which `arm` is ahead of the full vocabulary after `step` steps, paired by seed."""
    return paired_interval([own[arm][step] - own[FULL][step] for own in curves.values()])


def table(found: dict[str, Any]) -> str:
    """In Markdown."""
    curves = {seed: {a: {int(s): v for s, v in c.items()} for a, c in own.items()}
              for seed, own in found["curves"].items()}  # fmt: skip
    steps = [f"after {step} steps | ahead of full" for step in AT]
    gradient = [f"{what}, {point}" for point in found["gradients"] for what in ("noise", "bias")]
    lines = [f"| loss, who chooses | {' | '.join([*steps, *gradient])} |"]
    lines.append("|---" * (1 + 2 * len(AT) + len(gradient)) + "|")
    for arm in ARMS:
        cells = [arm]
        for step in AT:
            value, low, high = ahead(curves, arm, step)
            cells.append(f"{fmean(own[arm][step] for own in curves.values()):.1f}")
            cells.append("" if arm == FULL else f"{value:+.1f} ({low:+.1f} to {high:+.1f})")
        for measured in found["gradients"].values():
            cells += [f"{measured[arm]['noise']:.2f}", f"{measured[arm]['bias']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Any], out: Path) -> None:
    """Accuracy by step, mean over seeds."""
    figure, both = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axes, form in zip(both, ("tail", "hybrid"), strict=True):
        for arm in (FULL, *(f"{form}, {who}" for who in WHO)):
            curves = [own[arm] for own in found["curves"].values()]
            steps = list(curves[0])
            means = [fmean(own[step] for own in curves) for step in steps]
            axes.plot([int(step) for step in steps], means, label=arm, linewidth=1.6)
        axes.set(xlabel="steps of the merge", title=f"top-{K}, {form}")
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
    both[0].set(ylabel="sampled accuracy, mean over domains (%)")
    figure.savefig(out, dpi=140)


def main() -> None:
    """Run what is missing, measure, write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/merge-support"))
    parser.add_argument("--draws", type=int, default=32, help="rollouts of which a gradient is taken")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="merges side by side")
    options = parser.parse_args()
    none = ("--baselines.methods", "[]", "--baselines.mixed_grpo_all_tokens", "false")
    for seed in options.seeds:
        whole_run(options.out, seed, *none)
    jobs = [(seed, arm) for seed in options.seeds for arm in ARMS if arm != FULL]
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(lambda job: merge(options.out, *job), jobs))
    torch.set_num_threads(1)
    whole = options.out / f"seed-{options.seeds[0]}"
    found = {
        "seeds": options.seeds,
        "k": K,
        "curves": {
            str(seed): {arm: curve(folder_of(options.out, seed, arm)) for arm in ARMS}
            for seed in options.seeds
        },
        "gradients": {name: against_full(whole, whole / name, options.draws) for name in ("base", "merged")},
    }
    found = json.loads(json.dumps(found))  # as a later reader finds it
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "support.json").write_text(json.dumps(found) + "\n", "utf-8")
    (RESULTS / "support.md").write_text(table(found), "utf-8")
    draw(found, RESULTS / "support.png")
    print(table(found))
    print(f"table and plot: {RESULTS}/support.*", file=sys.stderr)


if __name__ == "__main__":
    main()
