"""Values that carry another expression's gradient, and the importance weights of a score function."""

from __future__ import annotations

import torch
from torch import Tensor

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
