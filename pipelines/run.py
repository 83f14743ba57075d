"""Run the stages of a recipe. Finished ones are skipped, ready ones may run concurrently."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from opd.config import Recipe
from opd.errors import OpdError
from opd.models.hf_folder import CHECKSUMS
from opd.pipelines.evaluation.evaluate import measurements_path, read_measurements
from opd.pipelines.launch.machine import configure_machine, kernel_implementation
from opd.pipelines.launch.servers import Servers, open_servers
from opd.pipelines.launch.workers import run_concurrently
from opd.pipelines.records.cards import write_cards
from opd.pipelines.records.results import write_results
from opd.pipelines.records.run_folder import ACCEPT_CODE, RunFolder
from opd.pipelines.report import write_report
from opd.pipelines.stages.context import StageContext, StageHelpers
from opd.pipelines.stages.pipeline_plan import Stage, stage_summary
from opd.pipelines.stages.rounds import ended_recipe, plan_portions
from opd.pipelines.stages.served_engine import with_engine
from opd.progress import Progress
from opd.ranks import Ranks
from opd.rollout.preemption import Preemption


def run_pipeline(recipe: Recipe, folder: RunFolder, names: list[str] | None = None) -> None:
    """Run every stage of `recipe`, or the named ones after their needs. Then write results.json and
    report.html. `evaluate` measures existing models and trains nothing. Raises `ConfigError` for an unknown
    name.
    """
    seen: set[str] = set()
    for part, stages in plan_portions(recipe, folder, names):
        _run_stages(part, folder, [stage for stage in stages if stage.name not in seen])
        seen |= {stage.name for stage in stages}
    record_results(recipe, folder)


def run_stage(recipe: Recipe, folder: RunFolder, stage: str) -> None:
    """Run one stage as `run_pipeline` does."""
    run_pipeline(recipe, folder, [stage])


def record_results(recipe: Recipe, folder: RunFolder) -> None:
    """Write results.json, the models' cards and report.html for the run so far."""
    recipe = ended_recipe(recipe, folder)
    write_results(recipe, folder)
    models = read_measurements(folder).get("models", {})
    write_cards(
        recipe, folder, {name: entry["domains"] | entry.get("sets", {}) for name, entry in models.items()}
    )
    write_report(folder.path)


def _run_stages(recipe: Recipe, folder: RunFolder, stages: list[Stage]) -> None:
    with Progress() as progress:
        for stage in stages:
            if folder.stage_done(stage.name) is not None:
                progress.finish_stage(stage.name, "already")
        waiting = [stage for stage in stages if folder.stage_done(stage.name) is None]
        if not waiting:  # then nothing else reads the models
            for stage in stages:
                folder.stage_done(stage.name, weights=True)
        if recipe.launch.type == "ray" and waiting:
            from opd.pipelines.launch.ray.trainer import run_on_ray

            run_on_ray(recipe, folder, waiting, progress)
            return
        if recipe.runtime.workers > 1 and len(waiting) > 1:
            run_concurrently(recipe, folder, waiting, progress)
            return
        with open_servers(recipe, folder.server_logs) as servers:
            for stage in waiting:
                progress.begin_stage(stage.name)
                report = partial(progress.update_stage, stage.name)
                result = execute_stage(recipe, folder, stage, report, servers=servers)
                progress.finish_stage(stage.name, stage_summary(result))


def execute_stage(
    recipe: Recipe,
    folder: RunFolder,
    stage: Stage,
    report: Callable[[int, int, str], None],
    preemption: Preemption | None = None,
    helpers: StageHelpers | None = None,
    ranks: Ranks | None = None,
    servers: Servers | None = None,
) -> dict[str, Any]:
    """Run one stage in this process, and record at the very end that it is done.

    Without a `preemption` the stage answers to this process's signals. All of several `ranks` call this, and
    the first one records. Without `servers` the stage's own servers end with it. An evaluation of an
    unfinished run is not done, because models may still come. Raises `PreemptedError` at the latest once the
    stage is recorded, if the run was asked to stop.
    """
    for need in stage.needs:
        folder.stage_done(need)  # the others will read its files
    configure_machine(
        folder.thread_count(recipe, alone=stage.alone), recipe.runtime.tf32, recipe.model.device
    )
    started = time.perf_counter()
    listening = Preemption(recipe.runtime.grace_seconds).handle_signals() if preemption is None else None
    starting = open_servers(recipe, folder.server_logs, ranks) if servers is None else nullcontext(servers)
    with listening or nullcontext(preemption) as stopping, starting as running:
        context = StageContext.open(recipe, folder, stage.name, report, stopping, helpers, ranks, running)
        try:
            with _resume_hint(), context.closing, with_engine(context):
                result = stage.run(context)
        finally:
            context.metrics.close()
    result.setdefault("seconds", time.perf_counter() - started)
    result["kernels"] = kernel_implementation()
    # Linux reports ru_maxrss in KiB.
    result["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    context.ranks.barrier("the end of a stage")
    if context.ranks.is_main and all(folder.stage_done(need) is not None for need in stage.needs):
        files = [] if stage.model is None else [context.model_path(stage.model) / CHECKSUMS]
        if stage.name == "evaluate":
            files.append(measurements_path(folder))
        context.metrics.sync()
        files += [folder.metrics_path(stage.name), folder.flags_path(stage.name)]
        folder.mark_done(stage.name, result, files, stage.needs)
        folder.remove_working_files(stage.name)
    # A stage that trains nothing may not have noticed a signal, and the next one begins with none.
    if context.ranks.any_rank(context.preemption.is_stopping, "the record of a stage"):
        context.preemption.stop()
        context.preemption.check()
    return result


@contextmanager
def _resume_hint() -> Iterator[None]:
    """Add to an error of the user's own code how to continue the run after the fix."""
    try:
        yield
    except OpdError as error:
        if not error.of_own_code:
            raise
        message = f"{str(error).rstrip('.')} and go on with {ACCEPT_CODE}."
        raise type(error)(message) from error.__cause__
