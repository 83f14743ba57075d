"""Off-policy distillation: the student is supervised on what its teachers wrote. A baseline of the merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd.algorithms.normalise import per_teacher_weights, token_weights
from opd.pipelines.context import StageContext
from opd.pipelines.domains import DomainSet
from opd.pipelines.loop import Extent, Step, StepResult, run_loop, within
from opd.pipelines.student import Student, load_model, make_writer, sampling_params
from opd.pipelines.teachers import whole_teacher
from opd.rollout.shared import write_shared
from opd.teachers.schedule import Route, Router
from opd.train.schedule import learning_rate
from opd.train.terms import CrossEntropyTerm
from opd.types import RolloutBatch, Sample

MERGE = "merge"
"""The merge's stage: with its uids the prompts are routed to the same teachers."""


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

    def step(step: Step) -> StepResult:
        first = step.index * per_step % len(written)
        samples = written[first : first + per_step]
        samples = within(samples, lambda sample: sample.trainable_tokens, step.tokens_left)
        masks = [s.loss_mask for s in samples]
        domains = [s.domain for s in samples]
        shares = {name: domain.weight for name, domain in recipe.domains.items()}
        weights = (
            per_teacher_weights(masks, domains, shares)
            if config.normalise == "teacher"
            else token_weights(masks)
        )
        student.backend.mine(samples)
        with step.timer("train"):
            metrics = student.backend.forward_backward(RolloutBatch.supervised(samples, weights))
            metrics |= student.backend.step(learning_rate(config.optim, step.index, step.progress))
        trained = sum(s.trainable_tokens for s in samples)
        return StepResult(metrics, trained, f"cross-entropy {metrics['loss/ce']:.3f}")

    result = run_loop(context, student.backend, Extent(tokens=tokens), config.checkpoint_every, step)
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
