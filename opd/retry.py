"""How long to leave alone what has failed, and how often to try again: stores, servers and engines alike."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


@dataclass(frozen=True, slots=True)
class Retry:
    """Times in seconds. Pauses double, and half of each is random, so that many do not come back at once."""

    attempts: int = 5
    """Tries in a row, the first one included, before the work is given up."""
    pause: float = 0.25
    """After the first failure; twice as long after each further one."""
    longest: float = 8.0
    """Of one pause."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; it must be at least 1.")

    def seconds(self, failures: int) -> float:
        """How long to wait after `failures` in a row, at least one."""
        return min(self.longest, self.pause * 2.0 ** min(failures - 1, 60)) * random.uniform(0.5, 1.0)

    async def call_async(self, attempt: Callable[[], Awaitable[T]], passing: type[Exception]) -> T:
        """`call` of a coroutine; when the attempts are used up the last failure itself is raised."""
        failures = 0
        while True:
            try:
                return await attempt()
            except passing:
                failures += 1
                if failures >= self.attempts:
                    raise
            await asyncio.sleep(self.seconds(failures))

    def call(self, attempt: Callable[[], T], passing: type[E], used_up: Callable[[E, float], Exception]) -> T:
        """The result of `attempt`, which is called again while it raises `passing`.

        Raises `used_up(the last failure, seconds since the first try)` when the attempts are used up.
        """
        begin, failures = time.monotonic(), 0
        while True:
            try:
                return attempt()
            except passing as error:
                failures += 1
                if failures == self.attempts:
                    raise used_up(error, time.monotonic() - begin) from error
            time.sleep(self.seconds(failures))
