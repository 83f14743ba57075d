"""Train on static samples: off-policy distillation, and the warm-up of a base made from scratch.

The first is a baseline of the merge, supervised on its teachers' answers. The second starts from random
weights, with demonstrations of mixed quality.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from opd.config import OptimConfig, Recipe, WarmupConfig
from opd.errors import ConfigError, TrainingError
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.generation import generation_of
from opd.models.token_ids import ids_of_texts
from opd.pipelines.evaluation.measure import held_out_accuracy
from opd.pipelines.records.stage_names import of_round
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet, load_domains, student_tokenizer
from opd.pipelines.stages.loop import Algorithm, Extent, LoopState, Plan, StepContext, Update, train
from opd.pipelines.stages.precision import model_dtype
from opd.pipelines.stages.sample_source import StaticSource
from opd.pipelines.stages.samples import StepSamples
from opd.pipelines.stages.stage_rollout import StageLogs, fault_tolerant, open_logs
from opd.pipelines.stages.student import (
    Student,
    open_engine,
    sampling_params,
    stop_strings,
    ways_of,
    with_stop_strings,
)
from opd.pipelines.stages.teachers import whole_teacher
from opd.progress import set_activity
from opd.rollout.collect import generate_groups
from opd.rollout.engine_pool import EnginePool
from opd.rollout.shared_groups import write_shared
from opd.teachers.schedule import Router
from opd.train.loss_weights import normalised_scales, policy_scales, token_weights, turn_shares, turns_of
from opd.train.optimizer import learning_rate
from opd.train.terms import CrossEntropyTerm
from opd.types import Sample, SampleGroup, Status, TokenTerms

_log = logging.getLogger(__name__)

MERGE = "merge"
"""The merge's stage. Its uids route the prompts to the same teachers."""


class SupervisedAlgorithm(Algorithm):
    """Cross-entropy on static samples.

    Args:
        shares: Each domain's share of the loss. `None`: every token weighs the same.
        normalise: The unit of equal weight within a share, as in the merge. `teacher`: its tokens.
    """

    def __init__(
        self, optim: OptimConfig, shares: dict[str, float] | None = None, normalise: str = "teacher"
    ) -> None:
        self.optim, self._shares, self._normalise = optim, shares, normalise

    def score(self, samples: StepSamples, step: StepContext) -> dict[str, float]:
        return {}

    def plan(self, samples: StepSamples, step: StepContext) -> Plan:
        samples.deal_samples()
        learned = samples.samples
        counts = [sample.trainable_tokens for sample in learned]
        if self._shares is None:
            scales = policy_scales(counts, "token")
            scale = {sample.uid: value for sample, value in zip(learned, scales, strict=True)}
        else:
            domains = [sample.domain for sample in learned]
            turns = [turns_of(sample.loss_mask) for sample in learned]
            scale = normalised_scales(learned, counts, domains, self._shares, turns, self._normalise)

        def sample_terms(sample: Sample) -> TokenTerms:
            terms = TokenTerms.zeros(len(sample.response_ids))
            shares = turn_shares(sample.loss_mask) if self._normalise == "turn" else None
            terms.ce_weight = token_weights(sample.loss_mask, scale[sample.uid], shares)
            return terms

        return Plan([Update(learned, samples.batch_reader(learned, sample_terms))])

    def progress_text(self, metrics: dict[str, float]) -> str:
        return f"cross-entropy {metrics['loss/ce']:.3f}"


def distill_off_policy(context: StageContext, start: Path, out: Path, tokens: int) -> dict[str, Any]:
    """Train the model in `start` on samples of its *teachers*, for `tokens` response tokens.

    It is the baseline of the merge: same teachers, same prompts, same settings, but supervised on the
    teachers' trajectories instead of scored on the student's own. Its student tokens are the trained ones. Of
    a mixture only the teacher of the largest weight generates.
    """
    recipe = context.recipe
    config = recipe.distill
    student = Student.open(context, start, config.optim, config.batch, [CrossEntropyTerm()])
    data = DomainSet.open(recipe, student.tokenizer)
    with open_logs(context) as logs:  # a resumed stage reads earlier answers from it
        steps = dict.fromkeys(recipe.domains, range(config.steps))
        written = teacher_samples(context, data, student, logs, steps)

    weights = {name: domain.weight for name, domain in recipe.domains.items()}
    shares = None if config.normalise == "token" else weights
    algorithm = SupervisedAlgorithm(config.optim, shares, config.normalise)
    source = StaticSource(lambda index: written[index % len(written)], student)
    extent = Extent(tokens=tokens)
    result = train(context, algorithm, source, student.backend, extent, config.checkpoint_every)
    return result | {"digest": student.export_model(out, context.stage_card(result))}


def teacher_samples(
    context: StageContext,
    data: DomainSet,
    student: Student,
    logs: StageLogs | None,
    steps: Mapping[str, range],
) -> dict[int, list[Sample]]:
    """Return the teachers' responses to the merge's prompts by step, of the `steps` of each domain. One
    teacher writes at a time. Logged responses come from `logs`. Of a mixture only the teacher of the largest
    weight generates.
    """
    recipe = context.recipe
    used = {name for domain in steps for name in recipe.teacher_weights(domain)}
    teachers = [name for name in Router.from_recipe(recipe).teacher_names if name in used]
    by_step: dict[int, list[Sample]] = {step: [] for step in sorted(set().union(*steps.values()))}
    context.ranks.main_first(
        lambda: [whole_teacher(context, teacher) for teacher in teachers], "the teachers' models"
    )
    for teacher in teachers:
        for step, group in _teacher_groups(teacher, context, data, student, logs, steps):
            by_step[step].extend(group.samples_with_branches)
    return by_step


def _teacher_groups(
    teacher: str,
    context: StageContext,
    data: DomainSet,
    student: Student,
    logs: StageLogs | None,
    steps: Mapping[str, range],
) -> Iterator[tuple[int, SampleGroup]]:
    """Yield (step, responses to one of its prompts) of all prompts of the merge that are `teacher`'s."""
    recipe = context.recipe
    config, router = recipe.distill, Router.from_recipe(recipe)
    path, merge = whole_teacher(context, teacher), of_round(MERGE, context.round)
    embedded = open_engine(recipe, path, context.ranks, student.tokenizer)
    engine = with_stop_strings(recipe, embedded, student.tokenizer)
    if logs is not None:
        stops = stop_strings(recipe, student.tokenizer)
        engine = fault_tolerant(context, EnginePool([embedded]), logs, stops)
    ways = ways_of(recipe, student.tokenizer, teacher=path)
    for domain, asked_steps in steps.items():
        count, prompts = recipe.for_domain(domain).distill.prompts_per_domain, []
        for prompt in data.next_prompts(domain, asked_steps.start * count, len(asked_steps) * count, merge):
            router.set_step(int(prompt.uid.rsplit("/", 1)[1]) // count)
            route = router.route_group(domain, prompt.uid)
            largest = max(zip(route.weights, route.teachers, strict=True), key=lambda pair: pair[0])
            if largest[1] == teacher:
                prompts.append(prompt)
        with set_activity(f"{teacher} answers {len(prompts)} prompts of {domain}"):
            groups = write_shared(
                context.ranks,
                prompts,
                lambda mine: generate_groups(
                    engine, [one.for_teacher() for one in mine], config.samples_per_prompt, ways, recipe.seed
                ),
                student.barrier,
                engine,
            )
        asked = {prompt.uid: prompt.token_ids for prompt in prompts}
        for group in groups:
            for sample in group.samples:
                sample.prompt_ids = asked[group.uid]  # the student's, whatever the teacher has answered
            yield int(group.uid.rsplit("/", 1)[1]) // count, group


def new_base(recipe: Recipe, folder: Path) -> None:
    """Write a freshly initialised model of the recipe's configuration, with its tokenizer."""
    tokenizer = student_tokenizer(recipe, load_domains(recipe).values())
    model = CausalLM.from_config(
        recipe.model.config or {},
        tokenizer=tokenizer,
        dtype=model_dtype(recipe),
        device=recipe.model.device,
        seed=recipe.seed,
    )
    model.module.generation_config = generation_of(tokenizer, sampling_params(recipe, tokenizer))
    save_checkpoint(model, tokenizer, folder, {"about": f"Random weights, seed {recipe.seed}: untrained."})


def warm_up(context: StageContext, start: Path, out: Path) -> dict[str, Any]:
    """Train the model in `start` on demonstrations of mixed quality and write it to `out`.

    If it samples fewer right answers than `min_accuracy` in some domain, it trains for another round of
    `steps`. Raises `TrainingError` if that is still so after the last round.
    """
    recipe = context.recipe
    config = recipe.base or WarmupConfig()
    student = Student.open(all_weights(context), start, config.optim, config.batch, [CrossEntropyTerm()])
    data = DomainSet.open(recipe, student.tokenizer)
    algorithm = WarmUp(context, config, student, data)
    source = StaticSource(
        lambda index: _step_demonstrations(data, config, student.tokenizer, recipe.seed, index), student
    )
    extent = _WarmUpExtent(steps=config.steps)
    result = train(context, algorithm, source, student.backend, extent, config.checkpoint_every)
    accuracy = algorithm.measure_accuracy(result["steps"])
    if short := _describe_shortfall(accuracy, config):
        raise TrainingError(
            f"after {config.rounds} rounds of warm-up {short}; raise base.steps, base.rounds or base.right"
        )
    return result | accuracy | {"digest": student.export_model(out, context.stage_card(result))}


class WarmUp(SupervisedAlgorithm):
    """Rounds of cross-entropy on demonstrations, as many as needed."""

    def __init__(
        self, context: StageContext, config: WarmupConfig, student: Student, data: DomainSet
    ) -> None:
        super().__init__(config.optim)
        self._context, self._config, self._student, self._data = context, config, student, data
        self._measured: dict[int, dict[str, float]] = {}

    def count_tokens(self, samples: StepSamples) -> int:
        return 0  # the student did not generate the demonstrations

    def step_rate(self, step: StepContext) -> float:
        within = step.index % self._config.steps
        return learning_rate(self.optim, within, within / self._config.steps)

    def finish_step(self, step: StepContext, metrics: dict[str, float]) -> dict[str, float]:
        done, config = step.index + 1, self._config
        if done % config.steps == 0 and done < config.steps * config.rounds:
            with step.timer("evaluate"):
                short = _describe_shortfall(self.measure_accuracy(done), config)
            if self._context.ranks.any_rank(bool(short), "the end of a round"):
                step.counters[_MORE_ROUNDS] = step.counters.get(_MORE_ROUNDS, 0.0) + 1.0
                _log.info("another round of warm-up: %s", short)
        return {}

    def measure_accuracy(self, version: int) -> dict[str, float]:
        """Return `accuracy/DOMAIN` of the present weights, which are of `version`."""
        if version not in self._measured:
            self._student.push_weights(version)
            domains = list(self._context.recipe.domains)
            self._measured[version] = held_out_accuracy(self._student, self._data, domains, 500)
        return self._measured[version]


_MORE_ROUNDS = "rounds_more"
"""Counter: rounds after the first. Checkpoints have it, so that a resumed stage ends at the same step."""


class _WarmUpExtent(Extent):
    """`steps`, and as many again for every further round."""

    def progress(self, state: LoopState) -> float:
        return min(1.0, state.step / self.total_steps(state))

    def total_steps(self, state: LoopState) -> int:
        return (self.steps or 1) * (1 + int(state.counters.get(_MORE_ROUNDS, 0)))


def _describe_shortfall(accuracy: Mapping[str, float], config: WarmupConfig) -> str:
    """Describe the domains below `min_accuracy`. Empty if there are none."""
    shares = [
        f"{share:.1%} in {name.removeprefix('accuracy/')}"
        for name, share in accuracy.items()
        if share < config.min_accuracy
    ]
    floor = f"base.min_accuracy = {config.min_accuracy:.1%}"
    return f"the base samples fewer right answers than {floor}: {', '.join(shares)}" if shares else ""


def _step_demonstrations(
    data: DomainSet, config: WarmupConfig, tokenizer: PreTrainedTokenizerBase, seed: int, step: int
) -> list[Sample]:
    """Return the step's demonstrations, a pure function of (seed, step)."""
    rng = np.random.default_rng([seed, step])
    names = list(data.domains)
    prompts = data.mixed_prompts(names, step * config.batch_size, config.batch_size, "warm-up")
    texts = []
    for prompt in prompts:
        demonstrate = data.domains[prompt.domain].demonstrations
        if demonstrate is None:
            raise ConfigError(
                f"domain {prompt.domain} has no demonstrations to warm up on; give model.path, not base."
            )
        texts.append(demonstrate(prompt.metadata["prompt"], rng, config.right, config.wrong_rule))
    end: Any = tokenizer.eos_token_id  # one number, though its annotation allows more
    return [
        supervised_sample(prompt.uid, prompt.domain, prompt.token_ids, [*ids, end])
        for prompt, ids in zip(prompts, ids_of_texts(tokenizer, texts), strict=True)
    ]


def supervised_sample(
    uid: str,
    domain: str,
    prompt_ids: np.ndarray,
    response_ids: Sequence[int] | np.ndarray,
    mask: np.ndarray | None = None,
) -> Sample:
    """Return a sample of given tokens. Those of `mask` `[R]` bool are trained on. `None`: all of them."""
    return Sample(
        uid=uid,
        group_uid=uid,
        domain=domain,
        prompt_ids=prompt_ids,
        response_ids=np.array(response_ids, dtype=np.int32),
        loss_mask=np.ones(len(response_ids), dtype=bool) if mask is None else mask.copy(),
        status=Status.COMPLETED,
    )


def all_weights(context: StageContext) -> StageContext:
    """Return `context` of a stage that trains all weights, even if the recipe has adapters."""
    recipe = context.recipe
    model = recipe.model.model_copy(update={"lora": None})
    return replace(context, recipe=recipe.model_copy(update={"model": model}))
