"""Losses of a mixture's routers: equal loads of the experts, and small scores.

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

import torch
from torch import Tensor

from opd.models.routing import ExpertRouting, RoutedTokens, Router


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
