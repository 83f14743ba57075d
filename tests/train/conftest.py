"""Groups of scored samples, and exact expectations in float64: every action of one state is enumerated and
weighed with its probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from opd.train.losses import SampledTokens, outside_support, topk_reverse_kl
from opd.types import Sample, SampleGroup


@dataclass(frozen=True)
class Position:
    """One state: the student's logits [V] (leaf, float64) and the teacher's log-probabilities [V]."""

    logits: Tensor
    teacher: Tensor

    @classmethod
    def random(cls, seed: int, vocabulary: int, *, spread: float = 1.5, distance: float = 1.0) -> Position:
        """Teacher logits of standard deviation `spread`; the student's differ by noise of size `distance`."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(2, vocabulary, generator=generator, dtype=torch.float64)
        teacher = spread * noise[0]
        return cls((teacher + distance * noise[1]).requires_grad_(), teacher.log_softmax(-1))

    @property
    def logprobs(self) -> Tensor:
        """[V] log p, with gradient. As `[N]` tensors of N = V tokens, one for each action."""
        return self.logits.log_softmax(-1)

    @property
    def probs(self) -> Tensor:
        """[V] p, detached."""
        return self.logprobs.exp().detach()

    @property
    def log_ratio(self) -> Tensor:
        """[V] r = log p - log t, detached."""
        return (self.logprobs - self.teacher).detach()

    @property
    def kl(self) -> Tensor:
        """KL(p || t)."""
        return (self.probs * self.log_ratio).sum()

    @property
    def reverse_gradient(self) -> Tensor:
        """[V] gradient of KL(p || t) with respect to the logits."""
        return self.probs * (self.log_ratio - self.kl)

    @property
    def forward_gradient(self) -> Tensor:
        """[V] gradient of KL(t || p)."""
        return self.probs - self.teacher.exp()

    def support(self, k: int) -> Tensor:
        """[K] the teacher's most likely tokens."""
        return self.teacher.topk(k).indices

    def topk_losses(self, k: int, form: str, importance: Tensor | None = None) -> Tensor:
        """[V] the top-k loss of every action, all with the teacher's support."""
        support = self.support(k)
        actions = torch.arange(len(self.teacher))
        rows = support.expand(len(actions), -1)
        sampled = SampledTokens(self.logprobs, self.teacher, outside_support(actions, rows), importance)
        student = self.logprobs[support].expand(len(actions), -1)
        return topk_reverse_kl(student, self.teacher[support].expand_as(student), form=form, sampled=sampled)

    def expected_gradient(self, losses: Tensor, behaviour: Tensor | None = None) -> Tensor:
        """[V] `sum_a mu_a grad losses_a`; `mu` [V] is the student's own distribution unless given."""
        weights = self.probs if behaviour is None else behaviour.detach()
        return torch.autograd.grad((weights * losses).sum(), self.logits, retain_graph=True)[0]

    def per_action_gradients(self, losses: Tensor) -> Tensor:
        """[V, V] gradient of each action's loss."""
        rows = [torch.autograd.grad(loss, self.logits, retain_graph=True)[0] for loss in losses]
        return torch.stack(rows)

    def gradient_variance(self, losses: Tensor) -> Tensor:
        """Trace of the covariance of the per-action gradient."""
        gradients = self.per_action_gradients(losses)
        mean = self.probs @ gradients
        return (self.probs * (gradients - mean).square().sum(-1)).sum()


@pytest.fixture(scope="session")
def position() -> type[Position]:
    return Position


def make_group(rewards: Sequence[float | None], lengths: Sequence[int] | None = None) -> SampleGroup:
    """One sample a reward; `lengths[i]` response tokens (3 by default), the second not trained on."""
    samples = []
    for index, reward in enumerate(rewards):
        length = 3 if lengths is None else lengths[index]
        mask = np.ones(length, dtype=bool)
        mask[1:2] = False
        samples.append(
            Sample(
                uid=f"g/{index}",
                group_uid="g",
                domain="sort",
                prompt_ids=np.array([1, 2], dtype=np.int32),
                response_ids=np.full(length, 3, dtype=np.int32),
                loss_mask=mask,
                reward=reward,
            )
        )
    return SampleGroup("g", "sort", samples)


@pytest.fixture(scope="session")
def group() -> Callable[..., SampleGroup]:
    return make_group
