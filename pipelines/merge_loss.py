"""Which streams a merge's loss has, and what each token weighs in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from opd.algorithms.corrections import Correction
from opd.config import DistillConfig, PolicyLossConfig, SampledTokenK1, SampledTokenK2
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


def token_terms(
    config: DistillConfig,
    samples: Sequence[Sample],
    old: Sequence[np.ndarray],
    advantages: Sequence[np.ndarray],
    correction: Correction | None,
    normalised: Callable[[Sequence[np.ndarray]], list[np.ndarray]],
) -> list[TokenTerms]:
    """The terms of each sample from its `[R]` log-probabilities and advantages; `normalised(masks)` are the
    weights of the tokens that masks `[R]` count.

    What a correction rejects leaves the policy stream and its normaliser, and so it does k2, all of whose
    gradient is sampled; the other losses keep at every token what does not depend on who drew it.
    """
    kl = policy = normalised([s.loss_mask for s in samples])
    importance: Sequence[np.ndarray | None] = [None] * len(samples)
    if correction is not None:
        kept = normalised(correction.masks)
        policy = [a * b for a, b in zip(kept, correction.weights, strict=True)]
        if config.weighs_samples and policy_loss(config).correction is not None:
            importance = correction.weights
            kl = kept if isinstance(config.loss, SampledTokenK2) else kl
    found = []
    for place, sample in enumerate(samples):
        term = TokenTerms.zeros(len(sample.response_ids))
        term.kl_weight, term.policy_weight = kl[place], policy[place]
        term.old_logprobs, term.advantages = old[place], advantages[place]
        term.importance = importance[place]
        found.append(term)
    return found


def loss_terms(config: DistillConfig, schedule: TeacherSchedule) -> list[LossTerm]:
    """The streams of the merge's loss."""
    terms: list[LossTerm] = []
    if needs_policy_stream(config):
        terms.append(PolicyTerm(policy_loss(config)))
    stream = build_distill_term(config, schedule)
    return [*terms, stream] if stream else terms
