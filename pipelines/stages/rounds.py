"""Run rounds of specialists and merge, of which each may be the last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opd.config import Recipe
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.records.stage_names import gain_stage, of_round
from opd.pipelines.stages.pipeline_plan import Stage, plan_stages, with_needs


def select_stages(plan: dict[str, Stage], names: Sequence[str]) -> list[Stage]:
    """Return the named stages, in order, with their needs. An evaluation measures existing models."""
    chosen = {name for name in names if name == "evaluate"}
    for name in names:
        if name != "evaluate":
            chosen |= {stage.name for stage in with_needs(plan, name)}
    return [stage for stage in plan.values() if stage.name in chosen]


def plan_portions(
    recipe: Recipe, folder: RunFolder, names: Sequence[str] | None = None
) -> Iterator[tuple[Recipe, list[Stage]]]:
    """Yield the stages to run (all for `None`, or the named ones with their needs), each portion with its
    recipe. `merge` stands for that of the last round. If any round may be the last, each is a portion, to be
    run before the next is asked for.
    """
    every = names is None or "merge" in names
    for number in range(1, recipe.rounds if every and recipe.min_round_gain is not None else 1):
        part = recipe.with_rounds(number + 1)
        yield part, with_needs(plan_stages(part), gain_stage(number))
        if ended_recipe(recipe, folder).rounds == number:
            break
    recipe = ended_recipe(recipe, folder)
    plan = plan_stages(recipe)
    if names is not None:
        names = [of_round(name, recipe.rounds) if name == "merge" else name for name in names]
    yield recipe, select_stages(plan, list(plan) if names is None else names)


def ended_recipe(recipe: Recipe, folder: RunFolder) -> Recipe:
    """Return `recipe` with the run's rounds: up to the first that gained too little, unless one follows."""
    least = recipe.min_round_gain
    for number in range(1, recipe.rounds if least is not None else 1):
        done = folder.stage_done(gain_stage(number))
        next_begun = any(folder.path.glob(f"stages/*+{number + 1}"))
        if done is not None and least is not None and done["gain"] < least and not next_begun:
            return recipe.with_rounds(number)
    return recipe
