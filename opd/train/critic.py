"""PPO's critic, a second model that predicts the reward still to come; advantages use its values.

A token's value is that of the state it was drawn in. It is read at the row that predicts the token, as its
log-probability is. A response gets its reward at its last token and nothing after it, even if
`max_new_tokens` cut it. Tokens that the loss does not count are no steps of the policy. The next state after
a token is that of the next counted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opd.errors import ModelError, RewardError, TrainingError
from opd.kernels.head import Head, statistics_dtype
from opd.kernels.vocab_parallel import AnyHead
from opd.models.causal_lm import CausalLM
from opd.train.advantages import Moments, discounted_returns
from opd.train.backend import Backend
from opd.train.losses import check_same_shape
from opd.train.terms import MetricSums, StudentRows, masked_mean
from opd.types import MicroBatch, Sample


@dataclass(frozen=True, slots=True)
class GAE:
    """Generalised advantage estimation (Schulman et al. 2016, 1506.02438, equation 16):
    `A_t = sum_k (gamma lam)^k d_{t+k}` with `d_t = r_t + gamma V_{t+1} - V_t`, and `V = 0` after the end.

    `lam` 1 is the discounted return less the value, `lam` 0 the error of one step.
    """

    gamma: float = 1.0
    lam: float = 1.0

    def __call__(self, rewards: np.ndarray, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """`[R]` float32 from the rewards and values `[R]`, at the tokens that `mask` `[R]` counts; else 0."""
        advantages = np.zeros(len(mask), np.float32)
        counted = values[mask].astype(np.float64)
        following = np.append(counted[1:], 0.0)[: len(counted)]
        errors = rewards[mask] + self.gamma * following - counted
        advantages[mask] = discounted_returns(errors, self.gamma * self.lam)
        return advantages


def token_rewards(sample: Sample, penalty: np.ndarray | None = None) -> np.ndarray:
    """Return `[R]` float64 rewards of the tokens of `sample`. The sample's reward is at the last counted
    token; `penalty` `[R]` is subtracted everywhere. Raises `RewardError` without a finite reward.
    """
    if sample.reward is None or not np.isfinite(sample.reward):
        raise RewardError(
            f"sample {sample.uid} (domain {sample.domain}) has the reward {sample.reward}; score every sample"
            " with a finite number before estimating advantages"
        )
    rewards = np.zeros(len(sample.loss_mask), np.float64)
    rewards[np.flatnonzero(sample.loss_mask)[-1:]] = sample.reward
    return rewards if penalty is None else rewards - np.where(sample.loss_mask, penalty, 0.0)


@dataclass(slots=True)
class ValueQuality:
    """Quality of the critic's values, measured before it learns from these tokens."""

    values: Moments
    returns: Moments
    errors: Moments
    """Moments of returns minus values."""

    @classmethod
    def from_sample(cls, values: np.ndarray, returns: np.ndarray, mask: np.ndarray) -> ValueQuality:
        """Moments of one sample, from `[R]` arrays."""
        errors = returns.astype(np.float64) - values
        return cls(*(Moments.from_values(numbers, mask) for numbers in (values, returns, errors)))

    @staticmethod
    def metrics(parts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        """Merge all `parts`, in order; each is the fields of one `ValueQuality`, or empty. Return the mean
        value and return. Add the share of the returns' variance that the values explain, unless all returns
        are equal. Return an empty dict without tokens.
        """
        merged = ValueQuality(Moments(), Moments(), Moments())
        for part in parts:
            for name, moments in part.items():
                getattr(merged, name).merge_from(Moments(**moments))
        values, returns = merged.values, merged.returns
        if not returns.count:
            return {}
        metrics = {"critic/value_mean": values.mean, "critic/return_mean": returns.mean}
        if returns.standard_deviation > 1e-6 * (1.0 + abs(returns.mean)):
            metrics["critic/explained_variance"] = 1.0 - merged.errors.squares / returns.squares
        return metrics


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the loss `[N]` `(V - R)^2 / 2`, and a mask `[N]` bool of tokens without a gradient.

    With `clip` the loss is the larger of that and the same at `V` clamped to `clip` around `old_values`
    `[N]`, the value at the start of the step (PPO's implementation, Schulman et al. 2017). There is no
    gradient if the clamped one is larger and the bound holds. `values` `[N]` carries the gradient. Raises
    `ValueError` for different shapes.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    loss = (values - returns).square()
    if clip is None:
        return 0.5 * loss, torch.zeros_like(loss, dtype=torch.bool)
    clamped = values.clamp(old_values - clip, old_values + clip)  # values inside stay bit for bit
    bounded = (clamped - returns).square()
    return 0.5 * torch.maximum(loss, bounded), bounded > loss


def predict_values(hidden: Tensor, head: AnyHead) -> Tensor:
    """Return `[N]` values, at least float32, of hidden states `[N, D]` by the value head."""
    assert isinstance(head, Head)
    assert head.bias is not None
    dtype = statistics_dtype(hidden, head.weight)
    return hidden.to(dtype) @ head.weight[0].to(dtype) + head.bias[0].to(dtype)


class ValueTerm:
    """The critic's loss, weighted by `policy_weight`."""

    def __init__(self, clip: float | None = None) -> None:
        self.clip = clip

    def __call__(self, micro: MicroBatch, student: StudentRows, sums: MetricSums) -> Tensor:
        if micro.values is None or micro.returns is None:
            raise ValueError("the value loss needs values and returns in every sample's terms")
        values = predict_values(student.hidden, student.head)
        per_token, clipped = value_loss(values, micro.values, micro.returns, self.clip)
        masked_mean(per_token, micro.policy_weight, sums, "critic/loss")
        if self.clip is not None:
            masked_mean(clipped.float(), micro.policy_weight, sums, "critic/clip_ratio")
        return (micro.policy_weight * per_token).sum()


def with_value_head(model: CausalLM) -> CausalLM:
    """Replace the head of `model` by one row with a bias. Both are 0, so every value is 0 before the first
    step. Raises `ModelError` if its head cannot be replaced.
    """
    size, dtype = model.config.hidden_size, model.dtype
    head = nn.utils.skip_init(nn.Linear, size, 1, device=model.device, dtype=dtype)  # draws nothing
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    model.module.set_output_embeddings(head)
    if model.module.get_output_embeddings() is not head:
        raise ModelError(
            f"the head of {type(model.module).__name__} cannot be replaced by one for values; take another"
            " advantage than gae."
        )
    model.vocabulary = None
    return model


def local_critic_values(backend: Backend, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Return `[R]` float32 values of the responses of this rank's samples. All ranks call it together, each
    with its own. Raises `TrainingError` if a value is not finite.
    """

    def values_of(hidden: Tensor, _: Tensor) -> Tensor:
        return predict_values(hidden, backend.head())

    of_samples = backend.local_values(samples, values_of, "the critic's values")
    for sample, values in zip(samples, of_samples, strict=True):
        if not np.isfinite(values).all():
            raise TrainingError(
                f"the critic's values of sample {sample.uid} are not finite; lower specialist.critic.optim.lr"
                " or resume from an earlier checkpoint."
            )
    return of_samples
