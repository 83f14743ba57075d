"""A mixture's routers in training: the engine's choices of experts, each expert's load, and two losses.

The balancing loss is that of transformers (`load_balancing_loss_func`), after Switch Transformer (Fedus et
al. 2021, arXiv:2101.03961, equations 4 to 6). For packed tokens of a micro-batch

    E sum_e f_e P_e,    f_e = choices of expert e / (T L),    P_e = mean over tokens and blocks of p_e

with `p` the softmax of a router's logits. Only `P` has a gradient. Equal loads give `K`. The z-loss is the
mean over tokens and blocks of the square of the logits' log-sum-exp (Zoph et al. 2022, arXiv:2202.08906,
equation 5).

A step adds up its micro-batches' losses, each weighted by its share of the step's tokens, over all ranks. The
z-loss is then that of the step. The balancing loss asks for equal loads in every micro-batch. Packing has no
padding, so every position counts.

Shapes: `T` packed tokens, `L` routed blocks, `E` experts of a block, `K` experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opd.errors import TrainingError
from opd.models.routing import ExpertRouting, RoutedTokens, Router
from opd.types import Sample


def pack_choices(
    samples: Sequence[Sample], routing: ExpertRouting, device: torch.device
) -> RoutedTokens | None:
    """Return the choices of `samples` packed end to end as `packing.pack_tokens` does, or `None` if no sample
    has any. Positions without a choice are left to the model.

    Raises `TrainingError` naming a sample whose choices are not of a model like that of `routing`.
    """
    if all(sample.expert_choices is None for sample in samples):
        return None
    lengths = [len(sample.prompt_ids) + len(sample.response_ids) for sample in samples]
    packed = routing.new_choices(sum(lengths))
    rows, start = packed.numpy(), 0
    for sample, length in zip(samples, lengths, strict=True):
        if sample.expert_choices is not None:
            choices = _checked_choices(sample, length, routing)
            rows[start : start + len(choices)] = choices
        start += length
    return RoutedTokens(packed.to(device, non_blocking=True))


def _checked_choices(sample: Sample, length: int, routing: ExpertRouting) -> np.ndarray:
    """Return the choices [N, L, K] of `sample` of `length` tokens."""
    choices = np.asarray(sample.expert_choices)
    form = (routing.layers, routing.per_token)
    if choices.shape[1:] != form or len(choices) > length or choices.dtype.kind != "u":
        raise TrainingError(
            f"expert_choices of sample {sample.uid} are {choices.dtype} {list(choices.shape)}, but its"
            f" {length} tokens and this model need at most {[length, *form]} of uint8 or uint16; let the"
            " engine write with the model that is trained, or set rollout.replay_experts to false."
        )
    if choices.size and int(choices.max()) >= routing.experts:
        raise TrainingError(
            f"expert_choices of sample {sample.uid} name expert {int(choices.max())}, but a layer of this"
            f" model has {routing.experts}; let the engine write with the model that is trained, or set"
            " rollout.replay_experts to false."
        )
    return choices


class ExpertLoad:
    """How often the engine chose each expert: `counts` [L, E] int64, over all positions of samples."""

    def __init__(self, routing: ExpertRouting) -> None:
        self.counts = np.zeros((routing.layers, routing.experts), np.int64)

    def add(self, samples: Sequence[Sample]) -> None:
        """Count the choices of `samples`, which were checked when they were packed."""
        layers, experts = self.counts.shape
        offsets = np.arange(layers, dtype=np.int64)[:, None] * experts
        for sample in samples:
            if sample.expert_choices is not None:
                numbers = (np.asarray(sample.expert_choices) + offsets).ravel()
                self.counts += np.bincount(numbers, minlength=self.counts.size).reshape(layers, experts)

    @torch.no_grad()
    def balance(self, corrections: Sequence[Tensor], rate: float, first: int = 0) -> None:
        """Move `corrections`, [E] of each block from number `first` on, by `rate`: up for experts with fewer
        tokens than the mean of their block, down for those with more (Wang et al. 2024, arXiv:2408.15664).
        """
        of_blocks = self.counts[first : first + len(corrections)]
        for counts, correction in zip(of_blocks, corrections, strict=True):
            signs = torch.from_numpy(np.sign(counts.mean() - counts))
            correction += rate * signs.to(correction.device, correction.dtype)

    def metrics(self) -> dict[str, float]:
        """Return the largest load over the mean one, the loads' entropy over that of equal ones, and the
        share of experts without a token; nothing if there were no choices.
        """
        experts = self.counts.shape[1]
        if not self.counts.any():
            return {}
        share = self.counts / self.counts.sum(1, keepdims=True)
        nats = -(share * np.log(np.where(share > 0, share, 1.0))).sum(1)
        return {
            "routing/load_max": float(share.max() * experts),
            "routing/load_entropy": float(nats.mean() / np.log(experts)) if experts > 1 else 1.0,
            "routing/dead": float((self.counts == 0).mean()),
        }


def balancing_loss(logits: Tensor, choices: Tensor) -> Tensor:
    """Return the balancing loss of `logits` [L, T, E] float32 whose tokens go to `choices` [L, T, K]."""
    experts = logits.shape[-1]
    rows = logits.shape[0] * logits.shape[1]
    loads = torch.bincount(choices.flatten(), minlength=experts).float() / rows
    return experts * (loads * logits.softmax(-1).mean((0, 1))).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Return the mean square of the log-sum-exp of `logits` [L, T, E] float32."""
    return logits.logsumexp(-1).square().mean()


def routed_choices(logits: Tensor, per_token: int, routed: RoutedTokens | None) -> Tensor:
    """Return the experts [L, T, K] int64 of tokens with `logits` [L, T, E]: those of `routed`, and the
    largest where it leaves them to the model.
    """
    own = logits.detach().softmax(-1).topk(per_token, -1).indices
    if routed is None:
        return own
    replayed = routed.choices.transpose(0, 1)
    return torch.where(replayed[..., :1] < 0, own, replayed.to(own.dtype))


@dataclass(frozen=True, slots=True)
class RouterLosses:
    """The weighted losses of one model's routers."""

    routing: ExpertRouting
    routers: Sequence[Router]
    """The router of each block."""
    balance: float
    """Weight of the balancing loss."""
    z: float
    """Weight of the z-loss."""

    def record(self) -> AbstractContextManager[list[Tensor]]:
        """Return a block that collects the logits of a forward in it; see `ExpertRouting.record_logits`."""
        return self.routing.record_logits(self.routers)

    def __call__(
        self, logits: Sequence[Tensor], routed: RoutedTokens | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch from its routers' `logits` [T, E] of each block, and its parts by
        the names of their metrics.
        """
        stacked = torch.stack(list(logits)).float()
        parts: dict[str, Tensor] = {}
        if self.balance:
            choices = routed_choices(stacked, self.routing.per_token, routed)
            parts["routing/balance_loss"] = balancing_loss(stacked, choices)
        if self.z:
            parts["routing/z_loss"] = z_loss(stacked)
        weights = {"routing/balance_loss": self.balance, "routing/z_loss": self.z}
        loss = torch.stack([weights[name] * value for name, value in parts.items()]).sum()
        return loss, {name: value.detach() for name, value in parts.items()}
