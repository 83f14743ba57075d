"""Where the processes of a run are: all here, or actors on a Ray cluster."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from opd.config.base import Config


class ActorResources(Config):
    """What one actor of a role asks of its node."""

    cpus: float = Field(default=1.0, ge=0)
    """Processors that Ray sets aside for it."""
    gpus: float = Field(default=0.0, ge=0)
    """A fraction shares a GPU with other actors of its bundle."""
    memory_mb: int = Field(default=0, ge=0)
    """0 asks for none in particular."""
    custom: dict[str, float] = {}
    """Resources of your own by name, such as `{h200: 1}`."""


class LocalLaunch(Config):
    """Everything in the process that was started (and, with `runtime.workers`, its children)."""

    type: Literal["local"] = "local"


class RayLaunch(Config):
    """The trainer, its rollout engines and its teachers as actors of a Ray cluster (extra `ray`)."""

    type: Literal["ray"] = "ray"
    address: str | None = None
    """`HOST:PORT` of a running cluster, or `auto` for the one this process belongs to (`RAY_ADDRESS`, a job).
    `null` starts a cluster on this machine for this run alone, and ends it."""
    port: int | None = Field(default=None, gt=0, lt=65536)
    """Port of the cluster this run starts; `null` takes a free one."""
    working_dir: str | None = None
    """A folder that Ray copies to every node, where `opd` or your own modules are not installed there."""
    layout: Literal["colocated", "disaggregated"] = "colocated"
    """`colocated`: the engines and teachers share the bundle, and so the node and devices, of their trainer;
    `disaggregated`: every actor has a bundle of its own, on other nodes where there are some."""
    engines: int = Field(default=1, gt=0, le=4096)
    """Rollout engines, at least one for each of `train.ranks`. A batch is shared out among them; one that
    dies costs time alone."""
    teachers: int = Field(default=1, ge=0, le=4096)
    """Teacher actors; the teachers are dealt out to them in turn. 0 keeps them in the trainer. Served ones
    (`type: sglang`) are elsewhere already."""
    trainer: ActorResources = ActorResources()
    engine: ActorResources = ActorResources()
    teacher: ActorResources = ActorResources()
    placement_timeout: float = Field(default=120.0, gt=0)
    """Seconds to wait for the resources."""
    start_timeout: float = Field(default=300.0, gt=0)
    """Seconds an actor may take to start, or to come back after its death, with its model loaded."""
    step_timeout: float = Field(default=600.0, gt=0)
    """Seconds an engine may take for one call, and a teacher for one mini-batch, before it is taken for
    hanging and started anew."""
    trainer_timeout: float | None = Field(default=None, gt=0)
    """Seconds without a finished step after which the trainer is taken for hanging and started anew."""
    max_restarts: int = Field(default=3, ge=0)
    """How often each actor of a stage may be started anew before the run gives up."""
    bucket_mb: int = Field(default=256, gt=0)
    """Weights travel to the engines in pieces of about this size."""


def _named(value: Any) -> Any:
    """`launch: ray` is short for `launch: {type: ray}`."""
    return {"type": value} if isinstance(value, str) else value


LaunchConfig = Annotated[LocalLaunch | RayLaunch, Field(discriminator="type"), BeforeValidator(_named)]
