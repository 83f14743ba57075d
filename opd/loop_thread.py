"""An asyncio loop in a thread of its own, for synchronous callers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
CANCEL_ROUNDS, CANCEL_SECONDS = 10, 0.5
"""Number of cancellations of a running task before it is left behind, and the seconds between them."""


class LoopThread:
    """Runs coroutines until it is closed. The thread never keeps the process from ending."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work`. Cancelling the future cancels it."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the loop is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. An interrupt of the caller cancels it."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call_soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have the loop call `function` soon. Does nothing once it is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel running tasks and end the thread. A second call changes nothing."""
        if self._loop.is_closed():
            return
        self.run(_cancel_others([CANCEL_SECONDS] * CANCEL_ROUNDS))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def begin_close(self, patience: float = CANCEL_SECONDS) -> Future[None]:
        """Cancel running tasks once. They have `patience` seconds to clean up. Call `end_close` next."""
        return self.start(_cancel_others([patience]))

    def end_close(self, begun: Future[None], seconds: float) -> bool:
        """End the thread, whose closing has `begun`, within `seconds`. Return whether it has ended. A thread
        held up by its code is left behind. It does not keep the process alive.
        """
        with contextlib.suppress(TimeoutError):
            begun.result(seconds)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CANCEL_SECONDS)
        if self._thread.is_alive():
            return False
        self._loop.close()
        return True


async def _cancel_others(rounds: Sequence[float]) -> None:
    """Cancel all other tasks. After each of the `rounds`, in seconds, cancel the remaining ones again."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for seconds in rounds:
        if not others:
            return
        for task in others:
            task.cancel()
        # Once is not enough: a cancellation that meets a time-out at the same moment is lost.
        done, others = await asyncio.wait(others, timeout=seconds)
        for task in done:
            if not task.cancelled():
                task.exception()
