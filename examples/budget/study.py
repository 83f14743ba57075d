"""Merges whose domains' shares stay against merges that steer them, at equal tokens.

    .venv/bin/python examples/budget/study.py --seeds 0 1 2
    .venv/bin/python examples/budget/study.py --table

Goes on where it stopped when it is started again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from opd.config.load import load_recipe
from opd.metrics import read_metrics
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_pipeline

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
DOMAINS = ("sort", "reverse", "add3")
GAP = ["--distill.budget.type", "gap", "--distill.budget.gain", "0.5"]
ARMS = {
    "static": [],
    "by hand": ["--domains.sort.weight", "2"],
    "gap": GAP,
    "gap, prompts": [*GAP, "--distill.budget.moves", "prompts"],
    "progress": ["--distill.budget.type", "progress"],
    "gradient": ["--distill.budget.type", "gradient"],
}
"""Name -> words of the command line. The first one trains the specialists of all."""


def run(out: Path, words: list[str]) -> dict[str, Any]:
    """Run the recipe with `words` in `out` to its end, and return its results."""
    recipe = load_recipe([HERE / "recipe.yaml"], words)
    opened = RunFolder.resume(out, recipe) if out.exists() else RunFolder.create(out, recipe)
    with opened as folder:
        run_pipeline(recipe, folder)
    return json.loads((out / "results.json").read_text())


def accuracies(result: dict[str, Any], model: str) -> dict[str, float]:
    """Return the sampled accuracy of `model` in each domain that it was measured in."""
    domains = next(one["domains"] for one in result["models"] if one["name"] == model)
    return {name: domains[name]["sampled"]["accuracy"] for name in DOMAINS if name in domains}


def study_seed(out: Path, seed: int) -> dict[str, Any]:
    """Run every arm of a seed, all with the specialists of the first."""
    first = run(out / "static", ["--seed", str(seed)])
    taught = {name: accuracies(first, f"specialist:{name}")[name] for name in DOMAINS}
    given = ["--seed", str(seed), "--base", "null", "--model.config", "null"]
    given += ["--model.path", str(out / "static" / "base")]
    for name in DOMAINS:
        given += [f"--teachers.{name}.path", str(out / "static" / "specialists" / name)]
    found: dict[str, Any] = {"base": accuracies(first, "base"), "specialists": taught, "arms": {}}
    for arm, words in ARMS.items():
        goals = [f"--distill.budget.goals={json.dumps(taught)}"] if "gap" in words else []
        folder = out / arm.replace(", ", "-").replace(" ", "-")
        result = first if arm == "static" else run(folder, [*given, *words, *goals])
        rows = read_metrics(folder / "stages" / "merge" / "metrics.jsonl")
        kind = "budget_prompts" if "prompts" in words else "budget_weight"
        shares = {
            name: [row[f"{kind}/{name}"] for row in rows if f"{kind}/{name}" in row] for name in DOMAINS
        }
        found["arms"][arm] = {
            "accuracy": accuracies(result, "merged"),
            "tokens": rows[-1]["tokens/student"],
            "shares": {name: fmean(values) for name, values in shares.items() if values},
        }
    return found


def spread(values: list[float]) -> str:
    """Format mean and standard deviation in percent."""
    if len(values) == 1:
        return f"{100 * values[0]:.1f}"
    return f"{100 * fmean(values):.1f} ({100 * stdev(values):.1f})"


def tables() -> list[str]:
    """Return the lines of the README's table, of the seeds that are measured."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("seed-*.json"))]
    if not found:
        return []
    header = ["worst domain", "less `static`, by seed", "mean", *DOMAINS, "mean shares", "tokens"]
    lines = [f"| seeds: {len(found)} | {' | '.join(header)} |", "|---" * (len(header) + 1) + "|"]
    for name in ("base", "specialists"):
        each = [[one[name][domain] for one in found] for domain in DOMAINS]
        of_seed = list(zip(*each, strict=True))
        cells = [spread(list(map(min, of_seed))), "", spread(list(map(fmean, of_seed))), *map(spread, each)]
        lines.append(f"| {name} | {' | '.join(cells)} | | |")
    for name in ARMS:
        rows = [one["arms"][name] for one in found]
        worst = [min(row["accuracy"].values()) for row in rows]
        still = [min(one["arms"]["static"]["accuracy"].values()) for one in found]
        gains = [f"{100 * (ours - other):+.1f}" for ours, other in zip(worst, still, strict=True)]
        shares = [fmean(row["shares"][d] for row in rows) for d in DOMAINS if d in rows[0]["shares"]]
        cells = [
            spread(worst),
            ", ".join(gains) if name != "static" else "",
            spread([fmean(row["accuracy"].values()) for row in rows]),
            *(spread([row["accuracy"][domain] for row in rows]) for domain in DOMAINS),
            ", ".join(f"{100 * share / sum(shares):.0f} %" for share in shares),
            f"{fmean(row['tokens'] for row in rows):,.0f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/budget"))
    parser.add_argument("--table", action="store_true", help="print the table of what is measured")
    options = parser.parse_args()
    for seed in () if options.table else options.seeds:
        found = study_seed(options.out / str(seed), seed)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"seed-{seed}.json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
