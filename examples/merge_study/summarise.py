"""The study's table and plots, from the results of its runs, into examples/merge_study/results/."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from study import DOMAINS, ESTIMATORS, HERE, VARIANTS

from opd.metrics import read_metrics

Table = dict[str, list[dict]]
LABELS = {
    "base": "base",
    "specialist": "specialists, own domain",
    "merged": "OPD, full vocabulary, reverse KL",
    "full-forward": "OPD, full vocabulary, forward KL",
    "full-jsd": "OPD, full vocabulary, JSD",
    "topk4-tail": "OPD, top-4 + tail bucket",
    "topk4-hybrid": "OPD, top-4 hybrid",
    "topk4-truncated": "OPD, top-4 truncated",
    "k1": "OPD, sampled token k1",
    "k2": "OPD, sampled token k2",
    "longer": "OPD, full vocabulary, reverse KL, three times the tokens",
    "off_policy": "off-policy distillation, equal tokens",
    "longer/off_policy": "off-policy distillation, three times the tokens",
    "mixed_grpo": "mixed-domain GRPO, the merge's tokens",
    "longer/mixed_grpo": "mixed-domain GRPO, three times the merge's tokens",
    "mixed_grpo_all": "mixed-domain GRPO, all tokens",
    "average": "weight average",
    "task_arithmetic": "task arithmetic, tuned",
    "ties": "TIES, tuned",
    "dare": "DARE, tuned",
}


def seeds_of(study: Path) -> list[int]:
    """The seeds that were run whole."""
    found = [re.fullmatch(r"seed-(\d+)", path.name) for path in study.iterdir() if path.is_dir()]
    return sorted(int(match[1]) for match in found if match)


def load(study: Path, seeds: list[int]) -> Table:
    """Name -> one entry a seed: accuracies by domain, and student tokens."""
    table: Table = {name: [] for name in LABELS}
    for seed in seeds:
        whole = json.loads((study / f"seed-{seed}" / "results.json").read_text())
        by_name = {model["name"]: model for model in whole["models"]}
        for name in LABELS:
            if name == "specialist":
                own = {d: by_name[f"specialist:{d}"]["domains"][d] for d in DOMAINS}
                tokens = sum(by_name[f"specialist:{d}"]["student_tokens"] for d in DOMAINS)
                table[name].append({"domains": own, "student_tokens": tokens})
            elif (variant := name.partition("/"))[0] in VARIANTS:
                results = json.loads((study / f"seed-{seed}-{variant[0]}" / "results.json").read_text())
                model = variant[2] or "merged"
                table[name].append(next(m for m in results["models"] if m["name"] == model))
            elif name in by_name:
                table[name].append(by_name[name])
    return {name: rows for name, rows in table.items() if rows}


def accuracy(row: dict, kind: str = "sampled") -> list[float]:
    """Accuracy in percent, domain by domain."""
    return [100 * row["domains"][d][kind]["accuracy"] for d in DOMAINS]


def markdown(table: Table, seeds: list[int], noise: dict) -> str:
    """The study's table."""
    lines = [
        f"Mean over seeds {', '.join(map(str, seeds))}; sampled accuracy in % (sd over seeds).",
        "",
        f"| | sampled (sd) | {' / '.join(DOMAINS)} | greedy | student tokens |",
        "|---|---|---|---|---|",
    ]
    for name, rows in table.items():
        sampled = np.array([accuracy(row) for row in rows])
        means = sampled.mean(1)
        spread = means.std(ddof=1) if len(means) > 1 else 0.0
        greedy = np.mean([accuracy(row, "greedy") for row in rows])
        tokens = np.mean([row["student_tokens"] for row in rows])
        parts = " / ".join(f"{value:.1f}" for value in sampled.mean(0))
        lines.append(
            f"| {LABELS[name]} | {means.mean():.1f} ({spread:.1f}) | {parts} | {greedy:.1f} | {tokens:,.0f} |"
        )
    lines += ["", "Gradient of one step on the same prompts, relative to full-vocabulary reverse KL:", ""]
    lines += [
        "| | noise, base | signal-to-noise, base | noise, merged | signal-to-noise, merged |",
        "|---|---|---|---|---|",
    ]
    for name in ("full-reverse", *ESTIMATORS):
        cells = [
            f"{noise[point][name][kind] / noise[point]['full-reverse'][kind]:.2f}x"
            for point in ("base", "merged")
            for kind in ("noise", "snr")
        ]
        lines.append(f"| {LABELS.get(name, LABELS['merged'])} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot_tokens(study: Path, seeds: list[int], out: Path) -> None:
    """Mean held-out accuracy against student tokens, for every estimator."""
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for name in ("merged", *VARIANTS):
        curves, tokens = [], []
        for seed in seeds:
            run = study / (f"seed-{seed}" if name == "merged" else f"seed-{seed}-{name}")
            rows = read_metrics(run / "stages" / "merge" / "metrics.jsonl")
            rows = [row for row in rows if f"accuracy/{DOMAINS[0]}" in row]
            curves.append([100 * np.mean([row[f"accuracy/{d}"] for d in DOMAINS]) for row in rows])
            tokens.append([row["tokens/student"] / 1000 for row in rows])
        axes.plot(np.mean(tokens, 0), np.mean(curves, 0), label=LABELS[name], linewidth=1.6)
    axes.set(xlabel="student tokens (thousands)", ylabel="sampled accuracy (%)")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.25)
    figure.savefig(out, dpi=140)


def plot_methods(table: Table, out: Path) -> None:
    """Every method's accuracy, a dot a seed."""
    figure, axes = plt.subplots(figsize=(7.5, 5), layout="constrained")
    names = list(table)[::-1]
    for y, name in enumerate(names):
        means = [np.mean(accuracy(row)) for row in table[name]]
        axes.plot(means, [y] * len(means), "o", alpha=0.5, color="tab:blue")
        axes.plot(np.mean(means), y, "|", markersize=14, color="black")
    axes.set_yticks(range(len(names)), [LABELS[name] for name in names], fontsize=8)
    axes.set(xlabel="sampled accuracy, mean over domains (%)", xlim=(0, 101))
    axes.grid(axis="x", alpha=0.25)
    figure.savefig(out, dpi=140)


def main() -> None:
    """Write table.md, summary.json and two plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--study", type=Path, default=Path("runs/merge-study"))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    seeds = seeds_of(options.study)
    noise = json.loads((options.study / "gradient_noise.json").read_text())
    table = load(options.study, seeds)
    options.out.mkdir(parents=True, exist_ok=True)
    text = markdown(table, seeds, noise)
    (options.out / "table.md").write_text(text)
    (options.out / "summary.json").write_text(
        json.dumps({"seeds": seeds, "models": table, "noise": noise}, indent=1)
    )
    plot_tokens(options.study, seeds, options.out / "accuracy_against_tokens.png")
    plot_methods(table, options.out / "methods.png")
    print(text)


if __name__ == "__main__":
    main()
