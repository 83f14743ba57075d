"""How far each existing teacher is from the student, on a few responses the student writes itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config import Recipe
from opd.models.token_ids import id_count
from opd.pipelines.doctor.checks import Finding, attempt, given_teachers
from opd.pipelines.doctor.rewards import check_rewards
from opd.pipelines.stages.precision import model_dtype
from opd.types import HiddenStates, RolloutRequest, Sample

if TYPE_CHECKING:
    from opd.models.causal_lm import CausalLM
    from opd.protocols import Teacher
    from opd.rollout.prompts import Domain

FAR = 3.1
"""Nats per token: the farthest start that a merge was measured from. The quick start's base begins at 0.7 to
3.1 from its teachers, and its merge keeps 99.8 % of their accuracy."""
_PROMPTS, _NEW_TOKENS, _ANSWERS = 8, 32, 3


def check_kl(recipe: Recipe, domains: Mapping[str, Domain], tokenizer: Any) -> list[Finding]:
    """KL(student || teacher) for every domain and teacher that exists; loads the models."""
    teachers = given_teachers(recipe)
    if recipe.model.path is None or not Path(recipe.model.path).is_dir() or not teachers:
        return []
    from opd.pipelines.stages.student import load_model

    student = load_model(recipe, Path(recipe.model.path))
    taught, followed = recipe.taught(), recipe.followed()
    findings: list[Finding] = []
    for name, source in teachers.items():
        teacher = _open(recipe, name, source, id_count(tokenizer))
        for domain in domains.values():
            if domain.name in (*taught.get(name, ()), *followed.get(name, ())):
                title = f"KL to {name} on {domain.name}"
                findings += attempt(
                    title, lambda t=teacher, d=domain, s=title: _check(recipe, d, student, t, tokenizer, s)
                )
    return findings


def check_base(recipe: Recipe, domains: Mapping[str, Domain], tokenizer: Any) -> list[Finding]:
    """What each reward says of a few answers of a base that exists; loads the model."""
    if recipe.model.path is None or not Path(recipe.model.path).is_dir():
        return []
    from opd.pipelines.stages.student import load_model

    student = load_model(recipe, Path(recipe.model.path))
    written = {}
    for name, domain in domains.items():
        samples = sample_responses(recipe, domain, student, tokenizer)[:_ANSWERS]
        texts = [tokenizer.decode(own.response_ids.tolist(), skip_special_tokens=True) for own in samples]
        prompts = [domain.held_out[int(own.uid.rpartition("/")[2])] for own in samples]
        written[name] = list(zip(prompts, texts, strict=True))
    return check_rewards(recipe, domains, written)


def _open(recipe: Recipe, name: str, source: str, vocabulary: int) -> Teacher:
    from opd.teachers.kinds import Placement
    from opd.teachers.local_teacher import LocalTeacher
    from opd.teachers.skeleton import is_published
    from opd.teachers.streamed_teacher import streamed_teachers

    dtype, device = model_dtype(recipe), recipe.model.device
    if is_published(source):
        placement = Placement(dtype, device, recipe.distill.batch.max_tokens, vocabulary)
        return streamed_teachers({name: source}, placement)[name]
    return LocalTeacher(name, source, dtype=dtype, device=device, vocabulary=vocabulary)


def _check(
    recipe: Recipe, domain: Domain, student: CausalLM, teacher: Teacher, tokenizer: Any, title: str
) -> list[Finding]:
    samples = sample_responses(recipe, domain, student, tokenizer)
    value = mean_kl(student, teacher, samples, id_count(tokenizer), recipe.rollout.temperature)
    text, numbers = f"{value:.3f} nats per token at the start", {"kl": value}
    if value > FAR:
        detail = (
            f"{text}; no merge was measured from beyond {FAR}: the student rarely writes what this teacher"
            " would; prefer a teacher trained from this student, or give the merge more steps"
        )
        return [Finding("warning", title, detail, numbers)]
    return [Finding("ok", title, text, numbers)]


def sample_responses(recipe: Recipe, domain: Domain, student: CausalLM, tokenizer: Any) -> list[Sample]:
    """The student's responses to a few held-out prompts, sampled as the recipe does; a uid ends with the
    place of its prompt among them.
    """
    from opd.pipelines.stages.domains import prompt_room, template_arguments
    from opd.pipelines.stages.student import sampling_params
    from opd.rollout.collect import responses
    from opd.rollout.prompts import encode_prompt, truncated
    from opd.rollout.torch_engine import TorchEngine

    recipe = recipe.for_domain(domain.name)
    room, kwargs = prompt_room(recipe, tokenizer, domain.name), template_arguments(recipe, domain.name)
    prompts = [
        truncated(encode_prompt(prompt, tokenizer, kwargs), room.tokens, tokenizer.bos_token_id)
        for prompt in domain.held_out[:_PROMPTS]
    ]
    sampling = sampling_params(recipe, tokenizer)
    sampling = replace(sampling, max_new_tokens=min(_NEW_TOKENS, sampling.max_new_tokens))
    requests = [
        RolloutRequest(f"doctor/{domain.name}/{number}", prompt, sampling, recipe.seed)
        for number, prompt in enumerate(prompts)
    ]
    engine = TorchEngine(
        student,
        max_running=_PROMPTS,
        max_sequence=recipe.rollout.max_sequence,
        vocab_size=id_count(tokenizer),
        settings=recipe.runtime.decode,
    )
    written = {uid: tokens.token_ids for uid, _, tokens in responses(engine, requests)}
    return [
        Sample(request.uid, request.uid, domain.name, request.prompt_ids, response_ids=ids)
        for request in requests
        if len(ids := written[request.uid])
    ]


def mean_kl(
    student: CausalLM, teacher: Teacher, samples: Sequence[Sample], vocabulary: int, temperature: float
) -> float:
    """Mean KL(student || teacher) over all response tokens, in nats, over the first `vocabulary` tokens."""
    import torch

    from opd.kernels.ops import linear_kl
    from opd.teachers.score_cache import check_finite
    from opd.train.packing import pack_tokens

    with torch.no_grad():
        ids, positions, cu_seqlens, rows = (t.to(student.device) for t in pack_tokens(samples))
        hidden = student.hidden(ids, positions, cu_seqlens)[rows]
        targets = teacher.score(samples)
        assert isinstance(targets, HiddenStates)  # of a teacher in this process
        check_finite(hidden, "the student")
        check_finite(targets.rows, f"teacher {teacher.name}")
        divergence = linear_kl(
            hidden, student.head(vocabulary), targets.rows, teacher.load_head(), temperature=temperature
        )
    return float(divergence.mean())
