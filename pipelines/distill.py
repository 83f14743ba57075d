"""The merge: the student writes, each sample is scored by the teacher of its domain, the student follows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opd.algorithms.advantages import build_advantage
from opd.algorithms.corrections import Correction, correct
from opd.algorithms.normalise import per_teacher_weights, token_weights
from opd.algorithms.opd_term import opd_advantages
from opd.config import DistillConfig, SampledTokenK1
from opd.pipelines.batches import Batches, open_batches
from opd.pipelines.context import StageContext
from opd.pipelines.domains import DomainSet
from opd.pipelines.evaluate import domain_accuracy
from opd.pipelines.loop import Extent, Step, StepResult, run_loop
from opd.pipelines.merge_loss import (
    loss_terms,
    needs_correction,
    needs_policy_stream,
    policy_loss,
    token_terms,
)
from opd.pipelines.rollout_metrics import generated_tokens, rollout_metrics, staleness_metrics
from opd.pipelines.route_shares import route_shares
from opd.pipelines.score_ahead import scoring_ahead
from opd.pipelines.shared_rewards import score_rewards
from opd.pipelines.stored.samples import StoredSamples
from opd.pipelines.student import Student, tokenizer_of
from opd.pipelines.teachers import open_schedule, wait_shares
from opd.rollout.collect import EncodedPrompt, Generates
from opd.teachers.schedule import Router, TeacherSchedule, sampled_logprobs
from opd.train.conversion import convert_batch
from opd.train.schedule import learning_rate
from opd.train.terms import MismatchProbe
from opd.types import RolloutBatch, Sample, SampleGroup


def distill(context: StageContext, start: Path, out: Path) -> dict[str, Any]:
    """Merge the recipe's teachers into the model in `start`, write it to `out`, return the result numbers."""
    with ExitStack() as stack:
        run = DistillRun.open(context, start, stack)
        batches = run.open_batches(stack)
        config = run.config
        result = run_loop(
            context,
            run.student.backend,
            Extent(steps=config.steps),
            config.checkpoint_every,
            lambda step: run.step(step, batches),
            lambda step: run.start(step, batches),
            lambda: run.consumed(batches),
        )
    exported = {"digest": run.student.export(out, context.card(result))}
    return result | exported | {"stop_ids": list(run.student.sampling.stop_ids)}


@dataclass(slots=True)
class DistillRun:
    """One merge with everything a step needs."""

    context: StageContext
    student: Student
    data: DomainSet
    schedule: TeacherSchedule
    config: DistillConfig
    teachers: list[str]
    probe: MismatchProbe
    stored: StoredSamples | None = None
    """Where responses are, if not in memory."""

    @classmethod
    def open(cls, context: StageContext, start: Path, stack: ExitStack) -> DistillRun:
        """Load the student and the data, open the teachers; all closed when `stack` unwinds."""
        recipe = context.recipe
        config = recipe.distill
        vocabulary = len(tokenizer_of(recipe, start))
        schedule = stack.enter_context(open_schedule(context, vocabulary))
        probe = MismatchProbe(context.ranks, entropy=not needs_policy_stream(config))
        terms = [*loss_terms(config, schedule), probe]
        student = Student.open(context, start, config.optim, config.batch, terms)
        data = DomainSet.open(recipe, student.tokenizer, context.note)
        teachers = Router.from_recipe(recipe).teachers
        stored = None
        if recipe.storage.trajectories == "disk":
            stored = stack.enter_context(StoredSamples.open(context, student, data.rewards, schedule))
        return cls(context, student, data, schedule, config, teachers, probe, stored)

    def open_batches(self, stack: ExitStack) -> Batches:
        """The batches to learn from, each a function of its number, and their log; closed with `stack`."""
        rollouts = self.student.open_rollouts(self.context, stack)
        return open_batches(self.context.recipe.rollout, self.student, rollouts, self.write, stack)

    def write(self, engine: Generates, index: int) -> list[SampleGroup]:
        """Batch number `index`."""
        prompts = self.prompts(index)
        if self.stored is not None:
            return self.stored.write(engine, prompts, index)
        if self.context.ranks.alone:  # else another rank may train what this one writes
            engine = scoring_ahead(self.context.recipe, engine, self.schedule, prompts)
        return self.student.rollout(prompts, self.config.samples_per_prompt, engine)

    def prompts(self, index: int) -> list[EncodedPrompt]:
        """The prompts of batch `index`, domain by domain."""
        count = self.config.prompts_per_domain
        stage = self.context.stage
        return [
            prompt
            for domain in self.context.recipe.domains
            for prompt in self.data.take(domain, index * count, count, stage)
        ]

    def start(self, step: int, batches: Batches) -> None:
        """The learner's weights of version `step` are in place."""
        if self.stored is not None:
            self.stored.start(step)
        batches.start(step)

    def consumed(self, batches: Batches) -> None:
        """A checkpoint holds what was learnt up to now."""
        batches.consumed()
        if self.stored is not None:
            self.stored.consumed()

    def step(self, step: Step, batches: Batches) -> StepResult:
        """Rollout, reward, teacher scores, update, sync."""
        with step.timer("rollout"):
            groups = batches.take(step.index)
        tokens, metrics = (self.learn if self.stored is None else self.stored.learn)(groups, step)
        with step.timer("train"):
            metrics |= self.probe.take()
            lr = learning_rate(self.config.optim, step.index, step.progress)
            metrics |= self.student.backend.step(lr)
        with step.timer("sync"):
            batches.learnt(step.index + 1)
        metrics |= self._counters(step) | batches.take_counters(step.counters)
        metrics |= wait_shares(metrics, sum(step.timer.seconds.values()))
        metrics |= self._curve(step, batches)
        kl = metrics.get("kl/mean", 0.0)
        headline = f"KL {kl:.4f}  reward {metrics['reward/mean']:.3f}"
        return StepResult(metrics, tokens, headline)

    def learn(self, groups: Sequence[SampleGroup], step: Step) -> tuple[int, dict[str, float]]:
        """The gradient of step `step` on groups in memory; tokens the student wrote, and metrics."""
        tokens = generated_tokens(groups)
        with step.timer("score"):
            self.score(groups)
        metrics = rollout_metrics(groups)
        samples = [s for group in groups for s in group.samples]
        metrics |= staleness_metrics(samples, step.index, self.context.recipe.rollout.max_staleness)
        with step.timer("train"):
            return tokens, metrics | self.accumulate(groups)

    def score(self, groups: Sequence[SampleGroup]) -> None:
        """Reward every sample and let its teacher read it."""
        self.reward(groups)
        self.let_teachers_read(groups)

    def reward(self, groups: Sequence[SampleGroup]) -> None:
        """Reward every sample and send it to its teacher."""
        samples = [s for group in groups for s in group.samples]
        score_rewards(self.context.ranks, self.data.rewards, samples)
        self.schedule.assign(samples)

    def let_teachers_read(self, groups: Sequence[SampleGroup]) -> None:
        """Let each sample's teacher read it."""
        samples = [s for group in groups for s in group.samples]
        self.schedule.score(self.student.backend.mine(samples))

    def accumulate(self, groups: Sequence[SampleGroup]) -> dict[str, float]:
        """The gradient of one optimiser step on scored groups, left in the parameters; returns metrics."""
        samples = [s for group in groups for s in group.samples]
        backend = self.student.backend
        metrics: dict[str, float] = {}
        old = advantages = [np.zeros(len(s.response_ids), dtype=np.float32) for s in samples]
        correction = None
        if needs_correction(self.config):
            old = backend.logprobs(samples)
            correction = self._correct(samples, old)
            metrics |= correction.metrics
        if needs_policy_stream(self.config):
            advantages, more = self._advantages(groups, samples, old)
            metrics |= more
        terms = token_terms(
            self.config, samples, old, advantages, correction, lambda masks: self._weights(samples, masks)
        )
        batch = convert_batch(RolloutBatch(samples, terms), self.config.to_batch, "distill.to_batch")
        batch = self.schedule.sort(batch)
        metrics |= backend.forward_backward(batch)
        self.schedule.release()
        return metrics

    def _advantages(
        self, groups: Sequence[SampleGroup], samples: list[Sample], old: list[np.ndarray]
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """The reward's advantages times `rl_coef`, with the k1 term added after their normalisation."""
        config, temperature = self.config, self.student.backend.temperature
        estimate = build_advantage(config.advantage)
        advantages = [config.rl_coef * a for group in groups for a in estimate(group)]
        if not isinstance(config.loss, SampledTokenK1):
            return advantages, {}
        teacher = self.student.backend.each(
            samples,
            lambda mine: sampled_logprobs(self.schedule, mine, config.mixture, temperature),
            "the teachers' log-probabilities",
        )
        ratios = np.concatenate([(p - t)[s.loss_mask] for s, p, t in zip(samples, old, teacher, strict=True)])
        advantages = opd_advantages(
            advantages,
            old,
            teacher,
            [s.loss_mask for s in samples],
            coef=config.loss.coef,
            baseline=config.loss.baseline,
            discount=config.loss.discount,
            teachers=[s.teacher for s in samples],
        )
        return advantages, {"kl/mean": float(ratios.mean())} if len(ratios) else {}

    def _correct(self, samples: list[Sample], old: list[np.ndarray]) -> Correction:
        """The importance correction of the sampled tokens. A full vocabulary's divergence needs none: its
        gradient is exact at every state, whatever policy led there."""
        return correct(
            policy_loss(self.config).correction,
            [s.rollout_logprobs for s in samples],
            old,
            [s.loss_mask for s in samples],
        )

    def _weights(self, samples: list[Sample], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
        shares = route_shares(self.context.recipe, samples)
        if shares is not None:
            return per_teacher_weights(masks, [s.teacher for s in samples], shares)
        return token_weights(masks)

    def _counters(self, step: Step) -> dict[str, float]:
        """The schedule's counters of this step; their totals survive a resume."""
        counters = self.schedule.take_counters()
        totals = step.counters
        for name, value in counters.items():
            before = totals.get(name, 0.0)
            totals[name] = max(before, value) if name.endswith("_peak") else before + value
        return counters

    def _curve(self, step: Step, batches: Batches) -> dict[str, float]:
        evaluation = self.context.recipe.evaluation
        if not evaluation.every or (step.index + 1) % evaluation.every:
            return {}
        with step.timer("evaluate"), batches.idle():
            return {
                f"accuracy/{domain}": domain_accuracy(
                    self.student.evaluator,
                    self.data,
                    domain,
                    evaluation.curve_prompts,
                    self.student.sampling,
                    seed=self.student.seed,
                ).accuracy
                for domain in self.context.recipe.domains
            }
