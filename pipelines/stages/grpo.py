"""GRPO: a specialist on one domain, or the mixed-domain baseline on all of them."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config.rl import GAEAdvantage
from opd.errors import TrainingError
from opd.models.causal_lm import CausalLM
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.loop import Algorithm, Extent, Plan, Step, Update, train
from opd.pipelines.stages.policy_stream import Against, PolicyStream
from opd.pipelines.stages.samples import StepSamples, rollout_metrics
from opd.pipelines.stages.source import Asked, open_source
from opd.pipelines.stages.student import Student, load_model
from opd.rollout.collect import EncodedPrompt
from opd.train.advantages import build_advantage, keep_groups
from opd.train.backend import Backend, response_logprobs
from opd.train.loss_weights import policy_scales, weigh
from opd.train.packing import convert_batch
from opd.train.shaping import changes_rewards, shape
from opd.train.terms import LossTerm, PolicyTerm, ReferenceTerm, next_coefficient
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
        grpo = GRPO(context, start, domains)
        student, config = grpo.student, grpo.config
        together = config.to_batch is not None
        asked = Asked(grpo.prompts, config.group_size, together=together, more=grpo.more)
        source = open_source(context, student, asked, stack)
        result = train(context, grpo, source, student.backend, extent, config.checkpoint_every)
    if result["counters"].get("steps_without_signal", 0) >= result["steps"]:
        raise grpo.no_signal(result["steps"])
    exported = {"digest": student.export(out, context.card(result))}
    return result | exported | {"stop_ids": student.stop_ids}


class GRPO(Algorithm):
    """Group-relative advantages, with a reference KL if the recipe asks for one.

    Args:
        context: The stage.
        start: The model to train; the frozen reference, too.
        domains: What it is trained on.
    """

    def __init__(self, context: StageContext, start: Path, domains: Sequence[str]) -> None:
        recipe, config = context.recipe, context.recipe.specialist
        self.config, self.optim, self.stage = config, config.optim, context.stage
        self.reference: CausalLM | None = None
        self._penalty = ReferenceTerm(config.reference_kl)
        terms: list[LossTerm] = [PolicyTerm(config.policy_loss, config.entropy_coef)]
        if config.reference_kl.coef:
            self.reference = load_model(recipe, start)
            if config.reference_kl.placement == "loss":
                terms.append(self._penalty)
        self.student = Student.open(context, start, config.optim, config.batch, terms)
        self._critic = self._open_critic(context, start)
        self.data = DomainSet.open(recipe, self.student.tokenizer)
        self._shapes, self._cut = changes_rewards(config.shaping), False
        self._domains, self._recipe, self._rollout = list(domains), recipe, recipe.rollout
        self._choice = self._choose()

    def _choose(self) -> PromptChoice | None:
        """Who chooses prompts, where they are not simply the next ones."""
        if self.config.refill is None:
            return None
        from opd.pipelines.stages.prompt_choice import Judge, PromptChoice

        judge = Judge(self._reward, self._shape, self._carrying)
        return PromptChoice(self.data, self._domains, self.stage, self.config, judge)

    def begin(self, step: Step) -> None:
        if self._choice is not None:
            self._choice.begin(step.counters)

    def _open_critic(self, context: StageContext, start: Path) -> Critic | None:
        if not isinstance(self.config.advantage, GAEAdvantage):
            return None
        from opd.pipelines.stages.critic import Critic

        return Critic.open(context, start, self.student)

    def learners(self) -> dict[str, Backend]:
        return {} if self._critic is None else {"critic": self._critic.backend}

    def prompts(self, index: int) -> list[EncodedPrompt]:
        """Those of batch number `index`."""
        if self._choice is not None:
            return self._choice.first()
        count = self.config.prompts_per_step
        return self.data.mixed(self._domains, index * count, count, self.stage)

    def more(self, samples: StepSamples) -> list[EncodedPrompt]:
        """Prompts that are asked beside those of `samples`, for the same batch."""
        return [] if self._choice is None else self._choice.more(samples)

    def score(self, samples: StepSamples, step: Step) -> dict[str, float]:
        if self._choice is None or not self._choice.refills:
            self._reward(samples)
        metrics = rollout_metrics(samples.groups) | self._shape(samples, step.counters)
        return metrics | samples.drop_stale(step.index, self._rollout.max_staleness)

    def _reward(self, samples: StepSamples) -> None:
        samples.reward(self.data.rewards)

    def _shape(self, samples: StepSamples, counters: MutableMapping[str, float]) -> dict[str, float]:
        if not self._shapes:
            return {}
        return shape(samples.groups, self.config.shaping, self._limit, counters)

    def _keep(self, samples: StepSamples) -> list[SampleGroup]:
        config = self.config
        return keep_groups(
            samples.groups,
            config.group_filter,
            zero_variance=not config.filter_zero_variance,
            whole=samples.whole,
        )

    def _carrying(self, samples: StepSamples) -> list[SampleGroup]:
        """The groups that something is learned from."""
        return [group for group in self._keep(samples) if not all(map(self._masks, group.samples))]

    def _masks(self, sample: Sample) -> bool:
        return self.config.shaping.mask_truncated and sample.status is Status.TRUNCATED

    def _limit(self, domain: str) -> int:
        return self._recipe.for_domain(domain).rollout.max_new_tokens

    def plan(self, samples: StepSamples, step: Step) -> Plan:
        config = self.config
        chosen: dict[str, float] = {}
        if self._choice is None:
            samples.groups = self._keep(samples)
        else:
            chosen = self._choice.settle(samples, step.counters)
        learned = [sample for sample in samples.samples if not self._masks(sample)]
        self._watch_signal(step, bool(learned), cut=bool(samples.groups))
        if not learned:
            return Plan([], chosen)
        samples.deal()
        stream, metrics = self._stream(samples, learned, step)
        metrics = chosen | metrics
        parts = _split(learned, config.minibatches)
        if self._critic is not None:
            metrics |= self._critic.learn(samples, parts * config.epochs, stream, step)
            if step.index < config.critic_warmup:
                return Plan([], metrics)
        updates = [self._update(samples, part, stream) for part in parts]
        return Plan(updates * config.epochs, metrics)

    def _stream(
        self, samples: StepSamples, learned: Sequence[Sample], step: Step
    ) -> tuple[PolicyStream, dict[str, float]]:
        reference = self.config.reference_kl
        penalised = self.reference is not None and reference.placement == "advantage"
        coef = self._penalty.coef = step.counters.get(_COEF, reference.coef)
        against = Against(coef, discount=reference.discount) if penalised else None
        stream = PolicyStream(samples, self.config.policy_loss.correction, against)
        if self.reference is not None:
            stream.add_others(samples.samples, self._reference_logprobs, "the reference's log-probabilities")
        own = self.config.advantage
        if self._critic is None:
            stream.estimate(build_advantage(own), whiten=learned if own.whiten else None)
        else:
            in_reward = self.reference is not None and reference.placement == "reward"
            self._critic.estimate(stream, learned, coef if in_reward else 0.0)
        metrics = stream.measure()
        metrics.pop("log_ratio", None)
        if reference.target is not None:
            metrics |= self._hold(stream.mean_log_ratio(), coef, step)
        return stream, metrics

    def _hold(self, measured: float | None, coef: float, step: Step) -> dict[str, float]:
        """Note the coefficient of the next step, where a checkpoint keeps it; metrics of this one."""
        if measured is None:
            return {_COEF: coef}
        reference = self.config.reference_kl
        assert reference.target is not None
        step.counters[_COEF] = next_coefficient(coef, measured, reference.target, reference.gain)
        return {_COEF: coef, "reference_kl/measured": measured}

    def _reference_logprobs(self, samples: Sequence[Sample]) -> list[Any]:
        assert self.reference is not None
        return response_logprobs(self.reference, samples, self.student.backend.temperature, self.config.batch)

    def _update(self, samples: StepSamples, part: list[Sample], stream: PolicyStream) -> Update:
        aggregation, limit = self.config.policy_loss.aggregation, self._rollout.max_new_tokens
        scales = policy_scales([stream.kept(sample) for sample in part], aggregation, limit)
        scale = {sample.uid: value for sample, value in zip(part, scales, strict=True)}

        def terms(sample: Sample) -> TokenTerms:
            own, found = stream.of(sample), TokenTerms.zeros(len(sample.response_ids))
            found.old_logprobs, found.advantages = own.old_logprobs, own.advantages
            found.policy_weight = weigh(own.mask, scale[sample.uid]) * own.weight
            found.ref_logprobs = own.other_logprobs
            return found

        if self.config.to_batch is None:
            return Update(part, samples.batches(part, terms))
        whole = RolloutBatch(part, [terms(sample) for sample in part])
        return Update.of(convert_batch(whole, self.config.to_batch, "specialist.to_batch"))

    def headline(self, metrics: dict[str, float]) -> str:
        return f"reward {metrics['reward/mean']:.3f}"

    def _watch_signal(self, step: Step, signal: bool, *, cut: bool) -> None:
        """`cut`: where there is no signal, groups had some, but all of their responses are masked."""
        silent = 0.0 if signal else step.counters.get("steps_without_signal", 0.0) + 1
        step.counters["steps_without_signal"] = silent
        self._cut = cut
        if silent >= self.config.max_steps_without_signal:
            raise self.no_signal(int(silent))

    def no_signal(self, steps: int) -> TrainingError:
        """The error for `steps` steps in a row that nothing could be learned from."""
        last = "last step" if steps == 1 else f"last {steps} steps"
        why = f"every group of the {last} had equal rewards"
        way = "check the reward function, raise group_size or take a better base"
        if self._cut:
            why = f"all responses of the {last} were cut, which shaping.mask_truncated masks"
            way = "raise rollout.max_new_tokens"
        elif self.config.group_filter is not None:
            why += f" or was refused by specialist.group_filter {self.config.group_filter}"
        return TrainingError(f"{self.stage}: {why}, so there is nothing to learn from; {way}.")


def _split(samples: list[Sample], parts: int) -> list[list[Sample]]:
    """`samples` in at most `parts` consecutive pieces of nearly equal size, none empty."""
    parts = min(parts, len(samples))
    bounds = [round(i * len(samples) / parts) for i in range(parts + 1)]
    return [samples[a:b] for a, b in pairwise(bounds)]
