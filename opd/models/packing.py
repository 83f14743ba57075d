"""Packed sequences as a few right-padded buckets: the gather index of packed attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SHORT = 32
"""Sequences up to this length share a bucket: for them another kernel call costs more than padding."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length, padded on the right to the longest of them."""

    shape: tuple[int, int]
    """(B, L)."""
    source: Tensor
    """[B * L] int64: the packed row in each place; padding repeats the first row of its sequence, so that
    it is finite and inside the same sequence."""


def buckets_of(lengths: list[int], device: torch.device) -> tuple[list[Bucket], Tensor]:
    """Group sequences (positive `lengths`, in packing order) so that padding at most doubles long ones.

    Returns the buckets and `places` [T] int64: where each packed row lies in all buckets laid end to end.
    """
    size = np.asarray(lengths, dtype=np.int64)
    start = np.cumsum(size) - size
    remaining = np.argsort(-size, kind="stable")
    buckets: list[Bucket] = []
    places = np.empty(int(size.sum()), dtype=np.int64)
    offset = 0
    while remaining.size:
        longest = int(size[remaining[0]])
        inside = size[remaining] * 2 > longest if longest > SHORT else np.ones(remaining.size, dtype=bool)
        members, remaining = np.sort(remaining[inside]), remaining[~inside]
        column = np.arange(longest)
        real = column < size[members, None]
        source = (start[members, None] + np.where(real, column, 0)).ravel()
        filled = np.flatnonzero(real.ravel())
        places[source[filled]] = offset + filled
        offset += source.size
        buckets.append(Bucket((len(members), longest), torch.from_numpy(source).to(device)))
    return buckets, torch.from_numpy(places).to(device)


def pad(packed: Tensor, bucket: Bucket) -> Tensor:
    """`packed` [H, T, d] -> [B, H, L, d], gathered along whichever memory layout is contiguous."""
    rows = packed.transpose(0, 1)
    if rows.is_contiguous():
        return rows.index_select(0, bucket.source).unflatten(0, bucket.shape).transpose(1, 2)
    return packed.index_select(1, bucket.source).unflatten(1, bucket.shape).transpose(0, 1)
