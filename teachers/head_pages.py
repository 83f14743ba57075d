"""Memory that one teacher's head leaves to the next."""

from __future__ import annotations

import mmap
import threading
import weakref

import torch
from torch import Tensor


def own_pages(nbytes: int) -> Tensor:
    """[nbytes] uint8 of pages that go back to the system with the last tensor on them.

    Heads are read by one thread after another; what `malloc` gives a thread, it keeps for threads of that
    arena after it is freed: several heads' worth for ten teachers.
    """
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


class HeadPages:
    """Pages for heads, of which at most two exist as a rule: one in use, and one that is read ahead.

    The system clears each new page before it gives it away, which takes several times as long as to read a
    head into pages that are there. So those of a head that is gone wait for the next one, while one other
    head exists; when that goes too, so do they. Gone is a head when no tensor is left on its memory, whoever
    had it. Safe between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may run inside
        self._used = 0
        self._spare: mmap.mmap | None = None

    def take(self, nbytes: int) -> Tensor:
        """[nbytes] uint8, of any content. Raises `OSError` where the system has no memory for it."""
        size, pages = max(nbytes, 1), None
        with self._lock:
            if self._spare is not None and len(self._spare) == size:
                pages, self._spare = self._spare, None
        if pages is None:
            pages = mmap.mmap(-1, size)
        lent = memoryview(pages)  # lives as long as the tensor's memory
        taken = torch.frombuffer(lent, dtype=torch.uint8)
        with self._lock:
            self._used += 1
        weakref.finalize(lent, self._given_back, pages).atexit = False
        return taken[:nbytes]

    def _given_back(self, pages: mmap.mmap) -> None:
        with self._lock:
            self._used -= 1
            self._spare = pages if self._used == 1 else None
