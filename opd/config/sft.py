"""Training on demonstrations: of a file (the base, or a domain's specialist), or generated (warm-up)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from opd.config.base import FILES, Changes, Config, Located
from opd.config.train import BatchConfig, OptimConfig


class SFTConfig(Config):
    """Supervised fine-tuning on demonstrations: cross-entropy, at temperature 1, of what the assistant
    writes, each such token of a step weighing the same. Rows are packed as `batch` says; who shares a pack
    changes nothing."""

    source: Annotated[str, Located(files=True)] = Field(min_length=1)
    """A `.jsonl` or `.parquet` file (on the Hub: `hf://datasets/org/name@revision/FILE`). With the column
    `messages` every answer of the assistant's counts that has no `weight: 0`. With `prompt` and `completion`
    (two texts, or messages and a text or messages) the completion counts. Of `domains.NAME.sft`, where rows
    have a `domain`, those of NAME."""
    epochs: float = Field(default=1.0, gt=0, le=10_000)
    """Passes over the demonstrations, if `steps` is not given."""
    steps: int | None = Field(default=None, gt=0, le=10_000_000)
    """Optimiser steps, in place of `epochs`."""
    batch_size: int = Field(default=32, gt=0, le=1_000_000)
    """Demonstrations of a step, in an order that `seed` shuffles anew for every epoch."""
    max_length: int | None = Field(default=None, gt=1, le=100_000_000)
    """Tokens of a demonstration, at most; `null` is `rollout.max_sequence`, or the model's positions if those
    are fewer."""
    too_long: Literal["drop", "truncate", "error"] = "drop"
    """Treatment of a longer one. `drop`: it is left out. `truncate`: it loses its end. `error`: it stops the
    run. They are counted."""
    held_out: float = Field(default=0.05, ge=0, le=0.9999)
    """Share of the demonstrations on which the cross-entropy is measured and nothing is learnt, chosen by a
    hash of what is asked; at most `evaluation.prompts_per_domain` are measured. What some domain asks in its
    evaluation is never learnt from."""
    evaluate_every: Annotated[int, Changes("aside")] = Field(default=0, ge=0)
    """Steps between measurements (0: only at the end)."""
    optim: OptimConfig = OptimConfig(lr=2e-5, schedule="cosine", warmup_steps=10)
    batch: BatchConfig = BatchConfig()
    checkpoint_every: Annotated[int, Changes("aside")] = Field(default=100, gt=0)
    """Steps between checkpoints; a killed run repeats at most this many."""

    @field_validator("source")
    @classmethod
    def _a_file(cls, source: str) -> str:
        if not source.endswith(FILES):
            raise ValueError(f"demonstrations come from a .jsonl or .parquet file, not from {source!r}")
        return source


class WarmupConfig(Config):
    """Supervised warm-up of the base on demonstrations of mixed quality (for models made from scratch)."""

    steps: int = Field(default=480, gt=0, le=10_000_000)
    """Optimiser steps of a round; one round, unless `min_accuracy` asks for more."""
    batch_size: int = Field(default=192, gt=0, le=1_000_000)
    """Demonstrations per step, spread evenly over the domains."""
    right: float = Field(default=0.30, ge=0, le=1)
    """Share of demonstrations that are right."""
    wrong_rule: float = Field(default=0.45, ge=0, le=1)
    """Share that follows one consistent wrong rule; the rest is corrupted at random."""
    optim: OptimConfig = OptimConfig(lr=3e-3, schedule="cosine", final_lr_fraction=0.0, warmup_steps=20)
    batch: BatchConfig = BatchConfig()
    checkpoint_every: Annotated[int, Changes("aside")] = Field(default=100, gt=0)
    """Steps between checkpoints; a killed run repeats at most this many."""
    min_accuracy: float = Field(default=0.0, ge=0, le=1)
    """Warm up for another round if the base samples fewer right answers than this in any domain."""
    rounds: int = Field(default=4, gt=0, le=1000)
    """Number of rounds of `steps`, each with its own learning-rate schedule, before that is an error."""
