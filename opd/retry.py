"""Pauses and numbers of retries for stores, servers and engines alike."""

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
    """Times in seconds. Pauses double, and half of each is random, so that clients do not return at once."""

    attempts: int = 5
    """Tries in a row, the first one included."""
    pause: float = 0.25
    """After the first failure. Each further one doubles it."""
    longest: float = 8.0
    """Longest pause."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; it must be at least 1.")

    def pause_seconds(self, failures: int) -> float:
        """Return the pause after `failures` in a row, at least one."""
        return min(self.longest, self.pause * 2.0 ** min(failures - 1, 60)) * random.uniform(0.5, 1.0)

    async def call_async(self, attempt: Callable[[], Awaitable[T]], passing: type[Exception]) -> T:
        """`call` a coroutine. When the attempts are used up, raise the last failure itself."""
        failures = 0
        while True:
            try:
                return await attempt()
            except passing:
                failures += 1
                if failures >= self.attempts:
                    raise
            await asyncio.sleep(self.pause_seconds(failures))

    def call(self, attempt: Callable[[], T], passing: type[E], used_up: Callable[[E, float], Exception]) -> T:
        """Return the result of `attempt`, which is called again while it raises `passing`.

        Raises `used_up(the last failure, seconds since the first try)` when the attempts are used up.
        """
        started, failures = time.monotonic(), 0
        while True:
            try:
                return attempt()
            except passing as error:
                failures += 1
                if failures == self.attempts:
                    raise used_up(error, time.monotonic() - started) from error
            time.sleep(self.pause_seconds(failures))
