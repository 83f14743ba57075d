"""Engines of containers: podman or docker, what they say of themselves, and what is left of killed processes.

A client's program is asked, and no call waits without end. Whatever it answers is taken for what anybody may
have written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from opd.environments.sandbox.owners import OWNER, is_left, owner
from opd.environments.sandbox.protocol import SandboxError
from opd.foreign import decoding, read_document, shown

_log = logging.getLogger(__name__)
ENGINES = ("podman", "docker")
"""Commands that are tried, in this order."""
ANSWERING = 30.0
"""Seconds in which an engine answers a question."""
LABEL = "opd.sandbox"
_ID = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_NAME = re.compile(rf"opd-(?P<owner>{OWNER})-[0-9a-f]{{16}}")
_ANSWER = 1 << 24
_PASSED = ("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "LANG", "DBUS_SESSION_BUS_ADDRESS")
_PASSED_ALL = ("XDG_", "DOCKER_", "CONTAINER_", "CONTAINERS_", "STORAGE_", "PODMAN_")


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """A client's program, with what it reaches."""

    program: str
    name: Literal["podman", "docker"]
    """Which of the two it is, whatever the program is called."""
    version: str
    rootless: bool
    """What is root in its containers is the engine's user."""
    profile: str | None = None
    """podman's own file of the calls that a container may make, which lets it make namespaces."""


def environment() -> dict[str, str]:
    """The variables that an engine's client is given: no other may come to a container by its settings."""
    return {
        name: value for name, value in os.environ.items() if name in _PASSED or name.startswith(_PASSED_ALL)
    }


def engines() -> Iterator[ContainerEngine | SandboxError]:
    """Those that are installed, or why one does not work."""
    for name in ENGINES:
        program = shutil.which(name)
        if program is not None:
            try:
                yield _engine(program)
            except SandboxError as error:
                yield error


def ask(program: str, words: Sequence[str]) -> bytes:
    """What a client answers. Raises `SandboxError` where it fails, cannot be started or takes too long."""
    what = f"`{os.path.basename(program)} {' '.join(words[:2])}`"
    try:
        process = subprocess.Popen(
            [program, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=environment(),
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"{program} cannot be started ({error.strerror}); install it anew") from error
    with process:
        try:
            said, wrong = process.communicate(timeout=ANSWERING)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise SandboxError(
                f"{what} did not answer within {ANSWERING:g} s: its engine hangs; start it anew"
            ) from None
    if process.returncode != 0:
        raise SandboxError(f"{what} failed ({_last_line(wrong)})")
    return said


def _last_line(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return shown(lines[-1].strip(), 300) if lines else "it says nothing"


def _engine(program: str) -> ContainerEngine:
    """What a client reaches. Raises `SandboxError` where that does not work."""
    name = os.path.basename(program)
    try:
        said = _object(program, ["info", "--format", "{{json .}}"])
    except SandboxError as error:
        mend = "start its daemon and let this user reach it" if name == "docker" else "mend its settings"
        raise SandboxError(f"{name} does not work here: {error}; {mend}") from None
    with decoding(lambda cause: SandboxError(f"`{name} info` makes no sense ({cause}); install it anew")):
        if "host" in said:  # also a `docker` that is podman's
            safety = said["host"]["security"]
            profile = str(safety.get("seccompProfilePath") or "") or None
            version = shown(said["version"]["Version"], 30)
            return ContainerEngine(program, "podman", version, safety["rootless"] is True, profile)
        if errors := said.get("ServerErrors"):
            raise SandboxError(f"docker does not work here: {shown(errors[0], 300)}; start its daemon")
        rootless = any(str(one).startswith("name=rootless") for one in said["SecurityOptions"] or [])
        return ContainerEngine(program, "docker", shown(said["ServerVersion"], 30), rootless)
    raise AssertionError


def _object(program: str, words: Sequence[str]) -> dict[str, Any]:
    """The one object of JSON that a client answers, alone or in a list."""
    what = f"`{os.path.basename(program)} {' '.join(words[:2])}`"
    data = ask(program, words)
    with decoding(lambda cause: SandboxError(f"the answer of {what} makes no sense ({cause})")):
        found = read_document(data, _ANSWER)
        found = found[0] if isinstance(found, list) and len(found) == 1 else found
        if not isinstance(found, dict):
            raise ValueError("it is no object")
        return found
    raise AssertionError


def image_digest(engine: ContainerEngine, image: str) -> str:
    """What an image is. Raises `SandboxError` where there is none of that name, or none that can be used."""
    try:
        said = _object(engine.program, ["image", "inspect", "--format", "{{json .}}", image])
    except SandboxError as error:
        raise SandboxError(
            f"{engine.name} has no image {shown(image)} here: {error}; build it, or fetch it before the run"
            f" by `{engine.name} pull`"
        ) from None
    with decoding(
        lambda cause: SandboxError(f"what {engine.name} says of {shown(image)} makes no sense ({cause})")
    ):
        found, volumes = _ID.fullmatch(said["Id"]), (said.get("Config") or {}).get("Volumes")
        if found is None:
            raise ValueError(f"its id is {shown(said['Id'])}")
        if volumes and engine.name == "docker":
            raise SandboxError(
                f"the image {shown(image)} declares the volume {shown(next(iter(volumes)))}, which docker"
                " lets a command write without bound; use podman, or build the image without VOLUME"
            )
        return f"sha256:{found[1]}"
    raise AssertionError


def new_name() -> str:
    """Of a new container: whose it is, and one more word."""
    return f"opd-{owner()}-{secrets.token_hex(8)}"


def removal(engine: ContainerEngine, names: Sequence[str]) -> list[str]:
    """The command that ends and removes containers; that one is not there is no error to podman."""
    return [engine.program, "rm", "--force", "--volumes", *names]


def remove_left(engine: ContainerEngine) -> None:
    """End the containers of this user's processes that were killed here. What cannot be is told."""
    try:
        words = ["ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}"]
        left = []
        for name in ask(engine.program, words).decode(errors="replace").split():
            found = _NAME.fullmatch(name)
            if found and is_left(found["owner"]):
                left.append(name)
        if left:
            program, *words = removal(engine, left)
            ask(program, words)
            _log.info("%d containers of processes that were killed are removed", len(left))
    except SandboxError as error:
        _log.warning("containers of processes that were killed may be left: %s", error)
