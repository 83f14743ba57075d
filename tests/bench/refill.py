"""Steps and batch places without signal, with and without `specialist.refill`, at equal samples.

    PYTHONPATH=tests:tests/pipelines .venv/bin/python tests/bench/refill.py [--seeds 0 1 2] [--json FILE]

Two tasks, a base of a few seconds that is right now and then, and the same number of groups for both arms:
the arm that refills takes fewer steps. Both start from the same weights. Nothing here is timed.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recipes import tiny_recipe

from opd.config import Recipe
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage

PER_STEP, GROUP, STEPS, LIMIT = 4, 4, 60, 4
ARMS: dict[str, dict[str, Any]] = {"plain": {}, "refill": {"refill": {"limit": LIMIT}}}
TASKS = ("sort", "add3")


def recipe_of(seed: int, **changes: Any) -> Recipe:
    """Harder than that of the tests: strings of four digits."""
    domains = {
        name: {"source": f"procedural:{name}", "params": {"digits": 4}, "prompts": 4000} for name in TASKS
    }
    rollout = {"max_new_tokens": 8, "max_sequence": 24}
    return tiny_recipe(seed=seed, domains=domains, rollout=rollout, baselines={"methods": []}, **changes)


def rows_of(folder: Path, recipe: Recipe, task: str) -> list[dict[str, Any]]:
    """The metrics of a task's specialist."""
    with RunFolder.create(folder, recipe) as run:
        run_stage(recipe, run, f"specialist-{task}")
        return run.read_metrics(f"specialist-{task}")


def shares(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of the first `STEPS * PER_STEP` groups that an arm has taken."""
    taken = [float(row.get("refill/taken", PER_STEP)) for row in rows]
    count = int(np.searchsorted(np.cumsum(taken), STEPS * PER_STEP, side="right"))
    rows, taken = rows[:count], taken[:count]
    dead = [float(row["frac_reward_zero_std"]) for row in rows]
    kept = [
        float(row["refill/kept"]) if "refill/kept" in row else round(PER_STEP * (1 - share))
        for row, share in zip(rows, dead, strict=True)
    ]
    return {
        "steps": len(rows),
        "groups": sum(taken),
        "groups_without_signal": float(np.average(dead, weights=taken)),
        "steps_without_signal": float(np.mean([count == 0 for count in kept])),
        "places_without_signal": 1.0 - sum(kept) / (PER_STEP * len(rows)),
        "reward_at_end": float(np.mean([row["reward/mean"] for row in rows[-max(1, len(rows) // 5) :]])),
    }


def measure(seed: int, folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Task -> arm -> shares."""
    base = tiny_recipe().base
    assert base is not None
    warm = base.model_dump() | {"steps": 200, "right": 0.5, "wrong_rule": 0.3}
    start = recipe_of(seed, base=warm)
    with RunFolder.create(folder / "base", start) as run:
        run_stage(start, run, "base")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for task in TASKS:
        found[task] = {}
        for arm, own in ARMS.items():
            grpo = {
                "steps": STEPS,
                "prompts_per_step": PER_STEP,
                "group_size": GROUP,
                "minibatches": 1,
                "max_steps_without_signal": STEPS,
                "optim": {"lr": 1e-3},
            }
            model = {"path": str(folder / "base" / "base")}
            recipe = recipe_of(seed, base=None, model=model, specialist=grpo | own)
            found[task][arm] = shares(rows_of(folder / f"{task}-{arm}", recipe, task))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as scratch:
            runs.append(measure(seed, Path(scratch)))
    print("| task | arm | steps | groups without signal | steps without signal | places without signal |")
    print("|---|---|---|---|---|---|")
    for task in TASKS:
        for arm in ARMS:
            own = [run[task][arm] for run in runs]
            mean = {key: float(np.mean([row[key] for row in own])) for key in own[0]}
            cells = [f"{100 * mean[key]:.1f} %" for key in mean if key.endswith("without_signal")]
            print(f"| {task} | {arm} | {mean['steps']:.1f} | {' | '.join(cells)} |")
    if options.json:
        options.json.write_text(json.dumps({"seeds": options.seeds, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
