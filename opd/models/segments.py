"""Attention of some tokens of packed sequences on keys of all of them.

Shapes: `t` queries, `T` packed tokens, `H` heads, `Hkv` key-value heads, `d` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opd.models.block_attention import Scores, attend, attend_backward


@dataclass(frozen=True, slots=True)
class Segment:
    """Queries of one rank that lie in one sequence, and the keys they may see."""

    queries: slice
    """Of the rank's own tokens."""
    keys: slice
    """Of all packed tokens: from the start of the sequence to the last query."""

    def seen(self, scores: Scores) -> slice:
        """The keys that a window leaves."""
        if scores.window is None:
            return self.keys
        first = self.keys.stop - (self.queries.stop - self.queries.start)
        return slice(max(self.keys.start, first - scores.window + 1), self.keys.stop)


def cut_segments(segments: Sequence[Segment], span: slice) -> tuple[Segment, ...]:
    """The `segments` of the queries in `span`, counted from its start."""
    cut = []
    for segment in segments:
        first, last = max(segment.queries.start, span.start), min(segment.queries.stop, span.stop)
        if first < last:
            keys = slice(segment.keys.start, segment.keys.stop - (segment.queries.stop - last))
            cut.append(Segment(slice(first - span.start, last - span.start), keys))
    return tuple(cut)


def attend_segments(
    query: Tensor, keys: Tensor, values: Tensor, segments: Sequence[Segment], scores: Scores
) -> tuple[Tensor, Tensor]:
    """`query` [H, t, d] on `keys` [Hkv, T, d] and `values` [Hkv, T, dv], without a gradient.

    Returns the output [H, t, dv] and the rows' log-sum-exp [H, t] (float32 at least).
    """
    output = values.new_empty(*query.shape[:2], values.shape[-1])
    logsumexp = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
    for segment in segments:
        own, seen = segment.queries, segment.seen(scores)
        output[:, own], logsumexp[:, own] = attend(query[:, own], keys[:, seen], values[:, seen], scores)
    return output, logsumexp


def attend_segments_backward(
    inputs: tuple[Tensor, Tensor, Tensor],
    ahead: tuple[Tensor, Tensor, Tensor],
    gradients: Sequence[Tensor],
    segments: Sequence[Segment],
    scores: Scores,
) -> Tensor:
    """Gradient of `attend_segments` in the query of `inputs` (query, keys, values); those in keys and values
    are added to `gradients`, of their shapes.

    `ahead` is the output, the log-sum-exp and the gradient that arrives.
    """
    query, keys, values = inputs
    of_query = torch.empty_like(query)
    for segment in segments:
        own, seen = segment.queries, segment.seen(scores)
        added = tuple(gradient[:, seen] for gradient in gradients)
        part = (query[:, own], keys[:, seen], values[:, seen])
        behind = (ahead[0][:, own], ahead[1][:, own], ahead[2][:, own])
        of_query[:, own] = attend_backward(*part, behind, added, scores)
    return of_query
