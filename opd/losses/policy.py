"""The clipped policy-gradient loss (PPO) with asymmetric bounds and dual clip, and its statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opd.config.rl import PolicyLossConfig
from opd.losses.kl_estimators import MAX_LOG_RATIO, check_same_shape


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """Sums and counts over tokens. They add up over micro-batches, so no mean of means is ever taken."""

    tokens: int = 0
    clipped_low: int = 0
    """Tokens of negative advantage held at the lower bound (no gradient)."""
    clipped_high: int = 0
    """Tokens of positive advantage held at the upper bound (no gradient)."""
    dual_clipped: int = 0
    """Tokens of negative advantage whose ratio is beyond `dual_clip` (no gradient)."""
    ratio_sum: float = 0.0
    ratio_min: float = float("inf")
    ratio_max: float = 0.0
    kl_sum: float = 0.0
    """Sum of the k3 estimate of KL(old policy || policy), nats."""

    def __add__(self, other: PolicyStats) -> PolicyStats:
        return PolicyStats(
            tokens=self.tokens + other.tokens,
            clipped_low=self.clipped_low + other.clipped_low,
            clipped_high=self.clipped_high + other.clipped_high,
            dual_clipped=self.dual_clipped + other.dual_clipped,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_min=min(self.ratio_min, other.ratio_min),
            ratio_max=max(self.ratio_max, other.ratio_max),
            kl_sum=self.kl_sum + other.kl_sum,
        )

    def metrics(self) -> dict[str, float]:
        """Means and shares, empty without tokens; `policy/clip_ratio` is the share without gradient."""
        if not self.tokens:
            return {}
        clipped = self.clipped_low + self.clipped_high + self.dual_clipped
        return {
            "policy/clip_ratio": clipped / self.tokens,
            "policy/clip_low": self.clipped_low / self.tokens,
            "policy/clip_high": self.clipped_high / self.tokens,
            "policy/dual_clip": self.dual_clipped / self.tokens,
            "policy/ratio_mean": self.ratio_sum / self.tokens,
            "policy/ratio_min": self.ratio_min,
            "policy/ratio_max": self.ratio_max,
            "policy/kl_old": self.kl_sum / self.tokens,
        }


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    config: PolicyLossConfig,
    mask: Tensor | None = None,
) -> tuple[Tensor, PolicyStats]:
    """Per-token loss [N] and its statistics; the caller weighs and sums.

    `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))` with `r = exp(logprobs - old_logprobs)` (PPO,
    1707.06347; asymmetric bounds: DAPO, 2503.14476), and for `A < 0` at most `-A dual_clip` (Ye et al. 2020,
    1912.09729). `logprobs` [N] carries the gradient; `old_logprobs` [N] is the trainer's own at the start of
    the step. At `logprobs == old_logprobs` the gradient is the plain policy gradient `-A grad logprobs`.
    Tokens where `mask` [N] bool is False have loss 0 and are left out of the statistics. Raises `ValueError`
    for different shapes.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    advantages = advantages.detach()
    log_ratio = (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if config.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * config.dual_clip), loss)
    if mask is not None:
        loss = torch.where(mask, loss, 0.0)
    return loss, _statistics(log_ratio.detach(), ratio.detach(), advantages, config, mask)


def _statistics(
    log_ratio: Tensor, ratio: Tensor, advantages: Tensor, config: PolicyLossConfig, mask: Tensor | None
) -> PolicyStats:
    if mask is not None:
        log_ratio, ratio, advantages = log_ratio[mask], ratio[mask], advantages[mask]
    if not ratio.numel():
        return PolicyStats()
    down, up = advantages < 0, advantages > 0
    beyond = down & (ratio > (config.dual_clip or float("inf")))
    # One transfer for all numbers: on an accelerator every `.item()` would wait for the queue.
    low, high, dual, total, least, most, kl = torch.stack(
        [
            (down & (ratio < 1.0 - config.clip_low)).sum().double(),
            (up & (ratio > 1.0 + config.clip_high)).sum().double(),
            beyond.sum().double(),
            ratio.sum(dtype=torch.float64),
            ratio.min().double(),
            ratio.max().double(),
            (ratio - 1.0 - log_ratio).sum(dtype=torch.float64),
        ]
    ).tolist()
    return PolicyStats(ratio.numel(), int(low), int(high), int(dual), total, least, most, kl)
