"""What is simulated: machines, models, lengths and schedule, read from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from opd.config.base import Config
from opd.config.explain import explain
from opd.config.yaml_reader import read_yaml
from opd.errors import ConfigError


class Gpu(Config):
    """One GPU and its links. What is not measured is what the maker promises times an efficiency."""

    tflops: float = Field(gt=0)
    """Peak of dense matrix products, 1e12 operations a second."""
    train_efficiency: float = Field(0.35, gt=0, le=1)
    """Share of the peak that forward and backward passes reach."""
    prefill_efficiency: float = Field(0.45, gt=0, le=1)
    """Share of the peak of a forward pass over whole sequences."""
    decode_efficiency: float = Field(0.45, gt=0, le=1)
    """Share of the peak of the products of a decode step, where reading weights does not take longer."""
    memory_gb: float = Field(gt=0)
    memory_gb_per_s: float = Field(gt=0)
    """What decoding reads weights, keys and values with (1e9 bytes)."""
    link_gb_per_s: float = Field(gt=0)
    """What a GPU receives of other GPUs in a second (1e9 bytes)."""
    step_overhead_ms: float = Field(0.0, ge=0)
    """Of one decode step, however small."""
    layer_overhead_ms: float = Field(0.0, ge=0)
    """Of one layer of one teacher."""
    update_overhead_ms: float = Field(0.0, ge=0)
    """Of one update."""


class Store(Config):
    """Where teachers' weights lie."""

    gb_per_s: float = Field(gt=0)
    """Of all readers together."""
    gb_per_s_per_rank: float = Field(gt=0)


class Shape(Config):
    """A decoder."""

    ceiling: ClassVar[float] = 1e18
    parameters: float = Field(gt=0)
    active: float | None = Field(None, gt=0)
    """Parameters a token uses; all of them where it is not given."""
    layers: int = Field(ge=1, le=100_000)
    hidden_size: int = Field(ge=1)
    vocabulary: int = Field(ge=1)
    bytes_per_parameter: float = Field(2.0, gt=0)
    """As stored and as computed with."""
    cache_bytes_per_token: float = Field(ge=0)
    """Keys and values of one token in all layers."""

    @property
    def used(self) -> float:
        """Parameters a token uses."""
        return self.parameters if self.active is None else min(self.active, self.parameters)


class Ranks(Config):
    """How many GPUs do what. Without `teachers` the trainer's ranks score as well."""

    rollout: int = Field(ge=1, le=100_000)
    per_engine: int = Field(1, ge=1)
    """GPUs of one rollout engine."""
    train: int = Field(ge=1, le=100_000)
    teachers: int = Field(0, ge=0)
    colocated: bool = False
    """Rollout, teachers and trainer take turns on the same GPUs; all three counts say how many."""


class Lengths(Config):
    """Of prompts and responses, in tokens; responses are log-normal."""

    prompt: float = Field(gt=0)
    mean: float = Field(gt=0)
    sigma: float = Field(0.0, ge=0)
    """Of the logarithm: 0 for equal lengths, 1 for a long tail."""
    longest: int = Field(ge=1)


class Work(Config):
    """What a step does."""

    prompts: int = Field(ge=1, le=1_000_000)
    samples_per_prompt: int = Field(1, ge=1, le=10_000)
    running_per_engine: int = Field(256, ge=1)
    """Most requests an engine writes at once; fewer where their keys and values do not fit."""
    max_tokens: int = Field(65_536, ge=1)
    """Packed tokens of a micro-batch."""
    kl_chunk: int = Field(2048, ge=1)
    """Rows of logits that exist at once."""
    checkpointing: bool = True
    """Activations are computed again in the backward pass."""
    steps: int = Field(8, ge=1, le=100_000)

    @property
    def requests(self) -> int:
        return self.prompts * self.samples_per_prompt


class Cluster(Config):
    """Everything `opd plan --simulate` is told."""

    gpu: Gpu
    store: Store
    ranks: Ranks
    student: Shape
    teacher: Shape
    teachers: int = Field(ge=1)
    """How many, each for an equal share of the samples."""
    prefetch_gb: float = Field(ge=0)
    """What a rank reads ahead of the teacher layer in use."""
    lengths: Lengths
    work: Work
    schedule: Literal["in_turn", "ahead", "async"] = "in_turn"
    max_staleness: int = Field(1, ge=1)
    """Of `async`: updates by which a token may be older than the weights that learn from it."""
    jitter: float = Field(0.0, ge=0)
    """Standard deviation of the logarithm of every duration's random factor."""
    seed: int = 0

    @property
    def ahead(self) -> int:
        """How many updates early a batch may be begun."""
        return {"in_turn": 0, "ahead": 1, "async": self.max_staleness}[self.schedule]

    @model_validator(mode="after")
    def _fits(self) -> Cluster:
        ranks = self.ranks
        if ranks.rollout % ranks.per_engine:
            raise ValueError(f"{ranks.rollout} rollout ranks do not make engines of {ranks.per_engine}")
        if ranks.colocated and not ranks.rollout == ranks.train == (ranks.teachers or ranks.train):
            raise ValueError("colocated ranks are the same GPUs; give the same count for each role")
        if ranks.colocated and self.schedule != "in_turn":
            raise ValueError("colocated ranks cannot write ahead; use the schedule in_turn")
        return self


def load_cluster(path: Path) -> Cluster:
    """Read a cluster. Raises `ConfigError` for what is wrong with file or values."""
    document, places = read_yaml(path, "cluster")
    try:
        return Cluster.model_validate(document)
    except ValidationError as error:
        raise ConfigError(explain(error, Cluster, document, {(): str(path), **places})) from None
