"""Distillation as a stream of the loss: the student against its teachers, on `kl_weight`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.config.base import DIVERGENCE
from opd.config.distill import DistillConfig
from opd.config.rl import GATED, CustomDivergence, FullVocabularyKL, TopKKL
from opd.errors import ConfigError, TeacherError, TrainingError
from opd.imports import import_function
from opd.kernels.ops import geometric_floor, linear_kl, linear_logprobs, linear_mixture_kl
from opd.train.losses import (
    SampledTokens,
    outside_support,
    sampled_k2,
    selected_weights,
    topk_reverse_kl,
    with_gradient,
)
from opd.train.packing import split_teachers
from opd.train.teacher_views import (
    ScoredView,
    TeacherView,
    TeacherViews,
    View,
    gated_views,
    most_likely,
    require_full,
    teacher_logprobs,
)
from opd.train.terms import MetricSums, StudentRows, per_token_loss, sum_parts
from opd.types import MicroBatch
from opd.user_code import call_user_code

KL_AT = "kl_at/"
"""Prefix of the metrics with the KL by position."""


class DistillTerm(ABC):
    """Shared shell: finds the teachers, weighs the tokens, sums the KL's metrics per teacher."""

    def __init__(self, teachers: TeacherViews, mixture: str) -> None:
        self.teachers = teachers
        self.mixture = mixture

    def __call__(self, micro: MicroBatch, student: StudentRows, sums: MetricSums) -> Tensor:
        parts = split_teachers(micro)
        if len(parts) == 1:
            return self._teacher_loss(micro, student, sums)
        return sum_parts(student, parts, sums, self._teacher_loss)

    def _teacher_loss(self, micro: MicroBatch, student: StudentRows, sums: MetricSums) -> Tensor:
        """Return the loss of a micro-batch of one teacher, or one mixture."""
        if micro.samples[0].teacher is None:  # only its reward counts, if anything: then the gradient is 0
            return 0.0 * student.hidden.sum()
        views = self.teachers(micro)
        if micro.kept is not None:
            views = [view.select_rows(micro.kept) for view in views]
        if len(views) > 1 and self.mixture in GATED:
            views = gated_views(micro, views, self.mixture, student, sums)
        if len(views) == 1 or self.mixture != "arithmetic":
            per_view = []
            for view in views:
                if isinstance(view, ScoredView) or view.aligned is None:
                    divergence = self.view_divergence(micro, student, view)
                else:
                    from opd.train.aligned_kl import aligned_divergence

                    divergence = aligned_divergence(micro, student, view, sums, self.loss_of(micro))
                per_view.append(view.weight * divergence)
            per_token = torch.stack(per_view).sum(0)
        else:
            per_token = self.mixture_divergence(micro, student, views)
        counted = micro.kl_weight != 0
        if len(views) > 1 and self.mixture in ("geometric", "entropy"):
            full = [require_full(view) for view in views]
            weights: Any = [view.weight for view in full]
            # `-log Z` of the geometric mean, the minimum of `sum_i w_i KL(p || t_i)`.
            scale: dict[str, Any] = {"temperature": student.temperature, "chunk": student.chunk}
            floor = geometric_floor([v.hidden for v in full], [v.head for v in full], weights, **scale)
            sums.add("kl/floor", torch.where(counted, floor, 0.0).sum(), counted.sum())
        total = torch.where(counted, per_token.detach(), 0.0).sum()
        sums.add("kl/mean", total, counted.sum())
        sums.add(f"kl/{micro.samples[0].teacher}", total, counted.sum())
        add_by_position(micro, per_token.detach(), counted, sums)
        return (micro.kl_weight * per_token).sum()

    def loss_of(self, micro: MicroBatch) -> FullVocabularyKL | None:
        """Return the divergence from a teacher with a tokenizer of its own, where both predict one token."""
        return None

    @abstractmethod
    def view_divergence(self, micro: MicroBatch, student: StudentRows, view: View) -> Tensor:
        """Return the per-token loss `[N]` against one teacher."""

    def mixture_divergence(self, micro: MicroBatch, student: StudentRows, views: Sequence[View]) -> Tensor:
        """Return the per-token loss `[N]` against the arithmetic mixture of `views`."""
        raise TypeError(f"{type(self).__name__} cannot score an arithmetic mixture of teachers")


def add_by_position(micro: MicroBatch, values: Tensor, counted: Tensor, sums: MetricSums) -> None:
    """Add `values [N]` where `counted [N]` to `kl_at/P`, for response tokens P to 2 P - 1, counted from 1.

    A student that drifts off its teachers' states shows at late positions first.
    """
    positions = np.concatenate([np.arange(1, len(s.response_ids) + 1) for s in micro.samples])
    positions = positions if micro.kept is None else positions[micro.kept.cpu().numpy()]

    def add_octaves(read: np.ndarray) -> None:
        values, mask = read[: len(positions)], read[len(positions) :] != 0
        octaves = np.frexp(positions[mask])[1] - 1
        totals, numbers = np.bincount(octaves, weights=values[mask]), np.bincount(octaves)
        for octave in np.flatnonzero(numbers):
            sums.add(f"{KL_AT}{2**octave}", totals[octave], int(numbers[octave]))

    sums.when_read(torch.cat([values.double(), counted.double()]), add_octaves)


class FullVocabularyTerm(DistillTerm):
    """The exact divergence over the vocabulary, at every position or at selected ones.

    Args:
        of_domain: By domain, the divergence of those with one of their own.
    """

    step = 0
    """The stage's step, whose kind of divergence is taken."""
    soft_domains: Collection[str] = ()
    """Domains whose teachers wrote this step's answers, which are soft labels: the kind is forward there."""

    def __init__(
        self,
        teachers: TeacherViews,
        mixture: str,
        config: FullVocabularyKL,
        of_domain: Mapping[str, FullVocabularyKL] | None = None,
    ) -> None:
        super().__init__(teachers, mixture)
        self.config, self._of_domain = config, of_domain or {}

    def loss_of(self, micro: MicroBatch) -> FullVocabularyKL:
        """Return the divergence of `micro`, whose samples have one teacher, with the kind of this step."""
        own, domain = self._of_domain, micro.samples[0].domain
        loss = own.get(domain, self.config) if own else self.config
        if domain in self.soft_domains:
            return loss.model_copy(update={"kind": "forward"})
        return loss.model_copy(update={"kind": loss.kind_at(self.step)}) if loss.later else loss

    def view_divergence(self, micro: MicroBatch, student: StudentRows, view: View) -> Tensor:
        view, loss = require_full(view), self.loss_of(micro)
        models = (student.hidden, student.own_head, view.hidden, view.head)
        options: Any = {"kind": loss.kind, "beta": loss.beta}
        options |= {"temperature": student.temperature, "chunk": student.chunk}
        weight = micro.kl_weight * view.weight
        if loss.select is None:
            if not isinstance(view.weight, Tensor):  # else other tokens count than those of the micro-batch
                options |= {"counted": micro.counted, "notes": student.open_notes(micro)}
            return linear_kl(*models, weight=weight, **options)
        with torch.no_grad():
            values = linear_kl(*models, weight=weight, counted=micro.counted, **options)
        scores = values if loss.select.by == "divergence" else student.entropy.detach()
        lengths = [len(sample.response_ids) for sample in micro.samples]
        chosen = selected_weights(scores, weight, lengths, loss.select.share)
        factor = torch.where(weight != 0, chosen / weight, 0.0)
        return with_gradient(values, factor * linear_kl(*models, weight=chosen, **options))

    def mixture_divergence(self, micro: MicroBatch, student: StudentRows, views: Sequence[View]) -> Tensor:
        views = [require_full(view) for view in views]
        weights: Any = [view.weight for view in views]
        return linear_mixture_kl(
            student.hidden,
            student.own_head,
            [view.hidden for view in views],
            [view.head for view in views],
            weights,
            temperature=student.temperature,
            weight=micro.kl_weight,
            counted=micro.counted,
            notes=student.open_notes(micro),
            chunk=student.chunk,
        )


NOTHING = -1e4
"""Log-probability of a token that the support has already. Its probability is 0 for student and teacher, so
it adds nothing to any form or gradient."""


class K2Term(DistillTerm):
    """`(log p_s - log p_t)^2 / 2` on the sampled tokens."""

    def view_divergence(self, micro: MicroBatch, student: StudentRows, view: View) -> Tensor:
        teacher = teacher_logprobs(view, micro.targets, student)
        # The square is no estimate of the KL: keep its gradient, report k1 as the value.
        loss = sampled_k2(student.logprobs, teacher, importance=micro.importance)
        return with_gradient(student.logprobs - teacher, loss)


class TopKTerm(DistillTerm):
    """Reverse KL on the top-k support of the teacher, of the student, or of both."""

    def __init__(self, teachers: TeacherViews, mixture: str, config: TopKKL) -> None:
        super().__init__(teachers, mixture)
        self.config = config

    def view_divergence(self, micro: MicroBatch, student: StudentRows, view: View) -> Tensor:
        k = min(self.config.k, student.head.vocabulary)
        twice = None  # [N, 2 k] bool: with both supports, ids of the teacher's that are the student's too
        if self.config.support == "teacher":
            if isinstance(view, TeacherView):
                ids, logprobs = most_likely(view.hidden, view.head, k, student)
            elif view.top_ids is None or view.top_logprobs is None or view.top_ids.shape[1] != k:
                raise TeacherError(
                    f"teacher {view.name} gave no log-probabilities of its {k} most likely tokens; set"
                    f" teachers.{view.name}.signal to topk or hidden."
                )
            else:
                ids, logprobs = view.top_ids, view.top_logprobs
        else:
            view = require_full(view)
            ids = most_likely(student.hidden.detach(), student.head, k, student)[0]
            if self.config.support == "union":
                theirs = most_likely(view.hidden, view.head, k, student)[0]
                twice = (theirs.unsqueeze(2) == ids.unsqueeze(1)).any(2)
                twice, ids = torch.cat([torch.zeros_like(twice), twice], 1), torch.cat([ids, theirs], 1)
            logprobs = teacher_logprobs(view, ids, student)
        on_support = linear_logprobs(
            student.hidden, student.own_head, ids, temperature=student.temperature, chunk=student.chunk
        )
        if twice is not None:
            on_support, logprobs = (rows.masked_fill(twice, NOTHING) for rows in (on_support, logprobs))
        sampled = None
        if self.config.form == "hybrid":
            sampled = SampledTokens(
                student_logprobs=student.logprobs,
                teacher_logprobs=teacher_logprobs(view, micro.targets, student),
                outside=outside_support(micro.targets, ids),
                importance=micro.importance,
            )
        return topk_reverse_kl(on_support, logprobs, form=self.config.form, sampled=sampled)


class CustomTerm(DistillTerm):
    """The user's divergence from a teacher, by dotted path. A `ScoredView` works too."""

    def __init__(self, teachers: TeacherViews, mixture: str, config: CustomDivergence, where: str) -> None:
        """Raises `ConfigError` if the function cannot be loaded."""
        super().__init__(teachers, mixture)
        self.path, self._where = config.path, f"{where}.path"
        self._loss: Any = import_function(config.path, self._where, ConfigError, DIVERGENCE)

    def view_divergence(self, micro: MicroBatch, student: StudentRows, view: View) -> Tensor:
        with call_user_code(f"{self._where} {self.path}", TrainingError):
            return per_token_loss(self._loss(micro, student, view), student.logprobs, self.path)


def build_distill_term(
    config: DistillConfig,
    teachers: TeacherViews,
    where: str = "distill.loss",
    of_domain: Mapping[str, FullVocabularyKL] | None = None,
) -> DistillTerm | None:
    """Build the loss term of `config`. Return None for k1, which lives in the advantages. `where` is the
    recipe's key of the loss, `of_domain` has the full divergences of domains with one of their own.
    """
    if isinstance(config.loss, FullVocabularyKL):
        return FullVocabularyTerm(teachers, config.mixture, config.loss, of_domain)
    if isinstance(config.loss, TopKKL):
        return TopKTerm(teachers, config.mixture, config.loss)
    if isinstance(config.loss, CustomDivergence):
        return CustomTerm(teachers, config.mixture, config.loss, where)
    if config.loss.type == "k2":
        return K2Term(teachers, config.mixture)
    return None
