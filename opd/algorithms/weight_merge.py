"""Merging of models in weight space: average, task arithmetic, TIES, DARE.

A model is a dict of tensors. All take the base and its fine-tuned experts with equal names and shapes,
compute in float32 and return new tensors in the base's dtype. Tensors that are not floating point are copied
from the base.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from opd.errors import ModelError

Weights = Mapping[str, Tensor]


def average(models: Sequence[Weights]) -> dict[str, Tensor]:
    """The mean of `models` (model soup: Wortsman et al. 2022, 2203.05482)."""
    if not models:
        raise ModelError("no models to average; give at least one")
    first = models[0]
    return _merge(first, models, lambda _, deltas: deltas.mean(0))


def task_arithmetic(base: Weights, experts: Sequence[Weights], scale: float) -> dict[str, Tensor]:
    """`base + scale * sum_i (expert_i - base)` (Ilharco et al. 2023, 2212.04089)."""
    return _merge(base, experts, lambda _, deltas: scale * deltas.sum(0))


def ties(base: Weights, experts: Sequence[Weights], density: float, scale: float) -> dict[str, Tensor]:
    """Trim, elect sign, merge (Yadav et al. 2023, 2306.01708, section 3 and algorithm 1).

    1. Of each task vector `expert - base`, over all tensors together, keep the share `density` of largest
    magnitude. 2. Each parameter takes the sign with the larger total magnitude. 3. Average the kept values of
    that sign; `base + scale * average`. A parameter whose kept values cancel exactly stays at the base.
    """
    _check_density(density)
    _check_alike(base, experts)
    thresholds = torch.tensor([_trim_threshold(base, expert, density) for expert in experts])

    def merge(_: str, deltas: Tensor) -> Tensor:
        per_expert = thresholds.to(deltas.device).reshape(-1, *([1] * (deltas.dim() - 1)))
        kept = torch.where(deltas.abs() >= per_expert, deltas, 0.0)
        agrees = (kept.sign() == kept.sum(0).sign()) & (kept != 0)
        return scale * torch.where(agrees, kept, 0.0).sum(0) / agrees.sum(0).clamp(min=1)

    return _merge(base, experts, merge)


def dare(
    base: Weights, experts: Sequence[Weights], density: float, scale: float, seed: int
) -> dict[str, Tensor]:
    """Drop and rescale, then task arithmetic (DARE: Yu et al. 2024, 2311.03099, section 3.2).

    Each element of a task vector survives with probability `density` and is divided by it, so the expectation
    is that of `task_arithmetic`. The draw depends on (seed, expert's index, tensor name) alone: not on the
    order of the tensors, nor on which others there are.
    """
    _check_density(density)

    def merge(name: str, deltas: Tensor) -> Tensor:
        total = torch.zeros_like(deltas[0])
        for index, delta in enumerate(deltas):
            total += delta * _survivors(delta.shape, density, seed, f"{index}:{name}").to(delta.device)
        return (scale / density) * total

    return _merge(base, experts, merge)


def _merge(
    base: Weights, experts: Sequence[Weights], merge: Callable[[str, Tensor], Tensor]
) -> dict[str, Tensor]:
    """`base + merge(name, deltas [E, ...])` for every floating-point tensor."""
    _check_alike(base, experts)
    merged = {}
    for name, tensor in base.items():
        if not tensor.is_floating_point():
            merged[name] = tensor.detach().clone()
            continue
        start = tensor.detach().float()
        deltas = torch.stack([expert[name].detach().float() - start for expert in experts])
        merged[name] = (start + merge(name, deltas)).to(tensor.dtype)
    return merged


def _trim_threshold(base: Weights, expert: Weights, density: float) -> float:
    """The smallest magnitude that is among the `density` largest of the whole task vector."""
    magnitudes = torch.cat(
        [
            (expert[name].detach().float() - tensor.detach().float()).abs().flatten()
            for name, tensor in base.items()
            if tensor.is_floating_point()
        ]
    )
    kept = max(round(density * magnitudes.numel()), 1)
    return float(magnitudes.kthvalue(magnitudes.numel() - kept + 1).values)


def _survivors(shape: torch.Size, density: float, seed: int, name: str) -> Tensor:
    """Bool mask, True with probability `density`, from the counter-based stream of (seed, name)."""
    stream = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)))
    return torch.from_numpy(generator.random(shape.numel(), dtype=np.float32) < density).reshape(shape)


def _check_alike(base: Weights, experts: Sequence[Weights]) -> None:
    if not experts:
        raise ModelError("no experts to merge; give at least one")
    for index, expert in enumerate(experts):
        if different := set(base) ^ set(expert):
            raise ModelError(
                f"expert {index} and the base do not have the same tensors (first difference:"
                f" {min(different)}); merge models of one architecture"
            )
        for name, tensor in base.items():
            if expert[name].shape != tensor.shape:
                raise ModelError(
                    f"tensor {name} is {list(expert[name].shape)} in expert {index} and"
                    f" {list(tensor.shape)} in the base; merge models of one architecture and vocabulary"
                )


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ModelError(f"density is {density}; give a share in (0, 1]")
