"""One stage of a tiny recipe, whose student writes on whatever engine a test names."""

import json

from recipes import tiny_recipe

from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage

FEW = {"steps": 4, "prompts_per_domain": 4, "checkpoint_every": 2, "teachers": "local"}


def run(out, stage, engine, served_models, **changes):
    """Run one stage of a tiny recipe; the metrics of its steps."""
    teacher = {"path": str(served_models["b"])}
    rollout = {"engine": engine, "max_new_tokens": 12, "max_sequence": 40} | changes.pop("rollout", {})
    settings = {
        "model": {"path": str(served_models["a"])},
        "base": None,
        "teachers": {"sort": teacher, "add3": teacher},
        "distill": FEW,
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 8, "every": 4, "curve_prompts": 4},
    }
    recipe = tiny_recipe(**(settings | {"rollout": rollout} | changes))
    opened = RunFolder.resume(out, recipe) if out.exists() else RunFolder.create(out, recipe)
    with opened as folder:
        run_stage(recipe, folder, stage)
    metrics = out / f"stages/{stage}/metrics.jsonl"
    # An evaluation has no steps.
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
