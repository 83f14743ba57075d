"""Merging by arithmetic on weights: average, task arithmetic, TIES, DARE, with coefficients chosen fairly.

A model is a dict of tensors. All take the base and its fine-tuned experts with equal names and shapes,
compute in float32 and return new tensors in the base's dtype. Tensors that are not floating point are copied
from the base.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.errors import ModelError
from opd.models.checkpoint import save_checkpoint
from opd.pipelines.evaluation.measure import prompt_accuracy
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.student import Writer, load_model, make_writer, tokenizer_of, ways_of
from opd.pipelines.stages.teachers import whole_teacher
from opd.teachers.schedule import Router

Weights = Mapping[str, Tensor]


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
        "average": lambda scale: average(experts),
        "task_arithmetic": lambda scale: task_arithmetic(base, experts, scale),
        "ties": lambda scale: ties(base, experts, config.density, scale),
        "dare": lambda scale: dare(base, experts, config.density, scale, recipe.seed),
    }
    scales = [1.0] if method == "average" else config.scales
    model = load_model(recipe, base_path)
    scores: dict[float, float] = {}
    if len(scales) > 1:
        data = DomainSet.open(recipe, tokenizer)
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
    context: StageContext, engine: Writer, data: DomainSet, weights: Weights, version: int
) -> float:
    """Mean sampled accuracy of `weights` over the domains, on training prompts."""
    recipe = context.recipe
    engine.pause()
    engine.flush()
    engine.update_weights(weights.items(), version)
    engine.resume()
    accuracies, ways = [], ways_of(recipe, data.tokenizer)
    for domain in recipe.domains:
        prompts = data.take(domain, 0, recipe.baselines.tuning_prompts, f"tune-{context.stage}")
        found = prompt_accuracy(engine, data, prompts, ways[domain], seed=recipe.seed)
        accuracies.append(found.accuracy)
    return sum(accuracies) / len(accuracies)


def average(models: Sequence[Weights]) -> dict[str, Tensor]:
    """The mean of `models` (model soup: Wortsman et al. 2022, 2203.05482)."""
    if not models:
        raise ModelError("no models to average; give at least one")
    first = models[0]
    return _merge(first, models, lambda _, deltas: deltas.mean(0))


def task_arithmetic(base: Weights, experts: Sequence[Weights], scale: float) -> dict[str, Tensor]:
    """`base + scale * sum_i (expert_i - base)` (Ilharco et al. 2023, 2212.04089)."""
    return _merge(base, experts, lambda _, deltas: scale * deltas.sum(0))


def ties(base: Weights, experts: Sequence[Weights], density: float, scale: float) -> dict[str, Tensor]:
    """Trim, elect sign, merge (Yadav et al. 2023, 2306.01708, section 3 and algorithm 1).

    1. Of each task vector `expert - base`, over all tensors together, keep the share `density` of largest
    magnitude. 2. Each parameter takes the sign with the larger total magnitude. 3. Average the kept values of
    that sign; `base + scale * average`. A parameter whose kept values cancel exactly stays at the base.
    """
    _check_density(density)
    _check_alike(base, experts)
    thresholds = torch.tensor([_trim_threshold(base, expert, density) for expert in experts])

    def merge(_: str, deltas: Tensor) -> Tensor:
        per_expert = thresholds.to(deltas.device).reshape(-1, *([1] * (deltas.dim() - 1)))
        kept = torch.where(deltas.abs() >= per_expert, deltas, 0.0)
        agrees = (kept.sign() == kept.sum(0).sign()) & (kept != 0)
        return scale * torch.where(agrees, kept, 0.0).sum(0) / agrees.sum(0).clamp(min=1)

    return _merge(base, experts, merge)


def dare(
    base: Weights, experts: Sequence[Weights], density: float, scale: float, seed: int
) -> dict[str, Tensor]:
    """Drop and rescale, then task arithmetic (DARE: Yu et al. 2024, 2311.03099, section 3.2).

    Each element of a task vector survives with probability `density` and is divided by it, so the expectation
    is that of `task_arithmetic`. The draw depends on (seed, expert's index, tensor name) alone: not on the
    order of the tensors, nor on which others there are.
    """
    _check_density(density)

    def merge(name: str, deltas: Tensor) -> Tensor:
        total = torch.zeros_like(deltas[0])
        for index, delta in enumerate(deltas):
            total += delta * _survivors(delta.shape, density, seed, f"{index}:{name}").to(delta.device)
        return (scale / density) * total

    return _merge(base, experts, merge)


def _merge(
    base: Weights, experts: Sequence[Weights], merge: Callable[[str, Tensor], Tensor]
) -> dict[str, Tensor]:
    """`base + merge(name, deltas [E, ...])` for every floating-point tensor."""
    _check_alike(base, experts)
    merged = {}
    for name, tensor in base.items():
        if not tensor.is_floating_point():
            merged[name] = tensor.detach().clone()
            continue
        start = tensor.detach().float()
        deltas = torch.stack([expert[name].detach().float() - start for expert in experts])
        merged[name] = (start + merge(name, deltas)).to(tensor.dtype)
    return merged


def _trim_threshold(base: Weights, expert: Weights, density: float) -> float:
    """The smallest magnitude that is among the `density` largest of the whole task vector."""
    magnitudes = torch.cat(
        [
            (expert[name].detach().float() - tensor.detach().float()).abs().flatten()
            for name, tensor in base.items()
            if tensor.is_floating_point()
        ]
    )
    kept = max(round(density * magnitudes.numel()), 1)
    return float(magnitudes.kthvalue(magnitudes.numel() - kept + 1).values)


def _survivors(shape: torch.Size, density: float, seed: int, name: str) -> Tensor:
    """Bool mask, True with probability `density`, from the counter-based stream of (seed, name)."""
    stream = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)))
    return torch.from_numpy(generator.random(shape.numel(), dtype=np.float32) < density).reshape(shape)


def _check_alike(base: Weights, experts: Sequence[Weights]) -> None:
    if not experts:
        raise ModelError("no experts to merge; give at least one")
    for index, expert in enumerate(experts):
        if different := set(base) ^ set(expert):
            raise ModelError(
                f"expert {index} and the base do not have the same tensors (first difference:"
                f" {min(different)}); merge models of one architecture"
            )
        for name, tensor in base.items():
            if expert[name].shape != tensor.shape:
                raise ModelError(
                    f"tensor {name} is {list(expert[name].shape)} in expert {index} and"
                    f" {list(tensor.shape)} in the base; merge models of one architecture and vocabulary"
                )


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ModelError(f"density is {density}; give a share in (0, 1]")
