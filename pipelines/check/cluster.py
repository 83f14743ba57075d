"""Describe a simulated cluster: machines, models, lengths and schedule, read from a YAML file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from opd.config.base import Config
from opd.config.recipe import Recipe
from opd.config.schema import explain_errors
from opd.config.teachers import TorchEngineConfig
from opd.config.yaml_reader import read_yaml
from opd.errors import ConfigError
from opd.pipelines.check.memory import MIB, cached_bytes, merge_tokens, sharing_ranks
from opd.pipelines.check.shapes import ModelShape
from opd.pipelines.stages.precision import WIDTH, is_cut, model_dtype
from opd.train.plan import layer_bytes, logits_bytes


class Gpu(Config):
    """One GPU and its links. Unmeasured figures are the maker's, times an efficiency."""

    tflops: float = Field(gt=0)
    """Peak of dense matrix products, 1e12 operations a second."""
    train_efficiency: float | None = Field(None, gt=0, le=1)
    """Share of the peak that forward and backward passes reach. `null`: by the student's size, 0.1 up to
    0.6e9 parameters to 0.35 from 8e9 on."""
    prefill_efficiency: float = Field(0.45, gt=0, le=1)
    """Share of the peak of a forward pass over whole sequences."""
    decode_efficiency: float = Field(0.45, gt=0, le=1)
    """Share of the peak of the products of a decode step, if reading weights is not slower."""
    memory_gb: float = Field(gt=0)
    memory_gb_per_s: float = Field(gt=0)
    """Bandwidth of decoding for weights, keys and values (1e9 bytes per second)."""
    link_gb_per_s: float = Field(gt=0)
    """Bandwidth from other GPUs (1e9 bytes per second)."""
    step_overhead_ms: float = Field(0.0, ge=0)
    """Overhead of one decode step, however small."""
    layer_overhead_ms: float = Field(0.0, ge=0)
    """Overhead of one layer of one teacher."""
    update_overhead_ms: float = Field(0.0, ge=0)
    """Overhead of one update."""


class Store(Config):
    """The store of the teachers' weights."""

    gb_per_s: float = Field(gt=0)
    """Bandwidth of all readers at once."""
    gb_per_s_per_rank: float = Field(gt=0)


class DecoderShape(Config):
    ceiling: ClassVar[float] = 1e18
    parameters: float = Field(gt=0)
    active: float | None = Field(None, gt=0)
    """Parameters a token uses. Default: all of them."""
    layers: int = Field(ge=1, le=100_000)
    hidden_size: int = Field(ge=1)
    vocabulary: int = Field(ge=1)
    bytes_per_parameter: float = Field(2.0, gt=0)
    """Width in storage and in computation."""
    cache_bytes_per_token: float = Field(ge=0)
    """Keys and values of one token in all layers."""
    experts: float = Field(0.0, ge=0)
    """Parameters of the experts that training ranks share: each holds its own, and tokens travel to them."""
    experts_per_token: int = Field(0, ge=0)
    """Experts of a layer that a token is sent to."""

    @property
    def active_parameters(self) -> float:
        """Parameters that a token uses."""
        return self.parameters if self.active is None else min(self.active, self.parameters)


SMALL, LARGE = (0.6e9, 0.10), (8e9, 0.35)
"""Parameters a token uses, and the share of a GPU's peak that training reaches there. The first is measured
on one H100, where small models wait for their launches: Qwen3-0.6B's step in `tests/gpu/results/h100.json`
(0.07 mixed to 0.12 in bfloat16 alone). The second is not measured. torchtitan reports 5,762 tokens a second
for Llama 3 8B, which are 0.28 and attention."""


def train_efficiency(gpu: Gpu, used: float) -> float:
    """Return the share of the peak that training reaches with `used` parameters a token. Between the two
    sizes it is interpolated by the logarithm of the size.
    """
    if gpu.train_efficiency is not None:
        return gpu.train_efficiency
    sizes, shares = zip(SMALL, LARGE, strict=True)
    return float(np.interp(np.log(used), np.log(sizes), shares))


class RankCounts(Config):
    """Numbers of GPUs by role. Without `teachers` the trainer's ranks score as well."""

    rollout: int = Field(ge=1, le=100_000)
    per_engine: int = Field(1, ge=1)
    """GPUs of one rollout engine."""
    train: int = Field(ge=1, le=100_000)
    teachers: int = Field(0, ge=0)
    colocated: bool = False
    """Rollout, teachers and trainer take turns on the same GPUs. All three counts are that number of GPUs."""


class Lengths(Config):
    """Lengths of prompts and responses, in tokens. Responses are log-normal."""

    prompt: float = Field(gt=0)
    mean: float = Field(gt=0)
    sigma: float = Field(0.0, ge=0, le=5)
    """Standard deviation of the logarithm: 0 for equal lengths, 1 for a long tail."""
    longest: int = Field(ge=1)


class Work(Config):
    prompts: int = Field(ge=1, le=1_000_000)
    samples_per_prompt: int = Field(1, ge=1, le=10_000)
    running_per_engine: int = Field(256, ge=1)
    """Maximum number of requests in an engine at once. It is lower if their keys and values do not fit."""
    max_tokens: int = Field(65_536, ge=1)
    """Packed tokens of a micro-batch."""
    kl_chunk: int = Field(2048, ge=1)
    """Rows of logits that exist at once."""
    checkpointing: bool = True
    """Activations are computed again in the backward pass."""
    steps: int = Field(8, ge=1, le=100_000)

    @property
    def request_count(self) -> int:
        return self.prompts * self.samples_per_prompt


_MOST_REQUESTS = 10_000_000


class SimulatedCluster(Config):
    """The input of `opd plan --simulate`."""

    gpu: Gpu
    store: Store
    ranks: RankCounts
    student: DecoderShape
    teacher: DecoderShape
    teachers: int = Field(ge=1)
    """Number of teachers, each for an equal share of the samples."""
    prefetch_gb: float = Field(ge=0)
    """Weights a rank reads ahead of the teacher layer in use."""
    lengths: Lengths
    work: Work
    schedule: Literal["in_turn", "ahead", "async"] = "in_turn"
    max_staleness: int = Field(1, ge=1)
    """For `async`: maximum number of updates between a token and the weights that learn from it."""
    jitter: float = Field(0.0, ge=0, le=5)
    """Standard deviation of the logarithm of every duration's random factor."""
    seed: int = Field(0, ge=0)

    @property
    def batches_ahead(self) -> int:
        """Number of updates by which a batch may begin early."""
        return {"in_turn": 0, "ahead": 1, "async": self.max_staleness}[self.schedule]

    @model_validator(mode="after")
    def _check_ranks(self) -> SimulatedCluster:
        ranks, work = self.ranks, self.work
        if work.request_count * work.steps > _MOST_REQUESTS:
            raise ValueError(
                f"work has {work.request_count * work.steps:,} requests in all steps, and at most"
                f" {_MOST_REQUESTS:,} are simulated; lower steps or prompts"
            )
        if ranks.rollout % ranks.per_engine:
            raise ValueError(f"{ranks.rollout} rollout ranks do not make engines of {ranks.per_engine}")
        if ranks.colocated and not ranks.rollout == ranks.train == (ranks.teachers or ranks.train):
            raise ValueError(
                "colocated ranks are the same GPUs, as those of a recipe's embedded engine are; give the same"
                " count for each role, or set ranks.colocated to false"
            )
        if ranks.colocated and self.schedule != "in_turn":
            raise ValueError("colocated ranks cannot write ahead; use the schedule in_turn")
        return self


def load_cluster(path: Path, values: Mapping[str, Any] | None = None) -> SimulatedCluster:
    """Read a cluster. `values` hold where the file says nothing, as `recipe_values`. Raises `ConfigError` if
    the file or a value is wrong.
    """
    document, places = read_yaml(path, "cluster")
    for key, value in (values or {}).items():
        given = document.get(key, value)
        document[key] = value | given if isinstance(value, dict) and isinstance(given, dict) else given
    try:
        return SimulatedCluster.model_validate(document)
    except ValidationError as error:
        raise ConfigError(
            explain_errors(error, SimulatedCluster, document, {(): str(path), **places})
        ) from None


def recipe_values(
    recipe: Recipe, student: ModelShape, teachers: Mapping[str, ModelShape], prompt: float
) -> dict[str, Any]:
    """Return what a recipe says of its cluster: models, lengths and work of a step of its merge. `prompt` is
    the mean length of a prompt in tokens. Responses are as long as they may get.
    """
    width = WIDTH[model_dtype(recipe)]
    names = recipe.teacher_domains()
    largest = max((teachers.get(name, student) for name in names), key=lambda shape: shape.parameters)
    ranks, batch = recipe.train.ranks or 1, recipe.distill.batch
    shares = sharing_ranks(recipe, student) == ranks > 1  # the simulation knows no other groups
    prompts = sum(recipe.for_domain(name).distill.prompts_per_domain for name in recipe.domains)
    response, schedule = recipe.longest_response(), recipe.rollout.schedule
    roles: dict[str, Any] = {"train": ranks}
    if isinstance(recipe.rollout.engine, TorchEngineConfig):  # it is the trainers', one for all or one each
        is_shared = is_cut(recipe, ranks, student.parameters * width)
        roles |= {"rollout": ranks, "colocated": True, "per_engine": ranks if is_shared else 1}
    return {
        "ranks": roles,
        "student": _shape_values(student, width)
        | {
            "cache_bytes_per_token": cached_bytes(recipe, student),
            "experts": student.experts if shares else 0,
            "experts_per_token": student.experts_per_token if shares else 0,
        },
        "teacher": _shape_values(largest, (largest.stored / largest.parameters) or width)
        | {"cache_bytes_per_token": 0},
        "teachers": len(names),
        "prefetch_gb": recipe.storage.prefetch_mb * MIB / 1e9,
        "lengths": {"prompt": prompt, "mean": response, "longest": response},
        "work": {
            "prompts": prompts,
            "samples_per_prompt": recipe.distill.samples_per_prompt,
            "running_per_engine": recipe.rollout.max_running,
            "max_tokens": merge_tokens(recipe, student, teachers),
            "checkpointing": batch.recompute_layers,
        },
        "schedule": schedule,
    } | ({"max_staleness": recipe.rollout.max_staleness} if schedule == "async" else {})


def _shape_values(shape: ModelShape, width: float) -> dict[str, Any]:
    return {
        "parameters": shape.parameters,
        "active": shape.used,
        "layers": shape.layer_count,
        "hidden_size": shape.hidden_size,
        "vocabulary": shape.vocabulary,
        "bytes_per_parameter": width,
    }


_HALF = 2
"""Bytes of a value in half precision, as activations are."""
_STATES = 14
"""Bytes of a trained parameter beside its weight in half precision: gradient, master weight, two moments."""


def forward_operations(shape: DecoderShape, tokens: float, squares: float) -> float:
    """Return the operations of a forward pass over sequences of `tokens` tokens in all. `squares` is the sum
    of their squared lengths.
    """
    return 2 * shape.active_parameters * tokens + 2 * shape.layers * shape.hidden_size * squares


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of an engine's decode step: `fixed(running) + per_token * tokens of keys and values`."""

    overhead: float
    reading: float
    """Seconds to read all weights once."""
    share: float
    """Share of the weights that one token uses."""
    compute: float
    """Seconds of the products of one token."""
    per_token: float

    def fixed_seconds(self, running: int) -> float:
        """Return its seconds without keys and values. Experts are read if any running request uses them."""
        touched = 1 - (1 - self.share) ** running
        return self.overhead + max(self.reading * touched, self.compute * running)


def decode_of(cluster: SimulatedCluster) -> DecodeCost:
    """Return the decode step of one engine."""
    gpu, shape, ranks = cluster.gpu, cluster.student, cluster.ranks.per_engine
    bandwidth = gpu.memory_gb_per_s * 1e9 * ranks
    return DecodeCost(
        overhead=gpu.step_overhead_ms / 1e3,
        reading=shape.parameters * shape.bytes_per_parameter / bandwidth,
        share=shape.active_parameters / shape.parameters,
        compute=2 * shape.active_parameters / (gpu.tflops * 1e12 * gpu.decode_efficiency * ranks),
        per_token=shape.cache_bytes_per_token / bandwidth,
    )


def prefill_seconds(cluster: SimulatedCluster, tokens: float) -> float:
    """Seconds of prefill on one engine, for tokens without cached keys and values."""
    gpu = cluster.gpu
    speed = gpu.tflops * 1e12 * gpu.prefill_efficiency * cluster.ranks.per_engine
    return 2 * cluster.student.active_parameters * tokens / speed


def train_seconds(cluster: SimulatedCluster, tokens: float, squares: float) -> float:
    """Return the seconds of an update: passes, both heads, reduction of gradients, over all trainer ranks."""
    gpu, student, ranks = cluster.gpu, cluster.student, cluster.ranks.train
    passes = 4 if cluster.work.checkpointing else 3
    heads = 2 * tokens * (3 * student.hidden_size + cluster.teacher.hidden_size) * student.vocabulary
    operations = passes * forward_operations(student, tokens, squares) + heads
    compute = operations / (ranks * gpu.tflops * 1e12 * train_efficiency(gpu, student.active_parameters))
    # Weights are gathered for each pass and gradients scattered. At best all of it hides behind the compute.
    # Shared experts stay, and each pass sends the tokens there and back.
    moved = 3 * (student.parameters - student.experts) * student.bytes_per_parameter
    sent = 2 * passes * student.experts_per_token * student.layers * student.hidden_size * _HALF
    moved = (moved + sent * tokens / ranks) * (ranks - 1) / ranks
    return max(compute, moved / (gpu.link_gb_per_s * 1e9)) + gpu.update_overhead_ms / 1e3


def sync_seconds(cluster: SimulatedCluster) -> float:
    """Return the seconds to send new weights to every engine. Each of its GPUs receives its shard."""
    shape, ranks = cluster.student, cluster.ranks
    if ranks.colocated and ranks.rollout == 1:
        return 0.0
    received = shape.parameters * shape.bytes_per_parameter / ranks.per_engine
    return received / (cluster.gpu.link_gb_per_s * 1e9)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer of one teacher, the same on every rank."""

    nbytes: float
    """Bytes of the full layer, which every rank holds while it computes with it."""
    load: float
    """Seconds to read the rank's share and to gather the rest."""
    compute: float


def layer_cost(cluster: SimulatedCluster, tokens: float, squares: float) -> LayerCost:
    """Return the cost of a layer of the teacher that reads `tokens` tokens in all."""
    gpu, shape, ranks = cluster.gpu, cluster.teacher, cluster.ranks.teachers or cluster.ranks.train
    nbytes = shape.parameters * shape.bytes_per_parameter / shape.layers
    speed = min(cluster.store.gb_per_s_per_rank, cluster.store.gb_per_s / ranks) * 1e9
    gathered = nbytes * (ranks - 1) / ranks / (gpu.link_gb_per_s * 1e9)
    operations = forward_operations(shape, tokens, squares) / shape.layers
    compute = operations / (ranks * gpu.tflops * 1e12 * gpu.prefill_efficiency)
    return LayerCost(nbytes, nbytes / ranks / speed + gathered, compute + gpu.layer_overhead_ms / 1e3)


def running_limit(cluster: SimulatedCluster) -> int:
    """Return an engine's maximum requests of maximum length. Raises `ConfigError` if not even one fits."""
    gpu, shape, ranks = cluster.gpu, cluster.student, cluster.ranks.per_engine
    free = gpu.memory_gb * 1e9 * ranks - shape.parameters * shape.bytes_per_parameter
    if cluster.ranks.colocated:
        free -= ranks * sum((_training_memory(cluster) | _scoring_memory(cluster)).values())
    each = (cluster.lengths.prompt + cluster.lengths.longest) * shape.cache_bytes_per_token
    fitting = math.inf if each == 0 else free / each
    if free < 0 or fitting < 1:
        raise ConfigError(
            f"an engine of {ranks} GPUs cannot hold the student and one request"
            f"{' beside its training' if cluster.ranks.colocated else ''}; raise ranks.per_engine"
        )
    return min(cluster.work.running_per_engine, int(min(fitting, 1e9)))


def _training_memory(cluster: SimulatedCluster) -> dict[str, float]:
    student, teacher, work, ranks = cluster.student, cluster.teacher, cluster.work, cluster.ranks
    width = student.bytes_per_parameter
    layer = (student.parameters - student.experts) * width / student.layers
    of_layer = layer_bytes(work.max_tokens, student.hidden_size, _HALF)
    begins = _HALF * work.max_tokens * student.hidden_size * student.layers
    return {
        "weights and optimizer": student.parameters * (width + _STATES) / ranks.train,
        "layers gathered": 2 * layer,
        "its experts": student.experts * width / ranks.train,
        "activations": begins + of_layer if work.checkpointing else of_layer * student.layers,
        "logits of a chunk": logits_bytes(work.kl_chunk, student.vocabulary),
        "heads of teachers": 2 * teacher.hidden_size * teacher.vocabulary * 2.0,
    }


def _scoring_memory(cluster: SimulatedCluster) -> dict[str, float]:
    teacher, tokens = cluster.teacher, cluster.work.max_tokens
    return {
        "teacher layers": teacher.parameters * teacher.bytes_per_parameter / teacher.layers
        + cluster.prefetch_gb * 1e9,
        "hidden states": _HALF * tokens * teacher.hidden_size
        + layer_bytes(tokens, teacher.hidden_size, _HALF),
    }


def memory_per_rank(cluster: SimulatedCluster) -> dict[str, dict[str, float]]:
    """Return the bytes of a GPU by role and item."""
    student, ranks = cluster.student, cluster.ranks
    train, scoring = _training_memory(cluster), _scoring_memory(cluster)
    limit, each = running_limit(cluster), student.cache_bytes_per_token / ranks.per_engine
    rollout = {
        "weights": student.parameters * student.bytes_per_parameter / ranks.per_engine,
        "keys and values": limit * (cluster.lengths.prompt + cluster.lengths.longest) * each,
    }
    if ranks.colocated:
        return {"every rank": train | scoring | rollout}
    if not ranks.teachers:
        return {"trainer": train | scoring, "rollout": rollout}
    return {"trainer": train, "teachers": scoring, "rollout": rollout}
