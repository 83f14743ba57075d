"""Memory that one teacher's head passes on to the next."""

from __future__ import annotations

import mmap
import threading
import weakref

import torch
from torch import Tensor


def own_pages(nbytes: int) -> Tensor:
    """Return [nbytes] uint8 of pages that go back to the system with the last tensor on them.

    One thread after another reads heads. Memory that `malloc` gives a thread stays with that arena's threads
    after it is freed: several heads' worth for ten teachers.
    """
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


class HeadPages:
    """Pages for heads. Usually at most two exist: one in use, and one that is read ahead.

    The system clears each new page before it gives it away, which takes several times as long as reading a
    head into existing pages. So the pages of a freed head wait for the next one, while one other head exists.
    When that is freed too, so are they. A head is freed when no tensor is left on its memory, in any thread.
    Safe between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may run inside
        self._used = 0
        self._spare: mmap.mmap | None = None

    def allocate_pages(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8, of any content. Raises `OSError` if the system has no memory for it."""
        size, pages = max(nbytes, 1), None
        with self._lock:
            if self._spare is not None and len(self._spare) == size:
                pages, self._spare = self._spare, None
        if pages is None:
            pages = mmap.mmap(-1, size)
        view = memoryview(pages)  # lives as long as the tensor's memory
        tensor = torch.frombuffer(view, dtype=torch.uint8)
        with self._lock:
            self._used += 1
        weakref.finalize(view, self._reclaim_pages, pages).atexit = False
        return tensor[:nbytes]

    def _reclaim_pages(self, pages: mmap.mmap) -> None:
        with self._lock:
            self._used -= 1
            self._spare = pages if self._used == 1 else None
