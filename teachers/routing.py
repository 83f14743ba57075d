"""Which teacher a sample is scored by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from opd.config import Recipe


@dataclass(frozen=True, slots=True)
class Route:
    """One teacher with weight 1, or several with weights that sum to 1."""

    name: str
    """What `Sample.teacher` holds: the teacher's name, or the names joined by `+`."""
    teachers: tuple[str, ...]
    weights: tuple[float, ...]


class Router:
    """Domain -> route.

    With the mixture `one_hot` a domain of several teachers sends each *group* to one of them, drawn with the
    teachers' weights by a hash of the group's uid: the draw is the same on every rank and after a resume.
    """

    def __init__(self, weights: Mapping[str, Mapping[str, float]], mixture: str) -> None:
        self._weights = weights
        self._one_hot = mixture == "one_hot"

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Router:
        """The routes of every domain of `recipe`."""
        return cls({d: recipe.teacher_weights(d) for d in recipe.domains}, recipe.distill.mixture)

    def route(self, domain: str, group_uid: str) -> Route:
        """The route of one group."""
        weights = self._weights[domain]
        if self._one_hot or len(weights) == 1:
            name = _draw(weights, group_uid)
            return Route(name, (name,), (1.0,))
        return Route("+".join(weights), tuple(weights), tuple(weights.values()))

    @property
    def teachers(self) -> list[str]:
        """Every teacher some domain uses, in the recipe's order."""
        return list(dict.fromkeys(name for weights in self._weights.values() for name in weights))


def _draw(weights: Mapping[str, float], key: str) -> str:
    point = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
    total = 0.0
    for name, weight in weights.items():
        total += weight
        if point < total:
            return name
    return name
