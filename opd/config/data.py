"""Domains: where prompts come from, how answers are scored, which teacher they go to."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from opd.config.base import Config
from opd.config.storage import TokenLogConfig
from opd.config.teachers import EngineConfig, TorchEngineConfig


class DomainConfig(Config):
    """One domain."""

    source: str = Field(min_length=1)
    """`procedural:NAME` (built in, or `procedural:package.module:Class`), `reasoning-gym:NAME` (extra), or a
    `.jsonl` / `.parquet` file with the columns `prompt` (text or messages) and `label`."""
    params: dict[str, Any] = {}
    """Arguments of the source; for a file, `domain` keeps the rows whose column `domain` says so."""
    reward: str | None = None
    """Dotted path of a reward function, `package.module:function`; `None` takes the source's own checker."""
    teacher: str | dict[str, float] | None = None
    """Name of a teacher, or weights over several; `None` is the teacher of the domain's own name:
    the entry under `teachers`, or else the specialist that the run trains on this domain."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the merge's loss, relative to the other domains, with `distill.normalise: teacher`."""
    held_out: float = Field(default=0.1, ge=0.0001, le=0.9999)
    """Share of the prompts kept for evaluation, chosen by a hash of the prompt."""
    long_prompts: Literal["drop", "truncate", "error"] = "drop"
    """What becomes of a prompt that leaves no room for `rollout.max_new_tokens` in `rollout.max_sequence` or
    in the model's positions: it is left out, counted and named; loses its beginning; or stops the run."""
    prompts: int = Field(default=20_000, gt=0, le=10_000_000)
    """How many training prompts a generated source makes."""


class RolloutConfig(Config):
    """How the student writes."""

    engine: EngineConfig = TorchEngineConfig()
    """What it writes with: `{type: torch}`, or `{type: sglang, urls: [...]}`."""
    temperature: float = Field(default=1.0, ge=0.001, le=1000)
    """Sampling temperature; student and teacher are scored at it too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the fewest tokens with at least this probability together; 1 is all of them."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many of the most likely tokens; 0 is all of them."""
    stop_ids: list[int] = []
    """Token ids that end a response, beside those of `model_stop_ids`."""
    model_stop_ids: bool = True
    """Whether a response also ends where the model says: at its tokenizer's end-of-sequence token and at
    every `eos_token_id` of its `generation_config.json` and `config.json`. `false`: at `stop_ids` alone."""
    stop: list[str] = []
    """Strings that end a response, however they are cut into tokens; they stay in the response."""
    max_new_tokens: int = Field(default=16, gt=0, le=100_000_000)
    """Response tokens after which a response is cut; it then counts as truncated."""
    max_running: int = Field(default=512, gt=0, le=1_000_000)
    """Requests decoded together; more wait in the queue."""
    max_sequence: int = Field(default=4096, gt=1, le=100_000_000)
    """Prompt plus response tokens a request may take."""
    log: TokenLogConfig | None = TokenLogConfig()
    """`null` writes no log: a resumed stage then repeats the rollouts since its last checkpoint."""
    schedule: Literal["in_turn", "ahead", "async"] = "in_turn"
    """`in_turn`: the student writes a batch, learns from it, writes the next. `ahead`: it writes the next one
    while it learns, with weights one version older. `async`: the same up to `max_ahead` batches early, those
    in flight together, and new weights reach responses in the middle (each token keeps its version). For both
    consider a correction (`specialist.policy_loss`, `distill.policy_loss`)."""
    max_ahead: int = Field(default=1, gt=0, le=1000)
    """Batches that may be begun before their turn with `schedule: async`; no token is older than that many
    versions when it is learnt from."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Tokens older than this many versions leave the loss. They occur beyond `max_ahead` only where a resumed
    stage finishes responses of an earlier attempt."""
    generate: str | None = None
    """Dotted path of `generate(engine, prompts, group_size, sampling, seed) -> groups`, for responses of
    several turns with an environment, tools or search (`opd.rollout.collect`)."""
    reward_timeout: float = Field(default=60.0, gt=0)
    """Seconds a reward function may take for one batch."""
