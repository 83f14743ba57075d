"""What the example's runs reach: right answers, the kept share of the specialists' gain, and the routing.

.venv/bin/python examples/mixtures/table.py                  # of what is in examples/mixtures/results/
.venv/bin/python examples/mixtures/table.py runs/mixtures    # first takes this one and those beside it there
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev

RESULTS = Path(__file__).parent / "results"
RUNS = {
    "": "mixture, its own specialists",
    "-dense": "dense, its own specialists",
    "-from-dense": "mixture, dense specialists",
    "-into-dense": "dense, the mixture's specialists",
}
"""What follows the name of the first run's folder -> student and teachers."""
ROWS = {
    "base": "base",
    "specialists": "specialists, each on its own domain",
    "merged": "**OPD, full vocabulary**",
    "off_policy": "off-policy distillation, equal tokens",
    "task_arithmetic": "task arithmetic, tuned",
    "ties": "TIES, tuned",
    "average": "weight average",
}
LAST = 10
"""Steps of a stage whose mean is its end."""


def take(run: Path) -> dict:
    """Return the figures of the four runs that one call of `run.sh` made."""
    told = {kind: json.loads(Path(f"{run}{kind}/results.json").read_text("utf-8")) for kind in RUNS}
    return {
        "seed": told[""]["seed"],
        "machine": told[""]["machine"],
        "runs": {kind: summary(Path(f"{run}{kind}"), results) for kind, results in told.items()},
    }


def summary(run: Path, results: dict) -> dict:
    """Return a run's share of right answers by model and domain, its last routing and its first KL."""
    models = {
        model["name"]: {domain: found["sampled"]["accuracy"] for domain, found in model["domains"].items()}
        for model in results["models"]
    }
    stages = {
        path.parent.name: [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for path in sorted(run.glob("stages/*/metrics.jsonl"))
    }
    routing = {
        stage: {
            key: mean(step[key] for step in steps[-LAST:]) for key in steps[-1] if key.startswith("routing/")
        }
        for stage, steps in stages.items()
    }
    return {
        "seconds": sum(stage["seconds"] for stage in results["stages"]),
        "models": models,
        "routing": {stage: found for stage, found in routing.items() if found},
        "kl": [stages["merge"][at]["kl/mean"] for at in (0, -1)],
    }


def level(models: dict, row: str) -> float:
    """Return the mean over domains in %."""
    names = {domain: f"specialist:{domain}" if row == "specialists" else row for domain in models["base"]}
    return 100 * mean(models[name][domain] for domain, name in names.items())


def accuracies(seeds: Sequence[dict]) -> Iterator[str]:
    """Yield lines of Markdown: a row a model, with the kept share of the specialists' gain."""
    count = "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
    yield f"| student, teachers | model, {count} | right, % (sd) | kept of the gain, % (sd) |"
    yield "|---|---|---|---|"
    for kind, name in RUNS.items():
        for row, label in ROWS.items():
            if row != "specialists" and any(row not in seed["runs"][kind]["models"] for seed in seeds):
                continue
            values, kept = zip(*(level_and_share(seed, kind, row) for seed in seeds), strict=True)
            yield f"| {name} | {label} | {spread(values)} | {spread(kept)} |"


def level_and_share(seed: dict, kind: str, row: str) -> tuple[float, float]:
    """Return a row's level in a run of a seed, and the share of its teachers' gain that it keeps, in %."""
    own = seed["runs"][kind]["models"]
    taught = seed["runs"][{"-from-dense": "-dense", "-into-dense": ""}.get(kind, kind)]["models"]
    value = level(taught if row == "specialists" else own, row)
    base, best = level(own, "base"), level(taught, "specialists")
    return value, 100 * (value - base) / (best - base)


def routing(seeds: Sequence[dict]) -> Iterator[str]:
    """Yield lines of Markdown: a row a stage that records choices."""
    keys = ("load_max", "load_entropy", "dead", "apart")
    yield "| student, teachers | stage | " + " | ".join(f"`routing/{key}`" for key in keys) + " |"
    yield "|---|---|" + "---|" * len(keys)
    for kind, name in RUNS.items():
        for stage in seeds[0]["runs"][kind]["routing"]:
            means = [
                mean(seed["runs"][kind]["routing"][stage][f"routing/{key}"] for seed in seeds) for key in keys
            ]
            yield f"| {name} | {stage} | {means[0]:.2f} | {means[1]:.2f} | {means[2]:.3f} | {means[3]:.4f} |"


def divergences(seeds: Sequence[dict]) -> Iterator[str]:
    """Yield lines of Markdown: a merge's KL in its first and last step."""
    yield "| student, teachers | KL, first step | KL, last step |"
    yield "|---|---|---|"
    for kind, name in RUNS.items():
        first, last = (mean(seed["runs"][kind]["kl"][at] for seed in seeds) for at in (0, 1))
        yield f"| {name} | {first:.2f} | {last:.3f} |"


def load() -> list[dict]:
    """Return what is kept of every seed, by seed."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("seed-*.json"))]


def spread(values: Sequence[float]) -> str:
    """Return a mean, and with several values their standard deviation."""
    return f"{mean(values):.1f}" + (f" ({stdev(values):.1f})" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, help="folder of the first of the four runs")
    for run in parser.parse_args().runs:
        taken = take(run)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"seed-{taken['seed']}.json").write_text(json.dumps(taken, indent=1) + "\n", "utf-8")
    seeds = load()
    if not seeds:
        parser.error(f"{RESULTS} holds no results; name the folder of a finished run")
    for lines in (accuracies(seeds), routing(seeds), divergences(seeds)):
        print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    main()
