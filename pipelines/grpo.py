"""GRPO: a specialist on one domain, or the mixed-domain baseline on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from opd.algorithms.advantages import build_advantage
from opd.algorithms.corrections import correct
from opd.algorithms.filters import keep_groups
from opd.algorithms.normalise import policy_weights
from opd.algorithms.reference_kl import reference_kl_advantages
from opd.config import RolloutConfig, SpecialistConfig
from opd.errors import TrainingError
from opd.models.causal_lm import CausalLM
from opd.pipelines.batches import Batches, open_batches
from opd.pipelines.context import StageContext
from opd.pipelines.domains import DomainSet
from opd.pipelines.loop import Extent, Step, StepResult, run_loop, within
from opd.pipelines.rollout_metrics import (
    generated_tokens,
    mismatch_metrics,
    rollout_metrics,
    staleness_metrics,
)
from opd.pipelines.shared_rewards import score_rewards
from opd.pipelines.student import Student, load_model
from opd.rollout.collect import Generates
from opd.train.conversion import convert_batch
from opd.train.schedule import learning_rate
from opd.train.terms import LossTerm, PolicyTerm, ReferenceTerm
from opd.train.torch_backend import response_logprobs
from opd.types import RolloutBatch, Sample, SampleGroup, TokenTerms


def train_grpo(
    context: StageContext, start: Path, domains: Sequence[str], out: Path, extent: Extent
) -> dict[str, Any]:
    """Train the model in `start` on the rewards of `domains`, write it to `out`, return the result numbers.

    Raises `TrainingError` if no step has signal for `max_steps_without_signal` steps in a row.
    """
    with ExitStack() as stack:
        run = GRPORun.open(context, start, domains)
        batches = run.open_batches(context, stack)

        def step(step: Step) -> StepResult:
            done = run.step(step, batches)
            return replace(done, metrics=done.metrics | batches.take_counters(step.counters))

        result = run_loop(
            context,
            run.student.backend,
            extent,
            run.config.checkpoint_every,
            step,
            batches.start,
            batches.consumed,
        )
    if result["counters"].get("steps_without_signal", 0) >= result["steps"]:
        raise run.no_signal(result["steps"])
    exported = {"digest": run.student.export(out, context.card(result))}
    return result | exported | {"stop_ids": list(run.student.sampling.stop_ids)}


@dataclass(slots=True)
class GRPORun:
    """One GRPO training with everything a step needs."""

    student: Student
    data: DomainSet
    domains: list[str]
    config: SpecialistConfig
    stage: str
    rollout: RolloutConfig
    reference: CausalLM | None

    @classmethod
    def open(cls, context: StageContext, start: Path, domains: Sequence[str]) -> GRPORun:
        """Load student, data and, if the recipe asks for a reference KL, the frozen reference."""
        recipe = context.recipe
        config = recipe.specialist
        terms: list[LossTerm] = [PolicyTerm(config.policy_loss, config.entropy_coef)]
        reference = None
        if config.reference_kl.coef:
            reference = load_model(recipe, start)
            if config.reference_kl.placement == "loss":
                terms.append(ReferenceTerm(config.reference_kl))
        student = Student.open(context, start, config.optim, config.batch, terms)
        data = DomainSet.open(recipe, student.tokenizer, context.note)
        return cls(student, data, list(domains), config, context.stage, recipe.rollout, reference)

    def open_batches(self, context: StageContext, stack: ExitStack) -> Batches:
        """The batches to learn from, each a function of its number."""
        rollouts = self.student.open_rollouts(context, stack)
        return open_batches(self.rollout, self.student, rollouts, self.write, stack)

    def write(self, engine: Generates, index: int) -> list[SampleGroup]:
        """Batch number `index`."""
        count = self.config.prompts_per_step
        prompts = self.data.mixed(self.domains, index * count, count, self.stage)
        return self.student.rollout(prompts, self.config.group_size, engine)

    def step(self, step: Step, batches: Batches) -> StepResult:
        """Rollout, reward, filter, recompute, estimate, update, sync."""
        with step.timer("rollout"):
            groups = batches.take(step.index)
        groups = within(groups, lambda group: generated_tokens([group]), step.tokens_left)
        tokens = generated_tokens(groups)
        with step.timer("score"):
            samples = [s for group in groups for s in group.samples]
            score_rewards(self.student.ranks, self.data.rewards, samples)
        metrics = rollout_metrics(groups)
        metrics |= staleness_metrics(samples, step.index, self.rollout.max_staleness)
        config = self.config
        kept = keep_groups(groups, config.group_filter, zero_variance=not config.filter_zero_variance)
        self._watch_signal(step, bool(kept))
        if kept:
            with step.timer("train"):
                metrics |= self._update(kept, learning_rate(self.config.optim, step.index, step.progress))
        with step.timer("sync"):
            batches.learnt(step.index + 1, changed=bool(kept))
        headline = f"reward {metrics['reward/mean']:.3f}"
        return StepResult(metrics, tokens, headline)

    def _watch_signal(self, step: Step, signal: bool) -> None:
        silent = 0.0 if signal else step.counters.get("steps_without_signal", 0.0) + 1
        step.counters["steps_without_signal"] = silent
        if silent >= self.config.max_steps_without_signal:
            raise self.no_signal(int(silent))

    def no_signal(self, steps: int) -> TrainingError:
        """The error for `steps` steps in a row without a group of unequal rewards."""
        return TrainingError(
            f"{self.stage}: every group of the last {steps} steps had equal rewards, so there is nothing to"
            " learn from; check the reward function, raise group_size or take a better base."
        )

    def _update(self, groups: Sequence[SampleGroup], lr: float) -> dict[str, float]:
        estimate = build_advantage(self.config.advantage)
        samples = [s for group in groups for s in group.samples]
        self.student.backend.mine(samples)  # deals them out
        old = self.student.backend.logprobs(samples)
        advantages = [a for group in groups for a in estimate(group)]
        references = self._references(samples)
        if references and self.config.reference_kl.placement == "advantage":
            masks = [s.loss_mask for s in samples]
            coef = self.config.reference_kl.coef
            advantages = reference_kl_advantages(advantages, old, references, masks, coef=coef)
        correction = correct(
            self.config.policy_loss.correction,
            [s.rollout_logprobs for s in samples],
            old,
            [s.loss_mask for s in samples],
        )
        columns = (samples, old, advantages, references or [None] * len(samples))
        rows = [Row(*row) for row in zip(*columns, correction.masks, correction.weights, strict=True)]
        totals: dict[str, float] = {}
        parts = _split(rows, self.config.minibatches)
        for part in parts:
            batch = self._batch(part)
            update = self.student.backend.forward_backward(batch) | self.student.backend.step(lr)
            for name, value in update.items():
                totals[name] = totals.get(name, 0.0) + value / len(parts)
        return totals | correction.metrics | mismatch_metrics(samples, old)

    def _references(self, samples: Sequence[Sample]) -> list[np.ndarray] | None:
        if self.reference is None:
            return None
        backend, reference = self.student.backend, self.reference
        return backend.each(
            samples,
            lambda mine: response_logprobs(reference, mine, backend.temperature, self.config.batch),
            "the reference's log-probabilities",
        )

    def _batch(self, rows: Sequence[Row]) -> RolloutBatch:
        weights = policy_weights(
            [row.mask for row in rows], self.config.policy_loss.aggregation, self.rollout.max_new_tokens
        )
        terms = []
        for row, weight in zip(rows, weights, strict=True):
            term = TokenTerms.zeros(len(row.sample.response_ids))
            term.old_logprobs, term.advantages = row.old_logprobs, row.advantages
            term.policy_weight = weight * row.weight
            term.ref_logprobs = row.ref_logprobs
            terms.append(term)
        batch = RolloutBatch([row.sample for row in rows], terms)
        return convert_batch(batch, self.config.to_batch, "specialist.to_batch")


@dataclass(frozen=True, slots=True)
class Row:
    """One sample with what an update needs of it, `[R]` each."""

    sample: Sample
    old_logprobs: np.ndarray
    advantages: np.ndarray
    ref_logprobs: np.ndarray | None
    mask: np.ndarray
    """The loss mask without rejected tokens."""
    weight: np.ndarray
    """The importance correction of each token."""


def _split(rows: list[Row], parts: int) -> list[list[Row]]:
    """`rows` in at most `parts` consecutive pieces of nearly equal size, none empty."""
    parts = min(parts, len(rows))
    bounds = [round(i * len(rows) / parts) for i in range(parts + 1)]
    return [rows[a:b] for a, b in pairwise(bounds)]
