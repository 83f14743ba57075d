"""Environments in a few processes of their own, each with many worlds (`environment.processes`).

A world of plain Python that computes would block the decoder, which shares its interpreter. Here it does not.
A worker may die, or be killed because a call takes too long. Then its worlds fail. They are made again
elsewhere and replayed, like any that fails (`opd.environments.world`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

from opd.child import Child, listen, parent_channel
from opd.config.environments import BUILT_IN
from opd.environments.protocol import Action, Step, Task, ToolCall
from opd.errors import ConfigError
from opd.imports import import_attribute

_ENDING = 5.0
"""Seconds that a killed or silent worker may take to be gone."""


class WorkerError(Exception):
    """A call failed in a worker, or its worker has ended. The text is a part of a sentence."""


class Worker:
    """A process that `command` starts, and its open calls."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises `OSError` if it cannot be started."""
        self._child = Child(command, log=2)
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.worlds = 0
        """Number of open worlds."""
        self.dead = False
        self._listener = listen(
            self._child.channel, self._on_answer, self._on_exit, lambda: self._child.status() is None
        )

    async def call(self, world: int, method: str, arguments: object, *, ends: bool = True) -> Any:
        """Return the worker's answer. Raises `WorkerError`. Cancelling it kills the worker if it `ends`."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answer
            dead = self.dead
        if not dead:
            # In a thread, because the worker may wait for the reader of its answers.
            message = [number, world, method, arguments]
            await asyncio.get_running_loop().run_in_executor(None, self._send_message, message)
        else:
            self._fail_calls()
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            if ends and method != "close":
                self.kill_process()
            raise

    def send_call(self, world: int, method: str) -> None:
        """Make a call without an answer."""
        message = [next(self._numbers), world, method, None]
        threading.Thread(target=self._send_message, args=(message,), daemon=True).start()

    def kill_process(self) -> None:
        """Kill the process. Its calls fail."""
        self.dead = True
        self._child.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        """Wait until it has ended, for a few seconds at most."""
        self._listener.join(_ENDING)

    def _send_message(self, message: object) -> None:
        with contextlib.suppress(OSError):  # it has died, and the listener reports that
            self._child.channel.send_message(message)

    def _on_answer(self, answer: bytes) -> None:
        try:
            number, value, error = json.loads(answer)
            with self._lock:
                future = self._waiting.pop(number, None)
        except (ValueError, TypeError, RecursionError):  # not a worker's message
            return self.kill_process()
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(value) if error is None else future.set_exception(WorkerError(error))

    def _on_exit(self) -> None:
        self._child.wait(_ENDING)  # a process that ends by itself has a status of its own
        self._child.kill_process()
        self.dead = True
        self._fail_calls()

    def _fail_calls(self) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(WorkerError(f"its process ended with status {self._child.status()}"))


class Processes:
    """At most `count` workers of one command, started when there are worlds for them."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command, self._count = command, count
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        self._worlds = itertools.count()

    def open(self, params: Mapping[str, object]) -> WorkerEnvironment:
        """Return an environment made with `params`. It lives in one of the workers once it is reset."""
        return WorkerEnvironment(self, next(self._worlds), params)

    def assign_worker(self) -> Worker:
        """Assign a world to the worker with the fewest. Raises `OSError` if a worker cannot be started."""
        with self._lock:
            self._workers = [one for one in self._workers if not one.dead]
            if len(self._workers) < self._count:
                self._workers.append(Worker(self._command))
            worker = min(self._workers, key=lambda one: one.worlds)
            worker.worlds += 1
            return worker

    def give_back(self, worker: Worker) -> None:
        """Tell that a world of `worker` is closed."""
        with self._lock:
            worker.worlds -= 1

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            ended, self._workers = self._workers, []
            for worker in ended:
                worker.kill_process()
            for worker in ended:
                worker.wait()


class WorkerEnvironment:
    """An `Environment` in a worker."""

    def __init__(self, pool: Processes, number: int, params: Mapping[str, object]) -> None:
        self._pool, self._number, self._params = pool, number, dict(params)
        self._worker: Worker | None = None

    async def reset(self, task: Task) -> Any:
        """See `Environment`."""
        worker = await asyncio.get_running_loop().run_in_executor(None, self._pool.assign_worker)
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


_pools: dict[tuple[str, ...], Processes] = {}
_lock = threading.Lock()


def shared_processes(command: Sequence[str], count: int) -> Processes:
    """Return this process's workers of `command`, shared by all episodes. They end with the process."""
    key = (*command, str(count))
    with _lock:
        if key not in _pools:
            _pools[key] = Processes(command, count)
            atexit.register(_pools[key].close)
        return _pools[key]


def world_command(kind: str) -> list[str]:
    """Return the command of a worker for environments of `kind`, the name of a built-in one."""
    return [sys.executable, "-m", "opd.environments.processes", kind]


def _serve_calls(kind: str) -> None:
    """Answer calls until the parent has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    channel = parent_channel()
    assert channel is not None
    calls: SimpleQueue[bytes] = SimpleQueue()
    listen(channel, calls.put)
    make_world: Any = import_attribute(BUILT_IN[kind], "environment.type", ConfigError)
    worlds: dict[int, Any] = {}
    while True:
        number, world, method, arguments = json.loads(calls.get())
        try:
            value = None
            if method == "reset":
                params, task = arguments
                worlds[world] = make_world(**params)
                value = worlds[world].reset(Task(**task))
            elif method == "step":
                tool_calls = [ToolCall(**one) for one in arguments.pop("calls")]
                value = asdict(worlds[world].step(Action(calls=tool_calls, **arguments)))
            elif world in worlds:
                worlds.pop(world).close()
            channel.send_message([number, value, None])
        except Exception as error:  # sent to the caller
            channel.send_message([number, None, f"{type(error).__name__}: {error}"])


if __name__ == "__main__":
    _serve_calls(sys.argv[1])
