"""Train the merge: the student samples, the teacher of each domain scores, the student follows.

The recipe selects the loss's streams. This module weighs each token in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from opd.config import DistillConfig, PolicyLossConfig, SampledTokenK1
from opd.config.rl import FullVocabularyKL
from opd.pipelines.evaluation.measure import held_out_accuracy
from opd.pipelines.stages.alert_rules import BaseKL
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.loop import Algorithm, Extent, Plan, StepContext, train
from opd.pipelines.stages.policy_stream import PolicyStream, PolicyTokens
from opd.pipelines.stages.sample_source import Rollouts, StageRequest, StaticSource, open_source
from opd.pipelines.stages.samples import StepSamples, rollout_metrics
from opd.pipelines.stages.stage_rollout import open_logs
from opd.pipelines.stages.student import Student, open_frozen, tokenizer_of
from opd.pipelines.stages.supervised import teacher_samples
from opd.pipelines.stages.teachers import StageTeachers, open_schedule, weigh_divergence
from opd.rollout.collect import EncodedPrompt
from opd.teachers.schedule import TeacherSchedule
from opd.train.advantages import build_advantage
from opd.train.distill_terms import FullVocabularyTerm, build_distill_term
from opd.train.loss_weights import route_scales, token_weights, turn_shares, turns_of
from opd.train.terms import LossTerm, MismatchProbe, PolicyTerm
from opd.types import Sample, TokenTerms


def needs_policy_stream(config: DistillConfig) -> bool:
    """Return whether sampled tokens carry a policy gradient: that of k1, or of a reward."""
    return config.rl_coef > 0 or isinstance(config.loss, SampledTokenK1)


def policy_loss(config: DistillConfig) -> PolicyLossConfig:
    """Return the settings of the policy stream. k1 is in that stream and has its own."""
    return config.loss.loss if isinstance(config.loss, SampledTokenK1) else config.policy_loss


def token_terms(
    config: DistillConfig,
    sample: Sample,
    policy: PolicyTokens | None,
    weights: np.ndarray,
    kept_weights: np.ndarray,
) -> TokenTerms:
    """Return the terms of a sample.

    `weights` `[R]` are for the tokens of its mask, `kept_weights` for those left by the correction of
    `policy`. Tokens that a correction rejects leave the policy stream and its normaliser. For the divergence
    see `weigh_divergence`.
    """
    term = TokenTerms.zeros(len(sample.response_ids))
    term.kl_weight = term.policy_weight = weights
    if policy is None:
        return term
    term.old_logprobs, term.advantages = policy.old_logprobs, policy.advantages
    term.policy_weight = kept_weights * policy.weight
    weigh_divergence(term, config.loss, policy_loss(config).correction, policy, weights, kept_weights)
    return term


def loss_terms(
    config: DistillConfig,
    schedule: TeacherSchedule,
    of_domain: Mapping[str, FullVocabularyKL] | None = None,
) -> list[LossTerm]:
    """Return the streams of the merge's loss. `of_domain` has the divergences of domains with their own."""
    terms: list[LossTerm] = []
    if needs_policy_stream(config):
        terms.append(PolicyTerm(policy_loss(config)))
    stream = build_distill_term(config, schedule, of_domain=of_domain)
    return [*terms, stream] if stream else terms


def train_merge(context: StageContext, start: Path, out: Path) -> dict[str, Any]:
    """Merge the recipe's teachers into the model in `start`, write it to `out`, return the result numbers."""
    with ExitStack() as stack:
        merge = Distill(context, start, stack)
        student, config = merge.student, merge.config
        merge.source = source = merge.open_source(stack)
        extent = Extent(steps=config.steps)
        result = train(context, merge, source, student.backend, extent, config.checkpoint_every)
    exported = {"digest": student.export_model(out, context.stage_card(result))}
    return result | exported | {"stop_ids": student.stop_ids}


class Distill(Algorithm):
    """The teachers' divergence at every token, with the recipe's other terms.

    Args:
        stack: Closes the teachers.
    """

    source: Rollouts | StaticSource
    """Set once the engine is open. Idle while the learning curve is measured."""

    def __init__(self, context: StageContext, start: Path, stack: ExitStack) -> None:
        recipe, config = context.recipe, context.recipe.distill
        self.context, self.config, self.optim = context, config, config.optim
        self.schedule = stack.enter_context(open_schedule(context, tokenizer_of(recipe, start)))
        self.teachers = StageTeachers(context, self.schedule)
        # Whether a stream weighs sampled tokens by their sampling probability.
        corrects = config.weighs_samples and policy_loss(config).correction is not None
        self._corrects = needs_policy_stream(config) or corrects
        self._taught = config.prefixes == "teacher"
        self._answers: dict[int, list[Sample]] = {}
        temperature = recipe.rollout.temperature
        apart = [n for n in recipe.domains if recipe.for_domain(n).rollout.temperature != temperature]
        self.probe = MismatchProbe(context.ranks, entropy=not needs_policy_stream(config), apart=apart)
        shares = {name: recipe.for_domain(name).distill for name in recipe.domains}
        own = {n: one.loss for n, one in shares.items() if isinstance(one.loss, FullVocabularyKL)}
        self.terms = [*loss_terms(config, self.schedule, own), self.probe]
        self.student = Student.open(context, start, config.optim, config.batch, self.terms)
        self.schedule.follow(self.student.backend)
        self.data = DomainSet.open(recipe, self.student.tokenizer)
        self._base_kl: BaseKL | None = None
        if recipe.evaluation.base_kl_every and not self._taught:  # their answers do not show its progress
            self._base_kl = BaseKL(recipe, open_frozen(context, start, config.batch))
        self._prompts = {name: share.prompts_per_domain for name, share in shares.items()}
        self.budget = None
        if config.budget.type != "static":
            from opd.pipelines.stages.domain_steering import DomainBudget

            self.budget = DomainBudget(recipe, self._prompts, context.stage)
        self.warm_up = None
        if config.warm_up is not None:
            from opd.pipelines.stages.domain_steering import SoftLabelStart

            self.warm_up = SoftLabelStart(context, self.data, self._prompts, self.student)
        self._apart = self.probe.apart
        self._rl_coefs = {name: share.rl_coef for name, share in shares.items()}

    def open_source(self, stack: ExitStack) -> Rollouts | StaticSource:
        """Open the student's rollouts, until `stack` is unwound, or its teachers' answers."""
        config = self.config
        if self._taught:
            return StaticSource(self._teacher_answers, self.student)
        in_memory = config.to_batch is not None
        request = StageRequest(
            self.batch_prompts, config.samples_per_prompt, in_memory=in_memory, steps=config.steps
        )
        if self.warm_up is not None:
            request = replace(request, given=self.warm_up.given_groups, kept=self.warm_up.kept_uids)
        return open_source(self.context, self.student, self.teachers.with_scoring(request), stack)

    def _teacher_answers(self, index: int) -> list[Sample]:
        """Return the teachers' answers to the prompts of step `index`. An attempt generates all of them
        before its first step, and reads earlier attempts' answers from the log.
        """
        if not self._answers:
            steps = dict.fromkeys(self.context.recipe.domains, range(self.config.steps))
            with open_logs(self.context) as logs:
                self._answers = teacher_samples(self.context, self.data, self.student, logs, steps)
        return self._answers[index]

    def begin_step(self, step: StepContext) -> None:
        if self.budget is not None:
            self.budget.begin_step(step)
        if self.warm_up is not None:
            self.warm_up.begin_step(step)
        self.schedule.router.set_step(step.index)
        self.probe.apart = self._apart | self.soft_domains
        for term in self.terms:
            if isinstance(term, FullVocabularyTerm):
                term.step, term.soft_domains = step.index, self.soft_domains

    @property
    def soft_domains(self) -> frozenset[str]:
        """Domains that are on soft labels before their own answers, in this step."""
        return frozenset() if self.warm_up is None else self.warm_up.domains

    def batch_prompts(self, index: int) -> list[EncodedPrompt]:
        """Return the prompts of batch number `index` that the student answers, domain by domain."""
        wanted = {name: (index * count, count) for name, count in self._prompts.items()}
        if self.budget is not None and self.budget.moves_prompts:
            wanted = self.budget.prompts_of(index)
        return [
            prompt
            for domain, (start, count) in wanted.items()
            if domain not in self.soft_domains
            for prompt in self.data.next_prompts(domain, start, count, self.context.stage)
        ]

    def score(self, samples: StepSamples, step: StepContext) -> dict[str, float]:
        """Compute rewards, and let each teacher read its samples once."""
        samples.reward_responses(self.data.rewards)
        metrics = rollout_metrics(samples.groups) | self.data.fill_teacher_prompts(samples)
        if not self._taught:  # a teacher's answers have no age
            metrics |= samples.drop_stale(step.index, self.context.recipe.rollout.max_staleness)
        self.teachers.score_samples(samples)
        return metrics

    def plan(self, samples: StepSamples, step: StepContext) -> Plan:
        """Plan one update: the teachers' divergence, and the policy stream if there is one."""
        # A full vocabulary's divergence alone needs no policy stream. Its gradient is exact at every state,
        # whatever policy led there.
        stream, metrics = self._policy_stream(samples) if self._corrects else (None, {})
        if self._base_kl is not None and not self.soft_domains:
            metrics |= self._base_kl.measure_kl(samples, step.index)
        learned, recipe, config = samples.samples, self.context.recipe, self.config
        counts = [sample.trainable_tokens for sample in learned]
        by_turn = config.normalise == "turn"
        turns = [turns_of(sample.loss_mask) for sample in learned] if by_turn else None
        weights = None if self.budget is None else self.budget.weights
        scales = kept_scales = route_scales(recipe, learned, counts, turns, weights)
        if stream is not None:
            kept_scales = route_scales(recipe, learned, *stream.accepted_counts(learned), weights)

        def weigh_tokens(sample: Sample, mask: np.ndarray, scale: float) -> np.ndarray:
            return token_weights(mask, scale, turn_shares(sample.loss_mask, mask) if by_turn else None)

        def sample_terms(sample: Sample) -> TokenTerms:
            weights = kept_weights = weigh_tokens(sample, sample.loss_mask, scales[sample.uid])
            policy = None if stream is None else stream.policy_tokens(sample)
            if policy is not None:
                kept_weights = weigh_tokens(sample, policy.mask, kept_scales[sample.uid])
            terms = token_terms(config, sample, policy, weights, kept_weights)
            coef = 0.0 if sample.teacher is None else self.teachers.coefs[sample.domain]
            terms.kl_weight = coef * terms.kl_weight
            return terms

        update = self.teachers.build_update(
            samples, learned, sample_terms, config.to_batch, "distill.to_batch"
        )
        update.done = self.schedule.release
        return Plan([update], metrics)

    def _policy_stream(self, samples: StepSamples) -> tuple[PolicyStream, dict[str, float]]:
        config = self.config
        correction, compared = policy_loss(config).correction, isinstance(config.loss, SampledTokenK1)
        recompute = compared or correction is not None or config.to_batch is not None
        stream = PolicyStream(samples, correction, recompute=recompute)
        if needs_policy_stream(config):
            learned = [sample for sample in samples.samples if self._rl_coefs[sample.domain]]
            whiten = learned if config.advantage.whiten else None
            stream.estimate_advantages(build_advantage(config.advantage), self._rl_coefs, whiten=whiten)
        self.teachers.add_advantages(stream, samples)
        measured = stream.measure_step()
        metrics = {name: value for name, value in measured.items() if name.startswith("correction/")}
        if "log_ratio" in measured:
            metrics["kl/mean"] = measured["log_ratio"]
        return stream, metrics

    def finish_step(self, step: StepContext, metrics: dict[str, float]) -> dict[str, float]:
        """Return mismatch, the schedule's counters, whose totals survive a resume, and the learning curve."""
        counters = self.teachers.take_counters(step, metrics)
        # Answers of other weights, as intended here, show no mismatch of the engine.
        mismatch = {} if self._taught else self.probe.drain_metrics()
        evaluation, curve = self.context.recipe.evaluation, {}
        if evaluation.every and not (step.index + 1) % evaluation.every:
            with step.timer("evaluate"), self.source.idle_engine():
                if self._taught:  # nobody else has given the engine the new weights
                    self.student.push_weights(step.index + 1)
                domains, prompts = list(self.context.recipe.domains), evaluation.curve_prompts
                curve = held_out_accuracy(self.student, self.data, domains, prompts)
        decided = {} if self.budget is None else self.budget.finish_step(step, metrics | curve)
        if self.warm_up is not None:
            decided |= self.warm_up.finish_step(step, metrics)
        return mismatch | counters | curve | decided | self.schedule.router.moving_weights

    def progress_text(self, metrics: dict[str, float]) -> str:
        return f"KL {metrics.get('kl/mean', 0.0):.4f}  reward {metrics['reward/mean']:.3f}"
