"""Where the tools of an agent run: `params.sandbox` of the environment `tools`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from opd.config.base import Config


class SandboxConfig(Config):
    """Where the tools of an agent run."""

    substrate: Literal["auto", "bubblewrap", "process"] = "auto"
    """What keeps commands apart; `auto` is bubblewrap where it works, else a process within limits."""
    seconds: float = Field(default=10.0, gt=0, le=3600)
    """That a command may take by the clock."""
    cpu_seconds: int = Field(default=10, gt=0, le=3600)
    """Of processor time, each process."""
    memory_mb: int = Field(default=512, gt=0, le=1 << 20)
    """MiB, of each process and of all together."""
    processes: int = Field(default=32, gt=0, le=1 << 15)
    """Processes and threads at a time."""
    disk_mb: int = Field(default=64, gt=0, le=1 << 20)
    """MiB of files; more ends the episode."""
    output: int = Field(default=8192, gt=0, le=1 << 24)
    """Bytes of a command's output that are kept."""
    reads: list[str] = []
    """Files and folders that commands can read, beside the system's and Python's library."""
    repeat: bool | None = None
    """Whether a command that a kill interrupted runs again, from the files as they were before it; else the
    model is told. `null`: where nothing but those files can be changed by it."""
    deterministic: list[str] = []
    """Tools that always do the same with the same files: after a kill their commands are run again, and no
    state is kept after each."""
