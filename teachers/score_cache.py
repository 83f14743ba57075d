"""What a schedule asks of a cache of hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from opd.protocols import Teacher
from opd.teachers.row_pieces import RowPieces
from opd.types import Sample


class ScoreCache(Protocol):
    """Hidden states that outlive a mini-batch; `opd.teachers.cached_scores` has one."""

    def find(self, teacher: Teacher, sample: Sample) -> Tensor | None:
        """The rows [R, D] of `sample` under `teacher`, valid until `release`; `None` if unknown."""
        ...

    def store(self, teacher: Teacher, samples: Sequence[Sample], rows: Sequence[Tensor]) -> list[Tensor]:
        """Keep the rows [R, D] of each sample; returns what to use in their place until `release`."""
        ...

    def store_pieces(self, teacher: Teacher, pieces: RowPieces) -> dict[str, Tensor]:
        """`store` for rows that come in pieces, each valid until the next; by uid."""
        ...

    def drop(self, samples: Sequence[Sample]) -> None:
        """What was found and stored of `samples` is no longer used."""
        ...

    def release(self) -> None:
        """What was found and stored is no longer used."""
        ...
