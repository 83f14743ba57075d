"""Per-token estimates of KL(p || q) from tokens sampled from `p` (Schulman 2020, "Approximating KL").

The value of an estimator says nothing about its gradient. With `r = log p - log q` of the sampled token,
on-policy, the expected gradients with respect to the logits of `p` are:

| | value | differentiated as a loss |
|---|---|---|
| k1 = r | unbiased | exactly 0 (`E[grad log p] = 0`): returned detached, for advantages and metrics |
| k2 = r^2 / 2 | biased | `p * (r - KL)`: the gradient of the reverse KL(p || q) |
| k3 = e^-r - 1 + r | unbiased, >= 0 | `p - q`: the gradient of the *forward* KL(q || p) |

Also what every per-token loss needs: equal shapes, values that carry another expression's gradient, and the
importance weights of a score function.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opd.errors import ConfigError


def check_same_shape(**tensors: Tensor | None) -> None:
    """Raise `ValueError` naming tensors whose shapes differ: broadcasting would silently sum wrong things."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"tensors of one loss have different shapes ({listed}); give one entry per token to each"
        )


MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`: e^20 is far beyond any useful ratio, and finite."""


def with_gradient(value: Tensor, surrogate: Tensor) -> Tensor:
    """The value of `value`, the gradient of `surrogate`."""
    return value.detach() + (surrogate - surrogate.detach())


def importance_weights(
    logprobs: Tensor, behaviour_logprobs: Tensor, *, maximum: float | None = None
) -> Tensor:
    """[N] `p / mu`, detached: corrects for tokens sampled from `mu` rather than from the policy `p`.

    Without `maximum` the correction is exact in expectation; with it (a truncated weight: Espeholt et al.
    2018, 1802.01561) biased and of bounded variance. Clip these rather than the log-ratios of a reward.
    """
    weights = (logprobs - behaviour_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return weights if maximum is None else torch.clamp(weights, max=maximum)


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


def sampled_k2(
    student_logprobs: Tensor, teacher_logprobs: Tensor, *, importance: Tensor | None = None
) -> Tensor:
    """[N] `(log p - log t)^2 / 2`: on-policy, its expected gradient is exactly that of KL(p || t).

    The value is not an unbiased estimate of the KL; log the mean of `k1` instead. `importance`
    [N] (`p / mu`, see `importance_weights`) keeps the gradient exact for tokens sampled from `mu`.
    The same gradient as `opd.algorithms.advantages` with discount 0 and coefficient 1, without clipping.
    """
    check_same_shape(
        student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs, importance=importance
    )
    loss = k2(student_logprobs, teacher_logprobs)
    return loss if importance is None else importance.detach() * loss
