"""How many bytes of teacher weights exist at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ByteMeter:
    """Adds and takes away bytes from any thread, and remembers the most there were."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may run inside `hold`
        self._now = 0
        self._peak = 0

    @property
    def now(self) -> int:
        """Bytes held now."""
        return self._now

    def hold(self, nbytes: int) -> None:
        """`nbytes` more exist."""
        with self._lock:
            self._now += nbytes
            self._peak = max(self._peak, self._now)

    def let_go(self, nbytes: int) -> None:
        """`nbytes` less exist."""
        with self._lock:
            self._now -= nbytes

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        """`nbytes` more exist inside the block."""
        self.hold(nbytes)
        try:
            yield
        finally:
            self.let_go(nbytes)

    def take_peak(self) -> int:
        """The most bytes held at once since this was last asked."""
        with self._lock:
            peak, self._peak = self._peak, self._now
            return peak
