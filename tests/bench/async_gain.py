"""Wall-clock time of one merge with the three schedules, where response lengths are long-tailed.

    export PYTHONPATH=tests/pipelines
    python tests/bench/async_gain.py [--steps 10] [--rounds 3] [--prompts 24] [--apart] [--models FOLDER]
                                     [--json FILE] [--plot FILE]

Real merges of the student of `async_student.py` with two local teachers, each step from the same prompts,
all in one process. `in turn` with one and with two threads, `ahead`, and `async` up to one and two batches
early. Rounds take the schedules in another order each time. Means over the steps but the first two.

engine, trainer   share of the time in which it was at work (the rest it waited), and in brackets the share
                  in which its thread had a processor: between them it waited for the interpreter or a core.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KMP_BLOCKTIME", "0")

import numpy as np
import torch
from async_plot import draw
from async_recorder import Recorder
from async_student import DOMAINS, make_models, model_config, recipe

from opd.config import Recipe
from opd.metrics import read_metrics
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages import samples as samples_module

SCHEDULES: dict[str, dict[str, Any]] = {
    "in turn": {"rollout": {"schedule": "in_turn"}, "threads": 1},
    "in turn, 2 threads": {"rollout": {"schedule": "in_turn"}, "threads": 2},
    "ahead": {"rollout": {"schedule": "ahead"}, "threads": 1},
    "async 1": {"rollout": {"schedule": "async", "max_ahead": 1}, "threads": 1},
    "async 2": {"rollout": {"schedule": "async", "max_ahead": 2}, "threads": 1},
}
APART = {"type": "ray", "layout": "disaggregated", "engines": 1, "teachers": 0}
"""Trainer and engine each in a process of its own."""
SKIP = 2
"""First steps of a merge that are not counted: the engine of a schedule that writes ahead has no lead yet."""
Found = dict[str, list[dict[str, Any]]]
"""By schedule, what each round gave."""
STRIP = 3
"""Steps in the timeline."""


def merge_recipe(models: dict[str, Path], config: dict[str, Any], options: argparse.Namespace) -> Recipe:
    """One merge, whatever the schedule."""
    own = recipe(
        config,
        base=None,
        model={"path": str(models["student"])},
        teachers={name: {"path": str(models[name])} for name in DOMAINS},
        distill={
            "steps": options.steps,
            "prompts_per_domain": options.prompts,
            "teachers": "local",
            "checkpoint_every": 10_000,
            "optim": {"lr": 3e-4},
        },
    )
    return own


def with_schedule(own: Recipe, schedule: dict[str, Any], apart: bool) -> Recipe:
    """`own` with a schedule's settings."""
    settings = own.model_dump(mode="json")
    if apart:
        settings["launch"] = APART
    settings["rollout"] |= schedule["rollout"]
    settings["runtime"]["threads"] = schedule["threads"]
    return Recipe.model_validate(settings)


def merge_apart(own: Recipe, out: Path) -> dict[str, Any]:
    """One whole merge in two processes: what its metrics say."""
    with RunFolder.create(out, own) as folder:
        run_stage(own, folder, "merge")
    rows = read_metrics(out / "stages" / "merge" / "metrics.jsonl")
    waits = sum(row["time/rollout"] for row in rows[SKIP:])
    steps = np.diff([row["time"] for row in rows[SKIP - 1 :]]).tolist()
    return {
        "steps": steps,
        "tokens": rows[-1]["tokens/student"],
        "kl": rows[-1]["kl/mean"],
        "waits": waits / sum(steps),
        "age": statistics.mean(row.get("staleness/mean", 0.0) for row in rows[SKIP:]),
        "oldest": max(row.get("staleness/max", 0.0) for row in rows),
    }


def merge(own: Recipe, out: Path) -> dict[str, Any]:
    """One whole merge: seconds of its steps, who was at work, ages of tokens, lengths of responses."""
    recorder, ages, lengths = Recorder(), Counter[int](), []
    measured = samples_module.staleness_metrics

    def note(samples: Any, version: int) -> dict[str, float]:
        for sample in samples:
            lengths.append(len(sample.response_ids))
            ages.update((version - sample.policy_versions).tolist())
        return measured(samples, version)

    samples_module.staleness_metrics = note
    try:
        with RunFolder.create(out, own) as folder, recorder.record():
            run_stage(own, folder, "merge")
    finally:
        samples_module.staleness_metrics = measured
    rows = read_metrics(out / "stages" / "merge" / "metrics.jsonl")
    bounds = recorder.step_bounds()
    begin, end = bounds[SKIP], bounds[-1]
    strip = bounds[min(SKIP + STRIP, len(bounds) - 1)]
    return {
        "steps": np.diff(bounds)[SKIP:].tolist(),
        "tokens": rows[-1]["tokens/student"],
        "kl": rows[-1]["kl/mean"],
        "shares": recorder.shares(begin, end),
        "decode_steps": len(recorder.rows) / len(rows),
        "rows": statistics.mean(recorder.rows),
        "ages": dict(ages),
        "lengths": lengths,
        "strip": recorder.strips(begin, strip)
        | {"steps": [b - begin for b in bounds if begin <= b <= strip]},
    }


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The merges of one schedule."""
    steps = [seconds for one in rounds for seconds in one["steps"]]
    ages = sum((Counter({int(k): v for k, v in one["ages"].items()}) for one in rounds), Counter())
    written = sum(ages.values())
    return {
        "seconds_per_step": statistics.median(steps),
        "mean_seconds_per_step": statistics.mean(steps),
        "of_each_round": [statistics.mean(one["steps"]) for one in rounds],
        "tokens": [one["tokens"] for one in rounds],
        "kl_at_the_end": statistics.mean(one["kl"] for one in rounds),
        "shares": {k: statistics.median(o["shares"][k] for o in rounds) for k in rounds[0]["shares"]},
        "decode_steps_per_batch": statistics.mean(one["decode_steps"] for one in rounds),
        "rows_per_decode_step": statistics.mean(one["rows"] for one in rounds),
        "ages": {age: count / written for age, count in sorted(ages.items())},
        "strip": rounds[-1]["strip"],
    }


def summary_apart(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The merges of one schedule in two processes."""
    return {
        "mean_seconds_per_step": statistics.mean(s for one in rounds for s in one["steps"]),
        "of_each_round": [statistics.mean(one["steps"]) for one in rounds],
        "tokens": [one["tokens"] for one in rounds],
        "kl_at_the_end": statistics.mean(one["kl"] for one in rounds),
        "trainer_waits": statistics.median(one["waits"] for one in rounds),
        "mean_age": statistics.mean(one["age"] for one in rounds),
        "oldest": max(one["oldest"] for one in rounds),
    }


def in_rounds(names: list[str], models: dict[str, Path], options: argparse.Namespace) -> Found:
    """What the merges of the schedules `names` gave, `options.rounds` times in turn."""
    own = merge_recipe(models, model_config(options.hidden, options.layers), options)
    measure = merge_apart if options.apart else merge
    found: Found = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as place:
        for number in range(options.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                out = Path(place, f"{number}-{name.replace(' ', '-')}")
                found[name].append(measure(with_schedule(own, SCHEDULES[name], options.apart), out))
                print(f"{name}: {statistics.mean(found[name][-1]['steps']):.3f} s a step", file=sys.stderr)
    return found


def run_apart(models: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """The schedules with engine and trainer in two processes, one thread each."""
    names = [name for name in options.only or SCHEDULES if SCHEDULES[name]["threads"] == 1]
    found = in_rounds(names, models, options)
    return {"apart": {name: summary_apart(rounds) for name, rounds in found.items()}}


def table_apart(result: dict[str, Any]) -> str:
    """Markdown."""
    base = next(iter(result["apart"].values()))["mean_seconds_per_step"]
    lines = [
        "| engine and trainer in two processes | s a step | against in turn | trainer waits | mean age |",
        "|---|---|---|---|---|",
    ]
    for name, one in result["apart"].items():
        seconds = one["mean_seconds_per_step"]
        lines.append(
            f"| {name} | {seconds:.3f} | {base / seconds:.2f} x | {one['trainer_waits']:.0%}"
            f" | {one['mean_age']:.2f} |"
        )
    return "\n".join(lines)


def run(models: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """All schedules."""
    names = options.only or list(SCHEDULES)
    found = in_rounds(names, models, options)
    lengths = np.array(found[names[0]][0]["lengths"])
    return {
        "lengths": {
            "mean": float(lengths.mean()),
            "p50": float(np.percentile(lengths, 50)),
            "p99": float(np.percentile(lengths, 99)),
            "longest": int(lengths.max()),
        },
        "schedules": {name: summary(rounds) for name, rounds in found.items()},
    }


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lengths = result["lengths"]
    lines = [
        f"response lengths: mean {lengths['mean']:.0f}, median {lengths['p50']:.0f}, 99 % below"
        f" {lengths['p99']:.0f}, longest {lengths['longest']}",
        "",
        "| schedule | s a step | against in turn | engine | trainer | decode steps a batch | age of tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    base = next(iter(result["schedules"].values()))["mean_seconds_per_step"]
    for name, one in result["schedules"].items():
        share = one["shares"]
        ages = ", ".join(f"{age}: {100 * part:.0f} %" for age, part in one["ages"].items())
        lines.append(
            f"| {name} | {one['mean_seconds_per_step']:.3f} | {base / one['mean_seconds_per_step']:.2f} x"
            f" | {share['engine_busy']:.0%} ({share['engine_processor']:.0%})"
            f" | {share['trainer_busy']:.0%} ({share['trainer_processor']:.0%})"
            f" | {one['decode_steps_per_batch']:.0f} | {ages} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="of a merge")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=24, help="of each of two domains")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--apart", action="store_true", help="engine and trainer in processes of their own")
    parser.add_argument("--only", nargs="+", choices=list(SCHEDULES))
    parser.add_argument("--models", type=Path, default=Path("runs/async-gain"), help="made where missing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--interval", type=float, help="ms a thread may keep the interpreter from others")
    options = parser.parse_args()
    if options.interval:
        sys.setswitchinterval(options.interval / 1000)
    models = make_models(options.models, options.hidden, options.layers)
    result = (run_apart if options.apart else run)(models, options) | {
        "settings": {k: v for k, v in vars(options).items() if type(v) is int},
        "machine": {"cores": os.cpu_count(), "arch": platform.machine(), "torch": torch.__version__},
    }
    print(table_apart(result) if options.apart else table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot and not options.apart:
        draw(result, options.plot)


if __name__ == "__main__":
    main()
