"""Optimiser, schedule and batching: what every trained stage needs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from opd.config.base import Config


class OptimConfig(Config):
    """AdamW with a warm-up and a decay of the learning rate."""

    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Shape of the decay after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    final_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the last step, as a fraction of `lr`."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient is scaled down to this global L2 norm."""


class BatchConfig(Config):
    """How samples are packed for one forward and backward pass."""

    max_tokens: int = Field(default=4096, gt=0)
    """Packed tokens per micro-batch (a longer single sample gets a micro-batch of its own)."""
    kl_chunk: int = Field(default=1024, gt=0)
    """Tokens whose logits exist at the same time in the full-vocabulary KL."""
