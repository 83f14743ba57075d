"""Train with GRPO: a specialist on one domain, or the mixed-domain baseline on all of them."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.config.rl import GAEAdvantage, SampledTokenK1
from opd.errors import TrainingError
from opd.pipelines.stages.alert_rules import BaseKL
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.loop import Algorithm, Extent, Plan, StepContext, Update, train
from opd.pipelines.stages.policy_stream import FollowTerm, PolicyStream
from opd.pipelines.stages.sample_source import Rollouts, StageRequest, open_source
from opd.pipelines.stages.samples import StepSamples, rollout_metrics
from opd.pipelines.stages.student import Student, open_frozen, tokenizer_of
from opd.pipelines.stages.teachers import StageTeachers, open_schedule, weigh_divergence
from opd.rollout.collect import EncodedPrompt
from opd.train.advantages import build_advantage, changes_rewards, keep_groups, shape_rewards
from opd.train.backend import Backend
from opd.train.distill_terms import build_distill_term
from opd.train.frozen import FrozenModel
from opd.train.loss_weights import response_scales, token_weights, turn_shares, turns_of
from opd.train.packing import convert_batch
from opd.train.terms import LossTerm, MismatchProbe, PolicyTerm, ReferenceTerm, next_coefficient
from opd.types import RolloutBatch, Sample, SampleGroup, Status, TokenTerms

if TYPE_CHECKING:
    from opd.pipelines.stages.critic import Critic
    from opd.pipelines.stages.prompt_choice import PromptChoice

_COEF = "reference_kl/coef"


def train_grpo(
    context: StageContext, start: Path, domains: Sequence[str], out: Path, extent: Extent
) -> dict[str, Any]:
    """Train the model in `start` on the rewards of `domains`, write it to `out`, return the result numbers.

    Raises `TrainingError` if no step has signal for `max_steps_without_signal` steps in a row.
    """
    with ExitStack() as stack:
        grpo = GRPO(context, start, domains, stack)
        student, config = grpo.student, grpo.config
        in_memory = config.to_batch is not None
        request = StageRequest(
            grpo.batch_prompts,
            config.group_size,
            in_memory=in_memory,
            more_prompts=grpo.more_prompts,
            steps=extent.steps,
        )
        if grpo.teachers is not None:
            request = grpo.teachers.with_scoring(request)
        grpo.source = source = open_source(context, student, request, stack)
        measured = grpo.choose_prompts(context, start)
        result = train(context, grpo, source, student.backend, extent, config.checkpoint_every)
    if result["counters"].get("steps_without_signal", 0) >= result["steps"]:
        raise grpo.no_signal(result["steps"])
    exported = {"digest": student.export_model(out, context.stage_card(result))}
    return result | exported | {"stop_ids": student.stop_ids} | measured


class GRPO(Algorithm):
    """Group-relative advantages, with a reference KL and teachers if the recipe has them.

    Filters and masks select the responses for the rewards. The teachers teach on every response.

    Args:
        start: The model to train, and the frozen reference.
        stack: Closes the teachers.
    """

    source: Rollouts  # set once the engine is open

    def __init__(self, context: StageContext, start: Path, domains: Sequence[str], stack: ExitStack) -> None:
        recipe, config = context.recipe, context.recipe.specialist
        self.config, self.optim, self.stage = config, config.optim, context.stage
        self.reference: FrozenModel | None = None
        self._penalty: ReferenceTerm | None = None
        terms: list[LossTerm] = [PolicyTerm(config.policy_loss, config.entropy_coef)]
        if config.reference_kl.coef:
            self.reference = open_frozen(context, start, config.batch)
            if config.reference_kl.placement == "loss":
                self._penalty = ReferenceTerm(config.reference_kl)
                terms.append(self._penalty)
        self.teachers: StageTeachers | None = None
        following = recipe.following_teachers(domains)
        if config.opd is not None:
            taught = replace(context, recipe=following)
            schedule = stack.enter_context(open_schedule(taught, tokenizer_of(recipe, start)))
            self.teachers = StageTeachers(taught, schedule)
            stream = build_distill_term(following.distill, schedule, "specialist.opd.loss")
            terms += [stream] if stream else []
        self._probe = None if config.needs_old_logprobs else MismatchProbe(context.ranks, shared=True)
        terms += [self._probe] if self._probe else []
        self.student = Student.open(context, start, config.optim, config.batch, terms)
        if all(recipe.for_domain(name).replays_masks for name in domains):
            self.student.record_masks()
        if self.teachers is not None:
            self.teachers.schedule.follow(self.student.backend, config.minibatches * config.epochs)
        self._critic: Critic | None = None
        if isinstance(config.advantage, GAEAdvantage):
            from opd.pipelines.stages.critic import Critic

            self._critic = Critic(context, start, self.student)
        self.data = DomainSet.open(following, self.student.tokenizer)
        self._base_kl: BaseKL | None = None
        if recipe.evaluation.base_kl_every:
            base = self.reference or open_frozen(context, start, config.batch)
            self._base_kl = BaseKL(recipe, base)
        self._shapes, self._cut = changes_rewards(config.shaping), False
        self._domains, self._recipe, self._rollout = list(domains), recipe, recipe.rollout
        self._choice: PromptChoice | None = None

    def choose_prompts(self, context: StageContext, start: Path) -> dict[str, Any]:
        """Choose the prompts of the stage. Returns their measurements, for the result."""
        measured = any(self._recipe.for_domain(name).specialist.difficulty for name in self._domains)
        if self.config.refill is None and self.config.replay is None and not measured:
            return {}
        from opd.pipelines.stages.prompt_choice import Judge, PromptChoice

        judge = Judge(
            lambda s: s.reward_responses(self.data.rewards),
            self._shape_rewards,
            self._filter_groups,
            self._is_masked,
        )
        self._choice = PromptChoice(self.data, self._domains, self.stage, self.config, judge)
        return self._choice.measure_prompts(context, self.student, start)

    def begin_step(self, step: StepContext) -> None:
        if self._choice is not None:
            self._choice.begin_step(step)

    def extra_backends(self) -> dict[str, Backend]:
        return {} if self._critic is None else {"critic": self._critic.backend}

    def batch_prompts(self, index: int) -> list[EncodedPrompt]:
        if self._choice is not None:
            return self._choice.first_prompts(index)
        count = self.config.prompts_per_step
        return self.data.mixed_prompts(self._domains, index * count, count, self.stage)

    def more_prompts(self, samples: StepSamples) -> list[EncodedPrompt]:
        """Return more prompts for the batch of `samples`."""
        return [] if self._choice is None else self._choice.more_prompts(samples)

    def score(self, samples: StepSamples, step: StepContext) -> dict[str, float]:
        if self._choice is None or not self._choice.is_refilling:
            samples.reward_responses(self.data.rewards)
        metrics = rollout_metrics(samples.groups) | self.data.fill_teacher_prompts(samples)
        metrics |= self._shape_rewards(samples, step.counters)
        metrics |= samples.drop_stale(step.index, self._rollout.max_staleness)
        if self.teachers is not None:
            self.teachers.score_samples(samples)
        return metrics

    def _shape_rewards(self, samples: StepSamples, counters: MutableMapping[str, float]) -> dict[str, float]:
        if not self._shapes:
            return {}
        limits = {name: self._recipe.for_domain(name).rollout.max_new_tokens for name in self._domains}
        return shape_rewards(samples.groups, self.config.shaping, limits.__getitem__, counters)

    def _filter_groups(self, samples: StepSamples) -> list[SampleGroup]:
        config, every = self.config, not self.config.filter_zero_variance
        return keep_groups(
            samples.groups, config.group_filter, zero_variance=every, with_tokens=samples.with_tokens
        )

    def _is_masked(self, sample: Sample) -> bool:
        return self.config.shaping.mask_truncated and sample.status is Status.TRUNCATED

    def plan(self, samples: StepSamples, step: StepContext) -> Plan:
        config = self.config
        chosen: dict[str, float] = {}
        every = samples.groups
        if self._choice is None:
            samples.groups = self._filter_groups(samples)
        else:
            chosen = self._choice.select_groups(samples, step)
        rewarded = learned = [sample for sample in samples.samples if not self._is_masked(sample)]
        if self.teachers is None:
            self._check_signal(step, bool(learned), cut=bool(samples.groups))
            if not learned:
                return Plan([], chosen)
            samples.deal_samples()
        else:  # they read all samples as they were dealt
            samples.groups = every
            learned = samples.samples
        stream, metrics = self._policy_stream(samples, rewarded, step)
        metrics = chosen | metrics
        parts = _split_episodes(learned, config.minibatches)
        if self._critic is not None:
            # It does not use samples for teachers alone.
            critic_parts = _split_episodes(rewarded, config.minibatches) * config.epochs
            metrics |= self._critic.train_critic(samples, critic_parts, stream, step)
            if step.index < config.critic_warmup:
                if self.teachers is not None:
                    self.teachers.schedule.release(learned=False)
                return Plan([], metrics)
        if self._base_kl is not None:
            metrics |= self._base_kl.measure_kl(samples, step.index)
        uids = {sample.uid for sample in rewarded}
        updates = [self._build_update(samples, part, stream, uids) for part in parts] * config.epochs
        if self.teachers is not None:
            updates[-1] = replace(updates[-1], done=self.teachers.schedule.release)
        return Plan(updates, metrics)

    def _policy_stream(
        self, samples: StepSamples, rewarded: Sequence[Sample], step: StepContext
    ) -> tuple[PolicyStream, dict[str, float]]:
        reference, advantage = self.config.reference_kl, self.config.advantage
        coef = reference.coef if reference.target is None else step.counters.get(_COEF, reference.coef)
        if self._penalty is not None:
            self._penalty.coef = coef
        stream = PolicyStream(samples, self.config.policy_loss.correction, recompute=not self._probe)
        if self.teachers is not None:
            self.teachers.add_advantages(stream, samples)
        if self.reference is not None:
            penalised = reference.placement == "advantage"
            against = FollowTerm(coef, discount=reference.discount) if penalised else None
            stream.add_logprobs("reference", samples.samples, self._reference_logprobs, against)
        if self._critic is None:
            whiten = rewarded if advantage.whiten else None
            stream.estimate_advantages(build_advantage(advantage), whiten=whiten, rewarded=rewarded)
        else:
            in_reward = self.reference is not None and reference.placement == "reward"
            self._critic.estimate_advantages(stream, rewarded, coef if in_reward else 0.0)
        metrics = stream.measure_step()
        if "log_ratio" in metrics:  # the distance of each teacher, with k1
            metrics["kl/mean"] = metrics.pop("log_ratio")
            for name in dict.fromkeys(sample.teacher for sample in samples.samples if sample.teacher):
                lot = [sample for sample in samples.samples if sample.teacher == name]
                if (distance := stream.mean_log_ratio("teacher", lot)) is not None:
                    metrics[f"kl/{name}"] = distance
        if self.reference is not None:
            measured = stream.mean_log_ratio("reference", samples.samples)
            metrics |= self._reference_metrics(measured, coef, step)
        return stream, metrics

    def _reference_metrics(self, measured: float | None, coef: float, step: StepContext) -> dict[str, float]:
        """Return the distance of the reference, unless a loss reports it. With a target, store the
        coefficient of the next step in the counters, which checkpoints save.
        """
        metrics = {} if measured is None or self._penalty is not None else {"reference_kl": measured}
        reference = self.config.reference_kl
        if reference.target is None or measured is None:
            return metrics if reference.target is None else {_COEF: coef}
        if step.index >= self.config.critic_warmup:  # before, the policy stays and no coefficient moves it
            step.counters[_COEF] = next_coefficient(coef, measured, reference.target, reference.gain)
        return metrics | {_COEF: coef, "reference_kl/measured": measured}

    def _reference_logprobs(self, samples: Sequence[Sample]) -> list[Any]:
        assert self.reference is not None
        return self.reference.local_logprobs(samples, self.student.backend.temperature)

    def _build_update(
        self, samples: StepSamples, part: list[Sample], stream: PolicyStream, rewarded: set[str]
    ) -> Update:
        config = self.config
        opd, correction = config.opd, config.policy_loss.correction
        # k1 is in the advantages of all samples. Any other divergence is its own stream.
        apart = opd is not None and not isinstance(opd.loss, SampledTokenK1)
        among = [sample for sample in part if sample.uid in rewarded] if apart else part
        scales = self._token_scales(among, stream)
        kl_scales = self._token_scales(part) if apart else {}
        kept_scales = self._token_scales(part, stream) if apart else {}
        by_turn = config.policy_loss.aggregation == "turn"

        def weigh_tokens(sample: Sample, mask: np.ndarray, scale: float) -> np.ndarray:
            return token_weights(mask, scale, turn_shares(sample.loss_mask, mask) if by_turn else None)

        def sample_terms(sample: Sample) -> TokenTerms:
            policy, terms = stream.policy_tokens(sample), TokenTerms.zeros(len(sample.response_ids))
            terms.old_logprobs, terms.advantages = policy.old_logprobs, policy.advantages
            weights = weigh_tokens(sample, policy.mask, scales.get(sample.uid, 0.0))
            terms.policy_weight = weights * policy.weight
            terms.ref_logprobs = policy.ref_logprobs
            if opd is not None and apart and sample.teacher is not None:
                weights = weigh_tokens(sample, sample.loss_mask, opd.coef * kl_scales[sample.uid])
                kept_weights = weigh_tokens(sample, policy.mask, opd.coef * kept_scales[sample.uid])
                weigh_divergence(terms, opd.loss, correction, policy, weights, kept_weights)
            return terms

        key = "specialist.to_batch"
        if self.teachers is not None:
            return self.teachers.build_update(samples, part, sample_terms, config.to_batch, key)
        if config.to_batch is None:
            return Update(part, samples.batch_reader(part, sample_terms))
        batch = RolloutBatch(part, [sample_terms(sample) for sample in part])
        return Update.from_batch(convert_batch(batch, config.to_batch, key))

    def _token_scales(
        self, samples: Sequence[Sample], stream: PolicyStream | None = None
    ) -> dict[str, float]:
        """Return the weight of a token of each sample, by uid. It is over all tokens of the loss masks, or
        over those left by the correction of `stream`.
        """
        aggregation, limit = self.config.policy_loss.aggregation, self._rollout.max_new_tokens
        if stream is None:
            counts = [sample.trainable_tokens for sample in samples]
            turns = [turns_of(sample.loss_mask) for sample in samples]
        else:
            counts, turns = stream.accepted_counts(samples)
        return response_scales(samples, counts, aggregation, limit, turns)

    def finish_step(self, step: StepContext, metrics: dict[str, float]) -> dict[str, float]:
        """Return mismatch, if the update found it, the teachers' counters, and the learning curve, if any."""
        counters = {} if self.teachers is None else self.teachers.take_counters(step, metrics)
        if self._probe and "grad_norm" in metrics:  # there was something to learn from
            counters |= self._probe.drain_metrics()
        every, prompts = self.config.evaluate_every, self._recipe.evaluation.curve_prompts
        if not every or (step.index + 1) % every:
            return counters
        from opd.pipelines.evaluation.measure import held_out_accuracy

        with step.timer("evaluate"), self.source.idle_engine():
            return counters | held_out_accuracy(self.student, self.data, self._domains, prompts)

    def progress_text(self, metrics: dict[str, float]) -> str:
        led = f"  KL {metrics['kl/mean']:.4f}" if "kl/mean" in metrics else ""
        return f"reward {metrics['reward/mean']:.3f}{led}"

    def _check_signal(self, step: StepContext, signal: bool, *, cut: bool) -> None:
        """Count steps without signal. `cut`: groups had some, but all of their responses are masked."""
        silent = 0.0 if signal else step.counters.get("steps_without_signal", 0.0) + 1
        step.counters["steps_without_signal"] = silent
        self._cut = cut
        if silent >= self.config.max_steps_without_signal:
            raise self.no_signal(int(silent))

    def no_signal(self, steps: int) -> TrainingError:
        """Return the error for `steps` steps in a row without any signal."""
        last = "last step" if steps == 1 else f"last {steps} steps"
        why = f"every group of the {last} had equal rewards"
        refill = "specialist.refill" if self.config.refill is None else "a larger specialist.refill.limit"
        fix = (
            "check the reward, and max_new_tokens if all are `truncated`; if no answer is right, begin with a"
            f" better model or with sft; else raise group_size, or take {refill}"
        )
        if self._cut:
            why = f"all responses of the {last} were cut, which shaping.mask_truncated masks"
            fix = "raise rollout.max_new_tokens"
        elif self.config.group_filter is not None:
            why += f" or was refused by specialist.group_filter {self.config.group_filter}"
        return TrainingError(f"{self.stage}: {why}, so there is nothing to learn from; {fix}.")


def _split_episodes(samples: list[Sample], parts: int) -> list[list[Sample]]:
    """Split into at most `parts` slices of nearly as many responses, none empty. Branches stay together."""
    episodes = [list(branches) for _, branches in groupby(samples, key=lambda sample: sample.episode)]
    parts = min(parts, len(episodes))
    bounds = [round(i * len(episodes) / max(parts, 1)) for i in range(parts + 1)]
    return [list(chain.from_iterable(episodes[a:b])) for a, b in pairwise(bounds)]
