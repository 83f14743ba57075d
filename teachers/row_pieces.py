"""Hidden states of packed samples handed out sample by sample, long ones in pieces, without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from opd.types import Sample

RowPieces = Iterator[tuple[Sample, Tensor]]
"""Rows [r, D] of the samples in order, those of a long one in pieces; each is valid until the next."""


@runtime_checkable
class Piecewise(Protocol):
    """What a teacher offers beyond `Teacher` when it can hand out rows without gathering all of them."""

    sequence_chunk: int | None
    """Packed tokens a piece of a long sequence has; `None` if nothing is cut."""

    def score_pieces(self, samples: Sequence[Sample]) -> RowPieces:
        """The rows of `score`, piece by piece."""
        ...


def cuts(teacher: object, samples: Sequence[Sample]) -> bool:
    """Whether `teacher` reads one of `samples` in pieces."""
    chunk = teacher.sequence_chunk if isinstance(teacher, Piecewise) else None
    return chunk is not None and any(len(s.prompt_ids) + len(s.response_ids) > chunk for s in samples)


def row_pieces(samples: Sequence[Sample], hidden: Tensor, chunk: int | None) -> RowPieces:
    """Of `hidden` [T, D], of `samples` packed end to end, the rows that predict response tokens."""
    for sample, first, last in response_rows(samples):
        for begin in range(first, last, chunk or max(1, last - first)):
            yield sample, hidden[begin : last if chunk is None else min(begin + chunk, last)]


def response_rows(samples: Sequence[Sample]) -> Iterator[tuple[Sample, int, int]]:
    """Each of `samples`, packed end to end, with the range of rows that predict its response tokens."""
    start = 0
    for sample in samples:
        first = start + len(sample.prompt_ids) - 1
        last = first + len(sample.response_ids)
        yield sample, first, last
        start = last + 1
