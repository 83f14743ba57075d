"""Per-token losses on `[N]` tensors, named by their gradient.

**The policy gradient**: clipped by token (PPO), with asymmetric bounds and dual clip, or by response (GSPO),
or with clipped weights (CISPO), and its statistics. Also the shared helpers of per-token losses: equal
shapes, values with another expression's gradient, importance weights of a score function.

**Estimates of KL(p || q)** from tokens sampled from `p` (Schulman 2020, "Approximating KL"). The value of an
estimator says nothing about its gradient. With `r = log p - log q` of the sampled token, on-policy, the
expected gradients with respect to the logits of `p` are:

| | value | differentiated as a loss |
|---|---|---|
| k1 = r | unbiased | exactly 0 (`E[grad log p] = 0`): returned detached, for advantages and metrics |
| k2 = r^2 / 2 | biased | `p * (r - KL)`: the gradient of the reverse KL(p || q) |
| k3 = e^-r - 1 + r | unbiased, >= 0 | `p - q`: the gradient of the *forward* KL(q || p) |

**Reverse KL(p || t) from the `K` most likely tokens of the teacher.** `S` is the support, `r_v = log p_v -
log t_v`, and the *tail* is everything outside `S` as one bucket of masses `p_tail = 1 - sum_S p` and
`t_tail`, with `b = log p_tail - log t_tail`.

| form | value | gradient |
|---|---|---|
| `truncated` | `sum_S p r`: can be negative | biased; not 0 where p == t: it pushes mass out of `S` |
| `tail` | `sum_S p r + p_tail b`: a lower bound on the KL | that bound's |
| `hybrid` | tail, plus `r_a - b` for a sampled token `a` outside `S`: unbiased | exact in expectation |

The hybrid's gradient. The KL's is `sum_v grad p_v (r_v + 1)`: exact on `S`, and outside of it the expectation
of the score function `(r_a + 1) grad log p_a` over sampled tokens. Because `sum_v grad p_v = 0`, a constant
may be taken off every coefficient. With `b + 1` the part on `S`, `sum_S grad p_v (r_v - b)`, is just the tail
bucket's gradient, and the sampled part is `(r_a - b) grad log p_a`: same expectation as with `(r_a + 1)`,
much less noise, and exactly 0 for every sample where p == t. Dropping the constant on one side only would
bias it, as `sum_S grad p` is not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from opd.config.rl import CISPOLoss, GSPOLoss, PolicyLossConfig
from opd.errors import ConfigError
from opd.train.loss_weights import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """Sums and counts over tokens. They add up over micro-batches, so there is no mean of means."""

    tokens: int = 0
    clipped_low: int = 0
    """Tokens of negative advantage held at the lower bound (no gradient); with CISPO all below it."""
    clipped_high: int = 0
    """Tokens of positive advantage held at the upper bound (no gradient); with CISPO all above it."""
    dual_clipped: int = 0
    """Tokens of negative advantage whose ratio is beyond `dual_clip` (no gradient)."""
    ratio_sum: float = 0.0
    """Sum of the clipped quantity: a token's ratio, or with GSPO its response's."""
    ratio_min: float = float("inf")
    ratio_max: float = 0.0
    kl_sum: float = 0.0
    """Sum of the k3 estimate of KL(old policy || policy), nats."""

    def metrics(self) -> dict[str, float]:
        """Means and shares, empty without tokens. `policy/clip_ratio` is the share that a bound clips."""
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


class Sequences:
    """The response of each of `[N]` tokens.

    Args:
        lengths: Tokens of each of the `B` responses, end to end.
        kept: [M] local tokens if ranks share responses; `None` is all.
        summed: Sums a tensor over those ranks.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | None = None,
        kept: Tensor | None = None,
        summed: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> None:
        self._given, self._device, self._kept, self._summed = lengths, device, kept, summed

    @cached_property
    def lengths(self) -> Tensor:
        """[B] int64, moved to the device at the first use."""
        return torch.tensor(self._given, dtype=torch.int64).to(self._device, non_blocking=True)

    @cached_property
    def bounds(self) -> Tensor:
        """[B + 1] int64: response `b` has the tokens `bounds[b]` to `bounds[b + 1]`."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @cached_property
    def token_responses(self) -> Tensor:
        """[M] int64: the response of each local token."""
        every = torch.repeat_interleave(self.lengths, output_size=sum(self._given))
        return every if self._kept is None else every[self._kept]

    def response_mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return `[M]`, at each token the mean of `values` `[M]` over its response's tokens that `mask` `[M]`
        counts, on all ranks. It is detached and summed in float64.
        """
        sums = torch.zeros(2, len(self.lengths), dtype=torch.float64, device=values.device)
        parts = torch.stack([torch.where(mask, values.detach().double(), 0.0), mask.double()])
        sums = self._summed(sums.index_add_(1, self.token_responses, parts))
        return (sums[0] / sums[1].clamp(min=1.0))[self.token_responses].to(values.dtype)


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    config: PolicyLossConfig,
    mask: Tensor | None = None,
    sequences: Sequences | None = None,
) -> tuple[Tensor, PolicyStats]:
    """Return the per-token loss `[N]` and its statistics. The caller weighs and sums.

    `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))` with `r = exp(logprobs - old_logprobs)` (PPO,
    1707.06347; asymmetric bounds: DAPO, 2503.14476), and for `A < 0` at most `-A dual_clip` (Ye et al. 2020,
    1912.09729). `logprobs` [N] carries the gradient; `old_logprobs` [N] is the trainer's own at the start of
    the step. At `logprobs == old_logprobs` the gradient is the plain policy gradient `-A grad logprobs`.
    Tokens where `mask` [N] bool is False have loss 0 and are left out of the statistics. Raises `ValueError`
    for different shapes.
    """
    del sequences  # every token has its own ratio
    log_ratio = _log_ratio(logprobs, old_logprobs, advantages, mask)
    return _clipped_loss(log_ratio, log_ratio, advantages, config, mask)


def gspo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    config: GSPOLoss,
    mask: Tensor | None = None,
    sequences: Sequences | None = None,
) -> tuple[Tensor, PolicyStats]:
    """Clip the response's ratio `s = exp(mean log-ratio of its tokens in mask)`, otherwise as
    `clipped_policy_loss` (GSPO, Zheng et al. 2025, 2507.18071, in its form by tokens, equation 14).

    Every token has the value of its response, and the gradient `-A s grad logprobs` unless `s` is clipped.
    Weighed by response and spread evenly over its tokens, both are those of `min(s A, clip(s) A)`. With
    `sequences`, responses may be split over ranks. Without, the tokens are one response.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, advantages, mask)
    sequences = sequences or Sequences([len(logprobs)], logprobs.device)
    counted = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask
    mean = sequences.response_mean((logprobs - old_logprobs).detach(), counted).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
    return _clipped_loss(with_gradient(mean, logprobs), log_ratio, advantages, config, mask)


def cispo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    config: CISPOLoss,
    mask: Tensor | None = None,
    sequences: Sequences | None = None,
) -> tuple[Tensor, PolicyStats]:
    """`-clip(r, 1 - clip_low, 1 + clip_high) A logprobs` with the clipped ratio detached, otherwise as
    `clipped_policy_loss` (CISPO: MiniMax-M1, 2506.13585, equation 4). No token loses its gradient.
    """
    del sequences
    log_ratio = _log_ratio(logprobs, old_logprobs, advantages, mask).detach()
    ratio = log_ratio.exp()
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    loss = -ratio.clamp(low, high) * advantages.detach() * logprobs
    clipped = (ratio < low, ratio > high, torch.zeros_like(ratio, dtype=torch.bool))
    loss = loss if mask is None else torch.where(mask, loss, 0.0)
    return loss, _policy_statistics(log_ratio, ratio, clipped, mask)


POLICY_LOSSES: dict[type, Callable[..., tuple[Tensor, PolicyStats]]] = {
    PolicyLossConfig: clipped_policy_loss,
    GSPOLoss: gspo_policy_loss,
    CISPOLoss: cispo_policy_loss,
}
"""Loss by settings class, called with `(logprobs, old_logprobs, advantages, settings, mask, sequences)`."""


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor | None) -> Tensor:
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    return (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped_loss(
    log_ratio: Tensor,
    token_log_ratio: Tensor,
    advantages: Tensor,
    config: PolicyLossConfig | GSPOLoss,
    mask: Tensor | None,
) -> tuple[Tensor, PolicyStats]:
    """Return the clipped loss of `log_ratio` `[N]`, which carries the gradient."""
    advantages = advantages.detach()
    ratio = log_ratio.exp()
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    most = config.dual_clip if isinstance(config, PolicyLossConfig) else None
    if most is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * most), loss)
    ratio, down = ratio.detach(), advantages < 0
    beyond = down & (ratio > (most or float("inf")))
    clipped = (down & (ratio < low), (advantages > 0) & (ratio > high), beyond)
    loss = loss if mask is None else torch.where(mask, loss, 0.0)
    return loss, _policy_statistics(token_log_ratio.detach(), ratio, clipped, mask)


def _policy_statistics(
    log_ratio: Tensor, ratio: Tensor, clipped: tuple[Tensor, Tensor, Tensor], mask: Tensor | None
) -> PolicyStats:
    """Return statistics of the tokens' `log_ratio` `[N]`, the clipped `ratio` `[N]`, and `clipped`, the masks
    of tokens clipped by the lower, upper and dual bound.
    """
    if mask is not None:
        counted = mask.nonzero().squeeze(1)  # once: a device is waited for here
        log_ratio, ratio = log_ratio[counted], ratio[counted]
        clipped = (clipped[0] & mask, clipped[1] & mask, clipped[2] & mask)
    if not ratio.numel():
        return PolicyStats()
    # One transfer for all numbers: on an accelerator every `.item()` would wait for the queue.
    low, high, dual, total, least, most, kl = torch.stack(
        [
            *(one.sum().double() for one in clipped),
            ratio.sum(dtype=torch.float64),
            ratio.min().double(),
            ratio.max().double(),
            (log_ratio.exp() - 1.0 - log_ratio).sum(dtype=torch.float64),
        ]
    ).tolist()
    return PolicyStats(ratio.numel(), int(low), int(high), int(dual), total, least, most, kl)


def check_same_shape(**tensors: Tensor | None) -> None:
    """Raise `ValueError` naming tensors of different shapes: broadcasting would silently sum wrong things."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"tensors of one loss have different shapes ({listed}); give one entry per token to each"
        )


def with_gradient(value: Tensor, surrogate: Tensor) -> Tensor:
    return value.detach() + (surrogate - surrogate.detach())


def entropy_gates(entropies: Tensor, weights: Sequence[float], mixture: str) -> Tensor:
    """Return `[M, N]` weights of M teachers at each token, which sum to 1, by their `entropies` `[M, N]`.

    `lowest_entropy`: all of it to the lowest, of equal ones to the first. `entropy`: in proportion to
    `w_i exp(-H_i)`.
    """
    if mixture == "lowest_entropy":
        lowest = entropies == entropies.amin(0)
        return (lowest & (lowest.cumsum(0) == 1)).to(entropies.dtype)
    return (entropies.new_tensor(weights).log().unsqueeze(1) - entropies).softmax(0)


def selected_weights(scores: Tensor, weights: Tensor, lengths: Sequence[int], share: float) -> Tensor:
    """Return `weights` `[N]` with those of the lowest `scores` `[N]` set to 0, response by response.

    Of the n tokens of a response with a weight, `ceil(share * n)` stay, the earlier ones of equal scores.
    Theirs are multiplied so that the response's sum stays. `lengths` are the responses' tokens, end to end.
    """
    counts = torch.tensor(lengths, dtype=torch.int64, device=scores.device)
    response = torch.repeat_interleave(torch.arange(len(counts), device=scores.device), counts)
    zeros = torch.zeros(len(counts), dtype=torch.float64, device=scores.device)
    counted = weights != 0
    order = torch.where(counted, -scores.double(), torch.inf).argsort(stable=True)
    order = order[response[order].argsort(stable=True)]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=scores.device) - (counts.cumsum(0) - counts)[response]
    numbers = zeros.index_add(0, response, counted.double())
    # Of 10 tokens a share of 0.3 is 3, though 10 * 0.3 is more than 3 as floating point numbers go.
    stays = counted & (rank < (numbers * share - 1e-9).ceil()[response])
    whole = zeros.index_add(0, response, weights.double())
    kept = zeros.index_add(0, response, torch.where(stays, weights, 0.0).double())
    factor = torch.where(kept > 0, whole / kept, 0.0)[response]
    return torch.where(stays, weights * factor, 0.0).to(weights.dtype)


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
    """Return the `[N]` penalty for leaving the reference, to be differentiated: k2 (reverse KL) or k3
    (forward KL). Raises `ConfigError` for k1, because its gradient as a loss is 0 in expectation.
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

    The value is not an unbiased estimate of the KL; log the mean of `k1` instead. `importance` `[N]` (`p /
    mu`, detached) keeps the gradient exact for tokens sampled from `mu`. It is the gradient of
    `opd.train.advantages` with discount 0 and coefficient 1, without clipping.
    """
    check_same_shape(
        student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs, importance=importance
    )
    loss = k2(student_logprobs, teacher_logprobs)
    return loss if importance is None else importance.detach() * loss


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The student's sampled tokens, for the hybrid form."""

    student_logprobs: Tensor
    """[N] float32, carries the gradient."""
    teacher_logprobs: Tensor
    """[N] float32."""
    outside: Tensor
    """[N] bool: True where the sampled token is not in the teacher's support (see `outside_support`)."""
    importance: Tensor | None = None
    """[N] `p / mu`, detached, for tokens sampled from `mu` rather than the student; `None` is on-policy."""


def outside_support(ids: Tensor, support: Tensor) -> Tensor:
    """Return `[N]` bool, True if the token `ids` `[N]` is missing from its `support` `[N, K]`."""
    return (support != ids.unsqueeze(-1)).all(dim=-1)


def topk_reverse_kl(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    *,
    form: Literal["tail", "hybrid", "truncated"],
    sampled: SampledTokens | None = None,
) -> Tensor:
    """Per-token divergence [N], nats, with the gradient in the table above.

    `student_logprobs` [N, K] (with gradient) and `teacher_logprobs` [N, K] are log-probabilities of the
    support under the full softmax, at the sampling temperature: neither is renormalised over the support.
    `sampled` is needed by `hybrid` only. Raises `ValueError` for different shapes and `ConfigError` for an
    unknown form or a hybrid without sampled tokens.
    """
    check_same_shape(student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs)
    teacher_logprobs = teacher_logprobs.detach()
    if form == "truncated":
        return (student_logprobs.exp() * (student_logprobs - teacher_logprobs)).sum(-1)
    if form == "tail":
        return _tail_divergence(student_logprobs, teacher_logprobs)[0]
    if form != "hybrid":
        raise ConfigError(f"top-k form {form!r} is unknown; use tail, hybrid or truncated")
    if sampled is None:
        raise ConfigError("the hybrid top-k form needs the sampled tokens' log-probabilities; pass `sampled`")
    bucket, log_ratio = _tail_divergence(student_logprobs, teacher_logprobs)
    logprobs = sampled.student_logprobs
    check_same_shape(
        student_logprobs=logprobs,
        teacher_logprobs=sampled.teacher_logprobs,
        outside=sampled.outside,
        importance=sampled.importance,
        support_rows=log_ratio,
    )
    # `r_a - b`, gradient `(r_a - b) grad log p_a`, for sampled tokens outside the support; else 0.
    excess = (logprobs - sampled.teacher_logprobs).detach() - log_ratio
    if sampled.importance is not None:
        excess = excess * sampled.importance.detach()
    excess = torch.where(sampled.outside, excess, 0.0)
    return bucket + with_gradient(excess, excess * logprobs)


def _tail_divergence(student_logprobs: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Tail-bucket divergence [N] and the bucket's log-ratio `b` [N], detached."""
    probs = student_logprobs.exp()
    ratios = (student_logprobs - teacher_logprobs).detach()
    tail = _tail_mass(probs.detach())
    log_ratio = tail.log() - _tail_mass(teacher_logprobs.exp()).log()
    value = (probs.detach() * ratios).sum(-1) + tail * log_ratio
    # As sum_S grad p (r - b) every coefficient is 0 where p == t, for any rounding of 1 - sum p.
    return with_gradient(value, (probs * (ratios - log_ratio.unsqueeze(-1))).sum(-1)), log_ratio


def _tail_mass(probs: Tensor) -> Tensor:
    """`[N]` mass outside the support, at least one unit of rounding, which may leave it at 0 or below."""
    return (1.0 - probs.sum(-1)).clamp(min=torch.finfo(probs.dtype).eps)
