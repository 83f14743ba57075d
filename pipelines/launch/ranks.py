"""Run a recipe as one of its ranks: the same stages on all of them, and each file written by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
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
from opd.pipelines.stages.pipeline_plan import Stage, stage_summary
from opd.pipelines.stages.rounds import plan_portions
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
        # A branch of the Hub may have moved between the requests of two machines.
        commits = [str(name) for name in map(cached_name, given_models(recipe)) if name is not None]
        if commits and any(other != commits for other in ranks.gather_json(commits, "what is from the Hub")):
            raise RanksError(
                f"the ranks have other commits of what is from the Hub ({', '.join(commits)} here); name a"
                " commit after the @ in the recipe, or start again."
            )
        folder = RunFolder.attach(path)
        if ranks.is_main:
            with set_activity("opening the run folder"):
                opened = opening()
            if opened is None:
                return _ERROR
            folder = stack.enter_context(opened)
        ranks.main_first(lambda: None, "the run folder")
        for part, chosen in plan_portions(recipe, folder, stages):
            undone = [stage.name for stage in chosen if folder.stage_done(stage.name) is None]
            plan = {stage.name: stage for stage in chosen}
            with open_servers(part, folder.server_logs, ranks) as servers:
                # As the first rank sees the folder. Another may look too late.
                for name in ranks.gather_json(undone, "the list of stages")[0]:
                    _execute_stage(part, folder, plan[name], ranks, servers)
        if ranks.is_main:
            record_results(recipe, folder)
            print(closing_summary(folder.path))
        ranks.main_first(lambda: None, "the record of the run")
    return 0


def _execute_stage(recipe: Recipe, folder: RunFolder, stage: Stage, ranks: Ranks, servers: Servers) -> None:
    """Run one stage on this rank. Raises `TrainingError` if its memory does not suffice."""
    with (
        ranks.name_missing_ranks(f"the work on stage {stage.name}"),
        Preemption(recipe.runtime.grace_seconds).handle_signals() as preemption,
        Progress() if ranks.is_main else nullcontext() as progress,
    ):

        def report_progress(done: int, total: int, headline: str) -> None:
            if progress is not None:
                progress.update_stage(stage.name, done, total, headline)

        if progress is not None:
            progress.begin_stage(stage.name)
        try:
            result = execute_stage(
                recipe, folder, stage, report_progress, preemption, ranks=ranks, servers=servers
            )
        except RanksError:
            preemption.check()  # all are to stop, and another rank did so first
            raise
        except (MemoryError, RuntimeError) as error:
            reason = out_of_memory(error)
            if reason is None:
                raise
            raise TrainingError(
                f"rank {ranks.rank} ran out of memory in stage {stage.name} ({reason}); lower"
                " runtime.decode.kv_cache_mb or train with more ranks, then continue with --resume, or lower"
                " batch.max_tokens, then with --resume --accept-changed-settings."
            ) from error
        if progress is not None:
            progress.finish_stage(stage.name, stage_summary(result))
