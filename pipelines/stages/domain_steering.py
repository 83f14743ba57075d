"""Steer what each domain of a merge gets: its share of the steps, by a schedule or by measurements; and soft
labels on its teacher's answers first, if the teacher is foreign.

The first step is on the student's own answers in every domain. Its divergence from a teacher says whether
that one is foreign.

A decision is a function of the step's metrics and of the checkpoint (`StepContext.memory`). So a resumed
stage decides the same, and its prompts have the same uids.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from opd.config import Recipe
from opd.config.distill import ScheduledBudget, StaticBudget, SteeredBudget
from opd.config.rl import route_names
from opd.pipelines.stages.context import StageContext, damaged_memory
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.loop import StepContext
from opd.pipelines.stages.sample_source import as_groups
from opd.pipelines.stages.student import Student
from opd.pipelines.stages.supervised import teacher_samples
from opd.train.loss_weights import weight_at
from opd.types import Sample, SampleGroup

_BUDGET = "budget"
_MOST = 1 << 53
"""Maximum plausible number of prompts."""
_LEAST = 1e-9
"""Least KL of a first step, share of a gradient or mean need that anything is divided by."""


def moved_factors(
    factors: Mapping[str, float], needs: Mapping[str, float], config: SteeredBudget
) -> dict[str, float]:
    """Return the logarithms of the domains' `factors` after a decision on their `needs`, at least 0 each.

    A need over the mean of all needs, to the power `strength`, is the wanted factor. With `gradient` the need
    is what the present factor is to be multiplied by. Domains without a need keep their factor.
    """
    mean, bound = math.fsum(needs.values()) / max(len(needs), 1), math.log(config.limit)
    moved = dict(factors)
    for name, need in needs.items():
        ratio = need if config.type == "gradient" else need / mean if mean > _LEAST else 1.0
        wanted = config.strength * math.log(ratio) if ratio > 0 else -math.inf
        base = factors[name] if config.type == "gradient" else 0.0
        wanted = min(max(wanted + base, -bound), bound)
        moved[name] = factors[name] + config.gain * (wanted - factors[name])
    return moved


def share_out(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Return counts proportional to `weights` that sum to `total`, at least 1 each.

    What would have less than 1 has 1, and the others share the rest. The largest remainders are rounded up,
    the first of equal ones first. `total` is at least the number of weights.
    """
    shared, free = dict(weights), total
    while True:
        whole = math.fsum(shared.values())
        exact = {name: free * weight / whole for name, weight in shared.items()}
        small = [name for name, value in exact.items() if value < 1]
        if not small:
            break
        free -= len(small)
        shared = {name: weight for name, weight in shared.items() if name not in small}
    counts = {name: int(exact.get(name, 1)) for name in weights}
    order = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in order[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


class DomainBudget:
    """The weights and prompts of a merge's domains, step by step.

    Args:
        recipe: Its `distill.budget` says how, its domains what they begin with.
        prompts: By domain, its prompts in a step as the recipe has them.
    """

    def __init__(self, recipe: Recipe, prompts: dict[str, int], stage: str) -> None:
        self._stage, config = stage, recipe.distill.budget
        assert not isinstance(config, StaticBudget), "a static budget decides nothing"
        self.config = config
        self.moves_prompts = config.moves != "loss"
        self._own = {name: domain.weight for name, domain in recipe.domains.items()}
        self._prompts = prompts
        self._routes = route_names({name: recipe.teacher_plan(name) for name in recipe.domains})
        self.weights = self._own
        """Weight of each domain in the loss of this step."""
        self._step, self._counts, self._taken = 0, self._prompts, dict.fromkeys(self._own, 0)
        self._factors, self._first = dict.fromkeys(self._own, 0.0), {}

    def begin_step(self, step: StepContext) -> None:
        """Set the weights and prompts of `step`. Raises `CheckpointError` for a state of no step."""
        config, state, names = self.config, step.memory.get(_BUDGET), set(self._own)
        if state is not None:
            if not (
                isinstance(state, dict)
                and _numbers(state.get("factors")) == names
                and _numbers(state.get("taken")) == names
                and _numbers(state.get("first"), least=0.0) <= names
                and all(type(count) is int and count >= 0 for count in state["taken"].values())
            ):
                raise damaged_memory(self._stage, "budget")
            self._factors, self._first, self._taken = state["factors"], state["first"], state["taken"]
        if isinstance(config, ScheduledBudget):
            planned = {name: weight_at(points, step.index) for name, points in config.weights.items()}
            factors = {name: planned.get(name, own) / own for name, own in self._own.items()}
        else:
            factors = {name: math.exp(value) for name, value in self._factors.items()}
        self._step = step.index
        if config.moves != "prompts":
            self.weights = {name: own * factors[name] for name, own in self._own.items()}
        if self.moves_prompts:
            weights = {name: count * factors[name] for name, count in self._prompts.items()}
            self._counts = share_out(sum(self._prompts.values()), weights)

    def prompts_of(self, index: int) -> dict[str, tuple[int, int]]:
        """Return by domain the number of its first prompt in step `index`, and of its prompts."""
        if index != self._step:
            raise RuntimeError(f"the prompts of step {index} are not known in step {self._step}")
        return {name: (self._taken[name], count) for name, count in self._counts.items()}

    def finish_step(self, step: StepContext, metrics: Mapping[str, float]) -> dict[str, float]:
        """Decide by the step's `metrics`, store the decision in `step`, and return what this step had."""
        config = self.config
        total = math.fsum(self.weights.values())
        logged = {f"budget_weight/{name}": weight / total for name, weight in self.weights.items()}
        if self.moves_prompts:
            logged |= {f"budget_prompts/{name}": float(count) for name, count in self._counts.items()}
            self._taken = {name: self._taken[name] + count for name, count in self._counts.items()}
        if isinstance(config, SteeredBudget):
            needs = self._measured_needs(config, metrics)
            logged |= {f"budget_need/{name}": need for name, need in needs.items()}
            self._factors = moved_factors(self._factors, needs, config)
        step.memory[_BUDGET] = {"factors": self._factors, "first": self._first, "taken": self._taken}
        return logged

    def _measured_needs(self, config: SteeredBudget, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the need of each domain that `metrics` tell of."""
        if config.type == "gap":
            measured = {name: metrics.get(f"accuracy/{name}") for name in self._own}
            goals = {name: config.goals.get(name, 1.0) for name in self._own}
            return {
                name: max(goals[name] - value, 0.0) for name, value in measured.items() if value is not None
            }
        kind = "kl" if config.type == "progress" else "grad_share"
        measured = {name: metrics.get(f"{kind}/{route}") for name, route in self._routes.items()}
        found = {name: max(value, 0.0) for name, value in measured.items() if value is not None}
        if config.type == "progress":
            self._first = found | self._first
            return {name: value / max(self._first[name], _LEAST) for name, value in found.items()}
        # Of a step's prompts, if those are moved, else of the loss.
        asked = self._prompts if config.moves == "prompts" else self._own
        whole = math.fsum(asked[name] for name in found)
        return {name: asked[name] / whole / max(value, _LEAST) for name, value in found.items()}


def _numbers(found: object, least: float = -_MOST) -> set[str]:
    """Return the names in `found` if it maps each to a plausible number, else one that no domain has."""
    if isinstance(found, dict) and all(
        type(value) in (int, float) and least <= value <= _MOST for value in found.values()
    ):
        return set(found)
    return {""}


_log = logging.getLogger(__name__)
_WARM_UP = "warm_up"


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
        state: Any = step.memory.get(_WARM_UP)
        known = isinstance(state, list) and all(isinstance(name, str) for name in state)
        if not known or len(set(state)) < len(state) or not set(state) <= self._routes.keys():
            raise damaged_memory(self._context.stage, "warm-up")
        self._foreign = state
        left = range(step.index, self.config.steps + 1)
        self.domains = frozenset(self._foreign if left else ())
        if not self.domains:
            self._answers = {}
        elif step.index not in self._answers:
            rollouts = self._student.rollouts
            logs = None if rollouts is None else rollouts.logs
            asked = dict.fromkeys(self._foreign, left)
            self._answers = teacher_samples(self._context, self._data, self._student, logs, asked)
            for index, samples in self._answers.items():
                for sample in samples:  # a teacher's answers have no age
                    sample.policy_versions = np.full(len(sample.response_ids), index, np.int32)

    def given_groups(self, index: int) -> list[SampleGroup]:
        """Return the teachers' groups of step `index`, which has begun."""
        return as_groups(self._answers.get(index, []))

    def kept_uids(self) -> set[str]:
        """Return the logged responses of teachers to prompts of later steps."""
        rollouts = self._student.rollouts
        if not self.domains or rollouts is None or rollouts.logs is None:
            return set()
        later = set()
        for uid in rollouts.logs.tokens.uids():
            _, domain, number = uid.split("/")[:3]
            if domain in self.domains and int(number) // self._counts[domain] > self._step:
                later.add(uid)
        return later

    def finish_step(self, step: StepContext, metrics: dict[str, float]) -> dict[str, float]:
        """Decide by the first step's `metrics`, and return what this step had."""
        if not step.index:
            measured = {
                name: metrics[key] for name, r in self._routes.items() if r and (key := f"kl/{r}") in metrics
            }
            foreign = [name for name, value in measured.items() if value >= self.config.min_kl]
            step.memory[_WARM_UP] = foreign
            _log.info(
                "distill.warm_up: the first step's divergences (nats a token) are %s, so %d steps of soft"
                " labels on teachers' answers begin %s",
                ", ".join(f"{name} {value:.2f}" for name, value in measured.items()),
                self.config.steps,
                ", ".join(foreign) or "no domain",
            )
        return {f"warm_up/{name}": 1.0 for name in self._routes if name in self.domains}
