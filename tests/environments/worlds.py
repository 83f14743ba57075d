"""Environments of the tests."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import ClassVar

from opd.environments.protocol import Action, Step, Task

MADE: list[Sum] = []
"""Every one that was made since a test emptied it."""


class Sum:
    """Answers every turn with the sum of the digits in it, and is over after a number of turns that the task
    says. `async` methods.
    """

    def __init__(self, turns: int = 3, first: str = "", delay: float = 0.0) -> None:
        self.turns, self.first, self.delay = turns, first, delay
        self.seen: list[str] = []
        self.closed = 0
        MADE.append(self)

    async def reset(self, task: Task) -> str | None:
        self.task = task
        return self.first or None

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(self.delay)
        assert action.turn == len(self.seen)
        self.seen.append(action.text)
        total = sum(int(sign) for sign in action.text if sign.isdigit())
        return Step(f"={total % 10}=", total / 10, len(self.seen) == self.turns, {"last": total})

    async def close(self) -> None:
        self.closed += 1


class Blocking(Sum):
    """The same, whose methods hold up the thread they run in."""

    def reset(self, task: Task) -> str | None:
        self.task = task
        return None

    def step(self, action: Action) -> Step:
        time.sleep(self.delay)
        return asyncio.run(super().step(action))

    def close(self) -> None:
        self.closed += 1


class Fails(Sum):
    """Raises in turn `at` (0: in reset), in so many of its lives."""

    failed: ClassVar[dict[tuple[str, int], int]] = {}

    def __init__(self, at: int, times: int) -> None:
        super().__init__()
        self.at, self.times = at, times

    def _maybe(self, turn: int) -> None:
        key = (self.task.uid, self.times)
        if turn == self.at and Fails.failed.get(key, 0) < self.times:
            Fails.failed[key] = Fails.failed.get(key, 0) + 1
            raise RuntimeError("no luck")

    async def reset(self, task: Task) -> str | None:
        self.task = task
        self._maybe(0)
        return None

    async def step(self, action: Action) -> Step:
        self._maybe(action.turn + 1)
        return await super().step(action)


class Hangs(Sum):
    """Never answers."""

    def reset(self, task: Task) -> None:
        self.task = task

    async def step(self, action: Action) -> Step:
        await asyncio.Event().wait()
        raise AssertionError


class Last(Sum):
    """Answers once an episode of another domain is over."""

    over: ClassVar[threading.Event] = threading.Event()

    def reset(self, task: Task) -> None:
        self.task = task

    def step(self, action: Action) -> Step:
        if not self.over.wait(50.0):
            raise RuntimeError("the other domain did not end")
        return Step("", 1.0, True)


class First(Sum):
    """The other one."""

    async def close(self) -> None:
        Last.over.set()


class Answers(Sum):
    """Says what it should not."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    async def step(self, action: Action) -> Step:
        deep: dict = {}
        for _ in range(2000):
            deep = {"a": deep}
        return {
            "text": "hello",
            "assistant": Step([{"role": "assistant", "content": "x"}]),
            "role": Step([{"role": None, "content": "x"}]),
            "nan": Step("", float("nan")),
            "info": Step("", 0.0, False, {"x": object()}),
            "deep": Step("", 0.0, False, {"x": deep["a"]}),
            "number": Step(3),
            "huge": Step("", 10**400),
            "bytes": Step("", b"1"),
            "many": Step([{"role": "tool", "content": ""}] * 1001),
            "nested": Step([{"role": "tool", "content": "", "x": deep}]),
            "object": Step([{"role": "tool", "content": "", "x": object()}]),
        }[self.what]


class Fickle(Sum):
    """Answers otherwise in every life, and fails once."""

    lives = 0

    def __init__(self) -> None:
        super().__init__()
        Fickle.lives += 1
        self.life = Fickle.lives

    async def step(self, action: Action) -> Step:
        if action.turn == 1:
            raise RuntimeError("no luck")
        return Step(f"={self.life}=")


class Exits(Sum):
    """Ends the process, were it its own; a loop, if `turn` of its `async` method is reached."""

    def __init__(self, turn: int | None = None) -> None:
        super().__init__()
        self.turn = turn

    async def step(self, action: Action) -> Step:
        if action.turn == self.turn:
            raise SystemExit(3)
        return await super().step(action)

    def reset(self, task: Task) -> None:
        self.task = task
        if self.turn is None:
            raise SystemExit(3)


class OwnError(BaseException):
    """No `Exception`."""


class Unusual(Sum):
    """Raises what is no `Exception`, or cancels itself."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    async def step(self, action: Action) -> Step:
        if self.what == "base":
            raise OwnError("odd")
        if self.what == "raised":
            raise asyncio.CancelledError
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60)
        raise AssertionError


class BadTools(Sum):
    tools = "look"


class Calls(Sum):
    """With a tool."""

    tools: ClassVar = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
