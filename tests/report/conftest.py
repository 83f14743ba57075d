"""A synthetic run folder. Every number in it is made up: it is test data, not a result."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd.pipelines.evaluation.statistics import Count, recovery_interval, wilson_interval

DOMAINS = ["sort", "reverse", "add3"]
TOTAL = 500
SAMPLED = {
    "base": (0.22, 0.17, 0.21),
    "specialist:sort": (0.958, 0.09, 0.31),
    "specialist:reverse": (0.12, 0.986, 0.18),
    "specialist:add3": (0.40, 0.07, 0.994),
    "merged": (0.97, 0.988, 0.996),
    "average": (0.78, 0.78, 0.95),
    "task_arithmetic": (0.78, 0.86, 0.97),
    "ties": (0.60, 0.86, 0.98),
    "dare": (0.74, 0.88, 0.98),
    "mixed_grpo": (0.82, 0.72, 0.86),
    "mixed_grpo_all": (0.98, 0.988, 0.996),
    "off_policy": (0.954, 0.978, 0.992),
}
TOKENS = {"merged": 207_360, "mixed_grpo": 207_360, "off_policy": 207_360, "mixed_grpo_all": 1_630_000}


def accuracy(share: float) -> dict[str, Any]:
    count = Count(round(share * TOTAL), TOTAL)
    value, low, high = wilson_interval(count)
    return {"correct": count.correct, "total": TOTAL, "accuracy": value, "low": low, "high": high}


def model(name: str, shares: tuple[float, ...], domains: list[str]) -> dict[str, Any]:
    kind = (
        name.partition(":")[0] if name.startswith(("base", "specialist", "teacher", "merged")) else "baseline"
    )
    return {
        "name": name,
        "kind": kind,
        "student_tokens": TOKENS.get(name, 470_000 if kind == "specialist" else 0),
        "seconds": 19.5 if kind in ("specialist", "merged") or name in TOKENS else 2.1,
        "settings": {"scale": 0.6, "density": 0.5} if name in ("ties", "dare") else {},
        "domains": {
            domain: {
                "sampled": accuracy(share),
                "greedy": accuracy(min(1.0, share + 0.4 * (1 - share))),
                "mean_length": 9.0,
            }
            for domain, share in zip(domains, shares, strict=True)
        },
    }


def results(sampled: dict[str, tuple[float, ...]] = SAMPLED, domains: list[str] = DOMAINS) -> dict[str, Any]:
    models = [model(name, shares, domains) for name, shares in sampled.items()]
    counts = {
        entry["name"]: {d: Count(v["sampled"]["correct"], TOTAL) for d, v in entry["domains"].items()}
        for entry in models
    }
    measured = [domain for domain in domains if f"specialist:{domain}" in counts]
    recovered: dict[str, dict[str, Any]] = {}
    for entry in models:
        if entry["kind"] in ("merged", "baseline"):
            own = counts[entry["name"]]
            values = {
                d: recovery_interval(own[d], counts["base"][d], counts[f"specialist:{d}"][d])
                for d in measured
            }
            recovered[entry["name"]] = {d: v._asdict() for d, v in values.items() if v}
    names = [
        "base",
        *(f"specialist-{d}" for d in domains),
        "merge",
        "baseline-mixed_grpo",
        "baseline-off_policy",
    ]
    return {
        "name": "synthetic",
        "seed": 0,
        "version": "0.1.0",
        "created": "2001-01-01T00:00:00",
        "machine": {"cpu": "Imaginary CPU", "cores": 2, "python": "3.11", "torch": "2.0"},
        "domains": domains,
        "models": models,
        "recovery": recovered,
        "stages": [stage(name) for name in [*names, "evaluate"]],
        "teachers": {domain: {"kl": 0.004, "token_share": 0.3, "grad_share": 0.5} for domain in domains},
        "counters": {"head_loads": 360, "resident_heads_peak": 1},
    }


def stage(name: str) -> dict[str, Any]:
    warm = name in ("base", "evaluate")
    phases = {"train": 38.0} if warm else {"rollout": 9.4, "score": 2.0, "train": 6.9, "sync": 0.3}
    return {
        "name": name,
        "seconds": 42.0 if warm else 19.5,
        "student_tokens": 0 if warm else 207_360 if name == "merge" or "baseline" in name else 470_000,
        "steps": 480 if name == "base" else 0 if warm else 120,
        "peak_rss_mb": 1123.4,
        "phases": phases,
    }


def metrics(name: str, steps: int = 120) -> list[dict[str, Any]]:
    """Smooth curves with noise; every value is invented."""
    rng = np.random.default_rng(sum(map(ord, name)))
    per_step = 1728 if name == "merge" or "baseline" in name else 3900
    rows = []
    for step in range(1, steps + 1):
        level = 1 - 0.8 * math.exp(-step / 25)
        row: dict[str, Any] = {"step": step, "time": 0.16 * step, "lr": 1e-3, "grad_norm": 0.4}
        if name == "base":
            rows.append({**row, "loss/ce": 0.6 + 2.4 * math.exp(-step / 30) + 0.02 * rng.normal()})
            continue
        row |= {
            "tokens/student": per_step * step,
            "reward/mean": level + 0.02 * rng.normal(),
            "time/rollout": 0.08,
        }
        row |= {
            "length/mean": 9 + 0.3 * math.exp(-step / 9),
            "entropy": 0.9 * (1.02 - level),
            "mismatch/mean_abs": 2e-7,
        }
        row |= {"mismatch/ess": 1.0, "frac_reward_zero_std": 0.1 + 0.7 * level, "policy/clip_ratio": 0.01}
        if name == "merge":
            for i, (domain, share) in enumerate(zip(DOMAINS, (0.5, 0.3, 0.2), strict=True)):
                row[f"reward/{domain}"] = level - 0.05 * i + 0.03 * rng.normal()
                row[f"kl/{domain}"] = (0.2 + 0.1 * i) * math.exp(-step / 30) + 0.004 * (
                    1 + 0.2 * rng.random()
                )
                row[f"token_share/{domain}"] = 1 / 3
                row[f"grad_share/{domain}"] = share + 0.02 * rng.normal()
        rows.append(row)
    return rows


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


RunMaker = Callable[..., Path]


def write_run(
    folder: Path, data: dict | None = None, stages: list[str] | None = None, config: dict | None = None
) -> Path:
    """A run folder that holds so much."""
    folder.mkdir()
    if data is not None:
        (folder / "results.json").write_text(json.dumps(data))
    for name in stages or []:
        write_lines(folder / "stages" / name / "metrics.jsonl", metrics(name))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> RunMaker:
    """`make_run(data=..., stages=..., config=...)` writes a run folder and returns it."""
    return functools.partial(write_run, tmp_path / "run")
