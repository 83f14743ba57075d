"""Divergence from a teacher with another tokenizer, whose tokens were aligned with the student's.

Two estimators share the response (`opd.models.token_alignment`):

- **Shared vocabulary.** At an exact position both models predict the same token after the same bytes. The
  loss is the chosen divergence over all tokens that both vocabularies have, of the two distributions given
  that the token is one of these. It says nothing of the mass on other tokens, which `align/outside` and
  `align/teacher_outside` measure.
- **Chunks.** Elsewhere the chunk's log-probability under the student is compared with that of the same bytes
  under the teacher, in its own tokens. The loss is `(log p - log t)^2 / 2` for a chunk. Its expected gradient
  is that of the reverse KL between chunks. The teacher's probability of the bytes is that of one way to write
  them, so it is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from opd.config.rl import FullVocabularyKL
from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.kernels.ops import linear_kl, linear_logprobs
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

    shared: Tensor
    """[2, S] int64: ids of the student and of the teacher."""
    teacher_ids: Tensor
    """[N'] int64."""
    student_chunks: Tensor
    """[N] int64, -1 without a chunk."""
    teacher_chunks: Tensor
    """[N'] int64, -1 without a chunk."""
    exact: Tensor
    """[N] int64: the teacher's row of the same token, else -1."""

    @classmethod
    def from_alignments(
        cls, alignments: Sequence[TokenAlignment], shared: np.ndarray, device: torch.device | None = None
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
        return cls(torch.from_numpy(shared).to(device), *joined)


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
    left = in_chunk
    rows = torch.nonzero(is_exact).squeeze(1)
    if loss is not None and len(rows):
        left = in_chunk & ~is_exact
        ours, theirs = student.hidden[rows], view.hidden[aligned.exact[rows]]
        heads = [
            _select_ids(head, ids)
            for head, ids in zip((student.head, view.head), aligned.shared, strict=True)
        ]
        exact = linear_kl(
            ours,
            heads[0],
            theirs,
            heads[1],
            kind=loss.kind,
            beta=loss.beta,
            temperature=student.temperature,
            weight=micro.kl_weight[rows] * view.weight,
            chunk=student.chunk,
        )
        values = values.index_copy(0, rows, exact.to(values.dtype))
        for name, hidden, whole, head, first in (
            ("align/outside", ours, student.head, heads[0], aligned.shared[0, :1]),
            ("align/teacher_outside", theirs, view.head, heads[1], aligned.shared[1, :1]),
        ):
            mass = _shared_mass(hidden[:_MEASURED].detach(), whole, head, first, student)
            sums.add(name, (1.0 - mass).clamp(min=0.0).sum(), len(mass))
    rows = torch.nonzero(left).squeeze(1)
    if not in_chunk.any():  # nothing is learnt, but the backward pass needs a way to the student
        first = linear_logprobs(
            student.hidden[:1], student.head, micro.targets[:1], temperature=student.temperature
        )
        values = values + 0.0 * first
    elif len(rows):
        values = values.index_copy(0, rows, _chunk_loss(micro, student, view, rows).to(values.dtype))
    return values


def _chunk_loss(micro: MicroBatch, student: StudentRows, view: TeacherView, rows: Tensor) -> Tensor:
    """Return [M]: the loss of the chunks that the student's `rows` `[M]` are all of, spread over them."""
    aligned = view.aligned
    assert aligned is not None
    chunks = aligned.student_chunks[rows]
    count = int(aligned.student_chunks.max()) + 1
    is_left = torch.zeros(count + 1, dtype=torch.bool, device=rows.device)  # the last is that of no chunk
    is_left[chunks] = True
    theirs = torch.nonzero(is_left[aligned.teacher_chunks.clamp(max=count)]).squeeze(1)
    mine = linear_logprobs(
        student.hidden[rows],
        student.head,
        micro.targets[rows],
        temperature=student.temperature,
        chunk=student.chunk,
    )
    with torch.no_grad():
        other = linear_logprobs(
            view.hidden[theirs],
            view.head,
            aligned.teacher_ids[theirs],
            temperature=student.temperature,
            chunk=student.chunk,
        )
    ours = mine.new_zeros(count).index_add(0, chunks, mine)
    taught = mine.new_zeros(count).index_add(0, aligned.teacher_chunks[theirs], other.to(mine.dtype))
    tokens = mine.new_zeros(count).index_add(0, chunks, torch.ones_like(mine))
    loss = k2(ours, taught)
    if micro.importance is not None:  # that of a chunk is the product of its tokens'
        weights = micro.importance[rows].clamp(min=torch.finfo(torch.float32).tiny).log()
        loss = loss * mine.new_zeros(count).index_add(0, chunks, weights.to(mine.dtype)).exp()
    per_chunk = with_gradient(ours - taught, loss)
    return per_chunk[chunks] / tokens[chunks]


def _select_ids(head: AnyHead, ids: Tensor) -> Head:
    """Return `head` over the tokens `ids` `[S]` alone."""
    if not isinstance(head, Head):
        raise TeacherError(
            "a teacher with a tokenizer of its own needs the student's whole head on each rank; set"
            " train.backend to torch or deepspeed."
        )
    bias = None if head.bias is None else head.bias[ids]
    return replace(head, weight=head.weight[ids], bias=bias, vocab_size=None, total=None)


@torch.no_grad()
def _shared_mass(hidden: Tensor, whole: AnyHead, shared: Head, first: Tensor, student: StudentRows) -> Tensor:
    """Return [M]: the probability of all shared tokens at `hidden` `[M, D]`. `first` [1] is the id of one."""
    logprobs = [
        linear_logprobs(
            hidden, head, ids.expand(len(hidden)), temperature=student.temperature, chunk=student.chunk
        )
        for head, ids in ((whole, first), (shared, torch.zeros_like(first)))
    ]
    return (logprobs[0] - logprobs[1]).exp()
