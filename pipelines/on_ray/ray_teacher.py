"""Teachers that are actors, for the schedule of a merge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.pipelines.on_ray.actors import ActorLostError, Remote
from opd.pipelines.on_ray.cluster import one_line
from opd.pipelines.on_ray.teacher import Asked, Assignment
from opd.types import HiddenStates, Sample


class RayTeacher:
    """Implements `opd.protocols.Teacher` over a `TeacherActor`.

    The hidden states are computed into the object store and read there in place: on one node nothing copies
    them. `begin` sends the work off, so that all teachers compute at once.

    Args:
        name: How recipes and metrics call it.
        remote: The actor that has it, perhaps with others.
        assignment: All teachers of that actor.
        device: Where hidden states and head are handed out.
        note: One line for the person who watches.
    """

    def __init__(
        self,
        name: str,
        remote: Remote,
        assignment: Assignment,
        device: torch.device,
        note: Callable[[str], None],
    ) -> None:
        self.name = name
        self._remote, self._assignment, self._device, self._note = remote, assignment, device, note
        self._begun: tuple[tuple[str, ...], Any] | None = None
        self._there = False
        """Whether the actor has loaded its teachers since it was last started."""

    @cached_property
    def _digest(self) -> str:
        return str(self._ask("digest", None))

    @property
    def digest(self) -> str:
        """Digest of its weights."""
        return self._digest

    def begin(self, samples: Sequence[Sample]) -> None:
        """Begin to score `samples`; `score` of the same ones waits for the result."""
        key = tuple(sample.uid for sample in samples)
        if samples and (self._begun is None or self._begun[0] != key):
            self._begun = (key, self._send("score", _asked(samples)))

    def score(self, samples: Sequence[Sample]) -> HiddenStates:
        """Last hidden states `[N, D]` at the rows `C-1 ... C+R-2` of every sample, in order; read-only.

        An actor that dies or hangs is started anew and asked again. Raises `TeacherError` if it does not come
        back, and whatever the teacher itself raises.
        """
        begun, self._begun = self._begun, None
        known = begun is not None and begun[0] == tuple(sample.uid for sample in samples)
        packed = self._ask("score", _asked(samples), begun[1] if known and begun else None)
        return HiddenStates(packed.tensor().to(self._device))

    def load_head(self) -> Head:
        """The head; its weights are read where the object store has them."""
        return self._ask("head", None).head(self._device)

    def _send(self, verb: str, asked: Sequence[Asked] | None) -> Any:
        more = () if asked is None else (asked,)
        return self._remote.send(verb, self._assignment, self.name, *more)

    def _ask(self, verb: str, asked: Sequence[Asked] | None, reference: Any = None) -> Any:
        remote = self._remote
        while True:
            # What others were begun on the same actor comes first, and the first time it loads its models.
            seconds = remote.limits.step_timeout * len(self._assignment.names)
            seconds += 0.0 if self._there else remote.limits.start_timeout
            try:
                if reference is None:
                    reference = self._send(verb, asked)
                answer = remote.get(reference, seconds)
                self._there = True
                return answer
            except ActorLostError as error:
                self._there = False
                self._note(f"teacher {self.name} is asked again, for {one_line(error)}")
            reference = None
            try:
                remote.await_return()
            except ActorLostError as error:
                raise TeacherError(
                    f"teacher {self.name} is lost: {one_line(error)}; see logs/{remote.name}.log and restart"
                    " with --resume."
                ) from None


def ray_teachers(
    remotes: Sequence[Remote],
    names: Sequence[str],
    stage: str,
    vocabulary: int,
    device: torch.device,
    note: Callable[[str], None],
) -> Mapping[str, RayTeacher]:
    """`names` dealt out to `remotes` in turn; in the order of `names`."""
    shares = [tuple(names[start :: len(remotes)]) for start in range(len(remotes))]
    return {
        name: RayTeacher(
            name,
            remotes[place % len(remotes)],
            Assignment(stage, shares[place % len(remotes)], vocabulary),
            device,
            note,
        )
        for place, name in enumerate(names)
    }


def _asked(samples: Sequence[Sample]) -> list[Asked]:
    return [Asked(sample.uid, sample.prompt_ids, sample.response_ids) for sample in samples]
