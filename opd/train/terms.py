"""The loss terms, and the student's rows that they use to predict response tokens.

Each term reads its own weights, so terms add up independently. The student's head may be unsharded, or its
vocabulary split over ranks. With a shard, each teacher's head is split at the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from opd.config.base import POLICY_LOSS
from opd.config.rl import PolicyLoss, ReferenceKLConfig
from opd.errors import ConfigError, TrainingError
from opd.imports import import_function, optional_arguments
from opd.kernels import checks
from opd.kernels.chunked import TokenNotes
from opd.kernels.head import statistics_dtype
from opd.kernels.ops import linear_logprobs_entropy
from opd.kernels.vocab_parallel import AnyHead, HeadShard
from opd.ranks import Ranks
from opd.train.loss_weights import MismatchSums
from opd.train.losses import POLICY_LOSSES, Sequences, reference_penalty
from opd.train.masks import policy_logprobs
from opd.types import MicroBatch
from opd.user_code import call_user_code


def with_total(head: AnyHead, total: Tensor | None) -> AnyHead:
    """Return `head` with `total` (of the weight's shape) to collect the weight's gradient. `None` leaves it
    to autograd.
    """
    rows = head.head if isinstance(head, HeadShard) else head
    if rows.total is total:
        return head
    rows = replace(rows, total=total)
    return replace(head, head=rows) if isinstance(head, HeadShard) else rows


class StudentRows:
    """The student's last hidden states `[N, D]` at a micro-batch's rows, and values derived from them.

    Log-probabilities are computed once, at the sampling temperature, and only if a term reads them. `summed`
    sums a tensor over the ranks that share the rows' sequences. `own_head` is `head` for the terms of this
    package, because they run backward through every value they read. If the back end collects the weight's
    gradient in one tensor, theirs goes there (`Head.total`).
    """

    def __init__(
        self,
        hidden: Tensor,
        head: AnyHead,
        targets: Tensor,
        temperature: float,
        chunk: int,
        summed: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> None:
        self.hidden = hidden
        self.own_head = head
        self.head = with_total(head, None)
        self.targets = targets
        self.temperature = temperature
        self.chunk = chunk
        self.summed = summed
        self.masks: Tensor | None = None
        """[N, K]: the tokens from which each was drawn, see `MicroBatch.masks`."""
        self.kept_mass: Tensor | None = None
        """[N]: their probability, 0 for a token without a mask, once `logprobs` were computed."""
        self.probed = False
        """A term compares the log-probabilities without training on them."""
        self.notes: TokenNotes | None = None
        """Log-probabilities and entropy, by-products of a divergence."""

    def open_notes(self, micro: MicroBatch) -> TokenNotes | None:
        """Notes for a divergence to fill, or None if nothing reads them or it covers too few tokens."""
        if not self.probed or self.notes is not None or not micro.kl_covers:
            return None
        self.notes = TokenNotes.empty_for(self.targets, statistics_dtype(self.hidden))
        return self.notes

    def cut_rows(self, rows: slice, head: AnyHead, values: Sequence[Tensor]) -> StudentRows:
        """Return the rows `rows` with `head`. `values` are their hidden states and, if they were computed,
        log-probabilities and entropy.
        """
        cut = StudentRows(values[0], head, self.targets[rows], self.temperature, self.chunk, self.summed)
        cut.probed, cut.masks = self.probed, None if self.masks is None else self.masks[rows]
        if len(values) > 1:
            cut._logprobs_entropy = values[1], values[2]
        return cut

    @cached_property
    def _logprobs_entropy(self) -> tuple[Tensor, Tensor]:
        tokens, scale = (self.hidden, self.own_head, self.targets), (self.temperature, self.chunk)
        if self.masks is not None:
            *of_policy, self.kept_mass = policy_logprobs(*tokens, self.masks, *scale)
            return of_policy[0], of_policy[1]
        return linear_logprobs_entropy(*tokens, temperature=self.temperature, chunk=self.chunk)

    @property
    def logprobs(self) -> Tensor:
        """[N] float32, differentiable log-probability of each response token, over its mask if it has one."""
        return self._logprobs_entropy[0]

    @property
    def entropy(self) -> Tensor:
        """[N] float32, differentiable, nats."""
        return self._logprobs_entropy[1]


def sum_parts(
    student: StudentRows,
    parts: Sequence[tuple[slice, MicroBatch]],
    sums: MetricSums,
    loss_of: LossTerm,
) -> Tensor:
    """Return the sum of `loss_of` each of `parts`, which has these rows of `student`.

    A part runs backward before the next one begins, and frees its graph. So one teacher's head is in memory
    at a time. The gradient of the student's head is one sum, in `Head.total`.
    """
    own = student.own_head
    head = own.head if isinstance(own, HeadShard) else own
    by_row = [student.hidden, *vars(student).get("_logprobs_entropy", ())]
    weight, bias = (
        None if one is None else one.detach().requires_grad_(one.requires_grad)
        for one in (head.weight, head.bias)
    )
    assert weight is not None
    total = head.total
    if total is None and weight.requires_grad:
        total = torch.zeros_like(weight, dtype=statistics_dtype(weight))
    copy: AnyHead = replace(head, weight=weight, bias=bias, total=total)
    copy = replace(own, head=copy) if isinstance(own, HeadShard) else copy
    of_head = [one for one in (weight, bias) if one is not None and one.requires_grad]
    gradients = [torch.zeros_like(values) for values in by_row]
    losses, notes = [], []
    for rows, part in parts:
        leaves = [values.detach()[rows].requires_grad_() for values in by_row]
        cut = student.cut_rows(rows, copy, leaves)
        loss = loss_of(part, cut, sums)
        loss.backward(inputs=[*leaves, *of_head])
        for gradient, leaf in zip(gradients, leaves, strict=True):
            if leaf.grad is not None:
                gradient[rows] = leaf.grad
        losses.append(loss.detach())
        notes.append(cut.notes)
        del loss, cut  # and with them the graph, which holds a teacher's head
    if all(one is not None for one in notes):
        student.notes = TokenNotes.join(notes)
    of_weight = weight.grad
    if total is not head.total and total is not None:
        of_weight = (total if of_weight is None else total.add_(of_weight)).to(weight.dtype)
    given = (*gradients, of_weight, None if bias is None else bias.grad)
    return _Collected.apply(torch.stack(losses).sum(), given, *by_row, head.weight, head.bias)


class _Collected(torch.autograd.Function):
    """A loss whose gradients were computed with it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], *inputs: Tensor | None) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *(None if one is None else one.mul_(upstream) for one in gradients)


class MetricSums:
    """Weighted sums over micro-batches that become means at the end, so there is no mean of means.

    Numbers on a device are read all at once, when a result is requested. Reading one waits until the device
    has finished all its work.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._minima: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._unread: list[tuple[Literal["sum", "least", "peak"], str, Tensor | float, Tensor | float]] = []
        """Unread additions, in order: operation, name, value and weight."""
        self._waiting: list[tuple[Tensor, Callable[[np.ndarray], object]]] = []
        """Tensors on a device for `when_read`."""

    def add(self, name: str, total: Tensor | float, weight: Tensor | float = 1.0) -> None:
        self._unread.append(("sum", name, _copy_value(total), _copy_value(weight)))

    def record_min(self, name: str, value: Tensor | float) -> None:
        """Keep the smallest value."""
        self._unread.append(("least", name, _copy_value(value), 1.0))

    def record_max(self, name: str, value: Tensor | float) -> None:
        """Keep the largest value."""
        self._unread.append(("peak", name, _copy_value(value), 1.0))

    def when_read(self, values: Tensor, use: Callable[[np.ndarray], object]) -> None:
        """Call `use`, which may add to this, with `values` `[N]` as float64. On the CPU it is called now."""
        if values.device.type == "cpu":
            use(values.detach().double().numpy())
        else:
            self._waiting.append((values.detach().to(torch.float64, copy=True), use))

    def normalised_shares(self, prefix: str) -> dict[str, float]:
        """Return the sums of all names that start with `prefix`, divided by their total (0 if it is 0)."""
        self._apply_unread()
        sums = {name: value for name, value in self._sums.items() if name.startswith(prefix)}
        total = sum(sums.values())
        return {name: value / total if total else 0.0 for name, value in sums.items()}

    def raw_sums(self) -> list[dict[str, float]]:
        """Return all sums, for `merge_ranks`."""
        self._apply_unread()
        return [self._sums, self._weights, self._minima, self._maxima]

    @classmethod
    def merge_ranks(cls, ranks: Sequence[list[dict[str, float]]]) -> MetricSums:
        """Merge the `raw_sums` of all ranks."""
        merged = cls()
        for sums, weights, minima, maxima in ranks:
            for name, total in sums.items():
                merged.add(name, total, weights[name])
            for name, value in minima.items():
                merged.record_min(name, value)
            for name, value in maxima.items():
                merged.record_max(name, value)
        return merged

    def means(self) -> dict[str, float]:
        """Return sum / weight for every name whose weight is not 0, and every minimum and maximum."""
        self._apply_unread()
        means = {
            name: total / self._weights[name] for name, total in self._sums.items() if self._weights[name]
        }
        return means | self._minima | self._maxima

    def _apply_unread(self) -> None:
        """Apply all unread additions, in order."""
        waiting, self._waiting = self._waiting, []
        on_device = [value for entry in self._unread for value in entry[2:] if isinstance(value, Tensor)]
        parts = [*(value.reshape(1) for value in on_device), *(values for values, _ in waiting)]
        read = torch.cat(parts).cpu().numpy() if parts else np.zeros(0)  # one transfer for all
        numbers, start = iter(read[: len(on_device)].tolist()), len(on_device)
        for values, use in waiting:
            use(read[start : start + len(values)])
            start += len(values)
        unread, self._unread = self._unread, []
        for kind, name, value, weight in unread:
            value = next(numbers) if isinstance(value, Tensor) else value
            weight = next(numbers) if isinstance(weight, Tensor) else weight
            if kind == "least":
                self._minima[name] = min(self._minima.get(name, float("inf")), value)
            elif kind == "peak":
                self._maxima[name] = max(self._maxima.get(name, float("-inf")), value)
            else:
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._weights[name] = self._weights.get(name, 0.0) + weight


def _copy_value(value: Tensor | float) -> Tensor | float:
    """Return the current `value`: a number, or a float64 copy on the device."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.detach().to(torch.float64, copy=True).reshape(())
    return float(value)


def masked_mean(values: Tensor, weight: Tensor, sums: MetricSums, name: str) -> None:
    """Add the sum of `values [N]` over the tokens whose `weight [N]` is not 0."""
    counted = weight != 0
    sums.add(name, torch.where(counted, values.detach(), 0.0).sum(), counted.sum())


class LossTerm(Protocol):
    """One stream of the loss."""

    def __call__(self, micro: MicroBatch, student: StudentRows, sums: MetricSums) -> Tensor:
        """Return the scalar to add to the loss. The weights in `micro` already hold the normaliser."""
        ...


class PolicyTerm:
    """The policy gradient on `policy_weight`, with an optional entropy bonus."""

    def __init__(self, config: PolicyLoss, entropy_coef: float = 0.0) -> None:
        """Raises `ConfigError` if the loss that `config.path` names cannot be loaded."""
        self.config = config
        self.entropy_coef = entropy_coef
        self._loss = POLICY_LOSSES[type(config)]
        self._path: str | None = getattr(config, "path", None)
        if self._path is not None:
            self._custom = import_function(self._path, "policy_loss.path", ConfigError, POLICY_LOSS)
            self._optional = optional_arguments(self._custom, POLICY_LOSS)

    def __call__(self, micro: MicroBatch, student: StudentRows, sums: MetricSums) -> Tensor:
        weight = micro.policy_weight
        counted = weight != 0
        old = student.logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
        inputs = (student.logprobs, old, micro.advantages, self.config)
        lengths = [len(sample.response_ids) for sample in micro.samples]
        sequences = Sequences(lengths, weight.device, micro.kept, student.summed)
        per_token, stats = self._loss(*inputs, counted, sequences)
        if self._path is not None:
            arguments = {name: getattr(sequences, name) for name in self._optional}
            if arguments and micro.kept is not None:
                raise ConfigError(shared_responses("policy_loss.path", self._path))
            with call_user_code(f"policy_loss.path {self._path}", TrainingError):
                per_token = per_token_loss(self._custom(*inputs, **arguments), student.logprobs, self._path)
        for name, value in stats.metrics().items():
            if name == "policy/ratio_min":
                sums.record_min(name, value)
            elif name == "policy/ratio_max":
                sums.record_max(name, value)
            else:
                sums.add(name, value * stats.tokens, stats.tokens)
        masked_mean(student.entropy, counted | (micro.kl_weight != 0), sums, "entropy")  # of all that learns
        loss = (weight * per_token).sum()
        if self.entropy_coef:
            loss = loss - self.entropy_coef * (weight * student.entropy).sum()
        return loss


def shared_responses(where: str, path: str) -> str:
    """Return the error for a loss on full responses while ranks share them."""
    return (
        f"{where}: {path} takes the bounds of responses, which train.context_parallel cuts over ranks; set"
        " train.context_parallel to 1, or leave its parameter `bounds` out."
    )


def per_token_loss(values: object, like: Tensor, path: str) -> Tensor:
    """Return `values` of a user's loss at `path`. Raises `TrainingError` unless they are a tensor `[N]` of
    real numbers like `like`, and have a gradient if `like` has one.
    """
    if not isinstance(values, Tensor) or values.shape != like.shape or not values.is_floating_point():
        form = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise TrainingError(
            f"the loss {path} returned {form}, but one number a token is needed: {list(like.shape)}."
        )

    def fail() -> None:
        raise TrainingError(
            f"the loss {path} returned numbers that are not finite; mend it, also for tokens of no weight."
        )

    checks.require_true(torch.isfinite(values).all(), fail)
    if like.requires_grad and not values.requires_grad:
        raise TrainingError(
            f"the loss {path} returned numbers without a gradient; compute them from the log-probabilities it"
            " is given, not from a copy or a detached tensor."
        )
    return values


class ReferenceTerm:
    """Reference KL as a loss (k2 or k3) on `policy_weight`; see `ReferenceKLConfig` for the gradients.

    `coef` may change between two steps.
    """

    def __init__(self, config: ReferenceKLConfig) -> None:
        self.config, self.coef = config, config.coef

    def __call__(self, micro: MicroBatch, student: StudentRows, sums: MetricSums) -> Tensor:
        if micro.ref_logprobs is None:
            raise ValueError("the reference KL needs reference log-probabilities in every sample's terms")
        penalty = reference_penalty(student.logprobs, micro.ref_logprobs, self.config.estimator)
        masked_mean(penalty, micro.policy_weight, sums, "reference_kl")
        return self.coef * (micro.policy_weight * penalty).sum()


FURTHEST_OFF = 0.2
"""Clamp of a step's relative error from the target."""
SMALLEST, LARGEST = 1e-12, 1e9
"""Bounds of a coefficient. One that reached 0 would never come back."""


def next_coefficient(coef: float, measured: float, target: float, gain: float) -> float:
    """Return `coef (1 + gain clip(measured / target - 1, -0.2, 0.2))`. It grows if the `measured` KL to the
    reference (nats a token) is above `target` and shrinks below it (Ziegler et al., 1909.08593, 2.2).
    """
    off = min(max(measured / target - 1.0, -FURTHEST_OFF), FURTHEST_OFF)
    return min(max(coef * (1.0 + gain * off), SMALLEST), LARGEST)


class MismatchProbe:
    """No loss. Compares the engine's and the trainer's log-probabilities for the mismatch metrics.

    It checks the recompute contract if no policy stream recomputes log-probabilities. It keeps sums, not
    tokens. It follows the full-vocabulary divergence term, which has the logits.
    """

    def __init__(
        self,
        ranks: Ranks | None = None,
        *,
        entropy: bool = False,
        shared: bool = False,
        apart: Collection[str] = (),
    ) -> None:
        """`ranks`: the ranks whose tokens the metrics cover. `entropy`: also average the student's entropy,
        if no `PolicyTerm` does. `shared`: reuse the log-probabilities of a `PolicyTerm`. `apart`: domains
        sampled at another temperature than trained, or by others. Their differences say nothing of the
        engine.
        """
        self._ranks = Ranks() if ranks is None else ranks
        self._entropy, self.shared, self.apart = entropy, shared, frozenset(apart)
        self._sums = MismatchSums()

    def __call__(self, micro: MicroBatch, student: StudentRows, sums: MetricSums) -> Tensor:
        if self.shared:
            logprobs, entropy = student.logprobs.detach(), student.entropy.detach()
        elif student.notes is not None:
            logprobs, entropy = student.notes.logprobs, student.notes.entropy
        else:
            with torch.no_grad():
                logprobs, entropy = linear_logprobs_entropy(
                    student.hidden,
                    student.head,
                    micro.targets,
                    temperature=student.temperature,
                    chunk=student.chunk,
                )
        compared = [sample.loss_mask & (sample.domain not in self.apart) for sample in micro.samples]
        drawn = [sample.rollout_logprobs for sample in micro.samples]
        masks = [sample.loss_mask for sample in micro.samples]
        rollout, counted, mask = map(np.concatenate, (drawn, compared, masks))
        if micro.kept is not None:
            rows = micro.kept.cpu().numpy()
            rollout, counted, mask = rollout[rows], counted[rows], mask[rows]
        sums.when_read(logprobs, lambda values: self._sums.add(rollout, values.astype(np.float32), counted))
        if self._entropy and mask.any():
            sums.when_read(
                entropy, lambda values: sums.add("entropy", float(values[mask].sum()), int(mask.sum()))
            )
        return logprobs.new_zeros(())

    def drain_metrics(self) -> dict[str, float]:
        """Return metrics of the tokens since the last call, and reset; empty if all domains are `apart`."""
        local, self._sums = self._sums, MismatchSums()
        merged = MismatchSums()
        for fields in self._ranks.gather_json(asdict(local), "the mismatch metrics"):
            merged.merge_from(MismatchSums(**fields))
        return merged.metrics() if merged.tokens or not self.apart else {}


class CrossEntropyTerm:
    """Negative log-likelihood of the response tokens on `ce_weight`."""

    def __call__(self, micro: MicroBatch, student: StudentRows, sums: MetricSums) -> Tensor:
        masked_mean(-student.logprobs, micro.ce_weight, sums, "loss/ce")
        return -(micro.ce_weight * student.logprobs).sum()
