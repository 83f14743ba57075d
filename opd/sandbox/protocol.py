"""The interface of a sandbox for an environment: commands, files, and snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from opd.errors import OpdError

KilledBy = Literal["wall", "memory", "processes", "disk", "output", "sandbox"]
"""The quota that ended a command, or `sandbox` if its supervisor did not answer."""


class SandboxError(OpdError, RuntimeError):
    """A sandbox cannot be made or used: it does not work here, a path leads out, a quota is used up."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one sandbox. Each holds for every single command, except `disk` and `files`."""

    seconds: float = 60.0
    """Wall time."""
    cpu_seconds: int = 30
    """Processor time of each process. SIGKILL beyond."""
    memory: int = 1 << 30
    """Bytes of address space for each process, beyond which an allocation fails. Also resident bytes of all
    processes, beyond which the command is killed.
    """
    processes: int = 64
    """Processes and threads at a time."""
    disk: int = 1 << 28
    """Bytes of the home, and of each file."""
    files: int = 10_000
    """Files, folders and links in the home."""
    output: int = 1 << 16
    """First bytes of each standard output that are kept."""
    open_files: int = 256


@dataclass(frozen=True, slots=True)
class Outcome:
    exit: int | None
    """Its status, or -N if signal N ended it. `None` if a quota did, or if it was interrupted."""
    stdout: bytes = b""
    stderr: bytes = b""
    killed_by: KilledBy | None = None
    files_changed: tuple[str, ...] = ()
    """Names from the home, sorted: written, made or removed, links and folders too."""
    cut: int = 0
    """Bytes of both standard outputs that were not kept."""
    interrupted: bool = False
    """The process that ran it was killed during it, and it was not run again. Its effects are unknown. Files
    are as they were before it.
    """


@dataclass(frozen=True, slots=True)
class HomeEntry:
    """A name in a sandbox's home."""

    path: str
    kind: Literal["file", "folder", "link", "other"]
    size: int = 0


class Sandbox(Protocol):
    """A home with files. Commands see and change nothing else. One command at a time."""

    @property
    def spent(self) -> str | None:
        """Reason why it can no longer be used, or None."""
        ...

    async def exec(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Outcome:
        """Run a program with its arguments, in the home, and end all processes that it has started.
        `timeout`: seconds, less than the sandbox's own. Raises `SandboxError` once it is `spent`.
        """
        ...

    async def read(self, path: str, most: int = 1 << 20) -> bytes:
        """Return the first `most` bytes of a file. Raises `SandboxError` for none, or one out of the home."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file, and folders above it. Raises `SandboxError` as `read`, and over quota."""
        ...

    async def list(self, path: str = "") -> list[HomeEntry]:
        """Return the entries of a folder, sorted by name. Raises `SandboxError` as `read`."""
        ...

    async def snapshot(self) -> str:
        """Store all files as they are and return the snapshot's digest. Raises `SandboxError` over quota."""
        ...

    async def restore(self, digest: str) -> None:
        """Restore the files of that snapshot. Raises `StorageError` if it is damaged or unknown, and leaves
        the files as they are.
        """
        ...

    async def close(self) -> None:
        """Close it and remove its files. Safe to call twice."""
        ...
