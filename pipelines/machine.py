"""How a stage uses the machine it runs on."""

from __future__ import annotations

import contextlib
import ctypes
import sys

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt(3)


def out_of_memory(error: BaseException) -> str | None:
    """What `error` says, in short, if it means that there is no more memory; `None` for any other error."""
    allocator = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if allocator or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return " ".join(str(error).split())[:160].rstrip(".") or "no more is free"
    return None


def settle(threads: int) -> None:
    """Fix the number of CPU threads, and keep freed memory for the next tensor.

    By default glibc gives every large block back to the kernel, which then zeroes it page by page for the
    next one: up to half of the time of a small model's training step where processes share the machine.
    """
    torch.set_num_threads(threads)
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 64 << 20)
