"""The quick start's merge with every schedule: accuracy at equal tokens, over several seeds.

    python tests/bench/async_accuracy.py runs/quickstart-0 runs/quickstart-1 ... [--out FOLDER] [--json FILE]

The folders are finished runs of `examples/quickstart/recipe.yaml`, one for each seed: their base and
specialists are merged again with each schedule, by an ordinary `opd run` below `--out`; one that is finished
is not run again. Accuracy is of sampled answers to the held-out prompts, as mean over the domains. The
difference is to `in turn` with the same seed; its standard error is over the seeds.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from opd.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("examples/quickstart/recipe.yaml", "examples/merge_study/merge_only.yaml")
SCHEDULES = {
    "in turn": {"schedule": "in_turn"},
    "ahead": {"schedule": "ahead"},
    "async 4": {"schedule": "async", "max_ahead": 4},
}


def merge(whole: Path, schedule: str, out: Path) -> Path:
    """One merge of the specialists in the run folder `whole`; returns its run folder."""
    seed = json.loads((whole / "config.json").read_text())["seed"]
    done = out / f"{schedule.replace(' ', '-')}-{seed}"
    if (done / "report.html").exists():
        return done
    teachers = {path.name: {"path": str(path)} for path in sorted((whole / "specialists").iterdir())}
    words = [*(str(ROOT / name) for name in RECIPES), "--seed", str(seed), "--teachers", json.dumps(teachers)]
    words += ["--model.path", str(whole / "base"), "--out", str(done)]
    for name, value in SCHEDULES[schedule].items():
        words += [f"--rollout.{name}", str(value)]
    resume = ["--resume"] if done.exists() else []
    command = [sys.executable, "-m", "opd.pipelines.cli", "run", *words, *resume]
    done.parent.mkdir(parents=True, exist_ok=True)
    with (out / f"{done.name}.log").open("a") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    return done


def read(done: Path) -> dict[str, Any]:
    """Accuracy, tokens and ages of one merge."""
    models = json.loads((done / "results.json").read_text())["models"]
    (merged,) = (model for model in models if model["name"] == "merged")
    rows = read_metrics(done / "stages" / "merge" / "metrics.jsonl")
    domains = {name: found["sampled"]["accuracy"] for name, found in merged["domains"].items()}
    return {
        "accuracy": statistics.mean(domains.values()),
        "domains": domains,
        "prompts": sum(found["sampled"]["total"] for found in merged["domains"].values()),
        "tokens": merged["student_tokens"],
        "mean_age": statistics.mean(row.get("staleness/mean", 0.0) for row in rows),
        "oldest": max(row.get("staleness/max", 0.0) for row in rows),
    }


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """By schedule: means over the seeds, and the paired difference to `in turn` with its standard error."""
    result = {}
    for name, runs in found.items():
        apart = [own["accuracy"] - base["accuracy"] for own, base in zip(runs, found["in turn"], strict=True)]
        error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
        result[name] = {
            "accuracy": statistics.mean(run["accuracy"] for run in runs),
            "difference": statistics.mean(apart),
            "standard_error": error,
            "tokens": statistics.mean(run["tokens"] for run in runs),
            "mean_age": statistics.mean(run["mean_age"] for run in runs),
            "oldest": max(run["oldest"] for run in runs),
            "seeds": runs,
        }
    return result


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| schedule | accuracy | against in turn, points | tokens | mean age | oldest token |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in result.items():
        apart, error = 100 * one["difference"], 100 * one["standard_error"]
        lines.append(
            f"| {name} | {100 * one['accuracy']:.2f} % | {apart:+.2f} ± {error:.2f} | {one['tokens']:,.0f}"
            f" | {one['mean_age']:.2f} | {one['oldest']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("runs/async-accuracy"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = [path.resolve() for path in options.runs]
    found = {name: [read(merge(run, name, options.out)) for run in runs] for name in SCHEDULES}
    result = summary(found)
    print(table(result))
    if options.json:
        machine = {"cores": os.cpu_count(), "arch": platform.machine(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"schedules": result, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
