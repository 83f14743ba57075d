"""The learning rate as a pure function of how much of the stage is done."""

from __future__ import annotations

import math

from opd.config.train import OptimConfig


def learning_rate(config: OptimConfig, step: int, progress: float) -> float:
    """Learning rate of step `step` (from 0) at `progress` in [0, 1] of the stage.

    The warm-up counts steps; the decay follows `progress`, so that a stage with a token budget instead of a
    number of steps has the same shape.
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
