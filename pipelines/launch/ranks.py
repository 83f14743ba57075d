"""Run a recipe as one of its ranks: the same stages on all of them, and each file written by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from opd.config import Recipe
from opd.config.hub_names import cached_name
from opd.config.load import given_models
from opd.errors import RanksError, TrainingError
from opd.pipelines.launch.local import has_joined
from opd.pipelines.launch.machine import out_of_memory
from opd.pipelines.launch.servers import Servers, open_servers
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.report.verdict import closing_summary
from opd.pipelines.run import execute_stage, record_results
from opd.pipelines.stages.pipeline_plan import Stage, plan_stages, stage_summary, with_needs
from opd.progress import Progress, set_activity
from opd.ranks import Ranks, join_ranks
from opd.rollout.preemption import Preemption

_ERROR = 2


def run_rank(
    recipe: Recipe, path: Path, opening: Callable[[], RunFolder | None], stages: Sequence[str] | None
) -> int:
    """Run `stages` (all for `None`) in the run folder at `path`, and return the exit status.

    The first rank opens the folder for all, so all must see the same files there. Raises `RanksError` if
    another rank is lost.
    """
    # Libraries call functions that newer versions of torch have renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    with ExitStack() as stack:
        with set_activity("waiting for the other ranks"):
            ranks = stack.enter_context(join_ranks(recipe.model.device, recipe.train.timeout_seconds))
        has_joined()
        _require_one_commit(recipe, ranks)
        folder = RunFolder.attach(path)
        if ranks.is_main:
            with set_activity("opening the run folder"):
                opened = opening()
            if opened is None:
                return _ERROR
            folder = stack.enter_context(opened)
        ranks.main_first(lambda: None)
        known = plan_stages(recipe)
        waiting = list(known.values()) if stages is None else _select_stages(known, stages)
        servers = stack.enter_context(open_servers(recipe, folder.server_logs, ranks))
        for name in _remaining_stages(waiting, folder, ranks):
            _run_stage(recipe, folder, known[name], ranks, servers)
        if ranks.is_main:
            record_results(recipe, folder)
            print(closing_summary(folder.path))
        ranks.main_first(lambda: None)
    return 0


def _require_one_commit(recipe: Recipe, ranks: Ranks) -> None:
    """Raise `RanksError` if a branch of the Hub moved between the requests of two machines."""
    given = [str(cached_name(value)) for value in given_models(recipe) if cached_name(value) is not None]
    if given and any(other != given for other in ranks.gather_json(given, "what is from the Hub")):
        raise RanksError(
            f"the ranks have other commits of what is from the Hub ({', '.join(given)} here); name a commit"
            " after the @ in the recipe, or start again."
        )


def _select_stages(known: dict[str, Stage], names: Sequence[str]) -> list[Stage]:
    """Return the named stages, in order, with their needs. An evaluation measures existing models."""
    chosen = {name: known[name] for name in names if name == "evaluate"}
    for name in names:
        if name != "evaluate":
            chosen |= {stage.name: stage for stage in with_needs(known, name)}
    return [stage for stage in known.values() if stage.name in chosen]


def _remaining_stages(stages: Sequence[Stage], folder: RunFolder, ranks: Ranks) -> list[str]:
    """Return the names of the stages to run, as the first rank sees the folder. Another may look too late."""
    undone = [stage.name for stage in stages if folder.stage_done(stage.name) is None]
    return ranks.gather_json(undone, "the list of stages")[0]


def _run_stage(recipe: Recipe, folder: RunFolder, stage: Stage, ranks: Ranks, servers: Servers) -> None:
    try:
        with ranks.name_missing_ranks(f"the work on stage {stage.name}"):
            _execute_stage(recipe, folder, stage, ranks, servers)
    except (MemoryError, RuntimeError) as error:
        reason = out_of_memory(error)
        if reason is not None:
            raise _memory_error(stage, ranks, reason) from error
        raise


def _execute_stage(
    recipe: Recipe, folder: RunFolder, stage: Stage, ranks: Ranks, servers: Servers | None = None
) -> None:
    with Preemption(recipe.runtime.grace_seconds).handle_signals() as preemption, ExitStack() as stack:
        progress = stack.enter_context(Progress()) if ranks.is_main else None
        if progress is not None:
            progress.begin_stage(stage.name)
        try:
            result = execute_stage(
                recipe,
                folder,
                stage,
                lambda done, total, headline: (
                    progress and progress.update_stage(stage.name, done, total, headline)
                ),
                preemption,
                ranks=ranks,
                servers=servers,
            )
        except RanksError:
            preemption.check()  # all are to stop, and another rank did so first
            raise
        if progress is not None:
            progress.finish_stage(stage.name, stage_summary(result))


def _memory_error(stage: Stage, ranks: Ranks, reason: str) -> TrainingError:
    return TrainingError(
        f"rank {ranks.rank} ran out of memory in stage {stage.name} ({reason}); lower"
        " runtime.decode.kv_cache_mb or train with more ranks, then continue with --resume, or lower"
        " batch.max_tokens, then with --resume --accept-changed-settings."
    )
