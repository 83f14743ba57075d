"""A merge that begins with soft labels where teachers are foreign, against merges that do not.

    .venv/bin/python examples/warm_up/study.py --seeds 0 1 2
    .venv/bin/python examples/warm_up/study.py --table      # and draws results/curves.png

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
from opd.pipelines.evaluation.statistics import paired_interval
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_pipeline, run_stage

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
DOMAINS = ("sort", "reverse", "add3")
FOREIGN = ("sort", "reverse")
TEACHER = ["--base.right", "1", "--base.wrong_rule", "0", "--base.steps", "400"]
LONG = ("--distill.steps", "180", "--evaluation.every", "15")
ARMS = {
    "none": [],
    "warm-up, 10 steps": ["--distill.warm_up.steps", "10"],
    "warm-up, 20 steps": ["--distill.warm_up.steps", "20"],
    "soft labels": ["--distill.prefixes", "teacher", "--distill.loss.kind", "forward"],
    "none, 180 steps": [*LONG],
    "warm-up, 20 of 180 steps": ["--distill.warm_up.steps", "20", *LONG],
}
"""Name -> words of the command line."""
AGAINST = {name: "none, 180 steps" if "180" in name else "none" for name in ARMS}
"""Name -> the arm without a warm-up of as many steps."""
STYLES = (
    *(("#2f6fc8", "-"), ("#7a4fb5", "-"), ("#7a4fb5", "--"), ("#c8442f", "--")),
    *(("#2f6fc8", ":"), ("#7a4fb5", ":")),
)


def open_run(out: Path, words: list[str]) -> Any:
    """Return the recipe with `words`, and its run folder `out`, begun or gone on with."""
    recipe = load_recipe([HERE / "recipe.yaml"], words)
    return recipe, RunFolder.resume(out, recipe) if out.exists() else RunFolder.create(out, recipe)


def train_base(out: Path, words: list[str]) -> Path:
    """Return a model that was trained on demonstrations alone."""
    recipe, opened = open_run(out, words)
    with opened as folder:
        run_stage(recipe, folder, "base")
    return out / "base"


def accuracies(result: dict[str, Any], model: str) -> dict[str, float]:
    """Return the sampled accuracy of `model` in each domain."""
    domains = next(one["domains"] for one in result["models"] if one["name"] == model)
    return {name: domains[name]["sampled"]["accuracy"] for name in DOMAINS}


def study_seed(out: Path, seed: int) -> dict[str, Any]:
    """Run every arm of a seed, all from one base and with one teacher of another seed."""
    base = train_base(out / "base", ["--seed", str(seed)])
    teacher = train_base(out / "teacher", ["--seed", str(100 + seed), *TEACHER])
    given = ["--seed", str(seed), "--base", "null", "--model.config", "null", "--model.path", str(base)]
    for name in DOMAINS:
        given += [f"--teachers.{name}.path", str(teacher), f"--teachers.{name}.type", "local"]
    found: dict[str, Any] = {}
    for arm, words in ARMS.items():
        folder = out / arm.replace(", ", "-").replace(" ", "-")
        recipe, opened = open_run(folder, [*given, *words])
        with opened as run:
            run_pipeline(recipe, run)
        result = json.loads((folder / "results.json").read_text())
        rows = read_metrics(folder / "stages" / "merge" / "metrics.jsonl")
        curve = [
            [row["tokens/student"], *(row[f"accuracy/{name}"] for name in DOMAINS)]
            for row in rows
            if f"accuracy/{DOMAINS[0]}" in row
        ]
        found[arm] = {
            "accuracy": accuracies(result, "merged"),
            "tokens": rows[-1]["tokens/student"],
            "first": {name: rows[0][f"kl/{name}"] for name in DOMAINS},
            "began": [name for name in DOMAINS if f"warm_up/{name}" in rows[1]],
            "curve": curve,
        }
    found["base"] = accuracies(result, "base")
    return found


def spread(values: list[float]) -> str:
    """Format mean and standard deviation in percent."""
    return f"{100 * fmean(values):.1f}" + (f" ({100 * stdev(values):.1f})" if len(values) > 1 else "")


def foreign(accuracy: dict[str, float]) -> float:
    """Return the mean accuracy of the domains whose base has the other format."""
    return fmean(accuracy[name] for name in FOREIGN)


def early(arm: str, found: dict[str, Any]) -> float:
    """Return that of step 15 of an arm's curve."""
    return fmean(found["curve"][0 if "180" in arm else 2][1:3])


def read_results() -> list[dict[str, Any]]:
    """Return what was measured, a seed each."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("seed-*.json"))]


def tables(found: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the README's tables."""
    if not found:
        return []
    arms = [name for name in ARMS if all(name in one for one in found)]
    first = [fmean(one["none"]["first"][name] for one in found) for name in DOMAINS]
    head = ["foreign domains", *DOMAINS, "after 15 steps, foreign", "tokens"]
    lines = [
        "First divergences, nats a token: "
        + ", ".join(f"{name} {value:.2f}" for name, value in zip(DOMAINS, first, strict=True)),
        "",
        f"| seeds: {len(found)} | {' | '.join(head)} |",
        "|---" * (len(head) + 1) + "|",
    ]
    base = [one["base"] for one in found]
    cells = [spread([foreign(one) for one in base]), *(spread([one[d] for one in base]) for d in DOMAINS)]
    lines.append(f"| base | {' | '.join(cells)} | | |")
    for name in arms:
        rows = [one[name] for one in found]
        cells = [
            spread([foreign(row["accuracy"]) for row in rows]),
            *(spread([row["accuracy"][domain] for row in rows]) for domain in DOMAINS),
            spread([early(name, row) for row in rows]),
            f"{fmean(row['tokens'] for row in rows):,.0f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "| against `none` of as many steps, points | foreign domains | add3 | after 15 steps, foreign |",
        "|---|---|---|---|",
    ]
    for name in (arm for arm in arms if AGAINST[arm] != arm):
        pairs = [(one[name], one[AGAINST[name]]) for one in found]
        gains = [
            [100 * (foreign(a["accuracy"]) - foreign(b["accuracy"])) for a, b in pairs],
            [100 * (a["accuracy"]["add3"] - b["accuracy"]["add3"]) for a, b in pairs],
            [100 * (early(name, a) - early(name, b)) for a, b in pairs],
        ]
        told = ["{:.1f} ({:.1f} to {:.1f})".format(*paired_interval(gain)) for gain in gains]
        lines.append(f"| {name} | {' | '.join(told)} |")
    return lines


def draw(found: list[dict[str, Any]]) -> None:
    """Draw the mean held-out curves of the foreign domains against tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, (colour, line) in zip(ARMS, STYLES, strict=True):
        if not all(name in one for one in found):
            continue
        curves = [one[name]["curve"] for one in found]
        tokens = [fmean(points) for points in zip(*([row[0] for row in c] for c in curves), strict=True)]
        right = [
            fmean(points) for points in zip(*([fmean(row[1:3]) for row in c] for c in curves), strict=True)
        ]
        axes.plot(tokens, [100 * value for value in right], line, color=colour, label=name)
        for curve in curves:
            axes.plot([r[0] for r in curve], [100 * fmean(r[1:3]) for r in curve], color=colour, alpha=0.2)
    axes.set(xlabel="response tokens learnt from", ylabel="right, foreign domains (%)", ylim=(0, 100))
    axes.legend()
    figure.savefig(RESULTS / "curves.png", dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/warm-up"))
    parser.add_argument("--table", action="store_true", help="print the tables of what is measured")
    options = parser.parse_args()
    for seed in () if options.table else options.seeds:
        found = study_seed(options.out / str(seed), seed)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"seed-{seed}.json").write_text(json.dumps(found) + "\n")
    found = read_results()
    print("\n".join(tables(found)))
    if found:
        draw(found)


if __name__ == "__main__":
    main()
