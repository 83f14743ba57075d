"""Where heavy things live: published teachers, cached hidden states, the log of rollouts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from opd.config.base import Config


class StorageConfig(Config):
    """Published teachers and what is kept of their work."""

    published: str | None = Field(default=None, min_length=1)
    """URL below which the run publishes its teachers, each under its name: a folder, `file://` or `s3://`
    (extra `s3`); `None` is `published/` in the run folder."""
    shards: int = Field(default=1, gt=0, le=4096)
    """Files each published teacher is cut into: as many ranks read an equal part each."""
    prefetch_mb: int = Field(default=256, gt=0)
    """Memory for layers read ahead, shared by all teachers (MiB)."""
    cache_mb: int = Field(default=1024, ge=0)
    """Disk for teachers' hidden states, so that they need not wait in memory for their turn in the update
    (MiB); 0 keeps them in memory."""
    trajectories: Literal["memory", "disk"] = "memory"
    """Where the merge and GRPO keep samples between rollout and update. `disk`: in a trajectory store, which
    each response goes to when it ends; the step is planned from lengths alone, and a micro-batch's tokens and
    hidden states are read when it is their turn and let go after it, to the same weights. For long responses.
    Several ranks need a run folder that all of them see. A stage with `to_batch` keeps them in memory."""
    trajectory_mb: int = Field(default=1024, gt=0)
    """Memory for the heavy data of a micro-batch and of the next, with `trajectories: disk` (MiB):
    micro-batches are made smaller where theirs would take more."""


class TokenLogConfig(Config):
    """The log of a stage's rollouts: an interrupted run continues in the middle of a response."""

    fsync: Literal["always", "interval", "os"] = "interval"
    """When tokens are on the disk and not only with the operating system. Whatever the policy, no death of a
    process loses any. `always`: before anyone sees them; `interval`: a power cut may take the newest
    `interval_seconds`; `os`: a power cut may take all since the last checkpoint."""
    interval_seconds: float = Field(default=0.2, gt=0)
    """Seconds between two flushes with `fsync: interval`."""
    segment_mb: int = Field(default=64, gt=0)
    """Size of the log's files (MiB)."""
