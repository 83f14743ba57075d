"""Processes and files of a cluster of our own, so that none is left when it ends, however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from opd.errors import RunFolderError
from opd.storage.files import FileLock

PROC = Path("/proc")
TEMPORARY = Path("/tmp")
"""Sockets lie below it, and their paths may have 107 characters."""
LOCK = ".lock"
YOUNG = 60.0
"""Seconds in which a folder may not be locked by its owner yet."""
KILLED_SECONDS = 2.0
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
    until = time.monotonic() + KILLED_SECONDS
    while _alive(processes) and time.monotonic() < until:
        time.sleep(0.02)


@contextmanager
def own_folder(prefix: str, parent: Path = TEMPORARY) -> Iterator[Path]:
    """A folder below `parent` while the block runs. Those that processes of this user left behind, because
    they were killed, are removed first.
    """
    for left in parent.glob(f"{prefix}*/{LOCK}"):
        _remove_ownerless(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with FileLock(folder / LOCK):
            yield folder
    finally:
        _remove(folder)


def _remove_ownerless(lock: Path) -> None:
    with suppress(OSError, RunFolderError):  # it is in use, somebody else's, or being removed
        if lock.stat().st_uid != os.getuid() or time.time() - lock.stat().st_mtime < YOUNG:
            return
        with FileLock(lock):
            _remove(lock.parent)


def _remove(folder: Path, patience: float = 2.0) -> None:
    """Remove `folder`, into which a dying process may still write."""
    until = time.monotonic() + patience
    while folder.exists() and time.monotonic() < until:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)


def _alive(processes: Mapping[int, int]) -> list[int]:
    return [pid for pid, start in processes.items() if (stat := _stat(pid)) is not None and stat[1] == start]


def _stat(pid: int) -> tuple[int, int] | None:
    """(parent, start) of a process; `None` if it is gone or only waits to be reaped."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))
