"""Environments while episodes act in them: one loop in a thread of its own, in which none waits for another.

Plain methods run in threads, so one that blocks does not block others. A time-out or an error is not the
model's fault. The environment is made again and replayed by the same actions. If that fails too, the run
stops and can be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from opd.config.environments import ROLE, EnvironmentConfig
from opd.environments.protocol import Action, Environment, Observation, Step, Task
from opd.errors import RolloutError
from opd.retry import Retry
from opd.rollout.rewards import LARGEST
from opd.untrusted import MAX_DEPTH, depth_exceeds, safe_excerpt
from opd.user_code import confine_user_code, describe_raise

_log = logging.getLogger(__name__)

MOST_MESSAGES = 1000
"""Messages of an observation."""
MOST_INFO = 1 << 16
"""Characters of a step's `info` as JSON."""


class FailedError(Exception):
    """An environment raised or took too long. The text is a part of a sentence."""


def given_up(where: str, error: FailedError, failures: int) -> RolloutError:
    """Return the error that ends the run after so many `failures`, with `error` as the last."""
    often = "" if failures == 1 else f", {failures} times"
    return RolloutError(f"{where}: {error}{often}; mend it (a run that has begun goes on with --resume).")


@dataclass(slots=True)
class World:
    """One episode's environment, and all its actions so far."""

    make: Callable[[], Environment]
    task: Task
    config: EnvironmentConfig
    name: str
    """Name of the domain."""
    begun: Observation = None
    """The observation of `reset`."""
    done: list[tuple[Action, Step]] = field(default_factory=list)
    _environment: Environment | None = None

    async def reset(self) -> Observation:
        """Begin. Raises `RolloutError` once all attempts have failed."""
        self.begun = await self._with_retries(self._open_environment, "reset")
        return self.begun

    async def step(self, action: Action) -> Step:
        """Act. Raises `RolloutError` once all attempts have failed."""

        async def attempt_step() -> Step:
            if self._environment is None:
                if await self._open_environment() != self.begun:
                    raise self._mismatch_error("reset")
                assert self._environment is not None
                for earlier, answer in self.done:
                    step = await self._call_method(self._environment.step, "step", earlier)
                    if _check_step(step, self.config.type) != answer:
                        raise self._mismatch_error(f"step {earlier.turn + 1}")
            assert self._environment is not None
            step = await self._call_method(self._environment.step, "step", action)
            return _check_step(step, f"{self.config.type}.step (domain {self.name})")

        step = await self._with_retries(attempt_step, f"step {action.turn + 1}")
        self.done.append((action, step))
        return step

    async def close(self) -> None:
        """Close the environment, and log its errors."""
        environment, self._environment = self._environment, None
        close = getattr(environment, "close", None)
        if close is not None:
            try:
                await self._call_method(close, "close")
            except FailedError as error:
                _log.warning("environment of %s: %s", self.task.uid, error)

    async def _open_environment(self) -> Observation:
        self._environment = None
        self._environment = environment = await self._call_method(self.make, "making it")
        observation = await self._call_method(environment.reset, "reset", self.task)
        return _check_observation(observation, f"{self.config.type}.reset (domain {self.name})")

    def _mismatch_error(self, method: str) -> RolloutError:
        return RolloutError(
            f"environment {self.config.type} (domain {self.name}, {self.task.uid}) failed, and made anew"
            f" its {method} answered otherwise; take its randomness from task.seed, or mend what fails."
        )

    async def _with_retries(self, attempt: Callable[[], Any], label: str) -> Any:
        retry = Retry(attempts=self.config.attempts)
        for failures in range(1, retry.attempts + 1):
            try:
                return await attempt()
            except FailedError as error:
                await self.close()
                where = f"environment {self.config.type} (domain {self.name}, {self.task.uid}), {label}"
                if failures == retry.attempts:
                    raise given_up(where, error, failures) from error
                _log.warning("%s: %s; it is made anew", where, error)
                await asyncio.sleep(retry.pause_seconds(failures))
        raise AssertionError("a retry has at least one attempt")

    async def _call_method(self, method: Callable[..., Any], label: str, *arguments: Any) -> Any:
        """Return the result of `method`, within the time limit. Raises `FailedError`."""
        limit = self.config.seconds
        try:
            with confine_user_code(f"environment {self.config.type}"):
                if inspect.iscoroutinefunction(method):
                    return await asyncio.wait_for(without_exit(method, *arguments), limit)
                result = await asyncio.wait_for(in_thread(method, arguments, self.config.type), limit)
                if inspect.isawaitable(result):
                    result = await asyncio.wait_for(without_exit(lambda: result), limit)
                return result
        except TimeoutError as error:
            raise FailedError(
                f"{label} took longer than {limit:g} s (domains.{self.name}.environment.seconds)"
            ) from error
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise FailedError(f"{label} cancelled itself") from error
        except RolloutError:
            raise
        except Exception as error:
            raise FailedError(f"{label} {describe_raise(error)}") from error


async def without_exit(work: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Return the result of `work`. An exit becomes an error, because it would end the event loop's thread."""
    try:
        return await work(*arguments)
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def is_cancelled() -> bool:
    """Return True if the running task was cancelled, False if code in it has raised `CancelledError`."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def in_thread(method: Callable[..., Any], arguments: Sequence[object], label: str) -> asyncio.Future[Any]:
    """Return the result of `method`. It runs in a daemon thread, so that one that never returns does not keep
    the process alive. Threads that have returned are reused.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def set_outcome(value: object, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        elif isinstance(error, Exception):
            future.set_exception(error)
        else:  # an exit must not end the command
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    def run() -> Callable[[], object]:
        value, failure = None, None
        try:
            value = method(*arguments)
        except BaseException as error:  # passed to the loop
            failure = error
        return lambda: loop.call_soon_threadsafe(set_outcome, value, failure)

    _Worker.submit_work(run, f"environment {label}")
    return future


class _Worker:
    """A thread that waits for the next work item when it has done one."""

    _idle: ClassVar[list[_Worker]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Callable[[], object]], str]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve_work, daemon=True)

    @classmethod
    def submit_work(cls, work: Callable[[], Callable[[], object]], name: str) -> None:
        """Run `work` at once in a thread, named `name` meanwhile. Its result is called when the thread may be
        reused. `work` does not raise, its result nothing but a `RuntimeError`.
        """
        with cls._lock:
            worker = cls._idle.pop() if cls._idle else None
        if worker is None:
            worker = cls()
            worker._thread.start()
        worker._work.put((work, name))

    def _serve_work(self) -> None:
        while True:
            try:
                work, self._thread.name = self._work.get(timeout=_SPARE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self in self._idle:
                        self._idle.remove(self)
                        return
                continue  # it has just been given work
            done = work()
            with self._lock:
                self._idle.append(self)
            with contextlib.suppress(RuntimeError):  # the loop is gone, and nothing waits
                done()
            del work, done

    @classmethod
    def reset_threads(cls) -> None:
        """Drop all threads, because a forked process has none."""
        cls._idle, cls._lock = [], threading.Lock()


os.register_at_fork(after_in_child=_Worker.reset_threads)
_SPARE_SECONDS = 10.0
"""Seconds after which an idle thread ends."""


def _check_observation(observation: object, where: str) -> Observation:
    if observation is None or type(observation) is str:
        return observation
    if isinstance(observation, str):
        return str.__str__(observation)
    if not isinstance(observation, list | tuple) or not observation:
        raise FailedError(
            f"{where} returned a {type(observation).__name__}; observations are a text or messages"
        )
    if len(observation) > MOST_MESSAGES:
        raise FailedError(
            f"{where} returned {len(observation):,} messages; {MOST_MESSAGES:,} at most are one answer"
        )
    for message in observation:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise FailedError(f"{where}: a message is a dict with role and content")
        if message["role"] == "assistant" or not isinstance(message.get("content"), str):
            raise FailedError(f"{where}: messages have a content of text, and none is the assistant's")
        if not ROLE.fullmatch(message["role"]):
            raise FailedError(
                f"{where}: a role is one word of letters, not {safe_excerpt(message['role'])!r}"
            )
    try:
        if depth_exceeds(list(observation), MAX_DEPTH):
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        return json.loads(json.dumps(list(observation), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise FailedError(f"{where}: messages are objects of JSON ({error})") from error


def number_of(reward: Any) -> float:
    """Convert a reward. Raises `TypeError`, `ValueError` or `OverflowError` if it is no number. Digits as
    text are none.
    """
    if isinstance(reward, str | bytes | bytearray):  # float() would read digits in them
        raise TypeError(f"a reward is a number, not a {type(reward).__name__}")
    return float(reward)


def _check_step(step: Any, where: str) -> Step:
    """Return `step`, if it is a step with plain values."""
    if not isinstance(step, Step):
        raise FailedError(f"{where} returned a {type(step).__name__}; return opd.environments.protocol.Step")
    try:
        if depth_exceeds(step.info, MAX_DEPTH):
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        reward = number_of(step.reward)
        info = json.loads(json.dumps(dict(step.info), allow_nan=False))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FailedError(f"{where}: reward is a number and info an object of JSON ({error})") from error
    if not abs(reward) <= LARGEST:
        raise FailedError(f"{where}: reward {reward} is not a finite number of at most {LARGEST:g}")
    if len(json.dumps(info)) > MOST_INFO:
        raise FailedError(f"{where}: info has more than {MOST_INFO:,} characters")
    return Step(_check_observation(step.observation, where), reward, bool(step.done), info)
