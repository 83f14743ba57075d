"""Stages side by side, each in a process of its own that ends when this one does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

from opd import errors
from opd.config import Recipe
from opd.errors import OpdError, from_system
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.stages.order import Stage, plan
from opd.progress import Progress
from opd.rollout.preemption import Preemption
from opd.streams import streams_into

LOOK = 0.2
"""Seconds between two looks at what this process was asked to do."""


@dataclass(slots=True)
class _Worker:
    stage: Stage
    process: BaseProcess
    connection: Connection
    suspended: bool = False


def run_side_by_side(recipe: Recipe, folder: RunFolder, stages: list[Stage], progress: Progress) -> None:
    """Run `stages`, at most `recipe.runtime.workers` at a time, each once everything it needs is done.

    Raises the first stage's `OpdError`; the others are stopped then and go on after `--resume`.
    """
    methods = multiprocessing.get_context("forkserver")
    methods.set_forkserver_preload(["opd.pipelines.run"])
    waiting = {stage.name: stage for stage in stages}
    running: dict[str, _Worker] = {}
    with Preemption(recipe.runtime.grace_seconds).listen(leave=False) as preemption:
        try:
            while waiting or running:
                preemption.check()
                for stage in _ready(waiting, running, recipe.runtime.workers):
                    progress.begin(stage.name)
                    running[stage.name] = _start(methods, recipe, folder, waiting.pop(stage.name))
                _pass_on(preemption, running)
                _listen(running, progress)
        finally:
            _end(running, preemption.grace)


def _pass_on(preemption: Preemption, running: dict[str, _Worker]) -> None:
    """Tell the workers to make room, or to go on, as this process was told."""
    for worker in running.values():
        if worker.suspended != preemption.suspended and worker.process.pid is not None:
            worker.suspended = preemption.suspended
            os.kill(worker.process.pid, signal.SIGUSR1 if worker.suspended else signal.SIGUSR2)


def _end(running: dict[str, _Worker], grace: float) -> None:
    """Stop the workers: each writes down what it holds, within the grace period."""
    deadline = time.monotonic() + grace
    for worker in running.values():
        worker.process.terminate()
    for worker in running.values():
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.process.kill()
        worker.process.join()


def _ready(waiting: dict[str, Stage], running: dict[str, _Worker], workers: int) -> list[Stage]:
    undone = waiting.keys() | running.keys()
    ready = [stage for stage in waiting.values() if undone.isdisjoint(stage.needs)]
    return ready[: workers - len(running)]


def _start(methods: ForkServerContext, recipe: Recipe, folder: RunFolder, stage: Stage) -> _Worker:
    ours, theirs = methods.Pipe()
    process = methods.Process(
        target=_work, args=(recipe.model_dump_json(), str(folder.path), stage.name, theirs), name=stage.name
    )
    try:
        process.start()
    except (EOFError, ConnectionError, BlockingIOError) as error:
        raise OpdError(
            f"stage {stage.name} cannot be started ({type(error).__name__}): the process that starts stages"
            " was ended; continue with --resume."
        ) from error
    theirs.close()
    return _Worker(stage, process, ours)


def _listen(running: dict[str, _Worker], progress: Progress) -> None:
    """Handle what the workers say next, or nothing for a moment. Raises what a failed worker raised."""
    by_connection = {worker.connection: worker for worker in running.values()}
    for connection in wait(list(by_connection), timeout=LOOK):
        worker = by_connection[connection]  # type: ignore[index]
        name = worker.stage.name
        try:
            kind, *words = worker.connection.recv()
        except EOFError:
            worker.process.join()
            raise OpdError(
                f"stage {name} ended with exit status {worker.process.exitcode} and said nothing; see"
                " its log.txt and continue with --resume."
            ) from None
        if kind == "progress":
            progress.update(name, *words)
        elif kind == "note":
            progress.note(words[0], name)
        elif kind == "crash":
            raise RuntimeError(f"stage {name} crashed with {words[0]}; its traceback is in {words[1]}")
        elif kind == "done":
            progress.finish(name, words[0])
            worker.process.join()
            del running[name]
        else:
            worker.process.join()
            raise _rebuilt(*words)


def _work(recipe_json: str, path: str, name: str, connection: Connection) -> None:
    """The worker's life: one stage, then a last message."""
    from opd.pipelines.run import execute, summary

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends its workers
    _end_with_parent(connection)
    recipe = Recipe.model_validate_json(recipe_json)
    folder = RunFolder.attach(path)
    with folder.log(name).open("a", buffering=1) as log, streams_into(log):
        try:
            result = execute(
                recipe,
                folder,
                plan(recipe)[name],
                lambda done, total, headline: connection.send(("progress", done, total, headline)),
                lambda text: connection.send(("note", text)),
            )
            connection.send(("done", summary(result)))
        except Exception as error:
            traceback.print_exc()
            understood = from_system(error)
            if understood is not None:
                connection.send(("error", type(understood).__name__, understood.args))
                return
            connection.send(("crash", f"{type(error).__name__}: {error}", str(folder.log(name))))


def _rebuilt(name: str, arguments: tuple) -> OpdError:
    """The error a worker raised."""
    return getattr(errors, name)(*arguments)


def _end_with_parent(connection: Connection) -> None:
    """Leave as soon as the parent is gone: a killed run must not go on writing into its folder."""

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            connection.recv()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
