"""How much of a merge's loss each teacher carries."""

from __future__ import annotations

from collections.abc import Sequence

from opd.config import Recipe
from opd.types import Sample


def route_shares(recipe: Recipe, samples: Sequence[Sample]) -> dict[str, float] | None:
    """Each route's share of the loss: its domains' weights, shared out by the `samples` they sent it.

    `None` where the recipe weighs every token the same.
    """
    if recipe.distill.normalise != "teacher":
        return None
    counts: dict[str, int] = {}
    for sample in samples:
        counts[sample.domain] = counts.get(sample.domain, 0) + 1
    shares: dict[str, float] = {}
    for sample in samples:
        share = recipe.domains[sample.domain].weight / counts[sample.domain]
        shares[sample.teacher or ""] = shares.get(sample.teacher or "", 0.0) + share
    return shares
