"""Ends what a run of tests has started and left behind, however the run ends: Ctrl-C, SIGTERM, SIGKILL.

Every process that tests start inherits a variable of the run, and so does what it starts, in whatever
session. A small process waits for the run's end and then kills those that still have it. A sandbox's guard
has none: it ends what runs in its sandbox and then itself, within a minute.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK = "OPD_TEST_RUN"
_PATIENCE = 3.0
"""Seconds that what is ending by itself may take."""
_ROUNDS = 20


def end_with_this_process() -> None:
    """Mark what this process starts from now on, and have it ended with it; within a run of tests that does
    so already (a worker of xdist, a test that runs tests), nothing.
    """
    if within_a_run() or not hasattr(os, "pidfd_open") or not Path("/proc/self/environ").exists():
        return
    os.environ[MARK] = f"{os.getpid()}-{_began(os.getpid())}-{uuid.uuid4().hex}"
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), os.environ[MARK]]
    quiet = subprocess.DEVNULL
    watcher = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    watcher.returncode = 0  # nobody waits for it: it outlives this process


def within_a_run() -> bool:
    """Whether the run whose mark this process has goes on: the variable may be left from another one."""
    found = re.fullmatch(r"([0-9]{1,10})-([0-9]{1,20})-.*", os.environ.get(MARK, ""))
    return found is not None and _began(int(found[1])) == int(found[2])


def _began(pid: int) -> int | None:
    """When the process began, in the kernel's ticks: its number may be another's later."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def marked(mark: str) -> list[int]:
    """The other processes that have inherited `mark`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def main(run: int, mark: str) -> None:
    """Wait for the end of the process `run`, then end what it left."""
    with contextlib.suppress(ProcessLookupError):
        waiting = select.poll()
        waiting.register(os.pidfd_open(run), select.POLLIN)
        waiting.poll()
    until = time.monotonic() + _PATIENCE
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.1)
    for _ in range(_ROUNDS):  # some may start others meanwhile
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
