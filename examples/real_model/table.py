"""The table of this example, from the `results.json` of one run or several.

.venv/bin/python examples/real_model/table.py                       # of what is in results/
.venv/bin/python examples/real_model/table.py runs/real-model*      # first takes these finished runs there
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from opd.pipelines.evaluation.statistics import Count, mean_difference

RESULTS = Path(__file__).with_name("results")
LABELS = {
    "base": "base",
    "specialists": "specialists, each on its own domain",
    "merged": "**OPD, full vocabulary**",
    "off_policy": "off-policy distillation, equal tokens",
    "ties": "TIES, tuned",
    "average": "weight average",
    "mixed_grpo": "mixed-domain GRPO, equal tokens",
}


def counts(results: dict, row: str, way: str) -> list[Count]:
    """Right answers of a row's models, one count a domain; `way` is `sampled` or `greedy`."""
    models = {model["name"]: model["domains"] for model in results["models"]}
    names = {domain: f"specialist:{domain}" if row == "specialists" else row for domain in results["domains"]}
    found = [models[name][domain][way] for domain, name in names.items()]
    return [Count(one["correct"], one["total"]) for one in found]


def pooled(runs: list[dict], row: str, way: str) -> list[Count]:
    """The same over all runs."""
    of_runs = [counts(run, row, way) for run in runs]
    return [
        Count(sum(one.correct for one in column), sum(one.total for one in column))
        for column in zip(*of_runs, strict=True)
    ]


def table(runs: list[dict]) -> Iterator[str]:
    """Lines of Markdown."""
    seeds = f"{len(runs)} seed" + "s" * (len(runs) > 1)
    yield f"| {seeds} | mean | {' / '.join(runs[0]['domains'])} | greedy | OPD is ahead by |"
    yield "|---|---|---|---|---|"
    merged = pooled(runs, "merged", "sampled")
    for row, label in LABELS.items():
        found = pooled(runs, row, "sampled")
        domains = " / ".join(f"{100 * one.accuracy:.1f}" for one in found)
        greedy = mean(100 * one.accuracy for one in pooled(runs, row, "greedy"))
        value, low, high = (100 * number for number in mean_difference(merged, found))
        ahead = "" if row == "merged" else f"{value:+.1f} ({low:+.1f} to {high:+.1f})"
        middle = mean(100 * one.accuracy for one in found)
        yield f"| {label} | {middle:.1f} | {domains} | {greedy:.1f} | {ahead} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, help="finished run folders")
    for run in parser.parse_args().runs:
        told = (run / "results.json").read_text("utf-8")
        # Where the run lay is of no interest to others.
        told = told.replace(f"{run.resolve()}", ".").replace(f"{Path.cwd()}/", "")
        (RESULTS / f"seed-{json.loads(told)['seed']}.json").write_text(told, "utf-8")
    print("\n".join(table([json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("*.json"))])))


if __name__ == "__main__":
    main()
