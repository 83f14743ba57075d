"""The learning rate, the optimiser that all back ends share, its update after clipping, its state on disk."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opd.config.train import OptimConfig
from opd.errors import CheckpointError, TrainingError

if TYPE_CHECKING:
    from opd.train.backend import Backend


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


MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's running means of a gradient and of its square, by torch's names."""


def adamw(parameters: Mapping[str, Tensor], optim: OptimConfig, *, fused: bool = True) -> torch.optim.AdamW:
    """AdamW over `parameters` as the recipe asks for it; the learning rate comes with every step."""
    return torch.optim.AdamW(
        list(parameters.values()),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=fused,
    )


def update(backend: Backend, optimizer: torch.optim.Optimizer, norm: float, lr: float) -> dict[str, float]:
    """Take the step for a clipped gradient, whose norm was `norm`, and zero it; returns the step's metrics.

    Raises `TrainingError` if `norm` is not finite; the weights are untouched then.
    """
    if not math.isfinite(norm):
        backend.zero_grad()
        raise not_finite(norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    backend.zero_grad()
    return {"lr": lr, "grad_norm": norm}


def not_finite(norm: float) -> TrainingError:
    """The error for a gradient of this norm."""
    return TrainingError(f"the gradient norm is {norm}; lower the learning rate or resume from a checkpoint.")


def optimizer_fields(
    saved: Mapping[str, Tensor], known: Mapping[str, object]
) -> dict[str, dict[str, Tensor]]:
    """The entries `NAME/FIELD` of a checkpoint by name of the parameter.

    Raises `CheckpointError` for a name that is not `known`.
    """
    by_name: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, value in saved.items():
        name, _, field = key.rpartition("/")
        by_name[name][field] = value
    unknown = sorted(set(by_name) - set(known))
    if unknown:
        raise CheckpointError(
            f"the checkpoint holds optimiser state for {unknown[0]}, which this model does not have;"
            " resume with the recipe the run was started with."
        )
    return by_name


def state_of(parameter: Tensor, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """AdamW's state of `parameter` from `fields` of a checkpoint, perhaps written in another precision."""
    # The fused AdamW keeps its step count, in its own dtype, where the parameter is, too.
    return {
        key: value.to(parameter.device, parameter.dtype if key in MOMENTS else value.dtype)
        for key, value in fields.items()
    }


def check_names(saved: Iterable[str], own: Iterable[str], model: str) -> None:
    """`CheckpointError` unless a checkpoint has `saved` exactly the tensors `model` owns."""
    different = sorted(set(saved) ^ set(own))
    if different:
        raise CheckpointError(
            f"the checkpoint and {model} do not have the same tensors, {different[0]} among them; resume with"
            " the recipe the run was started with."
        )
