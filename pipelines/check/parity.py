"""Compare the scores of every back end: `opd doctor --parity`. All score the same samples of the student, and
log-probabilities and KL are compared at several temperatures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from opd.config import Recipe
from opd.errors import OpdError, TeacherError
from opd.kernels.head import Head
from opd.kernels.ops import linear_kl, linear_logprobs
from opd.models.token_ids import id_count
from opd.pipelines.check.checks import given_teachers
from opd.pipelines.check.measured import open_here, sample_responses
from opd.pipelines.commands.exit_status import one_line
from opd.pipelines.stages.precision import model_dtype
from opd.protocols import Teacher
from opd.teachers.kinds import Placement
from opd.types import HiddenStates, Sample, TokenLogprobs, TopKLogprobs

if TYPE_CHECKING:
    from opd.models.causal_lm import CausalLM

TEMPERATURES = (1.0, 0.7)
"""At 1 an ignored temperature would go unnoticed."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-1, "float16": 2e-2}
"""Nats. For 16 bits it is the rounding of every layer's output, in another order."""


@dataclass(frozen=True, slots=True)
class ParityProblem:
    """The samples, and the student that generated them."""

    samples: Sequence[Sample]
    targets: Tensor
    """[N] int64: the response tokens, end to end."""
    student_hidden: Tensor
    """[N, D]: the student's last hidden states that predict them."""
    student_head: Head
    """Over the tokenizer's vocabulary."""
    placement: Placement


@dataclass(frozen=True, slots=True)
class ParityScores:
    """One back end's scores of a teacher on the samples of a problem."""

    logprobs: Mapping[float, Tensor]
    """Temperature -> [N] float32 nats: the teacher's log-probability of every response token."""
    kl: Mapping[float, Tensor]
    """Temperature -> [N] float32 nats: KL(student || teacher). Empty if only tokens are scored."""


Mode = Callable[[ParityProblem, Mapping[str, str]], dict[str, ParityScores]]
"""Scores the teachers it can run, given as name -> folder or URL."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest differences between two back ends, over all tokens and temperatures."""

    logprobs: float
    kl: float
    """NaN if one of the two has none."""

    def is_within(self, tolerance: float) -> bool:
        """Return whether both are within the tolerance. A missing KL does not count."""
        return self.logprobs <= tolerance and not self.kl > tolerance


def largest_differences(ours: ParityScores, theirs: ParityScores) -> Difference:
    """Compare at the common temperatures. Raises `TeacherError` if there is none or if tokens are missing."""
    common = [temperature for temperature in ours.logprobs if temperature in theirs.logprobs]
    if not common:
        raise TeacherError("two back ends have scored at no common temperature; score at one of them again.")
    with_kl = [temperature for temperature in common if temperature in ours.kl and temperature in theirs.kl]
    return Difference(
        max(_largest_difference(ours.logprobs[t], theirs.logprobs[t]) for t in common),
        max((_largest_difference(ours.kl[t], theirs.kl[t]) for t in with_kl), default=float("nan")),
    )


def scores_of(problem: ParityProblem, teacher: Teacher) -> ParityScores:
    """Score the problem with `teacher`, by any of its signals.

    Log-probabilities without hidden states count for temperature 1 alone.
    """
    targets = teacher.score(problem.samples)
    if isinstance(targets, TokenLogprobs):
        return ParityScores({1.0: targets.logprobs.float().cpu()}, {})
    if isinstance(targets, TopKLogprobs) and targets.sampled is not None:
        return ParityScores({1.0: targets.sampled.float().cpu()}, {})
    if not isinstance(targets, HiddenStates):
        raise TeacherError(
            f"teacher {teacher.name} gives {type(targets).__name__}, which cannot be compared token by token;"
            " ask it for hidden states or sampled tokens."
        )
    head, device = teacher.load_head(), targets.rows.device
    student = problem.student_hidden.to(device)
    logprobs, kl = {}, {}
    with torch.no_grad():
        for t in TEMPERATURES:
            of_token = linear_logprobs(targets.rows, head, problem.targets.to(device), temperature=t)
            divergence = linear_kl(student, problem.student_head, targets.rows, head, temperature=t)
            logprobs[t], kl[t] = of_token.cpu(), divergence.cpu()
    return ParityScores(logprobs, kl)


def by_torch(problem: ParityProblem, sources: Mapping[str, str]) -> dict[str, ParityScores]:
    """Score with Hugging Face models in this process. Published ones are streamed."""
    scores = {}
    for name, source in sources.items():
        with open_here(name, source, problem.placement) as teacher:
            scores[name] = scores_of(problem, teacher)
    return scores


def by_megatron(problem: ParityProblem, sources: Mapping[str, str]) -> dict[str, ParityScores]:
    """Score with Megatron-Core in this process."""
    from opd.teachers.megatron_teacher import megatron_teachers

    with megatron_teachers(sources, problem.placement) as teachers:
        return {name: scores_of(problem, teacher) for name, teacher in teachers.items()}


def by_kind(
    recipe: Recipe, type: str, problem: ParityProblem, sources: Mapping[str, str]
) -> dict[str, ParityScores]:
    """Score with the recipe's own teachers of that kind, opened as a merge does."""
    from opd.teachers.kinds import TeacherOpening, open_kinds

    with ExitStack() as stack:
        read: dict[str, str] = {}
        for name, source in sources.items():
            settings = recipe.teacher_settings(name) if name in recipe.teachers else None
            if settings is not None and settings.type == type:
                if settings.streams_weights:
                    source = stack.enter_context(_publish_temporarily(source))
                read[name] = source
        opening = TeacherOpening(recipe, problem.placement, read)
        opened = stack.enter_context(open_kinds([*read], opening))
        return {name: scores_of(problem, teacher) for name, teacher in opened.items()}


@contextmanager
def _publish_temporarily(source: str) -> Iterator[str]:
    """Yield `source` published, temporarily if it was not."""
    from opd.pipelines.stages.publishing import publish_checkpoint
    from opd.teachers.skeleton import is_published

    if is_published(source):
        yield source
        return
    with TemporaryDirectory(prefix="opd-parity-") as folder:
        publish_checkpoint(source, folder)
        yield folder


def _largest_difference(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        raise TeacherError(
            f"two back ends have scored {len(one)} and {len(other)} tokens of the same samples; one of them"
            " has lost or added tokens."
        )
    if not (torch.isfinite(one).all() and torch.isfinite(other).all()):
        return float("inf")
    return float((one.double() - other.double()).abs().max()) if len(one) else 0.0


REFERENCE = "torch"
ITSELF = "the student itself"
"""The teacher of the noise floor: its KL above 0 is the back end's rounding."""


def modes_of(recipe: Recipe) -> dict[str, Mode]:
    """Return the back ends that can run here, by name, the reference first."""
    from opd.pipelines.check.parity_ranks import RANKS, by_two_ranks  # it imports this file

    modes: dict[str, Mode] = {REFERENCE: by_torch}
    if find_spec("megatron") is not None:
        modes["megatron TP 1"] = by_megatron
        on_gpu = recipe.model.device != "cpu" and torch.cuda.is_available()
        if not on_gpu or torch.cuda.device_count() >= RANKS:
            modes["megatron TP 2"] = by_two_ranks
    for settings in recipe.teachers.values():
        if settings.type not in ("local", "streamed", "megatron", "student"):
            modes[settings.type] = partial(by_kind, recipe, settings.type)
    return modes


def check_parity(
    recipe: Recipe, console: Console | None = None, modes: Mapping[str, Mode] | None = None
) -> int:
    """Compare the back ends, print a table and return the exit status.

    The status is 2 if back ends differ by more than the tolerance. The teachers are the recipe's existing
    ones with the student's tokenizer, and the student itself. The samples are its answers to held-out prompts
    of every domain, a prompt without an answer, and an answer of one token.
    """
    console = console or Console()
    modes = modes_of(recipe) if modes is None else modes
    tolerance = TOLERANCE[model_dtype(recipe)]
    failed: dict[str, str] = {}
    with _parity_problem(recipe) as (problem, sources):
        results = {REFERENCE: modes[REFERENCE](problem, sources)}  # it must not fail
        for name, mode in modes.items():
            if name != REFERENCE:
                try:
                    results[name] = mode(problem, sources)
                except OpdError as error:
                    failed[name] = str(error)
    table = Table(title=Text(one_line(f"opd doctor --parity: {recipe.name}")), title_justify="left")
    for column in ("teacher", "back end", "max |Δ log p|", "max |Δ KL|", "mean KL at T 1, 0.7", ""):
        table.add_column(column, overflow="fold")
    wrong = len(failed)
    for teacher in sources:
        for mode, scores in results.items():
            if teacher not in scores:
                continue
            apart = largest_differences(scores[teacher], results[REFERENCE][teacher])
            good = apart.is_within(tolerance)
            wrong += not good
            mark = "[green]ok[/]" if good else "[red]differs[/]"
            kl = ", ".join(f"{float(values.mean()):.2e}" for values in scores[teacher].kl.values())
            table.add_row(Text(teacher), mode, f"{apart.logprobs:.1e}", f"{apart.kl:.1e}", kl, mark)
    console.print(table)
    tokens, counts = len(problem.targets), [len(s.response_ids) for s in problem.samples]
    console.print(
        f"{len(counts)} samples, {tokens} response tokens, {counts.count(0)} responses of no token and"
        f" {counts.count(1)} of one; temperatures 1 and 0.7; {model_dtype(recipe)},"
        f" tolerance {tolerance:g} nats"
    )
    for mode, scores in results.items():
        if ITSELF not in scores:
            continue
        floor = max(float(values.abs().max()) for values in scores[ITSELF].kl.values())
        console.print(f"noise floor, {mode}: KL of the student to itself is at most {floor:.1e} nats")
    for mode, reason in failed.items():
        console.print(Text.assemble((f"{mode} was not compared:", "red"), f" {one_line(reason)}"))
    return 2 if wrong else 0


@contextmanager
def _parity_problem(recipe: Recipe) -> Iterator[tuple[ParityProblem, dict[str, str]]]:
    """Yield the samples, and every teacher's folder or URL, with the student's, while the block runs."""
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
        samples: list[Sample] = []
        for domain in domains.values():
            responses = sample_responses(recipe, domain, student, tokenizer)
            samples += responses
            for length in (0, 1) if responses else ():  # a response of no token, and one of one
                first = responses[0]
                ids = np.array(first.response_ids[:length])
                samples.append(replace(first, uid=f"{first.uid}/{length}", response_ids=ids))
        problem = problem_of(recipe, student, samples, id_count(tokenizer))
        sources = {n: at for n, at in given_teachers(recipe).items() if recipe.teacher_tokenizer(n) is None}
        yield problem, {**sources, ITSELF: path}


def problem_of(recipe: Recipe, student: CausalLM, samples: list[Sample], vocabulary: int) -> ParityProblem:
    """Return `samples` with the student's hidden states at their responses and its head over `vocabulary`."""
    from opd.pipelines.stages.teachers import placement_of
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
        placement_of(recipe, vocabulary),
    )
