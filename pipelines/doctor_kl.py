"""How far each existing teacher is from the student, on a few responses the student writes itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.config import Recipe
from opd.pipelines.doctor_checks import Finding, attempt, given_teachers
from opd.types import RolloutRequest

if TYPE_CHECKING:
    from opd.data.prompts import Domain
    from opd.models.causal_lm import CausalLM

FAR = 0.19
"""Nats per token above which a merge is in doubt; teachers of the student's own origin measure near 0.04."""
_PROMPTS, _NEW_TOKENS = 8, 32


def check_kl(recipe: Recipe, domains: Mapping[str, Domain], tokenizer: Any) -> list[Finding]:
    """KL(student || teacher) for every domain and teacher that exists; loads the models."""
    teachers = given_teachers(recipe)
    if recipe.model.path is None or not Path(recipe.model.path).is_dir() or not teachers:
        return []
    from opd.pipelines.student import load_model

    student = load_model(recipe, Path(recipe.model.path))
    findings: list[Finding] = []
    for name, path in teachers.items():
        teacher = load_model(recipe, path)
        for domain in domains.values():
            if name in recipe.teacher_weights(domain.name):
                title = f"KL to {name} on {domain.name}"
                findings += attempt(
                    title, lambda t=teacher, d=domain, s=title: _check(recipe, d, student, t, tokenizer, s)
                )
    return findings


def _check(
    recipe: Recipe, domain: Domain, student: CausalLM, teacher: CausalLM, tokenizer: Any, title: str
) -> list[Finding]:
    sequences = sample_responses(recipe, domain, student, tokenizer)
    value = mean_kl(student, teacher, sequences, len(tokenizer), recipe.rollout.temperature)
    text = f"{value:.3f} nats per token"
    if value > FAR:
        detail = f"{text}, above {FAR}: the student rarely writes what this teacher would, a merge may fail"
        return [Finding("warning", title, f"{detail}; prefer a teacher trained from this student")]
    return [Finding("ok", title, text)]


def sample_responses(
    recipe: Recipe, domain: Domain, student: CausalLM, tokenizer: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(prompt ids `[C]`, response ids `[R]`) of a few held-out prompts, sampled as the recipe does."""
    from opd.data.load import encode_prompt
    from opd.pipelines.student import sampling_params
    from opd.rollout.torch_engine import TorchEngine

    prompts = [encode_prompt(prompt, tokenizer) for prompt in domain.held_out[:_PROMPTS]]
    sampling = sampling_params(recipe, tokenizer)
    sampling = replace(sampling, max_new_tokens=min(_NEW_TOKENS, sampling.max_new_tokens))
    requests = [
        RolloutRequest(f"doctor/{domain.name}/{number}", prompt, sampling, recipe.seed)
        for number, prompt in enumerate(prompts)
    ]
    written: dict[str, list[int]] = {request.uid: [] for request in requests}
    engine = TorchEngine(
        student,
        max_running=_PROMPTS,
        max_sequence=recipe.rollout.max_sequence,
        vocab_size=len(tokenizer),
    )
    for step in engine.generate(requests):
        for uid, token in zip(step.uids, step.token_ids, strict=True):
            written[uid].append(int(token))
    return [(request.prompt_ids, np.array(written[request.uid], np.int32)) for request in requests]


def mean_kl(
    student: CausalLM,
    teacher: CausalLM,
    sequences: Sequence[tuple[np.ndarray, np.ndarray]],
    vocabulary: int,
    temperature: float,
) -> float:
    """Mean KL(student || teacher) over all response tokens, in nats, over the first `vocabulary` tokens."""
    import torch

    from opd.kernels.ops import linear_kl

    device = student.device
    lengths = [len(prompt) + len(response) for prompt, response in sequences]
    starts = np.cumsum([0, *lengths])
    rows = [
        start + np.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
        for start, (prompt, response) in zip(starts[:-1], sequences, strict=True)
    ]
    ids = torch.as_tensor(np.concatenate([np.concatenate(pair) for pair in sequences]), dtype=torch.int64).to(
        device
    )
    positions = torch.as_tensor(np.concatenate([np.arange(length) for length in lengths])).to(device)
    cu_seqlens = torch.as_tensor(starts, dtype=torch.int32).to(device)
    chosen = torch.as_tensor(np.concatenate(rows)).to(device)
    with torch.no_grad():
        hidden = [model.hidden(ids, positions, cu_seqlens)[chosen] for model in (student, teacher)]
        heads = [model.head(vocabulary) for model in (student, teacher)]
        divergence = linear_kl(hidden[0], heads[0], hidden[1], heads[1], temperature=temperature)
    return float(divergence.mean())
