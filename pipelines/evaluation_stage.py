"""The stage that measures every model of a run on held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from opd.config import Recipe
from opd.errors import CheckpointError
from opd.pipelines.context import StageContext
from opd.pipelines.domains import DomainSet
from opd.pipelines.evaluate import evaluate_model
from opd.pipelines.run_folder import RunFolder
from opd.pipelines.student import load_model, make_writer, tokenizer_of
from opd.pipelines.teachers import whole_teacher
from opd.storage.files import write_atomic


def evaluated_models(context: StageContext) -> dict[str, Path]:
    """Name -> folder of every model to measure: base, each domain's (main) teacher, merged, baselines."""
    recipe = context.recipe
    models = {"base": context.model_path("base")}
    for domain in recipe.domains:
        models[f"specialist:{domain}"] = whole_teacher(context, main_teacher(recipe, domain))
    models["merged"] = context.model_path("merged")
    for folder in sorted((context.folder.path / "baselines").glob("*/config.json")):
        models[folder.parent.name] = folder.parent
    return models


def main_teacher(recipe: Recipe, domain: str) -> str:
    """The teacher of `domain` with the largest weight."""
    weights = recipe.teacher_weights(domain)
    return max(weights, key=lambda name: weights[name])


def evaluate(context: StageContext) -> dict[str, Any]:
    """Measure every model that is there; what a killed attempt measured is kept."""
    recipe = context.recipe
    models = {name: path for name, path in evaluated_models(context).items() if path.exists()}
    if not models:
        raise CheckpointError(f"{context.folder.path} holds no model to evaluate; train one first.")
    found = measured(context.folder)
    tokenizer = tokenizer_of(recipe, next(iter(models.values())))
    data = DomainSet.open(recipe, tokenizer, context.note)
    for done, (name, path) in enumerate(models.items(), start=1):
        if name not in found:
            # A teacher from elsewhere may have another configuration, so every model gets its own engine.
            engine = make_writer(recipe, load_model(recipe, path, tokenizer=tokenizer), tokenizer)
            found[name] = evaluate_model(engine, data, recipe, _teacher(name, path))
            write_atomic(_measurements(context.folder), json.dumps(found).encode())
        accuracies = [row["sampled"]["accuracy"] for row in found[name].values()]
        context.progress(done, len(models), f"{name}: {sum(accuracies) / len(accuracies):.1%} sampled")
    return {
        "steps": len(models),
        "student_tokens": 0,
        "phases": {},
        "counters": {},
    }


def _teacher(name: str, path: Path) -> Path | None:
    return path if name.startswith("specialist:") else None


def measured(folder: RunFolder) -> dict[str, Any]:
    """Name -> accuracies of every model measured so far; empty before the first."""
    path = _measurements(folder)
    return json.loads(path.read_text()) if path.exists() else {}


def _measurements(folder: RunFolder) -> Path:
    return folder.stage("evaluate") / "models.json"
