"""Run teachers as actors: the process of one, and its view in a merge's schedule."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.pipelines.launch.ray.actors import ActorLostError, ActorSpec, PackedHead, PackedTensor, RemoteActor
from opd.pipelines.launch.ray.cluster import one_line
from opd.protocols import Teacher
from opd.types import HiddenStates, Sample

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assignment:
    """The teachers of one actor in one stage."""

    stage: str
    names: tuple[str, ...]
    vocabulary: int


@dataclass(frozen=True, slots=True)
class TokensToScore:
    """The tokens of a sample that a teacher reads."""

    uid: str
    prompt_ids: np.ndarray
    """[C] int32."""
    response_ids: np.ndarray
    """[R] int32."""


class TeacherActor:
    """The actor behind `RayTeacher`. One method runs at a time. Every call has the assignment, so a restarted
    actor needs nothing else.
    """

    def __init__(self, spec: ActorSpec) -> None:
        self._recipe = spec.start_process("opd.pipelines.stages.teachers")
        self._spec = spec
        self._assignment: Assignment | None = None
        self._teachers: Mapping[str, Teacher] = {}
        self._stack = ExitStack()

    def ping(self) -> int:
        """Return the process id."""
        return os.getpid()

    def digest(self, assignment: Assignment, name: str) -> str:
        """Return the digest of a teacher's weights."""
        return self._load_teacher(assignment, name).digest

    def score(self, assignment: Assignment, name: str, tokens: Sequence[TokensToScore]) -> PackedTensor:
        """Return last hidden states [N, D] of the response tokens, in order. They stay in the store."""
        samples = [
            Sample(a.uid, a.uid, "", a.prompt_ids, teacher=name, response_ids=a.response_ids) for a in tokens
        ]
        targets = self._load_teacher(assignment, name).score(samples)
        if not isinstance(targets, HiddenStates):
            raise TeacherError(
                f"teacher {name} gives {type(targets).__name__}, and only hidden states travel between"
                " actors; set launch.teachers to 0."
            )
        return PackedTensor.from_tensor(targets.rows)

    def head(self, assignment: Assignment, name: str) -> PackedHead:
        """Return a teacher's head."""
        return PackedHead.from_head(self._load_teacher(assignment, name).load_head())

    def _load_teacher(self, assignment: Assignment, name: str) -> Teacher:
        if assignment == self._assignment:
            return self._teachers[name]
        from opd.pipelines.records.run_folder import RunFolder
        from opd.pipelines.stages.context import StageContext
        from opd.pipelines.stages.teachers import open_teachers
        from opd.rollout.preemption import Preemption

        self._stack.close()
        self._assignment, self._teachers = None, {}
        # Only the trainer has metrics and checkpoints.
        nobody: Any = None
        context = StageContext(
            self._recipe,
            RunFolder.attach(self._spec.folder),
            assignment.stage,
            metrics=nobody,
            checkpoints=nobody,
            progress=lambda *words: None,
            preemption=Preemption(),
        )
        names = list(assignment.names)
        self._teachers = open_teachers(context, names, assignment.vocabulary, None, self._stack)
        self._assignment = assignment
        return self._teachers[name]


class RayTeacher:
    """Implements `opd.protocols.Teacher` over a `TeacherActor`.

    The hidden states are computed into the object store and read there in place, so one node copies nothing.
    `begin_scoring` sends the work, so that all teachers compute concurrently.

    Args:
        name: Its name in recipes and metrics.
        remote: Its actor, which may have others.
        assignment: All teachers of that actor.
        device: The device of the returned hidden states and head.
    """

    def __init__(self, name: str, remote: RemoteActor, assignment: Assignment, device: torch.device) -> None:
        self.name = name
        self._remote, self._assignment, self._device = remote, assignment, device
        self._begun: tuple[tuple[str, ...], Any] | None = None
        self._there = False
        """The actor has loaded its teachers since its last start."""

    @cached_property
    def _digest(self) -> str:
        return str(self._call_actor("digest", None))

    @property
    def digest(self) -> str:
        """Digest of its weights."""
        return self._digest

    def begin_scoring(self, samples: Sequence[Sample]) -> None:
        """Begin to score `samples`. `score` of the same samples waits for the result."""
        key = tuple(sample.uid for sample in samples)
        if samples and (self._begun is None or self._begun[0] != key):
            self._begun = (key, self._send_call("score", _tokens_to_score(samples)))

    def score(self, samples: Sequence[Sample]) -> HiddenStates:
        """Return last hidden states `[N, D]` at the rows `C-1 ... C+R-2` of every sample, in order,
        read-only.

        An actor that dies or hangs is restarted and called again. Raises `TeacherError` if it does not come
        back, and the teacher's own errors.
        """
        begun, self._begun = self._begun, None
        is_begun = begun is not None and begun[0] == tuple(sample.uid for sample in samples)
        packed = self._call_actor(
            "score", _tokens_to_score(samples), begun[1] if is_begun and begun else None
        )
        return HiddenStates(packed.to_tensor().to(self._device))

    def load_head(self) -> Head:
        """Return the head. Its weights are read in place in the object store."""
        return self._call_actor("head", None).to_head(self._device)

    def _send_call(self, verb: str, tokens: Sequence[TokensToScore] | None) -> Any:
        arguments = () if tokens is None else (tokens,)
        return self._remote.send(verb, self._assignment, self.name, *arguments)

    def _call_actor(self, verb: str, tokens: Sequence[TokensToScore] | None, reference: Any = None) -> Any:
        remote = self._remote
        while True:
            # Other calls to the same actor come first, and the first one loads its models.
            seconds = remote.limits.step_timeout * len(self._assignment.names)
            seconds += 0.0 if self._there else remote.limits.start_timeout
            try:
                if reference is None:
                    reference = self._send_call(verb, tokens)
                answer = remote.get(reference, seconds)
                self._there = True
                return answer
            except ActorLostError as error:
                self._there = False
                _log.warning("teacher %s is asked again, for %s", self.name, one_line(error))
            reference = None
            try:
                remote.await_return()
            except ActorLostError as error:
                raise TeacherError(
                    f"teacher {self.name} is lost: {one_line(error)}; see logs/{remote.name}.log and restart"
                    " with --resume."
                ) from None


def ray_teachers(
    remotes: Sequence[RemoteActor],
    names: Sequence[str],
    stage: str,
    vocabulary: int,
    device: torch.device,
) -> Mapping[str, RayTeacher]:
    """Deal `names` out to `remotes` in turn. Returns teachers in the order of `names`."""
    shares = [tuple(names[start :: len(remotes)]) for start in range(len(remotes))]
    return {
        name: RayTeacher(
            name,
            remotes[index % len(remotes)],
            Assignment(stage, shares[index % len(remotes)], vocabulary),
            device,
        )
        for index, name in enumerate(names)
    }


def _tokens_to_score(samples: Sequence[Sample]) -> list[TokensToScore]:
    return [TokensToScore(sample.uid, sample.prompt_ids, sample.response_ids) for sample in samples]
