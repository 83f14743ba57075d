"""The student's optimiser for every back end: its learning rate, AdamW, and AdamW's state on disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from opd.config.train import OptimConfig
from opd.errors import TrainingError


def learning_rate(config: OptimConfig, step: int, progress: float) -> float:
    """Learning rate of step `step` (from 0) at `progress` in [0, 1] of the stage.

    The warm-up counts steps. The decay follows `progress`, so a stage with a token budget has the same shape
    as one with a number of steps.
    """
    warmup = min(1.0, (step + 1) / (config.warmup_steps + 1))
    progress = min(max(progress, 0.0), 1.0)
    floor = config.final_lr_fraction
    if config.schedule == "constant":
        decay = 1.0
    elif config.schedule == "linear":
        decay = 1.0 - (1.0 - floor) * progress
    else:
        decay = floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * warmup * decay


def build_adamw(
    parameters: Mapping[str, Tensor], optim: OptimConfig, *, fused: bool = True
) -> torch.optim.AdamW:
    """Build the recipe's AdamW over `parameters`. The learning rate is set at every step."""
    return torch.optim.AdamW(
        list(parameters.values()),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=fused,
    )


def not_finite(norm: float) -> TrainingError:
    """Return the error for a gradient of this norm."""
    return TrainingError(f"the gradient norm is {norm}; lower the learning rate or resume from a checkpoint.")


MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's running means of a gradient and of its square, by torch's names."""


def state_of(parameter: Tensor, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return AdamW's state of `parameter` from a checkpoint's `fields`, which may have another precision."""
    # The fused AdamW keeps its step count on the parameter's device too, in its own dtype.
    return {
        key: value.to(parameter.device, parameter.dtype if key in MOMENTS else value.dtype)
        for key, value in fields.items()
    }


def moments_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the shapes of AdamW's state for updated parameters of these `shapes`."""
    fields = {f"{name}/{key}": shape for name, shape in shapes.items() for key in MOMENTS}
    return fields | {f"{name}/step": () for name in shapes}
