"""Which streams a merge's loss has."""

from __future__ import annotations

from opd.config import DistillConfig, PolicyLossConfig, SampledTokenK1
from opd.teachers.schedule import TeacherSchedule
from opd.train.distill_terms import build_distill_term
from opd.train.terms import LossTerm, PolicyTerm


def needs_policy_stream(config: DistillConfig) -> bool:
    """Whether sampled tokens carry a policy gradient: k1 lives there, and so does a reward."""
    return config.rl_coef > 0 or isinstance(config.loss, SampledTokenK1)


def policy_loss(config: DistillConfig) -> PolicyLossConfig:
    """The settings of the policy stream: those of k1, which lives there, or the defaults."""
    return config.loss.loss if isinstance(config.loss, SampledTokenK1) else PolicyLossConfig()


def loss_terms(config: DistillConfig, schedule: TeacherSchedule) -> list[LossTerm]:
    """The streams of the merge's loss."""
    terms: list[LossTerm] = []
    if needs_policy_stream(config):
        terms.append(PolicyTerm(policy_loss(config)))
    stream = build_distill_term(config, schedule)
    return [*terms, stream] if stream else terms
