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
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.loop import Algorithm, Extent, Plan, StepContext, Update, train
from opd.pipelines.stages.policy_stream import Against, PolicyStream
from opd.pipelines.stages.samples import StepSamples, rollout_metrics
from opd.pipelines.stages.source import Rollouts, StageRequest, open_source
from opd.pipelines.stages.student import Student, open_frozen, tokenizer_of
from opd.pipelines.stages.teachers import Teachers, open_schedule, weigh_divergence
from opd.pipelines.stages.watch import Beginning
from opd.rollout.collect import EncodedPrompt
from opd.train.advantages import build_advantage, changes_rewards, keep_groups, shape
from opd.train.backend import Backend
from opd.train.distill_terms import build_distill_term
from opd.train.frozen import Frozen
from opd.train.loss_weights import response_scales, turn_shares, turns_of, weigh
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
        grpo.source = source = open_source(context, student, grpo.asked(), stack)
        measured = grpo.choose(context, start)
        result = train(context, grpo, source, student.backend, extent, config.checkpoint_every)
    if result["counters"].get("steps_without_signal", 0) >= result["steps"]:
        raise grpo.no_signal(result["steps"])
    exported = {"digest": student.export(out, context.card(result))}
    return result | exported | {"stop_ids": student.stop_ids} | measured


class GRPO(Algorithm):
    """Group-relative advantages, with a reference KL and teachers if the recipe has them.

    Filters and masks select the responses for the rewards. The teachers teach on every response.

    Args:
        context: The stage.
        start: The model to train, and the frozen reference.
        domains: The domains of training.
        stack: Closes the teachers.
    """

    source: Rollouts  # set once the engine is open

    def __init__(self, context: StageContext, start: Path, domains: Sequence[str], stack: ExitStack) -> None:
        recipe, config = context.recipe, context.recipe.specialist
        self.config, self.optim, self.stage = config, config.optim, context.stage
        self.reference: Frozen | None = None
        self._penalty: ReferenceTerm | None = None
        terms: list[LossTerm] = [PolicyTerm(config.policy_loss, config.entropy_coef)]
        if config.reference_kl.coef:
            self.reference = open_frozen(context, start, config.batch)
            if config.reference_kl.placement == "loss":
                self._penalty = ReferenceTerm(config.reference_kl)
                terms.append(self._penalty)
        self.teachers: Teachers | None = None
        if config.opd is not None:
            taught = replace(context, recipe=recipe.following_teachers())
            schedule = stack.enter_context(open_schedule(taught, len(tokenizer_of(recipe, start))))
            self.teachers = Teachers(taught, schedule)
            stream = build_distill_term(taught.recipe.distill, schedule, "specialist.opd.loss")
            terms += [stream] if stream else []
        self._probe = None if config.needs_old_logprobs else MismatchProbe(context.ranks, shared=True)
        terms += [self._probe] if self._probe else []
        self.student = Student.open(context, start, config.optim, config.batch, terms)
        self._critic = self._open_critic(context, start)
        self.data = DomainSet.open(recipe, self.student.tokenizer)
        self._began = Beginning(recipe, lambda: self.reference or open_frozen(context, start, config.batch))
        self._shapes, self._cut = changes_rewards(config.shaping), False
        self._domains, self._recipe, self._rollout = list(domains), recipe, recipe.rollout
        self._choice: PromptChoice | None = None

    def choose(self, context: StageContext, start: Path) -> dict[str, Any]:
        """Choose the prompts of the stage. Returns their measurements, for the result."""
        measured = any(self._recipe.for_domain(name).specialist.difficulty for name in self._domains)
        if self.config.refill is None and self.config.replay is None and not measured:
            return {}
        from opd.pipelines.stages.prompt_choice import Judge, PromptChoice

        judge = Judge(lambda s: s.reward(self.data.rewards), self._shape, self._keep, self._masks)
        self._choice = PromptChoice(self.data, self._domains, self.stage, self.config, judge)
        return self._choice.measure(context, self.student, start)

    def begin(self, step: StepContext) -> None:
        if self._choice is not None:
            self._choice.begin(step)

    def _open_critic(self, context: StageContext, start: Path) -> Critic | None:
        if not isinstance(self.config.advantage, GAEAdvantage):
            return None
        from opd.pipelines.stages.critic import Critic

        return Critic.open(context, start, self.student)

    def learners(self) -> dict[str, Backend]:
        return {} if self._critic is None else {"critic": self._critic.backend}

    def prompts(self, index: int) -> list[EncodedPrompt]:
        """Return the prompts of batch number `index`."""
        if self._choice is not None:
            return self._choice.first(index)
        count = self.config.prompts_per_step
        return self.data.mixed(self._domains, index * count, count, self.stage)

    def more(self, samples: StepSamples) -> list[EncodedPrompt]:
        """Return more prompts for the batch of `samples`."""
        return [] if self._choice is None else self._choice.more(samples)

    def asked(self) -> StageRequest:
        """Return the stage's request to the student."""
        together = self.config.to_batch is not None
        asked = StageRequest(self.prompts, self.config.group_size, together=together, more=self.more)
        return asked if self.teachers is None else self.teachers.listening(asked)

    def score(self, samples: StepSamples, step: StepContext) -> dict[str, float]:
        if self._choice is None or not self._choice.refills:
            samples.reward(self.data.rewards)
        metrics = rollout_metrics(samples.groups) | self._shape(samples, step.counters)
        metrics |= samples.drop_stale(step.index, self._rollout.max_staleness)
        if self.teachers is not None:
            self.teachers.read(samples)
        return metrics

    def _shape(self, samples: StepSamples, counters: MutableMapping[str, float]) -> dict[str, float]:
        if not self._shapes:
            return {}
        return shape(samples.groups, self.config.shaping, self._limit, counters)

    def _keep(self, samples: StepSamples) -> list[SampleGroup]:
        config, every = self.config, not self.config.filter_zero_variance
        return keep_groups(samples.groups, config.group_filter, zero_variance=every, whole=samples.whole)

    def _masks(self, sample: Sample) -> bool:
        return self.config.shaping.mask_truncated and sample.status is Status.TRUNCATED

    def _limit(self, domain: str) -> int:
        return self._recipe.for_domain(domain).rollout.max_new_tokens

    def plan(self, samples: StepSamples, step: StepContext) -> Plan:
        config = self.config
        chosen: dict[str, float] = {}
        every = samples.groups
        if self._choice is None:
            samples.groups = self._keep(samples)
        else:
            chosen = self._choice.settle(samples, step)
        rewarded = learned = [sample for sample in samples.samples if not self._masks(sample)]
        if self.teachers is None:
            self._watch_signal(step, bool(learned), cut=bool(samples.groups))
            if not learned:
                return Plan([], chosen)
            samples.deal()
        else:  # they read all samples as they were dealt
            samples.groups = every
            learned = samples.samples
        stream, metrics = self._stream(samples, rewarded, step)
        metrics = chosen | metrics
        parts = _split(learned, config.minibatches)
        if self._critic is not None:
            own = _split(rewarded, config.minibatches)  # the critic does not use samples for teachers alone
            metrics |= self._critic.learn(samples, own * config.epochs, stream, step)
            if step.index < config.critic_warmup:
                if self.teachers is not None:
                    self.teachers.schedule.release()
                return Plan([], metrics)
        metrics |= self._began.measure(samples, step.index)
        of_rewards = {sample.uid for sample in rewarded}
        updates = [self._update(samples, part, stream, of_rewards) for part in parts] * config.epochs
        if self.teachers is not None:
            updates[-1] = replace(updates[-1], done=self.teachers.schedule.release)
        return Plan(updates, metrics)

    def _stream(
        self, samples: StepSamples, rewarded: Sequence[Sample], step: StepContext
    ) -> tuple[PolicyStream, dict[str, float]]:
        reference = self.config.reference_kl
        coef = reference.coef if reference.target is None else step.counters.get(_COEF, reference.coef)
        if self._penalty is not None:
            self._penalty.coef = coef
        stream = PolicyStream(samples, self.config.policy_loss.correction, recompute=not self._probe)
        if self.teachers is not None:
            self.teachers.enter(stream, samples)
        if self.reference is not None:
            penalised = reference.placement == "advantage"
            against = Against(coef, discount=reference.discount) if penalised else None
            stream.add("reference", samples.samples, self._reference_logprobs, against)
        own = self.config.advantage
        if self._critic is None:
            whiten = rewarded if own.whiten else None
            stream.estimate(build_advantage(own), whiten=whiten, rewarded=rewarded)
        else:
            in_reward = self.reference is not None and reference.placement == "reward"
            self._critic.estimate(stream, rewarded, coef if in_reward else 0.0)
        metrics = stream.measure()
        if "log_ratio" in metrics:
            metrics |= {"kl/mean": metrics.pop("log_ratio")} | self._by_teacher(stream, samples)
        if self.reference is not None:
            metrics |= self._apart(stream.mean_log_ratio("reference", samples.samples), coef, step)
        return stream, metrics

    def _by_teacher(self, stream: PolicyStream, samples: StepSamples) -> dict[str, float]:
        """Return `kl/TEACHER`, with k1."""
        lots: dict[str | None, list[Sample]] = {}
        for sample in samples.samples:
            lots.setdefault(sample.teacher, []).append(sample)
        found = {f"kl/{name}": stream.mean_log_ratio("teacher", lot) for name, lot in lots.items()}
        return {name: value for name, value in found.items() if value is not None}

    def _apart(self, measured: float | None, coef: float, step: StepContext) -> dict[str, float]:
        """Return the distance of the reference, unless a loss reports it. With a target, store the
        coefficient of the next step in the counters, which checkpoints save.
        """
        found = {} if measured is None or self._penalty is not None else {"reference_kl": measured}
        reference = self.config.reference_kl
        if reference.target is None or measured is None:
            return found if reference.target is None else {_COEF: coef}
        if step.index >= self.config.critic_warmup:  # before, the policy stays and no coefficient moves it
            step.counters[_COEF] = next_coefficient(coef, measured, reference.target, reference.gain)
        return found | {_COEF: coef, "reference_kl/measured": measured}

    def _reference_logprobs(self, samples: Sequence[Sample]) -> list[Any]:
        assert self.reference is not None
        return self.reference.logprobs(samples, self.student.backend.temperature)

    def _update(
        self, samples: StepSamples, part: list[Sample], stream: PolicyStream, rewarded: set[str]
    ) -> Update:
        config = self.config
        opd, correction = config.opd, config.policy_loss.correction
        # k1 is in the advantages of all samples. Any other divergence is its own stream.
        apart = opd is not None and not isinstance(opd.loss, SampledTokenK1)
        among = [sample for sample in part if sample.uid in rewarded] if apart else part
        scale = self._scales(among, stream)
        taught, kept = (self._scales(part), self._scales(part, stream)) if apart else ({}, {})
        by_turn = config.policy_loss.aggregation == "turn"

        def weighed(sample: Sample, mask: np.ndarray, scale: float) -> np.ndarray:
            return weigh(mask, scale, turn_shares(sample.loss_mask, mask) if by_turn else None)

        def terms(sample: Sample) -> TokenTerms:
            own, found = stream.of(sample), TokenTerms.zeros(len(sample.response_ids))
            found.old_logprobs, found.advantages = own.old_logprobs, own.advantages
            found.policy_weight = weighed(sample, own.mask, scale.get(sample.uid, 0.0)) * own.weight
            found.ref_logprobs = own.ref_logprobs
            if opd is not None and apart:
                every = weighed(sample, sample.loss_mask, opd.coef * taught[sample.uid])
                left = weighed(sample, own.mask, opd.coef * kept[sample.uid])
                weigh_divergence(found, opd.loss, correction, own, every, left)
            return found

        if self.teachers is not None:
            return self.teachers.update(samples, part, terms, config.to_batch, "specialist.to_batch")
        if config.to_batch is None:
            return Update(part, samples.batches(part, terms))
        whole = RolloutBatch(part, [terms(sample) for sample in part])
        return Update.of(convert_batch(whole, config.to_batch, "specialist.to_batch"))

    def _scales(self, samples: Sequence[Sample], stream: PolicyStream | None = None) -> dict[str, float]:
        """Return the weight of a token of each sample, by uid. It is over all tokens of the loss masks, or
        over those left by the correction of `stream`.
        """
        aggregation, limit = self.config.policy_loss.aggregation, self._rollout.max_new_tokens
        if stream is None:
            counts = [sample.trainable_tokens for sample in samples]
            turns = [turns_of(sample.loss_mask) for sample in samples]
        else:
            counts = [stream.kept(sample) for sample in samples]
            turns = [stream.kept_turns(sample) for sample in samples]
        return response_scales(samples, counts, aggregation, limit, turns)

    def ended(self, step: StepContext, metrics: dict[str, float]) -> dict[str, float]:
        """Return mismatch, if the update found it, the teachers' counters, and the learning curve, if any."""
        counters = {} if self.teachers is None else self.teachers.take_counters(step, metrics)
        if self._probe and "grad_norm" in metrics:  # there was something to learn from
            counters |= self._probe.take()
        every, prompts = self.config.evaluate_every, self._recipe.evaluation.curve_prompts
        if not every or (step.index + 1) % every:
            return counters
        from opd.pipelines.evaluation.measure import held_out_accuracy

        with step.timer("evaluate"), self.source.idle():
            return counters | held_out_accuracy(self.student, self.data, self._domains, prompts)

    def headline(self, metrics: dict[str, float]) -> str:
        led = f"  KL {metrics['kl/mean']:.4f}" if "kl/mean" in metrics else ""
        return f"reward {metrics['reward/mean']:.3f}{led}"

    def _watch_signal(self, step: StepContext, signal: bool, *, cut: bool) -> None:
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
        more = "specialist.refill" if self.config.refill is None else "a larger specialist.refill.limit"
        way = f"check the reward, and max_new_tokens if all are `truncated`; raise group_size, or take {more}"
        if self._cut:
            why = f"all responses of the {last} were cut, which shaping.mask_truncated masks"
            way = "raise rollout.max_new_tokens"
        elif self.config.group_filter is not None:
            why += f" or was refused by specialist.group_filter {self.config.group_filter}"
        return TrainingError(f"{self.stage}: {why}, so there is nothing to learn from; {way}.")


def _split(samples: list[Sample], parts: int) -> list[list[Sample]]:
    """Split `samples` into at most `parts` consecutive slices of nearly as many responses, none empty.
    Branches stay with their episode.
    """
    episodes = [list(own) for _, own in groupby(samples, key=lambda sample: sample.episode)]
    parts = min(parts, len(episodes))
    bounds = [round(i * len(episodes) / max(parts, 1)) for i in range(parts + 1)]
    return [list(chain.from_iterable(episodes[a:b])) for a, b in pairwise(bounds)]
