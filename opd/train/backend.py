"""What every back end does alike: shares, packing, lock step, metrics. Where weights lie is a subclass's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opd.config.train import BatchConfig, OptimConfig
from opd.errors import TrainingError
from opd.kernels.head import Head
from opd.kernels.vocab_parallel import HeadShard
from opd.models.causal_lm import weights_digest
from opd.ranks import Ranks
from opd.train.head_ops import linear_logprobs
from opd.train.packing import micro_batches, of_packed, split_by_tokens
from opd.train.shares import PerSample, Shares
from opd.train.student_rows import MetricSums, StudentRows, shares
from opd.train.terms import LossTerm
from opd.types import MicroBatch, RolloutBatch, Sample


@dataclass(frozen=True, slots=True)
class Training:
    """How a student is trained, whatever the back end."""

    optim: OptimConfig
    """AdamW; the learning rate comes with every step."""
    batch: BatchConfig
    """Packing limits."""
    temperature: float
    """Sampling temperature; every log-probability is taken at it."""
    terms: Sequence[LossTerm]
    """The streams of the loss."""


class Backend(ABC):
    """A `TrainBackend` whose model is reached through `hidden` and `head`.

    With several ranks each makes the whole call and computes its share. Where `lockstep` says that a pass of
    the model is itself communication, a rank with fewer micro-batches makes empty passes.

    Args:
        training: How it is trained.
        data: The ranks that share the samples; those of one tensor-parallel group are one of them.
    """

    lockstep = False

    def __init__(self, training: Training, data: Ranks | None = None) -> None:
        self.terms = list(training.terms)
        self.temperature = training.temperature
        self.data = Ranks() if data is None else data
        self.shares = Shares(self.data)
        self._batch = training.batch

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def hidden(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Last hidden states [T, D] of packed sequences, inside `run`."""

    @abstractmethod
    def head(self) -> Head | HeadShard:
        """The head as it is inside `run`, live."""

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        """`compute()`, which uses `hidden` and `head`, with their weights in place."""
        return compute()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of `loss`; `last` of this step's."""
        del last
        loss.backward()

    def reduce(self) -> None:
        """Sum the gradient over the data-parallel ranks, where `backward` has not done so."""
        return

    @abstractmethod
    def zero_grad(self) -> None: ...

    @abstractmethod
    def step(self, lr: float) -> dict[str, float]: ...

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    @abstractmethod
    def state(self) -> dict[str, dict[str, Tensor]]: ...

    @abstractmethod
    def load_state(self, state: dict[str, dict[str, Tensor]]) -> None: ...

    def digest(self) -> str:
        """Digest of the student's weights, as an engine computes it after a sync; all ranks take part."""
        return weights_digest(self.weights())

    def close(self) -> None:
        """Give back what outlives the object."""
        return

    def mine(self, samples: Sequence[Sample]) -> list[Sample]:
        """Deal out the samples of a new step; returns those this rank scores and trains."""
        self.shares.deal(samples)
        return self.shares.mine(samples)

    def each(self, samples: Sequence[Sample], compute: PerSample, what: str) -> list[np.ndarray]:
        """`compute` for all `samples`, each on the rank that trains it."""
        return self.shares.each(samples, compute, what)

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """`[R]` float32 log-probability of each response under the weights as they are now."""
        return self.each(samples, self._logprobs, "the recomputed log-probabilities")

    @torch.no_grad()
    def _logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        with self.data.collective("the recomputed log-probabilities"):
            missing = self._missing_passes(samples, by_teacher=False)
            results = of_packed(
                samples,
                self._batch.max_tokens,
                self.device,
                lambda *packed: self.run(lambda: self._packed_logprobs(*packed)),
            )
            for _ in range(missing):
                self.run(self._nothing)
        return results

    def _packed_logprobs(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, rows: Tensor
    ) -> Tensor:
        hidden = self.hidden(input_ids, position_ids, cu_seqlens)[rows]
        return linear_logprobs(
            hidden,
            self.head(),
            input_ids[rows + 1],
            temperature=self.temperature,
            chunk=self._batch.kl_chunk,
        )

    def forward_backward(self, batch: RolloutBatch) -> dict[str, float]:
        """Accumulate the gradient of `batch`; its weights hold the normalisers of the whole step.

        Returns token-weighted means of every term's metrics, and for batches with teachers each teacher's
        share of the tokens and of the gradient (sum over tokens of the L2 norm at the last hidden state).

        Raises `TrainingError` if the loss is not finite or no sample has a response token; the weights are
        untouched then.
        """
        if not any(len(sample.response_ids) for sample in batch.samples):
            raise TrainingError(
                f"all {len(batch.samples)} responses of this step are empty: there is nothing to learn from;"
                " check the stop ids, the prompts and rollout.max_new_tokens."
            )
        return self.forward_backward_parts([batch])

    def forward_backward_parts(self, parts: Iterable[RolloutBatch]) -> dict[str, float]:
        """`forward_backward` of a step in parts: the next is asked for when one is done with.

        All ranks are given the same parts.
        """
        sums = MetricSums()
        try:
            with self.data.collective("the forward and backward passes"):
                for part in parts:
                    self._passes(part, sums)
                self.reduce()
        except FloatingPointError as error:
            self.zero_grad()
            raise TrainingError(f"{error}; lower the learning rate or resume from a checkpoint.") from error
        if not self.data.alone:
            sums = MetricSums.merged(self.data.gather_json(sums.parts(), "the metrics of a step"))
        metrics = sums.means()
        for kind in ("token_share", "grad_share"):
            for teacher, share in shares(sums.sums(f"{kind}/")).items():
                metrics[f"{kind}/{teacher}"] = share
        return metrics

    def _passes(self, batch: RolloutBatch, sums: MetricSums) -> None:
        mine = self.shares.batch(batch)
        micros: Iterator[MicroBatch] = micro_batches(mine, self._batch.max_tokens, self.device)
        waiting = next(micros, None)
        missing = self._missing_passes([s for s in mine.samples if len(s.response_ids)], by_teacher=True)
        while waiting is not None:
            micro, waiting = waiting, next(micros, None)
            self._pass(micro, sums, last=waiting is None and not missing)
        for left in reversed(range(missing)):
            self.backward(self.run(self._nothing), last=not left)

    def _pass(self, micro: MicroBatch, sums: MetricSums, last: bool) -> None:
        # The loss ends with this call: what its graph still holds, a teacher's head, is gone before the next.
        loss = self.run(lambda: self._loss(micro, sums))
        self._check(loss, micro)
        self.backward(loss, last)

    def _missing_passes(self, samples: Sequence[Sample], by_teacher: bool) -> int:
        """Passes this rank has to make beyond those of its own `samples`, so that all make as many."""
        if not self.lockstep:
            return 0
        lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
        teachers = [s.teacher if by_teacher else None for s in samples]
        own = len(split_by_tokens(lengths, teachers, self._batch.max_tokens))
        return self.data.most(own, "the number of passes") - own

    def _nothing(self) -> Tensor:
        """0, with a gradient of 0 for every weight."""
        head = self.head()
        ids = torch.zeros(1, dtype=torch.int64, device=self.device)
        ends = torch.tensor([0, 1], dtype=torch.int32, device=self.device)
        hidden = self.hidden(ids, ids, ends)
        weight = (head.head if isinstance(head, HeadShard) else head).weight
        return 0.0 * (hidden.sum() + weight[:1].sum())

    def _loss(self, micro: MicroBatch, sums: MetricSums) -> Tensor:
        hidden = self.hidden(micro.input_ids, micro.position_ids, micro.cu_seqlens)[micro.rows]
        teacher = micro.samples[0].teacher
        if teacher is not None:
            counted = (micro.kl_weight != 0) | (micro.policy_weight != 0)
            sums.add(f"token_share/{teacher}", counted.sum())
            hidden.register_hook(
                lambda grad: sums.add(f"grad_share/{teacher}", grad.float().norm(dim=-1).sum())
            )
        student = StudentRows(hidden, self.head(), micro.targets, self.temperature, self._batch.kl_chunk)
        return torch.stack([term(micro, student, sums) for term in self.terms]).sum()

    def _check(self, loss: Tensor, micro: MicroBatch) -> None:
        if not torch.isfinite(loss):
            self.zero_grad()
            first = micro.samples[0].uid
            raise TrainingError(
                f"the loss is {loss.item()} in the micro-batch that starts with sample {first}; lower the"
                " learning rate or resume from an earlier checkpoint."
            )
