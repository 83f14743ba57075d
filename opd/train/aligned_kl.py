"""Divergence from a teacher with another tokenizer, whose tokens were aligned with the student's.

Two estimators share the response (`opd.models.token_alignment`):

- **Classes.** At the start of a chunk both models predict from the same bytes. The loss is the chosen
  divergence over the classes of their next tokens, if both wrote a token of one class. Nothing is sampled.
- **Chunks.** What a chunk of several tokens says beyond the class of its first is compared by what was
  written: the log-probability of the chunk given that class, under the student and under the teacher, in the
  tokens of each. The loss is `(log p - log t)^2 / 2`. Its expected gradient is that of the reverse KL. The
  teacher's probability of the bytes is that of one way to write them, so it is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from opd.config.rl import FullVocabularyKL
from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.kernels.ops import linear_class_kl, linear_logprobs
from opd.kernels.token_classes import TokenClasses
from opd.kernels.vocab_parallel import AnyHead
from opd.models.token_alignment import TokenAlignment
from opd.train.losses import k2, with_gradient
from opd.train.terms import MetricSums, StudentRows
from opd.types import MicroBatch

if TYPE_CHECKING:
    from opd.train.teacher_views import TeacherView

_MEASURED = 64
"""Exact positions of a micro-batch at which the mass outside of the shared vocabulary is measured."""


@dataclass(frozen=True, slots=True)
class AlignedRows:
    """Alignments of a micro-batch's samples, end to end: `N` tokens of the student, `N'` of the teacher."""

    classes: tuple[TokenClasses, TokenClasses]
    """Of the student's tokens and of the teacher's."""
    teacher_ids: Tensor
    """[N'] int64."""
    student_chunks: Tensor
    """[N] int64, -1 without a chunk."""
    teacher_chunks: Tensor
    """[N'] int64, -1 without a chunk."""
    exact: Tensor
    """[N] int64: the teacher's row of a token of the same class at the start of a chunk, else -1."""

    @classmethod
    def from_alignments(
        cls,
        alignments: Sequence[TokenAlignment],
        classes: tuple[TokenClasses, TokenClasses],
        device: torch.device | None = None,
    ) -> AlignedRows:
        """Join `alignments`, in order."""
        rows = chunks = 0
        parts: list[tuple[np.ndarray, ...]] = []
        for one in alignments:
            shifted = [
                np.where(values < 0, -1, values + by)
                for values, by in (
                    (one.student_chunks, chunks),
                    (one.teacher_chunks, chunks),
                    (one.exact, rows),
                )
            ]
            parts.append((one.teacher_ids.astype(np.int64), *shifted))
            chunks += int(max(one.student_chunks.max(initial=-1), one.teacher_chunks.max(initial=-1))) + 1
            rows += len(one.teacher_ids)
        joined = [
            torch.from_numpy(np.concatenate(streams)).to(device) for streams in zip(*parts, strict=True)
        ]
        ours, theirs = classes
        return cls((ours.to(device), theirs.to(device)), *joined)


def aligned_divergence(
    micro: MicroBatch,
    student: StudentRows,
    view: TeacherView,
    sums: MetricSums,
    loss: FullVocabularyKL | None,
) -> Tensor:
    """Return [N]: the loss of each of the student's tokens, 0 without a chunk. A chunk's is spread evenly
    over its tokens.

    Args:
        view: The teacher, with `aligned`.
        sums: Gets the metrics `align/...`.
        loss: The divergence at exact positions, `None` to compare all of them as chunks.
    """
    aligned = view.aligned
    assert aligned is not None
    values = student.hidden.new_zeros(len(micro.targets), dtype=torch.float32)
    in_chunk, counted = aligned.student_chunks >= 0, micro.kl_weight != 0
    is_exact = aligned.exact >= 0
    for name, rows in (("exact", is_exact), ("chunk", in_chunk & ~is_exact), ("none", ~in_chunk)):
        sums.add(f"align/{name}", (rows & counted).sum(), counted.sum())
    starts = torch.nonzero(is_exact).squeeze(1)
    if loss is None:
        starts = starts[:0]
    elif len(starts):
        exact = _class_divergence(micro, student, view, starts, loss, sums)
        values = values.index_copy(0, starts, exact.to(values.dtype))
    if not in_chunk.any():  # nothing is learnt, but the backward pass needs a way to the student
        first = linear_logprobs(
            student.hidden[:1], student.head, micro.targets[:1], temperature=student.temperature
        )
        return values + 0.0 * first
    rows = torch.nonzero(_is_open(aligned, starts)).squeeze(1)
    if len(rows):
        values = values.index_add(0, rows, _chunk_loss(micro, student, view, rows, starts).to(values.dtype))
    return values


def _class_divergence(
    micro: MicroBatch,
    student: StudentRows,
    view: TeacherView,
    starts: Tensor,
    loss: FullVocabularyKL,
    sums: MetricSums,
) -> Tensor:
    """Return [S]: the divergence over classes at the student's rows `starts` [S]."""
    aligned = view.aligned
    assert aligned is not None
    ours, theirs = student.hidden[starts], view.hidden[aligned.exact[starts]]
    head = _whole_head(student.head)
    values = linear_class_kl(
        ours,
        head,
        theirs,
        view.head,
        aligned.classes,
        kind=loss.kind,
        beta=loss.beta,
        temperature=student.temperature,
        weight=micro.kl_weight[starts] * view.weight,
        chunk=student.chunk,
    )
    sides = (("align/outside", ours, head), ("align/teacher_outside", theirs, view.head))
    for (name, hidden, one), classes in zip(sides, aligned.classes, strict=True):
        mass = _class_mass(hidden[:_MEASURED].detach(), one, classes.ids, student)
        sums.add(name, (1.0 - mass).clamp(min=0.0).sum(), len(mass))
    return values


def _is_open(aligned: AlignedRows, starts: Tensor) -> Tensor:
    """Return [N] bool: the tokens of chunks of which the divergence at `starts` [S] does not say all. It says
    all of one token that stands for one of the teacher's.
    """
    chunks, count = aligned.student_chunks, len(aligned.student_chunks) + 1
    sizes = [torch.bincount(side[side >= 0], minlength=count) for side in (chunks, aligned.teacher_chunks)]
    said = chunks[starts]
    said = said[(sizes[0][said] == 1) & (sizes[1][said] == 1)]
    is_open = torch.ones(count, dtype=torch.bool, device=chunks.device)
    is_open[said] = False
    return (chunks >= 0) & is_open[chunks]


def _chunk_loss(
    micro: MicroBatch, student: StudentRows, view: TeacherView, rows: Tensor, starts: Tensor
) -> Tensor:
    """Return [M]: the loss of the chunks that the student's `rows` [M] are all of, spread over them. Of a
    chunk that begins at one of `starts` [S] it is that of its tokens given the class of the first.
    """
    aligned = view.aligned
    assert aligned is not None
    chunks, count = aligned.student_chunks[rows], int(aligned.student_chunks.max()) + 1
    is_open = torch.zeros(count + 1, dtype=torch.bool, device=rows.device)  # the last is that of no chunk
    is_open[chunks] = True
    theirs = torch.nonzero(is_open[aligned.teacher_chunks.clamp(max=count)]).squeeze(1)
    starts = starts[is_open[aligned.student_chunks[starts]]]
    scale: dict[str, Any] = {"temperature": student.temperature, "chunk": student.chunk}
    mine = linear_logprobs(student.hidden[rows], student.head, micro.targets[rows], **scale)
    ours = mine.new_zeros(count).index_add(0, chunks, mine)
    with torch.no_grad():
        ids = aligned.teacher_ids[theirs]
        other = linear_logprobs(view.hidden[theirs], view.head, ids, **scale).to(mine.dtype)
        taught = mine.new_zeros(count).index_add(0, aligned.teacher_chunks[theirs], other)
    if len(starts):
        begun, at = aligned.student_chunks[starts], aligned.exact[starts]
        which = aligned.classes[1].classes_of(aligned.teacher_ids[at])
        first = _class_logprobs(
            student.hidden[starts], _whole_head(student.head), aligned.classes[0], which, scale
        )
        ours = ours.index_add(0, begun, -first)
        with torch.no_grad():
            first = _class_logprobs(view.hidden[at], view.head, aligned.classes[1], which, scale)
            taught = taught.index_add(0, begun, -first.to(mine.dtype))
    tokens = mine.new_zeros(count).index_add(0, chunks, torch.ones_like(mine))
    loss = k2(ours, taught)
    if micro.importance is not None:  # that of a chunk is the product of its tokens'
        weights = micro.importance[rows].clamp(min=torch.finfo(torch.float32).tiny).log()
        loss = loss * mine.new_zeros(count).index_add(0, chunks, weights.to(mine.dtype)).exp()
    per_chunk = with_gradient(ours - taught, loss)
    return per_chunk[chunks] / tokens[chunks]


def _class_logprobs(
    hidden: Tensor, head: Head, vocabulary: TokenClasses, classes: Tensor, scale: dict[str, Any]
) -> Tensor:
    """Return [M]: the log-probabilities of `classes` [M] at `hidden` [M, D]."""
    ids, is_member = vocabulary.members(classes)
    return linear_logprobs(hidden, head, ids, **scale).masked_fill(~is_member, -torch.inf).logsumexp(1)


def _whole_head(head: AnyHead) -> Head:
    """Return `head`, which must have the whole vocabulary."""
    if not isinstance(head, Head):
        raise TeacherError(
            "a teacher with a tokenizer of its own needs the student's whole head on each rank; set"
            " train.backend to torch or deepspeed."
        )
    return head


@torch.no_grad()
def _class_mass(hidden: Tensor, head: Head, ids: Tensor, student: StudentRows) -> Tensor:
    """Return [M]: the probability of all tokens `ids` [K] together at `hidden` [M, D]."""
    bias = None if head.bias is None else head.bias[ids]
    part = replace(head, weight=head.weight[ids], bias=bias, vocab_size=None, total=None)
    logprobs = [
        linear_logprobs(
            hidden, one, first.expand(len(hidden)), temperature=student.temperature, chunk=student.chunk
        )
        for one, first in ((head, ids[:1]), (part, torch.zeros_like(ids[:1])))
    ]
    return (logprobs[0] - logprobs[1]).exp()
