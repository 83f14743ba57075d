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
from opd.pipelines.launch.servers import Servers, started_by
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.report.verdict import closing
from opd.pipelines.run import execute, record
from opd.pipelines.stages.order import Stage, plan, summary, with_needs
from opd.progress import Progress, doing
from opd.ranks import Ranks, joined
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
        with doing("waiting for the other ranks"):
            ranks = stack.enter_context(joined(recipe.model.device, recipe.train.timeout_seconds))
        has_joined()
        _require_one_commit(recipe, ranks)
        folder = RunFolder.attach(path)
        if ranks.main:
            with doing("opening the run folder"):
                opened = opening()
            if opened is None:
                return _ERROR
            folder = stack.enter_context(opened)
        ranks.main_first(lambda: None)
        known = plan(recipe)
        waiting = list(known.values()) if stages is None else _named(known, stages)
        servers = stack.enter_context(started_by(recipe, folder.server_logs, ranks))
        for name in _undone(waiting, folder, ranks):
            _run(recipe, folder, known[name], ranks, servers)
        if ranks.main:
            record(recipe, folder)
            print(closing(folder.path))
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


def _named(known: dict[str, Stage], names: Sequence[str]) -> list[Stage]:
    """Return the named stages, in order, with their needs. An evaluation measures existing models."""
    chosen = {name: known[name] for name in names if name == "evaluate"}
    for name in names:
        if name != "evaluate":
            chosen |= {stage.name: stage for stage in with_needs(known, name)}
    return [stage for stage in known.values() if stage.name in chosen]


def _undone(stages: Sequence[Stage], folder: RunFolder, ranks: Ranks) -> list[str]:
    """Return the names of the stages to run, as the first rank sees the folder. Another may look too late."""
    undone = [stage.name for stage in stages if folder.stage_done(stage.name) is None]
    return ranks.gather_json(undone, "the list of stages")[0]


def _run(recipe: Recipe, folder: RunFolder, stage: Stage, ranks: Ranks, servers: Servers) -> None:
    try:
        with ranks.naming_the_lost(f"the work on stage {stage.name}"):
            _execute(recipe, folder, stage, ranks, servers)
    except (MemoryError, RuntimeError) as error:
        reason = out_of_memory(error)
        if reason is not None:
            raise _no_memory(stage, ranks, reason) from error
        raise


def _execute(
    recipe: Recipe, folder: RunFolder, stage: Stage, ranks: Ranks, servers: Servers | None = None
) -> None:
    with Preemption(recipe.runtime.grace_seconds).listen() as preemption, ExitStack() as stack:
        progress = stack.enter_context(Progress()) if ranks.main else None
        if progress is not None:
            progress.begin(stage.name)
        try:
            result = execute(
                recipe,
                folder,
                stage,
                lambda done, total, headline: progress and progress.update(stage.name, done, total, headline),
                preemption,
                ranks=ranks,
                servers=servers,
            )
        except RanksError:
            preemption.check()  # all are to stop, and another rank did so first
            raise
        if progress is not None:
            progress.finish(stage.name, summary(result))


def _no_memory(stage: Stage, ranks: Ranks, reason: str) -> TrainingError:
    return TrainingError(
        f"rank {ranks.rank} ran out of memory in stage {stage.name} ({reason}); lower"
        " runtime.decode.kv_cache_mb or train with more ranks, then continue with --resume, or lower"
        " batch.max_tokens, then with --resume --accept-changed-settings."
    )
