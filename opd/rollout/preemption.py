"""Asking a rollout to make room: by signal or by call.

`SIGTERM` (or `stop`): leave within the grace period. `SIGUSR1` (or `suspend`): give the memory back and wait.
`SIGUSR2` (or `wake`): go on. The rollout looks between two chunks; whoever holds a `Preemption` may
look at other times with `check`.
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
"""Seconds between two looks while waiting."""
EXIT_STATUS = 128 + signal.SIGTERM
WRITE_SPEED = 100e6
"""Bytes per second assumed of the disk when the grace period must suffice for keys and values."""


class KVStore(Protocol):
    """Keeps the keys and values of interrupted requests; one set at a time."""

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep `tensors` durably in place of what was kept before."""
        ...

    def load(self) -> dict[str, Tensor] | None:
        """What is kept, or `None`."""
        ...

    def clear(self) -> None:
        """Keep nothing."""
        ...


@runtime_checkable
class Suspendable(Protocol):
    """An engine whose keys and values can leave and come back; see `TorchEngine`."""

    def snapshot(self) -> dict[str, Tensor]: ...

    def restore(self, tensors: Mapping[str, Tensor]) -> int: ...

    def release(self) -> None: ...


class Preemption:
    """What has been asked for. Plain attributes, because they are set by signal handlers."""

    def __init__(self, grace: float = 30.0) -> None:
        """`grace`: seconds between `stop` and the moment the process must be gone."""
        self.grace = grace
        self.suspended = False
        self._deadline: float | None = None

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self._deadline is not None

    @property
    def pending(self) -> bool:
        """Whether the rollout has something to do about it."""
        return self.stopping or self.suspended

    def remaining(self) -> float | None:
        """Seconds of the grace period that are left; `None` if the run was not asked to stop."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def stop(self) -> None:
        """Ask the run to leave; asking again does not extend the grace period."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self.grace

    def suspend(self) -> None:
        """Ask the rollout to give its memory back and wait."""
        self.suspended = True

    def wake(self) -> None:
        """Let a suspended rollout go on."""
        self.suspended = False

    def check(self) -> None:
        """Raise `PreemptedError` if the run was asked to stop."""
        if self.stopping:
            raise PreemptedError(
                "the run was asked to stop and did; every token written so far is in its log, continue with"
                " --resume."
            )

    def check_waiting(self) -> None:
        """`check` for who waits for what may never come: after half of the grace period. The other half is
        for the ending.
        """
        remaining = self.remaining()
        if remaining is not None and remaining < self.grace / 2:
            self.check()

    def wait(self) -> None:
        """Return once nobody wants the rollout suspended any more, or the run is to stop."""
        while self.suspended and not self.stopping:
            time.sleep(POLL)

    @contextlib.contextmanager
    def listen(self, *, leave: bool = True) -> Iterator[Preemption]:
        """Answer the three signals while the block runs. For the main thread.

        With `leave`, a process still there at the end of the grace period exits at once with status 143: the
        log holds all that was acknowledged, and the alternative is SIGKILL.
        """
        answers = {
            signal.SIGTERM: self.stop,
            signal.SIGUSR1: self.suspend,
            signal.SIGUSR2: self.wake,
        }
        before = {s: signal.signal(s, lambda *_, do=do: do()) for s, do in answers.items()}
        # Who started this process may have held them back; then they wait again for the next who listens.
        held = signal.pthread_sigmask(signal.SIG_UNBLOCK, answers)
        over = threading.Event()
        if leave:
            threading.Thread(target=self._leave_in_time, args=(over,), daemon=True).start()
        try:
            yield self
        finally:
            over.set()
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _leave_in_time(self, over: threading.Event) -> None:
        while not over.wait(POLL):
            remaining = self.remaining()
            if remaining is not None and remaining <= 0:
                said = (
                    f"not done {self.grace:g} s after it was asked to stop (runtime.grace_seconds), and ended"
                )
                with contextlib.suppress(OSError):
                    os.write(2, f"opd: {said}; continue with --resume.\n".encode())
                os._exit(EXIT_STATUS)
