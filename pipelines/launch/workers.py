"""Run stages concurrently, each in its own process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
from multiprocessing.context import ForkServerContext

from opd.child import Channel, Child
from opd.config import Recipe
from opd.errors import OpdError
from opd.output import LogForwarder, record_fields, streams_into
from opd.pipelines.launch import supervisor
from opd.pipelines.launch.supervisor import ProcessMember
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.stages.pipeline_plan import Stage, plan_stages, stage_summary
from opd.progress import Progress
from opd.rollout.preemption import Preemption


def run_concurrently(recipe: Recipe, folder: RunFolder, stages: list[Stage], progress: Progress) -> None:
    """Run `stages`, at most `recipe.runtime.workers` at a time, each once its needs are done.

    Raises the first stage's `OpdError`. The others are stopped then and continue after `--resume`.
    """
    methods = multiprocessing.get_context("forkserver")
    methods.set_forkserver_preload(["opd.pipelines.run"])
    waiting = {stage.name: stage for stage in stages}

    def show_message(worker: ProcessMember, message: supervisor.Message) -> None:
        message.forward_message(worker.name, progress)
        if message.kind == "done":
            progress.finish_stage(worker.name, message.words[0])

    with (
        Preemption(recipe.runtime.grace_seconds).handle_signals(leave=False) as preemption,
        supervisor.Supervisor(preemption, show_message, last_words=None) as workers,
    ):
        try:
            while waiting or workers.running:
                undone = {*waiting, *(worker.name for worker in workers.running)}
                ready = [stage for stage in waiting.values() if undone.isdisjoint(stage.needs)]
                free = 0 if workers.is_ending else recipe.runtime.workers - len(workers.running)
                for stage in ready[:free]:
                    progress.begin_stage(stage.name)
                    workers.add_member(_start_worker(methods, recipe, folder, waiting.pop(stage.name)))
                workers.check_members()
        except supervisor.MemberFailedError as failed:
            name = failed.member.name
            raise failed.to_error(f"stage {name}", str(folder.log_path(name))) from None


class ForkedChild(Child):
    """A child that is forked from a process with all imports done."""

    def __init__(self, methods: ForkServerContext, recipe: Recipe, folder: RunFolder, stage: str) -> None:
        """Fork a child that runs `stage`. Raises `EOFError` or `OSError` if it cannot start."""
        ours, theirs = socket.socketpair()
        words = (recipe.model_dump_json(), str(folder.path), stage, theirs)
        self._forked = methods.Process(target=_run_worker, args=words, name=stage)
        with theirs:
            self._forked.start()
        self.channel, self.pid = Channel(ours), self._forked.pid or 0

    def status(self) -> int | None:
        return self._forked.exitcode

    def wait(self, seconds: float | None = None) -> int | None:
        self._forked.join(seconds)
        return self._forked.exitcode

    def send_signal(self, number: int) -> None:
        if self.status() is None:
            os.kill(self.pid, number)


def _start_worker(
    methods: ForkServerContext, recipe: Recipe, folder: RunFolder, stage: Stage
) -> ProcessMember:
    try:
        with supervisor.defer_signals():
            return ProcessMember(stage.name, ForkedChild(methods, recipe, folder, stage.name))
    except (EOFError, ConnectionError, BlockingIOError) as error:
        raise OpdError(
            f"stage {stage.name} cannot be started ({type(error).__name__}): the process that starts stages"
            " was ended; continue with --resume."
        ) from error


def _run_worker(recipe_json: str, path: str, name: str, end: socket.socket) -> None:
    """Run one stage in a worker, and send its last message."""
    from opd.pipelines.run import execute_stage

    gc.freeze()  # imports before the fork stay, so a stage collects garbage only among its own objects
    parent = supervisor.ParentSupervisor(Channel(end))
    recipe = Recipe.model_validate_json(recipe_json)
    folder = RunFolder.attach(path)

    def report_progress(done: int, total: int, headline: str) -> None:
        parent.send_message("progress", done, total, headline)

    logged = LogForwarder(lambda record: parent.send_message("log", *record_fields(record)))
    with folder.log_path(name).open("a", buffering=1) as log, streams_into(log), logged:
        last = supervisor.final_message(
            lambda: stage_summary(execute_stage(recipe, folder, plan_stages(recipe)[name], report_progress))
        )
    parent.send_message(last.kind, *last.words)
