"""What a test waits for, and what it sees of processes: whether one lives, and how much memory it takes."""

import re
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(done: Callable[[], object], seconds: float = 120) -> None:
    """Poll `done` until it is true. Fail after `seconds`."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def without_waiting(said: str) -> str:
    """Return what a command wrote, without the lines by which it says on a busy machine that it goes on."""
    return re.sub(r"(?m)^opd: .*: \d+ s so far.*\n", "", said)


def is_alive(pid: int) -> bool:
    """Return whether `pid` is a process that does not wait to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def own_bytes(field: str = "VmHWM") -> int:
    """Return a field of this process's memory in bytes: `VmHWM`, the peak of what was resident, `VmRSS`,
    resident now, `RssAnon`, of these no file's, or `VmData`, what RLIMIT_DATA limits.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))
