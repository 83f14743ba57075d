"""The ranks of a student and the layers, sequences, samples or stages that they share.

The order is Megatron-Core's: neighbours share layers, then sequences, then samples, and stages lie furthest
apart. Megatron-Core counts ranks that share sequences among those that share samples, because it sums
gradients over both alike. Neighbours among all these share the experts of a mixture.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_AXES = ("stages", "data", "context", "tensor")


@dataclass(frozen=True, slots=True)
class RankLayout:
    """`size` ranks in so many `stages`. `tensor` of them share a layer and `context` share a sequence.
    `experts` of those with the same rows share experts.
    """

    rank: int
    size: int
    tensor: int = 1
    context: int = 1
    stages: int = 1
    experts: int = 1

    @property
    def copy_count(self) -> int:
        """Number of ranks that hold the same rows of the same layers."""
        return self.size // (self.tensor * self.stages)

    @property
    def copy_index(self) -> int:
        """Index of this rank among those copies."""
        return self.rank // self.tensor % self.copy_count

    @property
    def sharing(self) -> tuple[int, int]:
        """Index of this rank among those that share its experts, and their number."""
        return self.copy_index % self.experts, self.experts

    def expert_groups(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return groups of ranks that share the experts of layers, and of those that have the same ones."""
        shape = (self.stages, self.copy_count // self.experts, self.experts, self.tensor)
        grid = np.arange(self.size).reshape(shape)
        sharing, same = grid.transpose(0, 1, 3, 2), grid.transpose(0, 2, 3, 1)
        return sharing.reshape(-1, shape[2]).tolist(), same.reshape(-1, shape[1]).tolist()

    @property
    def stage_index(self) -> int:
        """Stage of this rank. 0 has the embedding."""
        return self.rank // (self.tensor * self.copy_count)

    def rank_groups(self, *axes: str) -> list[list[int]]:
        """Return groups of ranks that differ in the given `stages`, `data`, `context` or `tensor` alone."""
        shape = (self.stages, self.copy_count // self.context, self.context, self.tensor)
        others = [axis for axis, name in enumerate(_AXES) if name not in axes]
        along = [axis for axis, name in enumerate(_AXES) if name in axes]
        grid = np.arange(self.size).reshape(shape).transpose(*others, *along)
        return grid.reshape(-1, int(np.prod([shape[axis] for axis in along]))).tolist()
