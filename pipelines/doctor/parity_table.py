"""`opd doctor --parity`: every back end scores the same samples of the student, and they are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opd.config import Recipe
from opd.errors import OpdError
from opd.models.token_ids import id_count
from opd.pipelines.commands.ending import one_line
from opd.pipelines.doctor.checks import given_teachers
from opd.pipelines.doctor.kl import sample_responses
from opd.pipelines.doctor.parity import (
    TOLERANCE,
    Mode,
    ParityProblem,
    ParityScores,
    by_kind,
    by_megatron,
    by_torch,
    difference,
)
from opd.pipelines.doctor.parity_ranks import RANKS, by_two_ranks
from opd.pipelines.stages.precision import model_dtype
from opd.teachers.kinds import Placement
from opd.types import Sample

if TYPE_CHECKING:
    from opd.models.causal_lm import CausalLM

REFERENCE = "torch"
ITSELF = "the student itself"
"""The teacher of the noise floor: what its KL is above 0 is the back end's rounding."""


def modes_of(recipe: Recipe) -> dict[str, Mode]:
    """The back ends that can run here, by name, the reference first."""
    modes: dict[str, Mode] = {REFERENCE: by_torch}
    if find_spec("megatron") is not None:
        modes["megatron TP 1"] = by_megatron
        on_gpu = recipe.model.device != "cpu" and torch.cuda.is_available()
        if not on_gpu or torch.cuda.device_count() >= RANKS:
            modes["megatron TP 2"] = by_two_ranks
    for settings in recipe.teachers.values():
        if settings.type not in ("local", "streamed", "megatron"):
            modes[settings.type] = by_kind(recipe, settings.type)
    return modes


def check_parity(
    recipe: Recipe, console: Console | None = None, modes: Mapping[str, Mode] | None = None
) -> int:
    """Compare and print a table; returns the exit status: 2 if back ends differ by more than they may.

    The teachers are those of the recipe that exist already, and the student itself. Its samples are answers
    to held-out prompts of every domain, and a prompt alone, and answers of one token.
    """
    console = console or Console()
    modes = modes_of(recipe) if modes is None else modes
    tolerance = TOLERANCE[model_dtype(recipe)]
    with _problem(recipe) as (problem, sources):
        found, failed = _score(problem, sources, modes)
    table = Table(title=Text(one_line(f"opd doctor --parity: {recipe.name}")), title_justify="left")
    for column in ("teacher", "back end", "max |Δ log p|", "max |Δ KL|", "mean KL at T 1, 0.7", ""):
        table.add_column(column, overflow="fold")
    wrong = len(failed)
    for teacher in sources:
        for mode, scores in found.items():
            if teacher not in scores:
                continue
            apart = difference(scores[teacher], found[REFERENCE][teacher])
            good = apart.within(tolerance)
            wrong += not good
            mark = "[green]ok[/]" if good else "[red]differs[/]"
            numbers = (f"{apart.logprobs:.1e}", f"{apart.kl:.1e}", _mean_kl(scores[teacher]))
            table.add_row(Text(teacher), mode, *numbers, mark)
    console.print(table)
    tokens, counts = len(problem.targets), [len(s.response_ids) for s in problem.samples]
    console.print(
        f"{len(counts)} samples, {tokens} response tokens, {counts.count(0)} responses of no token and"
        f" {counts.count(1)} of one; temperatures 1 and 0.7; {model_dtype(recipe)},"
        f" tolerance {tolerance:g} nats"
    )
    for mode, scores in found.items():
        if ITSELF not in scores:
            continue
        floor = max(float(values.abs().max()) for values in scores[ITSELF].kl.values())
        console.print(f"noise floor, {mode}: KL of the student to itself is at most {floor:.1e} nats")
    for mode, reason in failed.items():
        console.print(Text.assemble((f"{mode} was not compared:", "red"), f" {one_line(reason)}"))
    return 2 if wrong else 0


def _score(
    problem: ParityProblem, sources: Mapping[str, str], modes: Mapping[str, Mode]
) -> tuple[dict[str, dict[str, ParityScores]], dict[str, str]]:
    """Mode -> teacher -> scores, and why a mode has none. The reference must not fail."""
    found, failed = {REFERENCE: modes[REFERENCE](problem, sources)}, {}
    for name, mode in modes.items():
        if name != REFERENCE:
            try:
                found[name] = mode(problem, sources)
            except OpdError as error:
                failed[name] = str(error)
    return found, failed


def _mean_kl(scores: ParityScores) -> str:
    return ", ".join(f"{float(values.mean()):.2e}" for values in scores.kl.values())


@contextmanager
def _problem(recipe: Recipe) -> Iterator[tuple[ParityProblem, dict[str, str]]]:
    """The samples, and every teacher's folder or URL, the student's among them, while the block runs."""
    from opd.models.causal_lm import CausalLM
    from opd.models.checkpoint import save_checkpoint
    from opd.pipelines.stages.domains import load_domains, student_tokenizer
    from opd.pipelines.stages.student import load_model

    domains = load_domains(recipe)
    tokenizer = student_tokenizer(recipe, domains.values())
    with TemporaryDirectory(prefix="opd-parity-") as folder:
        if recipe.model.path is not None:
            student, path = load_model(recipe, Path(recipe.model.path)), recipe.model.path
        else:
            student = CausalLM.from_config(
                recipe.model.config or {}, tokenizer=tokenizer, dtype=model_dtype(recipe), seed=recipe.seed
            )
            path = str(save_checkpoint(student, tokenizer, Path(folder) / "student", {}))
        samples = [
            sample
            for domain in domains.values()
            for sample in _with_short_ones(sample_responses(recipe, domain, student, tokenizer))
        ]
        problem = problem_of(recipe, student, samples, id_count(tokenizer))
        yield problem, {**given_teachers(recipe), ITSELF: path}


def problem_of(recipe: Recipe, student: CausalLM, samples: list[Sample], vocabulary: int) -> ParityProblem:
    """`samples` with the student's hidden states at their responses and its head over `vocabulary` tokens."""
    from opd.train.packing import pack_tokens

    input_ids, position_ids, cu_seqlens, rows = pack_tokens(samples)
    device = student.device
    with torch.no_grad():
        hidden = student.hidden(input_ids.to(device), position_ids.to(device), cu_seqlens)
    return ParityProblem(
        samples,
        input_ids[rows + 1],
        hidden[rows.to(device)],
        student.head(vocabulary),
        Placement(model_dtype(recipe), recipe.model.device, recipe.distill.batch.max_tokens, vocabulary),
    )


def _with_short_ones(samples: list[Sample]) -> list[Sample]:
    """`samples`, the first one's prompt without a response, and its first token alone."""
    if not samples:
        return []
    first: Any = samples[0]
    shortened = [
        replace(first, uid=f"{first.uid}/{length}", response_ids=np.array(first.response_ids[:length]))
        for length in (0, 1)
    ]
    return [*samples, *shortened]
