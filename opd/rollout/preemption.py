"""Requests to a rollout to free its memory or stop, by signal or by call.

`SIGTERM` (or `stop`): leave within the grace period. `SIGUSR1` (or `suspend`): free the memory and wait.
`SIGUSR2` (or `wake`): continue. The rollout checks between two chunks. Any holder of a `Preemption` may call
`check` at other times.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from opd.errors import PreemptedError

if TYPE_CHECKING:
    from torch import Tensor

POLL = 0.05
"""Seconds between two checks while waiting."""
EXIT_STATUS = 128 + signal.SIGTERM
WRITE_SPEED = 100e6
"""Assumed write speed of the disk, in bytes per second, for keys and values in the grace period."""


class KVStore(Protocol):
    """Stores the keys and values of interrupted requests, one set at a time."""

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Store `tensors` durably in place of the previous set."""
        ...

    def load(self) -> dict[str, Tensor] | None:
        """Return the stored set, or None."""
        ...

    def clear(self) -> None:
        """Delete the stored set."""
        ...


@runtime_checkable
class Suspendable(Protocol):
    """An engine whose keys and values can be saved and restored; see `TorchEngine`."""

    def snapshot(self) -> dict[str, Tensor]: ...

    def restore(self, tensors: Mapping[str, Tensor]) -> int: ...

    def release(self) -> None: ...


class Preemption:
    """The pending requests. Plain attributes, because signal handlers set them."""

    def __init__(self, grace: float = 30.0) -> None:
        """`grace`: seconds between `stop` and the moment the process must be gone."""
        self.grace = grace
        self.suspended = False
        self._deadline: float | None = None

    @property
    def is_stopping(self) -> bool:
        """True if the run was asked to stop."""
        return self._deadline is not None

    @property
    def needs_action(self) -> bool:
        """True if the rollout has to suspend or stop."""
        return self.is_stopping or self.suspended

    def seconds_left(self) -> float | None:
        """Seconds left of the grace period, or None if the run was not asked to stop."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def stop(self) -> None:
        """Ask the run to stop. Asking again does not extend the grace period."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self.grace

    def suspend(self) -> None:
        """Ask the rollout to free its memory and wait."""
        self.suspended = True

    def wake(self) -> None:
        """Let a suspended rollout continue."""
        self.suspended = False

    def check(self) -> None:
        """Raise `PreemptedError` if the run was asked to stop."""
        if self.is_stopping:
            raise PreemptedError(
                "the run was asked to stop and did; every token written so far is in its log, continue with"
                " --resume."
            )

    def check_waiting(self) -> None:
        """Call `check` after half of the grace period. For code that waits for an event that may never come.
        The other half is for shutdown.
        """
        remaining = self.seconds_left()
        if remaining is not None and remaining < self.grace / 2:
            self.check()

    def wait(self) -> None:
        """Return once the rollout is no longer suspended, or the run is to stop."""
        while self.suspended and not self.is_stopping:
            time.sleep(POLL)

    @contextlib.contextmanager
    def handle_signals(self, *, leave: bool = True) -> Iterator[Preemption]:
        """Handle the three signals while the block runs. For the main thread.

        With `leave`, a process still alive at the end of the grace period exits at once with status 143. The
        log holds every acknowledged token, and the alternative is SIGKILL.
        """
        answers = {
            signal.SIGTERM: self.stop,
            signal.SIGUSR1: self.suspend,
            signal.SIGUSR2: self.wake,
        }
        handlers = {s: signal.signal(s, lambda *_, do=do: do()) for s, do in answers.items()}
        # The parent process may have blocked them. They are blocked again after the block.
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, answers)
        over = threading.Event()
        if leave:
            threading.Thread(target=self._leave_in_time, args=(over,), daemon=True).start()
        try:
            yield self
        finally:
            over.set()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _leave_in_time(self, over: threading.Event) -> None:
        while not over.wait(POLL):
            remaining = self.seconds_left()
            if remaining is not None and remaining <= 0:
                message = (
                    f"opd: not done {self.grace:g} s after it was asked to stop (runtime.grace_seconds), and"
                    " ended; continue with --resume.\n"
                )
                with contextlib.suppress(OSError):
                    os.write(2, message.encode())
                os._exit(EXIT_STATUS)
