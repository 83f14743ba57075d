"""The simulated cluster against real merges on this machine: calibrated on two, asked about others.

    export PYTHONPATH=tests/pipelines
    python tests/bench/simulate_check.py [--steps 8] [--rounds 3] [--hidden 256] [--layers 6] [--json FILE]

Real merges of an untrained student with streamed teachers in this process, at several numbers of teachers,
prompts and lengths. An overhead and an efficiency for each of rollout, score and train are fitted to the
first two merges; the others are predicted from their own sizes and mean response lengths alone. The teachers'
files are in the page cache, so reading is taken as free. Medians over the steps but the first,
and of these over rounds of all merges.
"""

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from recipes import tiny_recipe

from opd.config import Recipe
from opd.metrics import read_metrics
from opd.models.causal_lm import CausalLM
from opd.pipelines.check.cluster import SimulatedCluster
from opd.pipelines.check.simulate import simulate_cluster
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages.publishing import publish_checkpoint

PHASES = ("rollout", "score", "train")
SIGMA = math.sqrt(math.log(2))
"""Of responses that end with the same probability at each token: their standard deviation is their mean."""
BYTES = 4


@dataclass(frozen=True)
class Setting:
    """One merge."""

    teachers: int
    prompts: int
    """For each teacher."""
    longest: int


SHAPES = [(2, 16, 24), (4, 48, 48), (4, 16, 24), (2, 48, 24), (2, 16, 72), (6, 32, 48), (3, 96, 72)]
SETTINGS = [Setting(*numbers) for numbers in SHAPES]
"""The first two are fitted to."""
FITTED = {
    "score": ("layer_overhead_ms", "prefill_efficiency"),
    "train": ("update_overhead_ms", "train_efficiency"),
    "rollout": ("step_overhead_ms", "decode_efficiency"),
}
"""In this order: an engine reads prompts as fast as a teacher does."""


def recipe(setting: Setting, shape: dict[str, int], steps: int, **more: Any) -> Recipe:
    """Domains `d0`, `d1` ... with a teacher each."""
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4, **shape}
    config |= {"max_position_embeddings": 256, "tie_word_embeddings": True}
    domains = {
        f"d{i}": {"source": "procedural:sort", "params": {"digits": 5}, "prompts": 2000, "teacher": f"t{i}"}
        for i in range(setting.teachers)
    }
    settings = {
        "model": {"config": config},
        "domains": domains,
        "rollout": {"max_new_tokens": setting.longest, "max_sequence": 128},
        "distill": {"steps": steps, "prompts_per_domain": setting.prompts, "checkpoint_every": 1000},
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 4, "every": 1000, "curve_prompts": 2},
        "runtime": {"threads": 1},
    }
    return tiny_recipe(**(settings | more))


def measured(setting: Setting, own: Recipe, out: Path) -> dict[str, float]:
    """Medians of a real merge."""
    with RunFolder.create(out, own) as folder:
        run_stage(own, folder, "merge")
    rows = read_metrics(out / "stages" / "merge" / "metrics.jsonl")[1:]
    found = {name: statistics.median(row[f"time/{name}"] for row in rows) for name in PHASES}
    found["step"] = statistics.median(sum(v for k, v in row.items() if k.startswith("time/")) for row in rows)
    found["length"] = statistics.mean(row["length/mean"] for row in rows)
    return found


def cluster(
    setting: Setting, model: dict[str, float], length: float, machine: dict[str, float]
) -> SimulatedCluster:
    """`setting` on one simulated device that does everything in turn."""
    shape = {
        "parameters": model["parameters"],
        "layers": int(model["layers"]),
        "hidden_size": int(model["hidden_size"]),
        "vocabulary": int(model["vocabulary"]),
        "bytes_per_parameter": BYTES,
        "cache_bytes_per_token": 2 * BYTES * model["layers"] * model["hidden_size"],
    }
    gpu = {"tflops": 1.0, "memory_gb": 24, "memory_gb_per_s": math.inf, "link_gb_per_s": math.inf}
    return SimulatedCluster.model_validate(
        {
            "gpu": gpu | machine,
            "store": {"gb_per_s": math.inf, "gb_per_s_per_rank": math.inf},
            "ranks": {"rollout": 1, "train": 1, "colocated": True},
            "student": shape,
            "teacher": shape,
            "teachers": setting.teachers,
            "prefetch_gb": 0.25,
            "lengths": {"prompt": 7, "mean": length, "sigma": SIGMA, "longest": setting.longest},
            "work": {
                "prompts": setting.teachers * setting.prompts,
                "running_per_engine": 512,
                "checkpointing": False,
                "steps": 6,
            },
        }
    )


def predicted(some: SimulatedCluster) -> dict[str, float]:
    """Medians of a simulation."""
    batches = simulate_cluster(some).batches[1:]
    found = {
        "rollout": statistics.median(batch.written - batch.opened for batch in batches),
        "score": statistics.median(batch.score_seconds for batch in batches),
        "train": statistics.median(batch.train_seconds for batch in batches),
    }
    return found | {"step": sum(found.values())}


def calibrate(
    settings: list[Setting], model: dict[str, float], real: list[dict[str, float]]
) -> dict[str, float]:
    """Overhead and efficiency of each phase, so that the simulation takes as long as two real merges. Seconds
    are a sum of an overhead's part and one that goes with 1 / efficiency: two merges give two equations, in
    shares of the merges' seconds.
    """
    machine: dict[str, float] = {}
    for phase, (overhead, efficiency) in FITTED.items():

        def ask(number: int, milliseconds: float, share: float) -> float:
            chosen = machine | {overhead: milliseconds, efficiency: share}  # noqa: B023
            some = cluster(settings[number], model, real[number]["length"], chosen)
            return predicted(some)[phase]  # noqa: B023

        rows, times = [], []
        for number, found in enumerate(real):
            fixed = ask(number, 1.0, 1.0)
            per_ms = ask(number, 2.0, 1.0) - fixed
            rest = ask(number, 0.0, 0.5) - ask(number, 0.0, 1.0)
            rows.append([per_ms, rest])
            times.append(found[phase] - (ask(number, 0.0, 1.0) - rest))
        milliseconds, inverse = fit(np.array(rows) / np.array(times)[:, None])
        machine |= {overhead: milliseconds, efficiency: 1 / max(1.0, inverse)}
    return machine


def fit(rows: np.ndarray) -> tuple[float, float]:
    """`x >= 0` [2] with `rows @ x` near 1. Without the first if an exact one were negative."""
    both = np.linalg.solve(rows, np.ones(2))
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    return 0.0, float(rows[:, 1].sum() / np.square(rows[:, 1]).sum())


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Every setting measured, the first fitted, the rest predicted."""
    shape = {
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
    }
    few = {"steps": 2, "batch_size": 8, "right": 0.7, "wrong_rule": 0.2, "optim": {"lr": 1e-4}}
    first = recipe(SETTINGS[0], shape, 1, base=few, teachers={f"t{i}": {"path": "none"} for i in range(2)})
    with RunFolder.create(folder / "base", first) as opened:
        run_stage(first, opened, "base")
    base, url = folder / "base" / "base", f"file://{folder}/published"
    publish_checkpoint(base, url, shards=1)
    loaded = CausalLM.from_pretrained(base)
    parameters = sum(p.numel() for p in loaded.module.parameters())
    vocabulary = loaded.module.get_input_embeddings().weight.shape[0]
    model = {"parameters": parameters, "layers": options.layers, "hidden_size": options.hidden}
    model["vocabulary"] = vocabulary
    seen: list[list[dict[str, float]]] = [[] for _ in SETTINGS]
    for turn in range(options.rounds):
        for number, setting in enumerate(SETTINGS):
            given = {f"t{i}": {"path": url} for i in range(setting.teachers)}
            changes: dict[str, Any] = {"model": {"path": str(base)}, "base": None, "teachers": given}
            own = recipe(setting, shape, options.steps, **changes)
            seen[number].append(measured(setting, own, folder / f"{turn}-{number}"))
    real = [{name: statistics.median(found[name] for found in own) for name in own[0]} for own in seen]
    rows = []
    machine = calibrate(SETTINGS[:2], model, real[:2])
    for setting, found in zip(SETTINGS, real, strict=True):
        said = predicted(cluster(setting, model, found["length"], machine))
        errors = {name: said[name] / found[name] - 1 for name in (*PHASES, "step")}
        rows.append({**asdict(setting), "measured": found, "predicted": said, "error": errors})
        print(
            f"{setting.teachers:8} {setting.prompts:8} {setting.longest:8}"
            + "".join(f"{found[n]:9.3f}{said[n]:9.3f}{100 * errors[n]:6.0f} %" for n in errors),
            flush=True,
        )
    return {"model": model, "fitted": machine, "rows": rows}


def main() -> None:
    """Measure, predict and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    titles = "".join(f"{name + ': real, simulated, error':>26}" for name in (*PHASES, "step"))
    print(f"{'teachers':>8} {'prompts':>8} {'longest':>8}{titles}")
    with tempfile.TemporaryDirectory() as folder:
        result = run(options, Path(folder))
    if options.json:
        machine = f"{os.cpu_count()} cores, {platform.machine()}"
        options.json.write_text(json.dumps({"machine": machine, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
