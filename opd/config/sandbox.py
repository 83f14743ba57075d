"""Where the tools of an agent run: `params.sandbox` of the environment `tools`."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from opd.config.base import Config

IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}")
_LEAST_MB = 16
"""Of a container's memory: with less no engine begins one."""


class SandboxConfig(Config):
    """Where the tools of an agent run."""

    substrate: Literal["auto", "bubblewrap", "process", "container"] = "auto"
    """What keeps commands apart; `auto` is bubblewrap where it works, else a process within limits."""
    image: str | None = None
    """Of the containers, by podman or docker: one that this machine has, by name, digest or id. It has a
    `/bin/sh`, and what the tools need. What it is when a run begins, it has to be when the run goes on."""
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
    """Tools that always do the same with the same files: after a kill their commands are run again, and a
    state is kept after those alone that a quota or a signal ended."""

    @field_validator("image")
    @classmethod
    def _is_a_name(cls, image: str | None) -> str | None:
        if image is not None and not IMAGE_NAME.fullmatch(image):
            raise ValueError(
                f"{image[:100]!r} names no image: give a name, name:tag, name@sha256:digest or an id"
            )
        return image

    @model_validator(mode="after")
    def _fits(self) -> SandboxConfig:
        contained = self.substrate == "container"
        if contained != (self.image is not None):
            raise ValueError("substrate: container and image go together; give both, or neither")
        odd = [path for path in self.reads if set(path) & set(',"\n\r')]
        if contained and odd:
            raise ValueError(
                f"reads has {odd[0][:100]!r}, and a container is given no path with a comma, quote or new"
                " line; rename it"
            )
        if contained and self.memory_mb < _LEAST_MB:
            raise ValueError(f"memory_mb of a container is {_LEAST_MB} at least; raise it")
        return self
