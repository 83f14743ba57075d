"""Low-rank adapters in place of full weights."""

from __future__ import annotations

from pydantic import Field

from opd.config.base import Config


class LoRAConfig(Config):
    """LoRA (arXiv 2106.09685): `W + alpha / rank * B A` with a frozen `W`, trained through `A` and `B`."""

    rank: int = Field(default=16, gt=0, le=16_384)
    """Columns of `B` and rows of `A`: what an adapter can express, and its size."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapters: `alpha / rank` times `B A` is added to the weight."""
    targets: list[str] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], min_length=1
    )
    """Last names of the linear layers, in every decoder layer, that get an adapter."""
