"""A thread that makes a log durable at a steady interval, so that decoding does not wait for the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable


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
