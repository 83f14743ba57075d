"""Off-policy distillation: the student is supervised on what its teachers wrote. A baseline of the merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd.algorithms.loss_weights import per_teacher_scales, policy_scales, weigh
from opd.config import OptimConfig
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.loop import Algorithm, Extent, Plan, Step, Update, train
from opd.pipelines.stages.samples import StepSamples
from opd.pipelines.stages.source import Given
from opd.pipelines.stages.student import Student, load_model, make_writer, sampling_params
from opd.pipelines.stages.teachers import whole_teacher
from opd.rollout.shared import write_shared
from opd.teachers.schedule import Route, Router
from opd.train.terms import CrossEntropyTerm
from opd.types import Sample, TokenTerms

MERGE = "merge"
"""The merge's stage: with its uids the prompts are routed to the same teachers."""


class Supervised(Algorithm):
    """Cross-entropy on what somebody wrote.

    Args:
        optim: How it is learnt.
        shares: Each domain's share of the loss; `None`: every token weighs the same.
    """

    def __init__(self, optim: OptimConfig, shares: dict[str, float] | None = None) -> None:
        self.optim, self._shares = optim, shares

    def score(self, samples: StepSamples, step: Step) -> dict[str, float]:
        return {}

    def plan(self, samples: StepSamples, step: Step) -> Plan:
        samples.deal()
        own = samples.samples
        counts = [sample.trainable_tokens for sample in own]
        scales = policy_scales(counts, "token")
        if self._shares is not None:
            scales = per_teacher_scales(counts, [sample.domain for sample in own], self._shares)
        scale = {sample.uid: value for sample, value in zip(own, scales, strict=True)}

        def terms(sample: Sample) -> TokenTerms:
            found = TokenTerms.zeros(len(sample.response_ids))
            found.ce_weight = weigh(sample.loss_mask, scale[sample.uid])
            return found

        return Plan([Update(own, samples.batches(own, terms))])

    def headline(self, metrics: dict[str, float]) -> str:
        return f"cross-entropy {metrics['loss/ce']:.3f}"


def distill_off_policy(context: StageContext, start: Path, out: Path, tokens: int) -> dict[str, Any]:
    """Train the model in `start` on samples its *teachers* wrote, for `tokens` response tokens.

    The baseline of the merge: same teachers, same prompts, same settings, but supervised on the teachers'
    trajectories instead of scored on the student's own. Its student tokens are those it was trained on. Of a
    mixture only the teacher of the largest weight writes.
    """
    recipe = context.recipe
    config = recipe.distill
    student = Student.open(context, start, config.optim, config.batch, [CrossEntropyTerm()])
    data = DomainSet.open(recipe, student.tokenizer, context.note)
    written = _teacher_samples(context, data, student, config.steps)
    per_step = len(recipe.domains) * config.prompts_per_domain * config.samples_per_prompt

    def samples(index: int) -> list[Sample]:
        first = index * per_step % len(written)
        return written[first : first + per_step]

    weights = {name: domain.weight for name, domain in recipe.domains.items()}
    algorithm = Supervised(config.optim, weights if config.normalise == "teacher" else None)
    source = Given(samples, student.backend)
    extent = Extent(tokens=tokens)
    result = train(context, algorithm, source, student.backend, extent, config.checkpoint_every)
    return result | {"digest": student.export(out, context.card(result))}


def _teacher_samples(context: StageContext, data: DomainSet, student: Student, steps: int) -> list[Sample]:
    """The teachers' responses to the merge's prompts, in the merge's order, one teacher at a time."""
    recipe = context.recipe
    config = recipe.distill
    router = Router.from_recipe(recipe)
    by_step: list[list[Sample]] = [[] for _ in range(steps)]
    context.ranks.main_first(lambda: [whole_teacher(context, teacher) for teacher in router.teachers])
    for teacher in router.teachers:
        path = whole_teacher(context, teacher)
        model = load_model(recipe, path, tokenizer=student.tokenizer)
        engine = make_writer(recipe, model, student.tokenizer)
        sampling = sampling_params(recipe, student.tokenizer, teacher=path)
        for domain in recipe.domains:
            count = config.prompts_per_domain
            prompts = [
                prompt
                for prompt in data.take(domain, 0, steps * count, MERGE)
                if main_of(router.route(domain, prompt.uid)) == teacher
            ]
            groups = write_shared(
                context.ranks,
                prompts,
                lambda mine, engine=engine, sampling=sampling: data.generate(
                    engine, mine, config.samples_per_prompt, sampling, recipe.seed
                ),
            )
            for group in groups:
                number = int(group.uid.rsplit("/", 1)[1])
                by_step[number // count].extend(group.samples)
    return [sample for samples in by_step for sample in samples]


def main_of(route: Route) -> str:
    """The teacher of the largest weight."""
    return max(zip(route.weights, route.teachers, strict=True), key=lambda pair: pair[0])[1]
