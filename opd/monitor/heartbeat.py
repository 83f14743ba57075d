"""No long silence: says that work goes on where nothing else has been said for a while."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

AFTER, LONGEST = 10.0, 60.0
"""Seconds of silence before the first word, and between two words at most."""

_doing: list[Callable[[], str]] = []


@contextmanager
def doing(what: str | Callable[[], str]) -> Iterator[None]:
    """What this process is busy with while the block runs, for whoever says that it is busy."""
    told = what if callable(what) else lambda: what
    _doing.append(told)
    try:
        yield
    finally:
        _doing.remove(told)


def busy_with() -> str:
    """The latest of what `doing` was told; empty if there is nothing."""
    latest = _doing[-1:]
    return latest[0]() if latest else ""


class Heartbeat:
    """While it is open, `say(seconds of silence)` is called after `AFTER` seconds without a `beat`, and then
    less and less often. `say` is called in a thread of its own.
    """

    def __init__(self, say: Callable[[float], None], after: float = AFTER) -> None:
        self._say, self._after = say, after
        self._last = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def beat(self) -> None:
        """Something was said."""
        self._last = time.monotonic()

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        since, wait = self._last, self._after
        while not self._over.wait(max(0.01, min(wait, since + wait - time.monotonic()))):
            if self._last != since:
                since, wait = self._last, self._after
            elif time.monotonic() - since >= wait:
                self._say(time.monotonic() - since)
                wait += min(wait, LONGEST)


@contextmanager
def never_silent(what: str, after: float = AFTER) -> Iterator[None]:
    """Say on standard error that `what` goes on, if the block takes long."""

    def say(seconds: float) -> None:
        detail = f", {busy_with()}" if busy_with() else ""
        print(f"opd: {what}: {seconds:.0f} s so far{detail}", file=sys.stderr, flush=True)

    with Heartbeat(say, after):
        yield
