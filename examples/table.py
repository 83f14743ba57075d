"""An example's accuracy over several seeds, from the `results.json` of each: a table, and a plot beside it.

.venv/bin/python examples/table.py quickstart                    # of what is in examples/quickstart/results/
.venv/bin/python examples/table.py real_model runs/real-model*   # first takes the finished ones there
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt

from opd.pipelines.evaluation.statistics import (
    Count,
    Interval,
    mean_accuracy,
    mean_difference,
    paired_interval,
    recovery_interval,
)

EXAMPLES = Path(__file__).parent
LABELS = {
    "base": "base",
    "specialists": "specialists, each on its own domain",
    "merged": "**OPD, full vocabulary**",
    "soft_labels": "soft labels on the teachers' answers, equal tokens",
    "off_policy": "off-policy distillation, equal tokens",
    "mixed_grpo": "mixed-domain GRPO, equal tokens",
    "mixed_grpo_all": "mixed-domain GRPO, all tokens",
    "task_arithmetic": "task arithmetic, tuned",
    "average": "weight average",
    "dare": "DARE, tuned",
    "ties": "TIES, tuned",
    "della": "DELLA, tuned",
    "sce": "SCE",
    "ram": "RAM",
}


def counts(results: dict, row: str, way: str) -> list[Count]:
    """Right answers of a row's models, one count a domain; `way` is `sampled` or `greedy`."""
    models = {model["name"]: model["domains"] for model in results["models"]}
    names = {domain: f"specialist:{domain}" if row == "specialists" else row for domain in results["domains"]}
    found = [models[name][domain][way] for domain, name in names.items()]
    return [Count(one["correct"], one["total"]) for one in found]


def pooled(runs: list[dict], row: str, way: str) -> list[Count]:
    """The same over all seeds."""
    columns = zip(*(counts(run, row, way) for run in runs), strict=True)
    return [Count(sum(one.correct for one in seeds), sum(one.total for one in seeds)) for seeds in columns]


def rows_of(runs: list[dict]) -> list[str]:
    """The rows of `LABELS` that these runs have."""
    names = {model["name"] for run in runs for model in run["models"]} | {"specialists"}
    return [row for row in LABELS if row in names]


def means(runs: list[dict], row: str, way: str) -> list[float]:
    """Mean over domains of the accuracy in %, a number a seed."""
    return [100 * mean(one.accuracy for one in counts(run, row, way)) for run in runs]


def table(runs: list[dict]) -> Iterator[str]:
    """Lines of Markdown."""
    seeds = f"{len(runs)} seed" + "s" * (len(runs) > 1)
    domains = _list(runs[0]["domains"])
    yield f"| {seeds} | mean (sd) | lowest / highest seed | {domains} | greedy | OPD is ahead by |"
    yield "|---|---|---|---|---|---|"
    for row in rows_of(runs):
        sampled, found = means(runs, row, "sampled"), pooled(runs, row, "sampled")
        middle = f"{mean(sampled):.1f}" + (f" ({stdev(sampled):.1f})" if len(runs) > 1 else "")
        middle = f"**{middle}**" if row == "merged" else middle
        ends = _numbers((min(sampled), max(sampled)))
        of_domains = _numbers(100 * one.accuracy for one in found)
        greedy = f"{mean(means(runs, row, 'greedy')):.1f}"
        by = "" if row == "merged" else "{:+.1f} ({:+.1f} to {:+.1f})".format(*ahead(runs, row))
        yield f"| {' | '.join([LABELS[row], middle, ends, of_domains, greedy, by])} |"


def ahead(runs: list[dict], row: str) -> Interval:
    """Points by which OPD's mean is ahead of a row's, sampled, with a 95 % interval: paired by seed; of fewer
    than three seeds, that of their answers' noise alone.
    """
    if len(runs) > 2:
        pairs = zip(means(runs, "merged", "sampled"), means(runs, row, "sampled"), strict=True)
        return paired_interval([merged - other for merged, other in pairs])
    found = mean_difference(pooled(runs, "merged", "sampled"), pooled(runs, row, "sampled"))
    return Interval(*(100 * bound for bound in found))


def kept(runs: list[dict]) -> Iterator[str]:
    """Lines of Markdown: what each row keeps of the specialists' gain over the base, sampled, in %. Of the
    mean gain of all domains by seed, and of each domain's over all seeds, with its answers' noise alone.
    """
    domains, compared = runs[0]["domains"], ("base", "specialists")
    yield f"| kept of the gain, % | of the mean (sd) | {' | '.join(domains)} |"
    yield "|---|---|" + "---|" * len(domains)
    for row in rows_of(runs)[len(compared) :]:
        shares = kept_shares(runs, row)
        counted = (pooled(runs, one, "sampled") for one in (row, *compared))
        found = [recovery_interval(*one) for one in zip(*counted, strict=True)]
        cells = [
            "no gain" if one is None else "{:.0f} ({:.0f} to {:.0f})".format(*(100 * x for x in one))
            for one in found
        ]
        middle = f"{mean(shares):.1f}" + (f" ({stdev(shares):.1f})" if len(runs) > 1 else "")
        yield f"| {' | '.join([LABELS[row], middle, *cells])} |"


def kept_shares(runs: list[dict], row: str) -> list[float]:
    """What a row keeps of the specialists' mean gain over the base, sampled, in %, a number a seed."""
    levels = (means(runs, one, "sampled") for one in (row, "base", "specialists"))
    return [100 * (value - base) / (best - base) for value, base, best in zip(*levels, strict=True)]


def plot(runs: list[dict], out: Path) -> None:
    """Each row's mean with the interval of its answers' noise; a small dot a seed, greedy as a ring."""
    rows = rows_of(runs)
    figure, axes = plt.subplots(figsize=(7.5, 0.42 * len(rows) + 0.9), layout="constrained")
    for y, row in enumerate(reversed(rows)):
        colour = "tab:orange" if row == "merged" else "tab:blue"
        value, low, high = (100 * bound for bound in mean_accuracy(pooled(runs, row, "sampled")))
        axes.errorbar(value, y, xerr=[[value - low], [high - value]], fmt="o", color=colour, capsize=3)
        seeds = means(runs, row, "sampled")
        axes.plot(seeds, [y + 0.22] * len(seeds), ".", color=colour, alpha=0.5)
        axes.plot(mean(means(runs, row, "greedy")), y, "o", markerfacecolor="none", color="gray")
    axes.set_yticks(range(len(rows)), [LABELS[row].strip("*") for row in reversed(rows)], fontsize=8)
    axes.set(xlabel="right answers, mean over domains (%); rings: greedy, dots: seeds", xlim=(0, 102))
    axes.grid(axis="x", alpha=0.25)
    figure.savefig(out, dpi=140)


def _numbers(values: Iterable[float]) -> str:
    return _list(f"{value:.1f}" for value in values)


def _list(words: Iterable[str]) -> str:
    return " / ".join(words)


def load(example: str) -> list[dict]:
    """The results of every seed in the example's `results/`, by seed."""
    paths = (EXAMPLES / example / "results").glob("seed-*.json")
    return sorted((json.loads(path.read_text("utf-8")) for path in paths), key=lambda run: run["seed"])


def take(example: str, run: Path) -> None:
    """Keep a finished run's results."""
    told = (run / "results.json").read_text("utf-8")
    # Where the run lay is of no interest to others.
    told = told.replace(f"{run.resolve()}", ".").replace(f"{Path.cwd()}/", "")
    results = json.loads(told)
    soft = Path(f"{run}-soft/results.json")
    if soft.is_file():  # the same merge on the teachers' answers
        others = json.loads(soft.read_text("utf-8"))["models"]
        results["models"] += [one | {"name": "soft_labels"} for one in others if one["name"] == "merged"]
        told = json.dumps(results, indent=1) + "\n"
    (EXAMPLES / example / "results" / f"seed-{results['seed']}.json").write_text(told, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("example", choices=("quickstart", "real_model", "five_tasks"))
    parser.add_argument("runs", nargs="*", type=Path, help="finished run folders")
    given = parser.parse_args()
    for run in given.runs:
        if (run / "results.json").is_file():
            take(given.example, run)
        else:
            print(f"{run} is no finished run and is left out: it has no results.json", file=sys.stderr)
    runs = load(given.example)
    print("\n".join(table(runs)))
    if given.example == "five_tasks":
        print("", *kept(runs), sep="\n")
    plot(runs, EXAMPLES / given.example / "results" / "accuracy.png")


if __name__ == "__main__":
    main()
