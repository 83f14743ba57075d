"""Per-token estimates of KL(p || q) from tokens sampled from `p` (Schulman 2020, "Approximating KL").

The value of an estimator says nothing about its gradient. With `r = log p - log q` of the sampled token,
on-policy, the expected gradients with respect to the logits of `p` are:

| | value | differentiated as a loss |
|---|---|---|
| k1 = r | unbiased | exactly 0 (`E[grad log p] = 0`): returned detached, for advantages and metrics |
| k2 = r^2 / 2 | biased | `p * (r - KL)`: the gradient of the reverse KL(p || q) |
| k3 = e^-r - 1 + r | unbiased, >= 0 | `p - q`: the gradient of the *forward* KL(q || p) |
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from opd.errors import ConfigError
from opd.losses.shapes import check_same_shape
from opd.losses.surrogate import MAX_LOG_RATIO


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] log-ratio, detached: a number for advantages and metrics, never a loss."""
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return (logprobs - ref_logprobs).detach()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] half the squared log-ratio; expected gradient on-policy: the reverse KL's."""
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return 0.5 * (logprobs - ref_logprobs.detach()).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N] `e^-r - 1 + r >= 0`; expected gradient on-policy: the *forward* KL's, `p - q`."""
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_ratio = logprobs - ref_logprobs.detach()
    return (-log_ratio).clamp(max=MAX_LOG_RATIO).exp() - 1.0 + log_ratio


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k2": k2, "k3": k3}


def reference_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """[N] penalty for leaving the reference, to be differentiated: k2 (reverse KL) or k3 (forward KL).

    Raises `ConfigError` for k1, whose gradient as a loss is 0 in expectation.
    """
    if estimator not in LOSSES:
        raise ConfigError(
            f"estimator {estimator} as a loss does not have a KL's gradient; use k2 or k3, or k1 with"
            " placement advantage"
        )
    return LOSSES[estimator](logprobs, ref_logprobs)
