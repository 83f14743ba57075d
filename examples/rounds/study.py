"""Two rounds against one of equal tokens, and OPD from a merge of weights against OPD from the base.

    .venv/bin/python examples/rounds/study.py --seeds 0 1 2
    .venv/bin/python examples/rounds/study.py --table

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
from opd.pipelines.run import run_pipeline, run_stage

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
SPECIALIST, MERGE = 20, 30
"""Steps of a specialist and of a merge in each of two rounds. One round has twice as many."""
STARTS = ("average", "ties", "ram_plus")
REACHED = 0.99
"""Share of the specialists' accuracy that the student is to reach."""


def run(out: Path, words: list[str], stage: str | None = None) -> dict[str, Any]:
    """Run the recipe with `words` in `out`, to its end or to `stage`, and return its results."""
    recipe = load_recipe([HERE / "recipe.yaml"], words)
    opened = RunFolder.resume(out, recipe) if out.exists() else RunFolder.create(out, recipe)
    with opened as folder:
        if stage is None:
            run_pipeline(recipe, folder)
        else:
            run_stage(recipe, folder, stage)
    return json.loads((out / "results.json").read_text())


def accuracies(models: list[dict[str, Any]]) -> dict[str, float]:
    """Return the sampled accuracy of each model, a specialist's on its own domain, else the domains' mean."""
    found = {}
    for model in models:
        rows = {name: row["sampled"]["accuracy"] for name, row in model["domains"].items()}
        found[model["name"]] = rows.get(model["name"].partition(":")[2], fmean(rows.values()))
    return found


def tokens_of(result: dict[str, Any]) -> int:
    """Return the student tokens of all stages."""
    return sum(stage.get("student_tokens", 0) for stage in result["stages"])


def tokens_to_reach(out: Path, goal: float) -> int | None:
    """Return the merge's student tokens until its held-out curve is at `goal`, `None` if it never is."""
    for row in read_metrics(out / "stages" / "merge" / "metrics.jsonl"):
        curve = [value for key, value in row.items() if key.startswith("accuracy/")]
        if curve and fmean(curve) >= goal:
            return int(row["tokens/student"])
    return None


def study_seed(out: Path, seed: int) -> dict[str, Any]:
    """Run every arm of a seed, all from one base."""
    run(out / "base", ["--seed", str(seed)], "base")
    path = ["--seed", str(seed), "--base", "null", "--model.config", "null"]
    path += ["--model.path", str(out / "base" / "base")]
    steps = {count: ["--specialist.steps", str(count * SPECIALIST), "--distill.steps", str(count * MERGE)]
             for count in (1, 2)}  # fmt: skip
    one = run(out / "one", [*path, *steps[2]])
    two = run(out / "two", [*path, *steps[1], "--rounds", "2"])
    of_one, of_two = accuracies(one["models"]), accuracies(two["models"])
    taught = fmean(value for name, value in of_one.items() if name.startswith("specialist:"))
    found = {
        "one": of_one | {"tokens": tokens_of(one)},
        "two": of_two | {"tokens": tokens_of(two)},
        "first round of two": accuracies(two["rounds"][0]["models"]),
        "goal": REACHED * taught,
        "starts": {
            "base": {"end": of_one["merged"], "tokens": tokens_to_reach(out / "one", REACHED * taught)}
        },
    }
    given = [word for name in ("sort", "add3")
             for word in (f"--teachers.{name}.path", str(out / "one" / "specialists" / name))]  # fmt: skip
    for start in STARTS:
        result = accuracies(run(out / start, [*path, *steps[2], *given, "--distill.start", start])["models"])
        reached = tokens_to_reach(out / start, REACHED * taught)
        found["starts"][start] = {"start": result[start], "end": result["merged"], "tokens": reached}
    return found


def spread(values: list[float]) -> str:
    """Format mean and standard deviation in percent."""
    return (
        f"{100 * fmean(values):.1f} ({100 * stdev(values):.1f})"
        if len(values) > 1
        else f"{100 * values[0]:.1f}"
    )


def tables() -> list[str]:
    """Return the lines of the README's tables, of the seeds that are measured."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("seed-*.json"))]
    if not found:
        return []
    lines = [f"| seeds: {len(found)} | base | specialists | merged | tokens, thousands |"]
    lines.append("|---|---|---|---|---|")
    base = spread([one["one"]["base"] for one in found])
    for name in ("one", "first round of two", "two"):
        rows = [one[name] for one in found]
        own = [fmean(v for k, v in row.items() if k.startswith("specialist:")) for row in rows]
        tokens = fmean(row.get("tokens", 0) for row in rows) / 1000
        cells = [
            name,
            base,
            spread(own),
            spread([row["merged"] for row in rows]),
            f"{tokens:.0f}" if tokens else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    gaps = ", ".join(f"{100 * (one['two']['merged'] - one['one']['merged']):+.1f}" for one in found)
    lines += ["", f"Two rounds minus one, by seed, points: {gaps}", ""]
    lines.append("| start | its accuracy | tokens to 99 % of the specialists, by seed | at the end |")
    lines.append("|---|---|---|---|")
    for name in ("base", *STARTS):
        rows = [one["starts"][name] for one in found]
        begins = [row.get("start", one["one"]["base"]) for row, one in zip(rows, found, strict=True)]
        reached = ", ".join(str(row["tokens"] or "never") for row in rows)
        lines.append(f"| {name} | {spread(begins)} | {reached} | {spread([row['end'] for row in rows])} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/rounds"))
    parser.add_argument("--table", action="store_true", help="print the tables of what is measured")
    options = parser.parse_args()
    for seed in () if options.table else options.seeds:
        found = study_seed(options.out / str(seed), seed)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"seed-{seed}.json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
