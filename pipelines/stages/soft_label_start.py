"""Begin a merge with soft labels on the teachers' answers, in domains whose teacher is foreign.

The first step is on the student's own answers in every domain, and its divergence decides. The decision is in
the checkpoints (`StepContext.memory`), so a resumed stage begins the same domains so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from opd.config.rl import route_names
from opd.errors import CheckpointError
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.loop import StepContext
from opd.pipelines.stages.sample_source import as_groups
from opd.pipelines.stages.student import Student
from opd.pipelines.stages.supervised import teacher_samples
from opd.types import Sample, SampleGroup

_log = logging.getLogger(__name__)
_KEY = "warm_up"


class SoftLabelStart:
    """The domains that begin with soft labels, and the answers of their teachers.

    Args:
        context: The merge, whose recipe has a `distill.warm_up`.
        data: Its prompts.
        prompts: By domain, its prompts in a step.
        student: Its rollouts have the log of the answers.
    """

    def __init__(
        self, context: StageContext, data: DomainSet, prompts: Mapping[str, int], student: Student
    ) -> None:
        recipe = context.recipe
        assert recipe.distill.warm_up is not None, "no domain begins with soft labels"
        self.config = recipe.distill.warm_up
        self._context, self._data, self._student = context, data, student
        self._routes = route_names({name: recipe.teacher_plan(name) for name in recipe.domains})
        self._counts = prompts
        self._foreign: list[str] = []
        self._answers: dict[int, list[Sample]] = {}
        self._step = 0
        self.domains: frozenset[str] = frozenset()
        """Domains whose teachers write the answers of this step."""

    def begin_step(self, step: StepContext) -> None:
        """Let teachers write what is left of their answers, if this step needs some. Raises
        `CheckpointError` for a state of no step.
        """
        self._step = step.index
        if not step.index:
            return
        self._foreign = self._check_state(step.memory.get(_KEY))
        left = range(step.index, self.config.steps + 1)
        self.domains = frozenset(self._foreign if left else ())
        if not self.domains:
            self._answers = {}
        elif step.index not in self._answers:
            self._answers = self._write_answers(left)

    def _write_answers(self, steps: range) -> dict[int, list[Sample]]:
        """Return the teachers' answers to the prompts of `steps`. Logged ones are not written again."""
        rollouts = self._student.rollouts
        logs = None if rollouts is None else rollouts.logs
        asked = dict.fromkeys(self._foreign, steps)
        written = teacher_samples(self._context, self._data, self._student, logs, asked)
        for step, samples in written.items():
            for sample in samples:  # a teacher's answers have no age
                sample.policy_versions = np.full(len(sample.response_ids), step, np.int32)
        return written

    def given_groups(self, index: int) -> list[SampleGroup]:
        """Return the teachers' groups of step `index`, which has begun."""
        return as_groups(self._answers.get(index, []))

    def kept_uids(self) -> set[str]:
        """Return the logged responses of teachers to prompts of later steps."""
        rollouts = self._student.rollouts
        if not self.domains or rollouts is None or rollouts.logs is None:
            return set()
        return {uid for uid in rollouts.logs.tokens.uids() if self._is_later(uid)}

    def _is_later(self, uid: str) -> bool:
        _, domain, number = uid.split("/")[:3]
        return domain in self.domains and int(number) // self._counts[domain] > self._step

    def finish_step(self, step: StepContext, metrics: dict[str, float]) -> dict[str, float]:
        """Decide by the first step's `metrics`, and return what this step had."""
        if not step.index:
            measured = {
                name: metrics[key] for name, r in self._routes.items() if r and (key := f"kl/{r}") in metrics
            }
            foreign = [name for name, value in measured.items() if value >= self.config.min_kl]
            step.memory[_KEY] = foreign
            _log.info(
                "distill.warm_up: the first step's divergences (nats a token) are %s, so %d steps of soft"
                " labels on teachers' answers begin %s",
                ", ".join(f"{name} {value:.2f}" for name, value in measured.items()),
                self.config.steps,
                ", ".join(foreign) or "no domain",
            )
        return {f"warm_up/{name}": 1.0 for name in self._routes if name in self.domains}

    def _check_state(self, state: Any) -> list[str]:
        """Return the state that the first step has left."""
        known = isinstance(state, list) and all(isinstance(name, str) for name in state)
        if not known or len(set(state)) < len(state) or not set(state) <= self._routes.keys():
            raise CheckpointError(
                f"the checkpoint of {self._context.stage} holds what no step has left there of its warm-up;"
                " delete it, to go on from the one before."
            )
        return state
