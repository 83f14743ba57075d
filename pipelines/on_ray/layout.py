"""Which actor gets which bundle of a placement group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opd.config import ActorResources, RayLaunch

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """The bundles to reserve, and each actor's place in them."""

    bundles: list[dict[str, float]]
    strategy: str
    """How Ray spreads the bundles over nodes."""
    places: dict[str, int]
    """Actor name -> index of its bundle."""

    @classmethod
    def of(cls, launch: RayLaunch, ranks: int = 1) -> Layout:
        """One bundle for each trainer with its share of the others, or one for each actor, on other nodes
        where there are some.
        """
        names = actor_names(launch, ranks)
        roles = {name: resources_of(getattr(launch, role_of(name))) for name in names}
        if launch.layout == "colocated":
            places = {name: number_of(name) % ranks for name in names}
            together: list[Counter[str]] = [Counter() for _ in range(ranks)]
            for name, needs in roles.items():
                together[places[name]].update(needs)
            return cls([dict(sums) for sums in together], "PACK" if ranks > 1 else "STRICT_PACK", places)
        return cls(list(roles.values()), "SPREAD", {name: place for place, name in enumerate(roles)})

    @property
    def total(self) -> dict[str, float]:
        """Resources of all bundles together."""
        sums: Counter[str] = Counter()
        for bundle in self.bundles:
            sums.update(bundle)
        return dict(sums)


def actor_names(launch: RayLaunch, ranks: int = 1) -> list[str]:
    """`trainer`, or `trainer-0` ... of several ranks, `engine-0` ..., `teacher-0` ..."""
    trainers = ["trainer"] if ranks == 1 else [f"trainer-{rank}" for rank in range(ranks)]
    engines = [f"engine-{index}" for index in range(launch.engines)]
    return [*trainers, *engines, *(f"teacher-{index}" for index in range(launch.teachers))]


def role_of(name: str) -> str:
    """`engine` for `engine-3`."""
    return name.partition("-")[0]


def number_of(name: str) -> int:
    """3 for `engine-3`; 0 for the only trainer."""
    return int(name.partition("-")[2] or 0)


def resources_of(wanted: ActorResources) -> dict[str, float]:
    """A bundle in Ray's own words; what is 0 is left out."""
    needs = {"CPU": wanted.cpus, "GPU": wanted.gpus, "memory": wanted.memory_mb * MIB, **wanted.custom}
    found = {name: float(value) for name, value in needs.items() if value}
    return found or {"CPU": 0.001}  # Ray refuses an empty bundle


def options_of(wanted: ActorResources) -> dict[str, Any]:
    """The same as options of an actor."""
    options: dict[str, Any] = {"num_cpus": wanted.cpus, "num_gpus": wanted.gpus}
    if wanted.memory_mb:
        options["memory"] = wanted.memory_mb * MIB
    return options | ({"resources": dict(wanted.custom)} if wanted.custom else {})


def words(resources: Mapping[str, float]) -> str:
    """`CPU 5, GPU 1`, without Ray's bookkeeping."""
    shown = {n: v for n, v in sorted(resources.items()) if ":" not in n and n != "object_store_memory"}
    sizes = {n: f"{v / MIB:.0f} MiB" if n == "memory" else f"{v:g}" for n, v in shown.items()}
    return ", ".join(f"{name} {size}" for name, size in sizes.items()) or "nothing"
