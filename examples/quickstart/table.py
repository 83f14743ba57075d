"""The README's table over several seeds of the quick start, from the `results.json` of each.

.venv/bin/python examples/quickstart/table.py                       # of what is in results/
.venv/bin/python examples/quickstart/table.py runs/quickstart-*     # first takes these finished runs there
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean, stdev

RESULTS = Path(__file__).with_name("results")
LABELS = {
    "base": "base",
    "specialists": "specialists, each on its own domain",
    "merged": "**OPD, full vocabulary**",
    "off_policy": "off-policy distillation, equal tokens",
    "mixed_grpo": "mixed-domain GRPO, equal tokens",
    "task_arithmetic": "task arithmetic, tuned",
    "average": "weight average",
    "dare": "DARE, tuned",
    "ties": "TIES, tuned",
}


def accuracies(results: dict, row: str, way: str) -> list[float]:
    """Accuracy in % of a row's models, one number a domain; `way` is `sampled` or `greedy`."""
    models = {model["name"]: model["domains"] for model in results["models"]}
    names = {domain: f"specialist:{domain}" if row == "specialists" else row for domain in results["domains"]}
    return [100 * models[name][domain][way]["accuracy"] for domain, name in names.items()]


def table(seeds: dict[int, dict]) -> Iterator[str]:
    """Lines of Markdown: `seeds` is each seed's results."""
    runs = [seeds[seed] for seed in sorted(seeds)]
    yield f"| {len(runs)} seeds | mean (sd) | lowest / highest seed | {_list(runs[0]['domains'])} | greedy |"
    yield "|---|---|---|---|---|"
    for row, label in LABELS.items():
        sampled = [accuracies(run, row, "sampled") for run in runs]
        of_seed = [mean(found) for found in sampled]
        middle = f"{mean(of_seed):.1f}" + (f" ({stdev(of_seed):.1f})" if len(runs) > 1 else "")
        greedy = mean(mean(accuracies(run, row, "greedy")) for run in runs)
        domains = [mean(column) for column in zip(*sampled, strict=True)]
        middle = f"**{middle}**" if row == "merged" else middle
        cells = [label, middle, _numbers((min(of_seed), max(of_seed))), _numbers(domains)]
        yield f"| {' | '.join(cells)} | {greedy:.1f} |"


def _numbers(values: Iterable[float]) -> str:
    return _list(f"{value:.1f}" for value in values)


def _list(words: Iterable[str]) -> str:
    return " / ".join(words)


def load() -> dict[int, dict]:
    """Seed -> results, of every file in `results/`."""
    found = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("seed-*.json"))]
    return {results["seed"]: results for results in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, help="finished run folders")
    for run in parser.parse_args().runs:
        told = (run / "results.json").read_text("utf-8")
        seed = json.loads(told)["seed"]
        # Where the run lay is of no interest to others.
        (RESULTS / f"seed-{seed}.json").write_text(told.replace(f"{run.resolve()}", "."), "utf-8")
    print("\n".join(table(load())))


if __name__ == "__main__":
    main()
