"""Calls one reward function on one domain's samples and reads its answers, in a thread, with a time limit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

from opd.errors import RewardError
from opd.imports import calling, raised
from opd.rewards.functions import RewardFunction, RewardSample
from opd.rewards.values import reward_value
from opd.streams import streams_kept

Scored = tuple[float, dict[str, float]]
"""A reward and its parts."""

_CANCEL_SECONDS = 0.5
"""How long a cancelled asynchronous function may take to clean up."""


class Job:
    """One call of a function on samples of one domain.

    A thread cannot be stopped: a synchronous function that never returns keeps its (daemon) thread, which
    ends with the process. An asynchronous one is cancelled.
    """

    def __init__(self, function: RewardFunction, samples: Sequence[RewardSample], timeout: float) -> None:
        self.function = function
        self.samples = samples
        self._timeout = timeout
        self._thread = threading.Thread(target=self._run, name=f"reward {function.name}", daemon=True)
        self._deadline = 0.0
        self._scored: list[Scored] | None = None
        self._failure: BaseException | None = None
        self._expired = False
        self._running = [sample.uid for sample in samples]
        """Samples being scored right now, for the sentence of an error."""

    def start(self) -> None:
        """Begin; the time limit counts from here."""
        grace = _CANCEL_SECONDS if self.function.is_async else 0.0
        self._deadline = time.monotonic() + self._timeout + grace
        self._thread.start()

    def result(self) -> list[Scored]:
        """Each sample's reward. Raises `RewardError`."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive() or self._expired:
            raise RewardError(
                f"{self._what()} took longer than {self._timeout:g} s; make it faster or raise "
                "rollout.reward_timeout."
            )
        if self._failure is not None:
            raise self._failure
        if self._scored is None:
            raise RewardError(f"{self._what()} raised what cannot be shown; mend it.")
        return self._scored

    def _what(self) -> str:
        uids = list(self._running)
        more = f" and {len(uids) - 1} more" if len(uids) > 1 else ""
        domain = self.samples[0].domain
        return f"reward function {self.function.name} (domain {domain}, sample {uids[0]}{more})"

    def _raised(self, error: BaseException) -> RewardError:
        return RewardError(f"{self._what()} {raised(error)}")

    def _run(self) -> None:
        try:
            with streams_kept():
                if self.function.is_async:
                    self._scored = asyncio.run(asyncio.wait_for(self._call_async(), self._timeout))
                else:
                    self._scored = self._call()
        except RewardError as error:
            self._failure = error
        except TimeoutError:  # of wait_for: the function's own errors arrive as RewardError
            self._expired = True
        except BaseException as error:  # handed to the thread that asked
            self._failure = self._raised(error)

    def _call(self) -> list[Scored]:
        if self.function.style == "batch":
            with calling(self._what(), RewardError):
                returned = self.function.call(**self.function.batch_arguments(self.samples))
            return self._whole(returned)
        scored = []
        for sample in self.samples:
            self._running = [sample.uid]
            with calling(self._what(), RewardError):
                value = self.function.call(sample)
            scored.append(reward_value(self.function, sample, value))
        return scored

    async def _call_async(self) -> list[Scored]:
        if self.function.style == "batch":
            return self._whole(await self._batch())
        try:
            async with asyncio.TaskGroup() as tasks:
                pending = [tasks.create_task(self._one(sample)) for sample in self.samples]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group.exceptions[0].__cause__
        return [task.result() for task in pending]

    async def _batch(self) -> Any:
        arguments = self.function.batch_arguments(self.samples)
        try:
            return await self.function.call(**arguments)
        except Exception as error:
            raise self._raised(error) from error

    async def _one(self, sample: RewardSample) -> Scored:
        try:
            value = await self.function.call(sample)
        except Exception as error:
            self._running = [sample.uid]
            raise self._raised(error) from error
        if sample.uid in self._running:
            self._running.remove(sample.uid)
        return reward_value(self.function, sample, value)

    def _whole(self, returned: Any) -> list[Scored]:
        """A batch function's result, if it is a sequence of the right length."""
        what, wanted = self._what(), len(self.samples)
        with calling(f"{what} returned a {type(returned).__name__}, and reading it", RewardError):
            if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__len__"):
                raise RewardError(
                    f"{what} returned a {type(returned).__name__}; return a list of one number each."
                )
            found = list(
                islice(returned, wanted + 1)
            )  # it may say another length than it has, or have no end
            if len(found) != wanted:
                count = len(found) if len(found) < wanted else max(len(returned), len(found))
                raise RewardError(
                    f"{what} returned {count} rewards for {wanted} completions; return one for each."
                )
        return [reward_value(self.function, *pair) for pair in zip(self.samples, found, strict=True)]
