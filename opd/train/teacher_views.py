"""A teacher's results for a micro-batch's loss: hidden states and a head, or a few log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.kernels.ops import linear_logprobs, linear_logprobs_entropy, linear_topk
from opd.kernels.vocab_parallel import AnyHead
from opd.train.losses import entropy_gates
from opd.train.terms import MetricSums, StudentRows
from opd.types import MicroBatch

if TYPE_CHECKING:
    from opd.train.aligned_kl import AlignedRows


@dataclass(frozen=True, slots=True)
class TeacherView:
    """One teacher as a micro-batch sees it."""

    name: str
    weight: float | Tensor
    """Its share in the mixture, or `[N]` of each token; 1 if a sample has one teacher."""
    hidden: Tensor
    """[N, Dt]: last hidden states at the micro-batch's rows; with `aligned` [N', Dt] at the teacher's."""
    head: Head
    aligned: AlignedRows | None = None
    """For a teacher with a tokenizer of its own."""

    def select_rows(self, rows: Tensor) -> TeacherView:
        """Select `rows` (`[M]` int64). Raises `TeacherError` for a teacher with a tokenizer of its own."""
        if self.aligned is not None:
            raise TeacherError(
                f"teacher {self.name} has a tokenizer of its own, whose tokens ranks cannot share; set"
                " train.context_parallel to 1."
            )
        return replace(self, hidden=self.hidden[rows.to(self.hidden.device)])


@dataclass(frozen=True, slots=True)
class ScoredView:
    """One teacher with log-probabilities instead of hidden states, computed at temperature 1."""

    name: str
    weight: float
    sampled: Tensor
    """[N] float32, nats, of the response tokens."""
    top_ids: Tensor | None = None
    """[N, K] int64."""
    top_logprobs: Tensor | None = None
    """[N, K] float32, nats."""

    def select_rows(self, rows: Tensor) -> ScoredView:
        """Select `rows` (`[M]` int64)."""
        top = [None if x is None else x[rows] for x in (self.top_ids, self.top_logprobs)]
        return replace(self, sampled=self.sampled[rows], top_ids=top[0], top_logprobs=top[1])


View = TeacherView | ScoredView


class TeacherViews(Protocol):
    """Yields the teachers of a micro-batch, such as the schedule in `opd.teachers`."""

    def __call__(self, micro: MicroBatch) -> Sequence[View]: ...


def require_full(view: View) -> TeacherView:
    """Return `view` if it has the full vocabulary. Raises `TeacherError` otherwise."""
    if isinstance(view, TeacherView):
        return view
    raise TeacherError(
        f"teacher {view.name} gave log-probabilities of a few tokens, but this loss or mixture needs the"
        f" whole vocabulary; set teachers.{view.name}.signal to hidden."
    )


def gated_views(
    micro: MicroBatch, views: Sequence[View], mixture: str, student: StudentRows, sums: MetricSums
) -> list[View]:
    """Return `views` with the weights `[N]` that their entropies give them at each token."""
    full, counted = [require_full(view) for view in views], micro.kl_weight != 0
    scale: Any = {"temperature": student.temperature, "chunk": student.chunk}
    with torch.no_grad():
        entropies = torch.stack(
            [linear_logprobs_entropy(view.hidden, view.head, micro.targets, **scale)[1] for view in full]
        )
    gates = entropy_gates(entropies, [float(view.weight) for view in full], mixture)
    for view, gate in zip(full, gates, strict=True):
        sums.add(f"gate/{view.name}", torch.where(counted, gate, 0.0).sum(), counted.sum())
    return [replace(view, weight=gate) for view, gate in zip(full, gates, strict=True)]


def teacher_logprobs(view: View, ids: Tensor, student: StudentRows) -> Tensor:
    """Return float32 log-probabilities by the teacher, in the shape of `ids`, without gradient. `ids` are the
    response tokens `[N]`, or with a head any `[N, K]`. The temperature is the student's.
    """
    if isinstance(view, ScoredView):
        return view.sampled
    with torch.no_grad():
        return linear_logprobs(
            view.hidden, view.head, ids, temperature=student.temperature, chunk=student.chunk
        )


def most_likely(hidden: Tensor, head: AnyHead, k: int, student: StudentRows) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities `[N, k]` of the most likely tokens; no gradient."""
    with torch.no_grad():
        return linear_topk(hidden, head, k, temperature=student.temperature, chunk=student.chunk)[:2]
