"""Who computes for a stage beside its own process: rollout engines and teachers elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from opd.protocols import RolloutEngine, Teacher
from opd.rollout.engine_pool import RetryPolicy
from opd.rollout.fault_tolerant import DEFAULT_POLICY


@dataclass(frozen=True, slots=True)
class Writers:
    """The engines that write for one student, and what is done when one fails."""

    engines: Sequence[RolloutEngine]
    policy: RetryPolicy = DEFAULT_POLICY
    revive: Callable[[int], RolloutEngine] | None = None
    """See `FaultTolerantRollout`."""


class Helpers(Protocol):
    """What `launch` has put at a stage's disposal."""

    def writers(self, model: Path) -> Writers:
        """Engines that hold the Hugging Face folder `model` as version 0, or nothing yet as version -1."""
        ...

    def teachers(self, names: Sequence[str], vocabulary: int) -> Mapping[str, Teacher] | None:
        """The recipe's teachers of these names, cut to `vocabulary` tokens; `None`: they run in this
        process.
        """
        ...
