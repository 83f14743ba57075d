"""Teachers in a process of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from opd.errors import TeacherError
from opd.pipelines.on_ray.actors import ActorSpec
from opd.pipelines.on_ray.tensors import Packed, PackedHead
from opd.protocols import Teacher
from opd.types import HiddenStates, Sample


@dataclass(frozen=True, slots=True)
class Assignment:
    """The teachers of one actor in one stage."""

    stage: str
    names: tuple[str, ...]
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What a teacher reads of a sample."""

    uid: str
    prompt_ids: np.ndarray
    """[C] int32."""
    response_ids: np.ndarray
    """[R] int32."""


class TeacherActor:
    """What `opd.pipelines.on_ray.ray_teacher` talks to. Every method is told the assignment, so an actor that
    was started anew needs nothing else. One method runs at a time.
    """

    def __init__(self, spec: ActorSpec) -> None:
        self._recipe = spec.begin("opd.pipelines.teachers")
        self._spec = spec
        self._held: Assignment | None = None
        self._teachers: Mapping[str, Teacher] = {}
        self._stack = ExitStack()

    def ping(self) -> int:
        """The process."""
        return os.getpid()

    def digest(self, assignment: Assignment, name: str) -> str:
        """Digest of a teacher's weights."""
        return self._teacher(assignment, name).digest

    def score(self, assignment: Assignment, name: str, asked: Sequence[Asked]) -> Packed:
        """Last hidden states [N, D] of the response tokens, in order; they stay in the object store."""
        samples = [
            Sample(a.uid, a.uid, "", a.prompt_ids, teacher=name, response_ids=a.response_ids) for a in asked
        ]
        targets = self._teacher(assignment, name).score(samples)
        if not isinstance(targets, HiddenStates):
            raise TeacherError(
                f"teacher {name} gives {type(targets).__name__}, and only hidden states travel between"
                " actors; set launch.teachers to 0."
            )
        return Packed.of(targets.rows)

    def head(self, assignment: Assignment, name: str) -> PackedHead:
        """A teacher's head."""
        return PackedHead.of(self._teacher(assignment, name).load_head())

    def _teacher(self, assignment: Assignment, name: str) -> Teacher:
        if assignment != self._held:
            self._stack.close()
            self._held, self._teachers = None, {}
            self._teachers = self._open(assignment)
            self._held = assignment
        return self._teachers[name]

    def _open(self, assignment: Assignment) -> Mapping[str, Teacher]:
        from opd.pipelines.context import StageContext
        from opd.pipelines.run_folder import RunFolder
        from opd.pipelines.teachers import open_teachers
        from opd.rollout.preemption import Preemption

        # Metrics and checkpoints are the trainer's alone.
        nobody: Any = None
        context = StageContext(
            self._recipe,
            RunFolder.attach(self._spec.folder),
            assignment.stage,
            metrics=nobody,
            checkpoints=nobody,
            progress=lambda *words: None,
            note=lambda text: print(text, flush=True),
            preemption=Preemption(),
        )
        return open_teachers(context, list(assignment.names), assignment.vocabulary, None, self._stack)
