"""Evaluation of all models of a run: held-out prompts of the domains, and separate sets."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from opd.config.base import Changes, Config, Located, Name
from opd.config.environments import NamedEnvironment
from opd.config.rewards import RewardConfig
from opd.config.writing import WritingConfig

K = Annotated[int, Field(gt=0, le=10_000)]


class SamplesConfig(Config):
    """Several answers to each prompt, and what is made of them."""

    samples_per_prompt: int = Field(default=1, gt=0, le=10_000)
    """Sampled answers to each prompt. The intervals are over prompts, so more answers to the same ones narrow
    them only as far as these answers differ."""
    pass_at: list[K] = Field(default=[], max_length=32)
    """For each k the share of prompts for which one of k sampled answers is right. It is the unbiased
    estimate from all `samples_per_prompt`, which must be k or more."""
    maj_at: list[K] = Field(default=[], max_length=32)
    """For each k how often the commonest of k sampled answers is right, mean over the disjoint groups of k
    among the `samples_per_prompt`. An answer is the result of the reward's `answer` function if it has one,
    else the response without blanks around it. A tie counts by its share."""

    @model_validator(mode="after")
    def _enough_samples(self) -> SamplesConfig:
        for key in ("pass_at", "maj_at"):
            count = getattr(self, key)
            if count and max(count) > self.samples_per_prompt:
                raise ValueError(
                    f"{key} {max(count)} needs as many answers to each prompt, and samples_per_prompt is"
                    f" {self.samples_per_prompt}; raise it to {max(count)}"
                )
            if len(set(count)) < len(count):
                raise ValueError(f"{key} {count} names a k twice; give each once")
        return self


class SetConfig(SamplesConfig):
    """An evaluation set: prompts that nothing of the run is trained on, from a source of their own."""

    source: Annotated[str, Located(files=True)] = Field(min_length=1)
    """As of a domain: `procedural:NAME`, `reasoning-gym:NAME`, or a `.jsonl` / `.parquet` file. All of a file
    is held out; of what is generated, that part which no generated domain of the run is trained on."""
    params: dict[str, Any] = {}
    """Arguments of the source; for a file, `domain` keeps the rows whose column `domain` says so."""
    reward: RewardConfig | None = None
    """Score of an answer, given as a domain's `reward`. `null` takes the source's own checker."""
    environment: NamedEnvironment | None = None
    """An agent's world for its answers, as of a domain."""
    prompts: int = Field(default=500, gt=0, le=1_000_000)
    """Prompts that every model answers: of a file the first in the order of their hash, or all it has."""
    long_prompts: Literal["drop", "truncate", "error"] = "drop"
    """Treatment of a prompt that leaves no room for its response, as `long_prompts` of a domain."""
    rollout: WritingConfig | None = None
    """Settings for the set's responses. They replace those of the recipe's `rollout`; fields that are not
    given here keep the recipe's values. `generate` lets an agent answer."""


class ContaminationConfig(Config):
    """How evaluation prompts are compared with what the run is trained on."""

    ngram: int = Field(default=13, gt=1, le=100)
    """A prompt counts if this many words in a row are also in a training text. A prompt with fewer words is
    compared whole. Text that more than ten different training texts have, such as an instruction, does not
    count."""


class EvaluationConfig(SamplesConfig):
    """Held-out accuracy, greedy and sampled at the rollout temperature."""

    prompts_per_domain: int = Field(default=500, gt=0, le=1_000_000)
    """Held-out prompts that every model answers."""
    sets: dict[Name, SetConfig] = {}
    """Sets of prompts beside the domains' held-out ones, each measured on every model of the run."""
    contamination: ContaminationConfig | None = ContaminationConfig()
    """Count the evaluation prompts, of domains and sets, that stand in training prompts or demonstrations of
    the run; `null` does not."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Level of the confidence intervals in results and report."""
    every: Annotated[int, Changes("aside")] = Field(default=0, ge=0)
    """Steps between evaluations inside the merge (0: only at the end), on `curve_prompts` prompts."""
    curve_prompts: Annotated[int, Changes("aside")] = Field(default=100, gt=0, le=1_000_000)
    """Held-out prompts a domain for the learning curve, where `every` or `specialist.evaluate_every` is above
    0."""
    base_kl_every: Annotated[int, Changes("aside")] = Field(default=0, ge=0)
    """Steps between measurements of the KL to the model that a specialist, the merge or mixed GRPO began as,
    nats a token of what the student wrote. Each is a pass of the step's samples through a copy of that model,
    which stays in memory; 0 takes none."""
