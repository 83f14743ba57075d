"""Rollout engines with continuous batching: requests run together, and each ends after its own length."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from opd.pipelines.simulate.costs import Decode
from opd.pipelines.simulate.events import Clock, Usage


@dataclass(slots=True)
class Request:
    """One response to write."""

    batch: int
    prompt: float
    length: float
    """Tokens."""
    began_under: int = -1
    """Policy version of its first token."""


class Engine:
    """Advances all running requests together, token by token, in closed form between two ends."""

    def __init__(
        self, clock: Clock, decode: Decode, prefill: Callable[[float], float], slots: int, factor: float = 1.0
    ) -> None:
        """`factor`: how much slower than planned this engine is."""
        self._clock, self._decode, self._prefill = clock, decode, prefill
        self._slots, self._factor = slots, factor
        self._running: list[tuple[float, int, Request]] = []  # (position at which it ends, serial, request)
        self._position = 0.0
        self._cached = 0.0
        """Tokens of keys and values of all running requests."""
        self._since = 0.0
        self._debt = 0.0
        """Seconds of prefill that come before the next token."""
        self._epoch = 0
        self._serial = 0
        self._paused = True
        self.usage = Usage()

    @property
    def free(self) -> int:
        """Slots without a request."""
        return self._slots - len(self._running)

    def pause(self) -> None:
        """Stop between two tokens."""
        self._settle()
        self._paused = True
        self._epoch += 1

    def resume(self, *, rebuild: bool) -> None:
        """Go on; with `rebuild`, keys and values are computed anew, since the weights are others."""
        self._since, self._paused = self._clock.now, False
        if rebuild and self._running:
            self._debt += self._prefill(self._cached)

    def work(
        self, queue: deque[Request], version: int, done: Callable[[Request], None], again: Callable[[], None]
    ) -> None:
        """Take requests into free slots and plan the next end, which calls `done`, then `again`."""
        if self._paused:
            return
        self._settle()
        while queue and self.free:
            request = queue.popleft()
            request.began_under = version
            self._debt += self._prefill(request.prompt)
            self._cached += request.prompt
            heapq.heappush(self._running, (self._position + request.length, self._serial, request))
            self._serial += 1
        self._epoch += 1
        if self._running:
            epoch = self._epoch
            tokens = self._running[0][0] - self._position
            end = self._clock.now + self._debt + self._factor * self._seconds(tokens)
            self._clock.at(end, lambda: self._ended(epoch, done, again))

    def _ended(self, epoch: int, done: Callable[[Request], None], again: Callable[[], None]) -> None:
        if epoch != self._epoch:
            return  # it was planned anew in the meantime
        self._settle(self._running[0][0])
        while self._running and self._running[0][0] <= self._position:
            _, _, request = heapq.heappop(self._running)
            self._cached -= request.prompt + request.length
            done(request)
        if not self._running:
            self._cached = 0.0
        again()

    def _seconds(self, tokens: float) -> float:
        """Of `tokens` decode steps of what runs now; keys and values grow by one token each a step."""
        decode, running = self._decode, len(self._running)
        linear = decode.fixed(running) + decode.per_token * self._cached
        return tokens * linear + decode.per_token * running * tokens * tokens / 2

    def _settle(self, position: float | None = None) -> None:
        """Bring position and usage to the present, or to `position`, which is reached now."""
        elapsed, self._since = self._clock.now - self._since, self._clock.now
        if self._paused or not self._running:
            return
        self.usage.busy += elapsed
        paid = min(elapsed, self._debt)
        self._debt -= paid
        reached = self._position + self._tokens(elapsed - paid) if position is None else position
        if position is not None:
            self._debt = 0.0
        tokens = min(reached, self._running[0][0]) - self._position
        self._cached += tokens * len(self._running)
        self._position += tokens

    def _tokens(self, seconds: float) -> float:
        """The inverse of `_seconds`."""
        decode, running = self._decode, len(self._running)
        linear = decode.fixed(running) + decode.per_token * self._cached
        square = decode.per_token * running / 2
        given = seconds / self._factor
        if square == 0 or linear == 0:
            return given / linear if linear else math.sqrt(given / square) if square else math.inf
        return 2 * given / (linear + math.sqrt(linear * linear + 4 * square * given))
