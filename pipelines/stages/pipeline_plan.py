"""Plan a run's stages and needs: base -> specialists -> merge (again each round) -> baselines -> evaluate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from opd.config import Recipe
from opd.config.recipe import WEIGHT_MERGES
from opd.errors import ConfigError
from opd.models.hf_folder import is_whole
from opd.pipelines.evaluation.evaluate import evaluate_models, measure_round
from opd.pipelines.records.stage_names import gain_stage, model_stage, of_round, specialist_stage, stage_model
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.distill import train_merge
from opd.pipelines.stages.grpo import train_grpo
from opd.pipelines.stages.loop import Extent
from opd.pipelines.stages.precision import model_dtype
from opd.pipelines.stages.publishing import whole_model
from opd.pipelines.stages.sft import fine_tune
from opd.pipelines.stages.student import tokenizer_of
from opd.pipelines.stages.supervised import all_weights, distill_off_policy, new_base, warm_up
from opd.pipelines.stages.weight_baselines import merge_weights
from opd.progress import format_clock


@dataclass(frozen=True, slots=True)
class Stage:
    """One resumable stage of a run."""

    name: str
    needs: tuple[str, ...]
    """Stages that must be done before."""
    run: Callable[[StageContext], dict[str, Any]]
    """Does the work and returns the result numbers. All its output is on disk then."""
    trained: bool = True
    """It trains. While another kind of stage runs, others have the processors to themselves."""
    model: str | None = None
    """Its model, by the name for `StageContext.model_path`."""
    alone: bool = False
    """No training stage can run concurrently with it."""


def plan_stages(recipe: Recipe) -> dict[str, Stage]:
    """Return every stage of `recipe`, in an order in which each comes after its needs."""
    stages: list[Stage] = []
    base: tuple[str, ...] = ()
    if recipe.trains_base or recipe.model.config is not None or _is_made_whole(recipe):
        stages.append(Stage("base", (), _make_base, model="base", alone=True))
        base = ("base",)
    start = before = base
    specialists, merge, baselines = (), "", []
    for number in range(1, recipe.rounds + 1):
        before, merge = start, of_round("merge", number)
        specialists = tuple(of_round(specialist_stage(d), number) for d in recipe.specialist_domains())
        stages += _round_stages(recipe, number, before)
        start = (merge,)
        if recipe.min_round_gain is not None and number < recipe.rounds:
            start = (merge, gain_stage(number))
            stages.append(Stage(gain_stage(number), (merge,), measure_round, alone=True))
    for method in [name for name in recipe.baseline_methods if name != recipe.distill.start]:
        trained = method not in WEIGHT_MERGES
        needs, run = (merge,) if trained else before + specialists, partial(_run_baseline, method=method)
        baselines.append(Stage(model_stage(method), needs, run, trained, method))
    stages += baselines
    stages.append(Stage("evaluate", (merge, *(one.name for one in baselines)), evaluate_models, alone=True))
    return {stage.name: stage for stage in stages}


def _round_stages(recipe: Recipe, number: int, start: tuple[str, ...]) -> list[Stage]:
    """Return the specialists and the merge of a round, which begin after the stages `start`."""
    stages, specialists = [], []
    for domain in recipe.specialist_domains():
        needs = start
        if recipe.is_started(domain) and number == 1:
            needs = (model_stage(f"sft:{domain}"),)
            run = partial(_fine_tune, domain=domain, model=f"sft:{domain}")
            stages.append(Stage(needs[0], start, run, model=f"sft:{domain}"))
        run, model = partial(_train_specialist, domain=domain), of_round(f"specialist:{domain}", number)
        stages.append(Stage(model_stage(model), needs, run, model=model))
        specialists.append(model_stage(model))
    model, merged = of_round("merged", number), recipe.distill.start
    if merged != "base":
        run = partial(_run_baseline, method=merged)
        stages.append(Stage(model_stage(merged), (*start, *specialists), run, False, merged))
        specialists.append(model_stage(merged))
    return [*stages, Stage(model_stage(model), (*start, *specialists), _run_merge, model=model, alone=True)]


def with_needs(stages: dict[str, Stage], name: str) -> list[Stage]:
    """Return `name` and every stage it needs, in order. Raises `ConfigError` for an unknown name."""
    if name not in stages:
        raise ConfigError(f"this recipe has no stage {name}; it has {', '.join(stages)}.")
    wanted = {name}
    for stage in reversed(stages.values()):
        if stage.name in wanted:
            wanted.update(stage.needs)
    return [stage for stage in stages.values() if stage.name in wanted]


def _nothing_trained() -> dict[str, Any]:
    return {"steps": 0, "student_tokens": 0, "seconds": 0.0, "phases": {}, "counters": {}}


def _is_made_whole(recipe: Recipe) -> bool:
    """Return whether the student starts from an adapter and its base, which are merged first, or from
    quantised weights, which become numbers first.
    """
    return recipe.model.path is not None and not is_whole(Path(recipe.model.path))


def _make_base(context: StageContext) -> dict[str, Any]:
    recipe = context.recipe
    out = context.model_path("base")
    if not recipe.trains_base and _is_made_whole(recipe):
        source = Path(recipe.model.path or "")
        tokenizer, main = tokenizer_of(recipe, source), context.ranks.is_main
        dtype = model_dtype(recipe)
        context.ranks.main_first(
            lambda: whole_model(source, out, tokenizer, dtype) if main else None, "the whole model"
        )
        return _nothing_trained()
    if recipe.model.path is not None:
        return _train_base(context, Path(recipe.model.path), out)
    fresh = context.folder.stage_folder("base") / "initial" if recipe.trains_base else out
    ranks = context.ranks
    ranks.main_first(lambda: new_base(recipe, fresh) if ranks.is_main else None, "the new base")
    return _train_base(context, fresh, out) if recipe.trains_base else _nothing_trained()


def _train_base(context: StageContext, start: Path, out: Path) -> dict[str, Any]:
    """Train the base first, on demonstrations of a file or of the domains."""
    if context.recipe.sft is None:
        return warm_up(context, start, out)
    return fine_tune(all_weights(context), context.recipe.sft, start, out)


def _fine_tune(context: StageContext, domain: str, model: str) -> dict[str, Any]:
    """Train `model`, a specialist or its start, on the demonstrations of `domain`."""
    config = context.recipe.domains[domain].sft
    assert config is not None  # else there is no such stage
    return fine_tune(context, config, context.start_model(), context.model_path(model), domain)


def _train_specialist(context: StageContext, domain: str) -> dict[str, Any]:
    context = replace(context, recipe=context.recipe.for_domain(domain))
    if domain not in context.recipe.grpo_domains():
        return _fine_tune(context, domain, stage_model(context.stage))
    is_started = context.recipe.is_started(domain) and context.round == 1
    start = context.checked_model(f"sft:{domain}") if is_started else context.start_model()
    extent = Extent(steps=context.recipe.specialist.steps)
    return train_grpo(context, start, [domain], context.model_path(stage_model(context.stage)), extent)


def _run_merge(context: StageContext) -> dict[str, Any]:
    return train_merge(context, context.start_model(), context.model_path(stage_model(context.stage)))


def _run_baseline(context: StageContext, method: str) -> dict[str, Any]:
    if method in WEIGHT_MERGES:
        return merge_weights(context, method)
    recipe, base, out = context.recipe, context.checked_model("base"), context.model_path(method)
    numbers = range(1, recipe.rounds + 1)
    budget = sum(_stage_tokens(context, of_round("merge", number)) for number in numbers)
    if method == "off_policy":
        return distill_off_policy(context, base, out, budget)
    if method == "mixed_grpo_all":
        trained = [specialist_stage(domain) for domain in recipe.specialist_domains()]
        budget += sum(_stage_tokens(context, of_round(one, n)) for one in trained for n in numbers)
    context = replace(context, recipe=recipe.drawn_alike())
    return train_grpo(context, base, list(recipe.domains), out, Extent(tokens=budget))


def _stage_tokens(context: StageContext, stage: str) -> int:
    """Return the student tokens that a finished stage generated."""
    done = context.folder.stage_done(stage)
    if done is None:
        raise ConfigError(
            f"stage {stage} is not done, and its number of student tokens is needed; run it first."
        )
    return int(done["student_tokens"])


def stage_summary(result: dict[str, Any]) -> str:
    """Format a finished stage in a few words."""
    tokens = result["student_tokens"]
    written = f", {tokens:,} student tokens" if tokens else ""
    return f"in {format_clock(result['seconds'])}{written}"
