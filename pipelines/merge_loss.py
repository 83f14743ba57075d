"""Which streams a merge's loss has, and what each token weighs in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opd.algorithms.normalise import per_teacher_scales, policy_scales
from opd.config import DistillConfig, PolicyLossConfig, Recipe, SampledTokenK1, SampledTokenK2
from opd.pipelines.policy_stream import PolicyTokens
from opd.teachers.schedule import TeacherSchedule
from opd.train.distill_terms import build_distill_term
from opd.train.terms import LossTerm, PolicyTerm
from opd.types import Sample, TokenTerms


def needs_policy_stream(config: DistillConfig) -> bool:
    """Whether sampled tokens carry a policy gradient: k1 lives there, and so does a reward."""
    return config.rl_coef > 0 or isinstance(config.loss, SampledTokenK1)


def policy_loss(config: DistillConfig) -> PolicyLossConfig:
    """The settings of the policy stream; k1, which lives there, has its own."""
    return config.loss.loss if isinstance(config.loss, SampledTokenK1) else config.policy_loss


def needs_correction(config: DistillConfig) -> bool:
    """Whether some stream weighs sampled tokens by what drew them."""
    if needs_policy_stream(config):
        return True
    return config.weighs_samples and policy_loss(config).correction is not None


def route_scales(recipe: Recipe, samples: Sequence[Sample], counts: Sequence[int]) -> dict[str, float]:
    """What a token of each sample weighs, by uid, where the loss counts so many of each.

    With `normalise: teacher` each route's share of the loss is its domains' weights, shared out by the
    samples they sent it; else every token weighs the same.
    """
    if recipe.distill.normalise != "teacher":
        scales = policy_scales(counts, "token")
    else:
        sent: dict[str, int] = {}
        for sample in samples:
            sent[sample.domain] = sent.get(sample.domain, 0) + 1
        shares: dict[str, float] = {}
        for sample in samples:
            share = recipe.domains[sample.domain].weight / sent[sample.domain]
            shares[sample.teacher or ""] = shares.get(sample.teacher or "", 0.0) + share
        scales = per_teacher_scales(counts, [sample.teacher for sample in samples], shares)
    return {sample.uid: scale for sample, scale in zip(samples, scales, strict=True)}


def token_terms(
    config: DistillConfig,
    sample: Sample,
    policy: PolicyTokens | None,
    weights: np.ndarray,
    kept_weights: np.ndarray,
) -> TokenTerms:
    """The terms of a sample: `weights` `[R]` of the tokens that its mask counts, `kept_weights` of those that
    the correction of `policy` has left.

    What a correction rejects leaves the policy stream and its normaliser, and so it does k2, all of whose
    gradient is sampled; the other losses keep at every token what does not depend on who drew it.
    """
    term = TokenTerms.zeros(len(sample.response_ids))
    term.kl_weight = term.policy_weight = weights
    if policy is None:
        return term
    term.old_logprobs, term.advantages = policy.old_logprobs, policy.advantages
    term.policy_weight = kept_weights * policy.weight
    if config.weighs_samples and policy_loss(config).correction is not None:
        term.importance = policy.weight
        if isinstance(config.loss, SampledTokenK2):
            term.kl_weight = kept_weights
    return term


def loss_terms(config: DistillConfig, schedule: TeacherSchedule) -> list[LossTerm]:
    """The streams of the merge's loss."""
    terms: list[LossTerm] = []
    if needs_policy_stream(config):
        terms.append(PolicyTerm(policy_loss(config)))
    stream = build_distill_term(config, schedule)
    return [*terms, stream] if stream else terms
