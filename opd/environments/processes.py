"""Environments in processes of their own, a few that act in many worlds each (`environment.processes`).

A world of plain Python that computes would hold up the decoder, with which it shares an interpreter; here it
does not. Worker and pool speak JSON, a line each way for each call. A worker that dies, or in which a call
takes too long and which is ended for that, fails the worlds that were in it; they are made anew elsewhere and
brought to where they were, as any that fails (`opd.environments.world`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from opd.config.environments import BUILT_IN
from opd.environments.protocol import Action, Step, Task, ToolCall
from opd.errors import ConfigError
from opd.imports import import_attribute

MOST_LINE = 64 << 20
"""Bytes of a call or an answer."""
_ENDING = 5.0
"""Seconds that a killed worker may take to be gone."""


class WorkerError(Exception):
    """A call failed in a worker, or its worker has ended: the text is a part of a sentence."""


class Worker:
    """A process that `command` begins, and the calls that it has not answered."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises `OSError` if it cannot be begun."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._pipe = threading.Lock()
        """Whose turn it is to write. The reader does not wait for it: the worker may wait for the reader."""
        self.worlds = 0
        """Open in it."""
        self.dead = False
        self._reader = threading.Thread(target=self._read, name="environments of a worker", daemon=True)
        self._reader.start()

    async def call(self, world: int, what: str, given: Any, *, ends: bool = True) -> Any:
        """What the worker answers. Raises `WorkerError`; who stops waiting ends the worker, if it `ends`."""
        found: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = found
            dead = self.dead
        if not dead:
            line = json.dumps([number, world, what, given]).encode() + b"\n"
            await asyncio.get_running_loop().run_in_executor(None, self._write, line)
        else:
            self._fail()
        try:
            return await asyncio.wrap_future(found)
        except asyncio.CancelledError:
            if ends and what != "close":
                self.end()
            raise

    def tell(self, world: int, what: str) -> None:
        """A call that is not answered."""
        line = json.dumps([next(self._numbers), world, what, None]).encode() + b"\n"
        threading.Thread(target=self._write, args=(line,), daemon=True).start()

    def end(self) -> None:
        """Kill it: its calls fail."""
        self.dead = True
        self._process.kill()

    def wait(self) -> None:
        """Until it has ended, for a few seconds at most."""
        self._reader.join(_ENDING)

    def _write(self, line: bytes) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        # One that has died has closed pipes: the reader says so.
        with self._pipe, contextlib.suppress(OSError, ValueError):
            pipe.write(line)
            pipe.flush()

    def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        try:
            while line := pipe.readline(MOST_LINE):
                number, value, error = json.loads(line)
                with self._lock:
                    found = self._waiting.pop(number, None)
                if found is None or not found.set_running_or_notify_cancel():
                    continue
                found.set_result(value) if error is None else found.set_exception(WorkerError(error))
        except ValueError:  # not its own words
            self._process.kill()
        finally:
            self.dead = True
            self._process.wait()
            with self._pipe:
                for one in (pipe, self._process.stdin):
                    if one is not None:
                        with contextlib.suppress(OSError):
                            one.close()
            self._fail()

    def _fail(self) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for found in waiting:
            if found.set_running_or_notify_cancel():
                found.set_exception(WorkerError(f"its process ended with status {self._process.poll()}"))


class Processes:
    """At most so many workers, begun when there are worlds for them."""

    def __init__(self, kind: str, count: int) -> None:
        """`kind`: name of a built-in environment."""
        self._kind, self._count = kind, count
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        self._worlds = itertools.count()

    def open(self, params: Mapping[str, Any]) -> Elsewhere:
        """An environment made with `params`, in one of the workers once it is reset."""
        return Elsewhere(self, next(self._worlds), params)

    def take(self) -> Worker:
        """The worker with the fewest worlds, which has one more now."""
        with self._lock:
            self._workers = [one for one in self._workers if not one.dead]
            if len(self._workers) < self._count:
                own = [sys.executable, "-m", "opd.environments.processes", self._kind]
                self._workers.append(Worker(own))
            worker = min(self._workers, key=lambda one: one.worlds)
            worker.worlds += 1
            return worker

    def give_back(self, worker: Worker) -> None:
        """A world of `worker` is closed."""
        with self._lock:
            worker.worlds -= 1

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            ended, self._workers = self._workers, []
            for worker in ended:
                worker.end()
            for worker in ended:
                worker.wait()


class Elsewhere:
    """An `Environment` in a worker."""

    def __init__(self, pool: Processes, number: int, params: Mapping[str, Any]) -> None:
        self._pool, self._number, self._params = pool, number, dict(params)
        self._worker: Worker | None = None

    async def reset(self, task: Task) -> Any:
        """See `Environment`."""
        worker = await asyncio.get_running_loop().run_in_executor(None, self._pool.take)
        self._worker = worker
        return await worker.call(self._number, "reset", [self._params, asdict(task)])

    async def step(self, action: Action) -> Step:
        """See `Environment`."""
        assert self._worker is not None
        return Step(**await self._worker.call(self._number, "step", asdict(action)))

    async def close(self) -> None:
        """See `Environment`."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._pool.give_back(worker)
            if not worker.dead:
                await worker.call(self._number, "close", None)


_pools: dict[tuple[str, int], Processes] = {}
_lock = threading.Lock()


def shared(kind: str, count: int) -> Processes:
    """The workers of all episodes of this process in environments of `kind`."""
    with _lock:
        if (kind, count) not in _pools:
            _pools[kind, count] = Processes(kind, count)
            atexit.register(_pools[kind, count].close)
        return _pools[kind, count]


def _serve(kind: str) -> None:
    """Answer calls until nobody is there to make any."""
    # What a library prints is no answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    made: Any = import_attribute(BUILT_IN[kind], "environment.type", ConfigError)
    worlds: dict[int, Any] = {}
    for line in iter(lambda: sys.stdin.buffer.readline(MOST_LINE), b""):
        number, world, what, given = json.loads(line)
        value, failure = None, None
        try:
            value = _done(made, worlds, world, what, given)
            told = json.dumps([number, value, None])
        except Exception as error:  # told to who called
            failure = f"{type(error).__name__}: {error}"
            told = json.dumps([number, None, failure])
        answers.write(told.encode() + b"\n")
        answers.flush()


def _done(made: Callable[..., Any], worlds: dict[int, Any], world: int, what: str, given: Any) -> Any:
    if what == "reset":
        params, task = given
        worlds[world] = made(**params)
        return worlds[world].reset(Task(**task))
    if what == "step":
        calls = [ToolCall(**one) for one in given.pop("calls")]
        return asdict(worlds[world].step(Action(calls=calls, **given)))
    if world in worlds:
        worlds.pop(world).close()
    return None


if __name__ == "__main__":
    _serve(sys.argv[1])
