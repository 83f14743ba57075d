"""Teachers as a micro-batch's loss sees them: hidden states and a head, or a few log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.kernels.vocab_parallel import HeadShard
from opd.train.terms import StudentRows, linear_logprobs, linear_topk
from opd.types import MicroBatch


@dataclass(frozen=True, slots=True)
class TeacherView:
    """One teacher as a micro-batch sees it."""

    name: str
    weight: float
    """Its share in the mixture; 1 where a sample has one teacher."""
    hidden: Tensor
    """[N, Dt]: last hidden states at the micro-batch's rows."""
    head: Head

    def take(self, rows: Tensor) -> TeacherView:
        """The same at `rows` ([M] int64) alone."""
        return replace(self, hidden=self.hidden[rows.to(self.hidden.device)])


@dataclass(frozen=True, slots=True)
class ScoredView:
    """One teacher that gave log-probabilities in place of hidden states; computed at the temperature 1."""

    name: str
    weight: float
    sampled: Tensor
    """[N] float32, nats: of the response tokens."""
    top_ids: Tensor | None = None
    """[N, K] int64."""
    top_logprobs: Tensor | None = None
    """[N, K] float32, nats."""

    def take(self, rows: Tensor) -> ScoredView:
        """The same at `rows` ([M] int64) alone."""
        top = [None if x is None else x[rows] for x in (self.top_ids, self.top_logprobs)]
        return replace(self, sampled=self.sampled[rows], top_ids=top[0], top_logprobs=top[1])


View = TeacherView | ScoredView


class TeacherViews(Protocol):
    """Hands out the teachers of a micro-batch; the schedule in `opd.teachers` is one."""

    def __call__(self, micro: MicroBatch) -> Sequence[View]: ...


def whole(view: View) -> TeacherView:
    """`view`, if it gives the whole vocabulary."""
    if isinstance(view, TeacherView):
        return view
    raise TeacherError(
        f"teacher {view.name} gave log-probabilities of a few tokens, but this loss or mixture needs the"
        f" whole vocabulary; set teachers.{view.name}.signal to hidden."
    )


def teacher_logprobs(view: View, ids: Tensor, student: StudentRows) -> Tensor:
    """Float32, of the shape of `ids`: the teacher's log-probabilities of the response tokens `ids [N]`, or
    with a head of any `[N, K]`, at the student's temperature; no gradient.
    """
    if isinstance(view, ScoredView):
        return view.sampled
    with torch.no_grad():
        return linear_logprobs(
            view.hidden, view.head, ids, temperature=student.temperature, chunk=student.chunk
        )


def most_likely(
    hidden: Tensor, head: Head | HeadShard, k: int, student: StudentRows
) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities `[N, k]` of the most likely tokens; no gradient."""
    with torch.no_grad():
        return linear_topk(hidden, head, k, temperature=student.temperature, chunk=student.chunk)[:2]
