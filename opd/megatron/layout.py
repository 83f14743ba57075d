"""Who shares what among the ranks of a student: layers, sequences, samples, or stages of layers.

In Megatron-Core's own order: neighbours share layers, then sequences, then samples; stages lie furthest
apart. Of what Megatron-Core knows, ranks that share sequences are ranks that share samples: it sums gradients
over both alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_AXES = ("stages", "data", "context", "tensor")


@dataclass(frozen=True, slots=True)
class RankLayout:
    """`size` ranks, of which `tensor` share each layer and `context` each sequence, in so many `stages`."""

    rank: int
    size: int
    tensor: int = 1
    context: int = 1
    stages: int = 1

    @property
    def copies(self) -> int:
        """Ranks that hold the same rows of the same layers."""
        return self.size // (self.tensor * self.stages)

    @property
    def copy(self) -> int:
        """Which of those this one is."""
        return self.rank // self.tensor % self.copies

    @property
    def stage(self) -> int:
        """Of this rank, from 0: the one with the embedding."""
        return self.rank // (self.tensor * self.copies)

    def groups(self, *axes: str) -> list[list[int]]:
        """Ranks that differ in these of `stages`, `data`, `context` and `tensor` alone."""
        shape = (self.stages, self.copies // self.context, self.context, self.tensor)
        others = [place for place, name in enumerate(_AXES) if name not in axes]
        along = [place for place, name in enumerate(_AXES) if name in axes]
        grid = np.arange(self.size).reshape(shape).transpose(*others, *along)
        return grid.reshape(-1, int(np.prod([shape[place] for place in along]))).tolist()
