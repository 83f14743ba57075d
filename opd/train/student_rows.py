"""What a loss term may ask of the student at the positions that predict response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from opd.kernels.head import Head
from opd.kernels.vocab_parallel import HeadShard
from opd.train.head_ops import linear_logprobs_entropy


class StudentRows:
    """The student's last hidden states `[N, D]` at a micro-batch's rows, and what follows from them.

    Log-probabilities are computed once, at the sampling temperature, and only if a term asks for them.
    """

    def __init__(
        self, hidden: Tensor, head: Head | HeadShard, targets: Tensor, temperature: float, chunk: int
    ) -> None:
        self.hidden = hidden
        self.head = head
        self.targets = targets
        self.temperature = temperature
        self.chunk = chunk

    @cached_property
    def _logprobs_entropy(self) -> tuple[Tensor, Tensor]:
        return linear_logprobs_entropy(
            self.hidden, self.head, self.targets, temperature=self.temperature, chunk=self.chunk
        )

    @property
    def logprobs(self) -> Tensor:
        """[N] float32, differentiable: log-probability of each response token."""
        return self._logprobs_entropy[0]

    @property
    def entropy(self) -> Tensor:
        """[N] float32, differentiable, nats."""
        return self._logprobs_entropy[1]


class MetricSums:
    """Weighted sums over micro-batches that end as means: never a mean of means."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._maxima: dict[str, float] = {}

    def add(self, name: str, total: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add `total`, which stands for `weight` units."""
        self._sums[name] = self._sums.get(name, 0.0) + float(total)
        self._weights[name] = self._weights.get(name, 0.0) + float(weight)

    def peak(self, name: str, value: Tensor | float) -> None:
        """Keep the largest value."""
        self._maxima[name] = max(self._maxima.get(name, float("-inf")), float(value))

    def sums(self, prefix: str) -> dict[str, float]:
        """The raw sums of every name that starts with `prefix`, without the prefix."""
        return {name[len(prefix) :]: v for name, v in self._sums.items() if name.startswith(prefix)}

    def include(self, other: MetricSums) -> None:
        """Add all that `other` holds."""
        for name, total in other._sums.items():
            self.add(name, total, other._weights[name])
        for name, value in other._maxima.items():
            self.peak(name, value)

    def parts(self) -> list[dict[str, float]]:
        """Everything it holds, for `merged` on another rank."""
        return [self._sums, self._weights, self._maxima]

    @classmethod
    def merged(cls, ranks: Sequence[list[dict[str, float]]]) -> MetricSums:
        """The sums over all ranks from the `parts` of each."""
        whole = cls()
        for sums, weights, maxima in ranks:
            for name, total in sums.items():
                whole.add(name, total, weights[name])
            for name, value in maxima.items():
                whole.peak(name, value)
        return whole

    def means(self) -> dict[str, float]:
        """Sum divided by weight for every name whose weight is not 0, and every maximum."""
        means = {
            name: total / self._weights[name] for name, total in self._sums.items() if self._weights[name]
        }
        return means | self._maxima


def shares(sums: dict[str, float]) -> dict[str, float]:
    """`sums` divided by their total; all 0 if the total is."""
    total = sum(sums.values())
    return {name: value / total if total else 0.0 for name, value in sums.items()}


def masked_mean(values: Tensor, weight: Tensor, sums: MetricSums, name: str) -> None:
    """Add the sum of `values [N]` over the tokens whose `weight [N]` is not 0."""
    counted = weight != 0
    sums.add(name, torch.where(counted, values.detach(), 0.0).sum(), counted.sum())
