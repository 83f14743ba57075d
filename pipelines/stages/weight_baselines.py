"""Merging by arithmetic on weights: average, task arithmetic, TIES, DARE, with coefficients chosen fairly."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from opd.algorithms import weight_merge
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.evaluation.accuracy import prompt_accuracy
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.student import load_model, make_writer, sampling_params, tokenizer_of
from opd.pipelines.stages.teachers import whole_teacher
from opd.protocols import RolloutEngine
from opd.teachers.schedule import Router

Weights = dict[str, Tensor]


def merge_weights(context: StageContext, method: str) -> dict[str, Any]:
    """Merge the teachers' weights by `method` and write the model; returns the result numbers.

    Scaling coefficients are chosen by sampled accuracy on *training* prompts, never on held-out ones.
    """
    started = time.perf_counter()
    recipe, config = context.recipe, context.recipe.baselines
    base_path = context.model("base")
    base = dict(load_model(recipe, base_path).weights())
    teachers = Router.from_recipe(recipe).teachers
    tokenizer = tokenizer_of(recipe, base_path)
    experts = [
        dict(load_model(recipe, whole_teacher(context, name), tokenizer=tokenizer).weights())
        for name in teachers
    ]
    merges: dict[str, Callable[[float], Weights]] = {
        "average": lambda scale: weight_merge.average(experts),
        "task_arithmetic": lambda scale: weight_merge.task_arithmetic(base, experts, scale),
        "ties": lambda scale: weight_merge.ties(base, experts, config.density, scale),
        "dare": lambda scale: weight_merge.dare(base, experts, config.density, scale, recipe.seed),
    }
    scales = [1.0] if method == "average" else config.scales
    model = load_model(recipe, base_path)
    scores: dict[float, float] = {}
    if len(scales) > 1:
        data = DomainSet.open(recipe, tokenizer, context.note)
        engine = make_writer(recipe, load_model(recipe, base_path), tokenizer)
        for version, scale in enumerate(scales, start=1):
            scores[scale] = _training_accuracy(context, engine, data, merges[method](scale), version)
            context.progress(
                version, len(scales), f"scale {scale:g}: {scores[scale]:.1%} on training prompts"
            )
    best = max(scores, key=lambda scale: scores[scale]) if scores else scales[0]
    model.load_weights(merges[method](best).items())
    settings = {} if method == "average" else {"scale": best}
    if method in ("ties", "dare"):
        settings["density"] = config.density
    save_checkpoint(model, tokenizer, context.model_path(method), context.card({"settings": settings}))
    return {
        "steps": 0,
        "student_tokens": 0,
        "seconds": time.perf_counter() - started,
        "phases": {},
        "counters": {},
        "settings": settings,
        "training_accuracy": {f"{scale:g}": accuracy for scale, accuracy in scores.items()},
        "digest": model.digest(),
    }


def _training_accuracy(
    context: StageContext, engine: RolloutEngine, data: DomainSet, weights: Weights, version: int
) -> float:
    """Mean sampled accuracy of `weights` over the domains, on training prompts."""
    recipe = context.recipe
    engine.pause()
    engine.flush()
    engine.update_weights(weights.items(), version)
    engine.resume()
    accuracies = []
    for domain in recipe.domains:
        prompts = data.take(domain, 0, recipe.baselines.tuning_prompts, f"tune-{context.stage}")
        sampling = sampling_params(recipe, data.tokenizer)
        found = prompt_accuracy(engine, data, prompts, sampling, seed=recipe.seed)
        accuracies.append(found.accuracy)
    return sum(accuracies) / len(accuracies)
