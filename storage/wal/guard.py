"""When a log may be written, and why not; and the thread that makes it durable meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from opd.errors import StorageError


class WriteGuard:
    """Remembers the first failure of a log and refuses every write after it.

    Used as a context from the first byte written until memory agrees: whatever breaks that off ends the log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = os.getpid()
        self._failure: str | None = None
        self._told = False
        self._busy = False
        self._closed = False

    @property
    def intact(self) -> bool:
        """Nothing has failed, and this is the process that opened the log."""
        return self._failure is None and os.getpid() == self._process

    @property
    def untold(self) -> bool:
        """Something failed in the background, and no call has said so yet."""
        return self._failure is not None and not self._told

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Refuse every further write."""
        self._closed = True

    def check(self) -> None:
        """Raise `StorageError` after a failure, after `close`, in a forked child, or inside another write."""
        if self._failure is not None:
            self._told = True
            raise StorageError(self._failure)
        if self._closed:
            raise StorageError(f"the log in {self._folder} has been shut down; open it again")
        if self._busy:
            raise StorageError(
                f"the log in {self._folder} was called in the middle of a write, as from a signal handler;"
                " set a flag there and call it later"
            )
        if os.getpid() != self._process:
            raise StorageError(
                f"the log in {self._folder} belongs to process {self._process}; a forked child cannot write"
                " to it"
            )

    def __enter__(self) -> None:
        """Begin a write."""
        self._busy = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End a write: memory agrees with the file, or nothing is written again."""
        self._busy = False
        if isinstance(error, OSError):
            self._told = True
            raise StorageError(self._fail(error)) from error
        if kind is not None:
            self._failure = (
                f"a write to the log in {self._folder} was broken off by {kind.__name__}; open it again"
            )

    def in_background(self, sync: Callable[[], None]) -> None:
        """Run `sync`; a failure is told by the next write."""
        if self._failure is None:
            try:
                sync()
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> str:
        self._failure = (
            f"the log in {self._folder} could not be written ({error.strerror or error}) and takes nothing"
            " more; mend that and open it again: what was acknowledged is kept"
        )
        return self._failure


class Syncer:
    """Calls `sync` at most every `interval` seconds while there is something to do, until stopped.

    Waiting is by the monotonic clock: setting the machine's time changes nothing.
    """

    def __init__(self, sync: Callable[[], None], interval: float) -> None:
        self._sync = sync
        self._interval = interval
        self._work = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="opd-wal-sync", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Something was written."""
        if not self._work.is_set():
            self._work.set()

    def stop(self) -> None:
        """Let a sync under way end, then end the thread; does not sync by itself."""
        self._stopped.set()
        self._work.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._work.wait()
            if self._stopped.wait(self._interval):
                return
            self._work.clear()  # before the sync: a write during it asks for another one
            self._sync()
