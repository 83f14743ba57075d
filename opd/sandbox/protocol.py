"""What a sandbox is to an environment: commands, files, and states that can be come back to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from opd.errors import OpdError

KilledBy = Literal["wall", "memory", "processes", "disk", "output", "sandbox"]
"""Which quota ended a command; `sandbox` where what keeps it did not answer."""


class SandboxError(OpdError, RuntimeError):
    """A sandbox cannot be made or used: it does not work here, a path leads out, a quota is used up."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one sandbox; each holds for every command by itself, but `disk` and `files`."""

    seconds: float = 60.0
    """By the clock."""
    cpu_seconds: int = 30
    """Of processor time, for each process; SIGKILL beyond."""
    memory: int = 1 << 30
    """Bytes: of address space for each process, where an allocation fails, and resident in all together,
    where the command is killed.
    """
    processes: int = 64
    """Processes and threads at a time."""
    disk: int = 1 << 28
    """Bytes of the home, and of each file."""
    files: int = 10_000
    """Files, folders and links in the home."""
    output: int = 1 << 16
    """Bytes of each standard output that are kept: the first ones."""
    open_files: int = 256


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended."""

    exit: int | None
    """Its status; -N where signal N ended it; `None` where a quota did, or it was interrupted."""
    stdout: bytes = b""
    stderr: bytes = b""
    killed_by: KilledBy | None = None
    files_changed: tuple[str, ...] = ()
    """Names from the home, sorted: written, made or removed, links and folders too."""
    cut: int = 0
    """Bytes of both standard outputs that were not kept."""
    interrupted: bool = False
    """The process that ran it was killed in its middle, and it was not run again: whether it did what it was
    to do is not known; files are as they were before it.
    """


@dataclass(frozen=True, slots=True)
class HomeEntry:
    """A name in a sandbox's home."""

    path: str
    kind: Literal["file", "folder", "link", "other"]
    size: int = 0


class Sandbox(Protocol):
    """A home with files, and commands that see and change nothing else. One command at a time."""

    @property
    def spent(self) -> str | None:
        """Why nothing more can be done in it; `None` as long as it can be."""
        ...

    async def exec(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Outcome:
        """Run a program with its arguments, in the home, and end all that it has started. `timeout`: seconds,
        less than the sandbox's own. Raises `SandboxError` once it is `spent`.
        """
        ...

    async def read(self, path: str, most: int = 1 << 20) -> bytes:
        """The first `most` bytes of a file. Raises `SandboxError` if it is none, or lies out of the home."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file, and folders above it. Raises `SandboxError` as `read`, and over quota."""
        ...

    async def list(self, path: str = "") -> list[HomeEntry]:
        """What is in a folder, sorted by name. Raises `SandboxError` as `read`."""
        ...

    async def snapshot(self) -> str:
        """Keep all files as they are; the digest of the whole. Raises `SandboxError` over quota."""
        ...

    async def restore(self, digest: str) -> None:
        """Make the files what they were at that snapshot. Raises `StorageError` if it is damaged or unknown,
        and leaves the files as they are.
        """
        ...

    async def close(self) -> None:
        """End it and remove its files; safe to call twice."""
        ...
