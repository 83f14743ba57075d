"""Do all back ends say the same of the same samples? Log-probabilities and KL, at several temperatures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from opd.config import Recipe
from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.kernels.ops import linear_kl, linear_logprobs
from opd.protocols import Teacher
from opd.teachers.kinds import Placement
from opd.types import HiddenStates, Sample, TokenLogprobs, TopKLogprobs

TEMPERATURES = (1.0, 0.7)
"""At 1 a back end that ignores the temperature goes unnoticed."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-1, "float16": 2e-2}
"""Nats. For 16 bits it is the rounding of every layer's output, done in another order."""


@dataclass(frozen=True, slots=True)
class ParityProblem:
    """The samples, and the student that wrote them."""

    samples: Sequence[Sample]
    targets: Tensor
    """[N] int64: the response tokens, end to end."""
    student_hidden: Tensor
    """[N, D]: the student's last hidden states where it predicts them."""
    student_head: Head
    """Over the tokenizer's vocabulary."""
    placement: Placement


@dataclass(frozen=True, slots=True)
class ParityScores:
    """What one back end says of a teacher on the samples of a problem."""

    logprobs: Mapping[float, Tensor]
    """Temperature -> [N] float32 nats: the teacher's log-probability of every response token."""
    kl: Mapping[float, Tensor]
    """Temperature -> [N] float32 nats: KL(student || teacher); nothing where only tokens are scored."""


Mode = Callable[[ParityProblem, Mapping[str, str]], dict[str, ParityScores]]
"""Scores the teachers it can run, given as name -> folder or URL."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest differences between two back ends, over all tokens and temperatures."""

    logprobs: float
    kl: float
    """NaN where one of the two has none."""

    def within(self, tolerance: float) -> bool:
        """Whether both are; a missing KL does not count."""
        return self.logprobs <= tolerance and not self.kl > tolerance


def difference(ours: ParityScores, theirs: ParityScores) -> Difference:
    """At the temperatures both have. Raises `TeacherError` if there is none or if tokens are missing."""
    common = [temperature for temperature in ours.logprobs if temperature in theirs.logprobs]
    if not common:
        raise TeacherError("two back ends have scored at no common temperature; score at one of them again.")
    with_kl = [temperature for temperature in common if temperature in ours.kl and temperature in theirs.kl]
    return Difference(
        max(_largest(ours.logprobs[t], theirs.logprobs[t]) for t in common),
        max((_largest(ours.kl[t], theirs.kl[t]) for t in with_kl), default=float("nan")),
    )


def scores_of(problem: ParityProblem, teacher: Teacher) -> ParityScores:
    """What `teacher` says, whichever of its signals it gives.

    Log-probabilities that come without hidden states count for temperature 1 alone.
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
    """Hugging Face models in this process; published ones are streamed."""
    from opd.teachers.local_teacher import LocalTeacher
    from opd.teachers.skeleton import is_published
    from opd.teachers.streamed_teacher import streamed_teachers

    place, found = problem.placement, {}
    for name, source in sources.items():
        if is_published(source):
            teacher = streamed_teachers({name: source}, place)[name]
            found[name] = scores_of(problem, teacher)
            teacher.close()
            continue
        options = {"dtype": place.dtype, "device": place.device, "max_tokens": place.max_tokens}
        found[name] = scores_of(problem, LocalTeacher(name, source, vocabulary=place.vocabulary, **options))
    return found


def by_megatron(problem: ParityProblem, sources: Mapping[str, str]) -> dict[str, ParityScores]:
    """Megatron-Core in this process."""
    from opd.teachers.megatron_teacher import megatron_teachers

    with megatron_teachers(sources, problem.placement) as teachers:
        return {name: scores_of(problem, teacher) for name, teacher in teachers.items()}


def by_kind(recipe: Recipe, type: str) -> Mode:
    """The mode of the recipe's own teachers of that kind, opened as a merge does."""

    def score(problem: ParityProblem, sources: Mapping[str, str]) -> dict[str, ParityScores]:
        from opd.teachers.kinds import TeacherOpening, open_kinds

        mine = [name for name in sources if name in recipe.teachers and recipe.teacher(name).type == type]
        with ExitStack() as stack:
            read = {name: sources[name] for name in mine}
            for name in mine:
                if recipe.teacher(name).streams:
                    read[name] = stack.enter_context(_published(sources[name]))
            opened = stack.enter_context(open_kinds(mine, TeacherOpening(recipe, problem.placement, read)))
            return {name: scores_of(problem, teacher) for name, teacher in opened.items()}

    return score


@contextmanager
def _published(source: str) -> Iterator[str]:
    """`source` published, for as long as the block runs if it was not."""
    from opd.pipelines.commands.publish import publish_checkpoint
    from opd.teachers.skeleton import is_published

    if is_published(source):
        yield source
        return
    with TemporaryDirectory(prefix="opd-parity-") as folder:
        publish_checkpoint(source, folder)
        yield folder


def _largest(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        raise TeacherError(
            f"two back ends have scored {len(one)} and {len(other)} tokens of the same samples; one of them"
            " has lost or added tokens."
        )
    if not (torch.isfinite(one).all() and torch.isfinite(other).all()):
        return float("inf")
    return float((one.double() - other.double()).abs().max()) if len(one) else 0.0
