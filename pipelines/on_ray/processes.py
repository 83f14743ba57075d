"""The processes a cluster of our own consists of, so that none is left when it ends, however it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
Processes = dict[int, int]
"""Process id -> when it started, in the kernel's ticks: an id alone may name another process later."""


def descendants(root: int) -> Processes:
    """Children of process `root`, their children and so on; empty where there is no `/proc`."""
    table: dict[int, tuple[int, int]] = {}
    for entry in PROC.glob("[0-9]*") if PROC.is_dir() else ():
        stat = _stat(int(entry.name))
        if stat is not None:
            table[int(entry.name)] = stat
    found: Processes = {}
    parents = {root}
    while parents:
        children = {pid: start for pid, (parent, start) in table.items() if parent in parents}
        children = {pid: start for pid, start in children.items() if pid not in found}
        found |= children
        parents = set(children)
    return found


def end_left_over(processes: Mapping[int, int], patience: float) -> None:
    """Give `processes` `patience` seconds to leave, then SIGKILL those that stay."""
    until = time.monotonic() + patience
    while (left := _alive(processes)) and time.monotonic() < until:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _alive(processes: Mapping[int, int]) -> list[int]:
    return [pid for pid, start in processes.items() if (stat := _stat(pid)) is not None and stat[1] == start]


def _stat(pid: int) -> tuple[int, int] | None:
    """(parent, start) of a process; `None` if it is gone or only waits to be reaped."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))
