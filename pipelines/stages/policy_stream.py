"""Build the policy-gradient stream of a step: each sampled token's inputs, pass by pass before the update.

Log-probabilities under the weights at the start of the step, those of a teacher or a reference, and the
reward's advantages are signals. A signal is one number a token, stored with the samples. Step-wide numbers (a
baseline, the normaliser of a correction) are sums over numbers of each sample, in the order of the samples.
So they depend neither on the samples' place nor on their rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from opd.config.rl import CorrectionConfig
from opd.pipelines.stages.samples import StepSamples
from opd.protocols import AdvantageEstimator
from opd.train.advantages import Moments, UserAdvantage, opd_returns, teacher_means, with_opd_term
from opd.train.loss_weights import CorrectionSums, MismatchSums, apply_correction, turns_of
from opd.train.packing import PerSample
from opd.types import Sample, SampleGroup

if TYPE_CHECKING:
    from opd.train.critic import GAE

_OLD, _ADVANTAGES, _VALUES = "old_logprobs", "advantages", "values"
Who = Literal["teacher", "reference"]
"""Another source of log-probabilities of sampled tokens: a sample's teacher, or the frozen reference."""


@dataclass(frozen=True, slots=True)
class FollowTerm:
    """The term of the advantages that follows the teacher (k1) or the reference."""

    coef: Mapping[str, float] | float
    """Its weight, or that of each domain."""
    baseline: Literal["none", "batch_mean"] = "none"
    discount: float = 0.0


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The stream's values of one sample, `[R]` each."""

    old_logprobs: np.ndarray | None
    """`None` if not computed. The update computes its own."""
    advantages: np.ndarray
    mask: np.ndarray
    """The loss mask without rejected tokens."""
    weight: np.ndarray
    """The importance correction of each token, 0 where `mask` is False."""
    ref_logprobs: np.ndarray | None = None


@dataclass(slots=True)
class _SampleNumbers:
    """One sample's contribution to step-wide numbers."""

    correction: CorrectionSums
    advantages: Moments = field(default_factory=Moments)
    """The reward's, if they are whitened."""
    returns: dict[str, float] = field(default_factory=dict)
    """Source -> sum of its term in the advantages, over the tokens of the loss mask."""
    log_ratios: dict[str, float] = field(default_factory=dict)
    """Source -> sum of the log-ratio to it, over the same tokens."""
    values: dict[str, Any] = field(default_factory=dict)
    """With a critic, the quality of its values: the fields of `ValueQuality`."""
    turns: int = 0
    """Number of turns with a token left by the correction."""


class PolicyStream:
    """The stream of one step, in four acts:

    1. `add_logprobs` stores those of teachers and of a reference, after the constructor has recomputed ours.
    2. `estimate_advantages`, or `estimate_gae` with a critic, stores the reward's advantages.
    3. `measure_step` adds up what the whole step decides: whitening, baselines, normalisers, metrics.
    4. `policy_tokens` puts these together for one sample after another.

    Args:
        step: Its samples, dealt out.
        correction: The weighting of tokens that others sampled.
        recompute: Compute the log-probabilities under the weights at the start of the step. Without it
            there are no log-ratios. The one update that follows computes log-probabilities too.
    """

    def __init__(
        self, step: StepSamples, correction: CorrectionConfig | None, *, recompute: bool = True
    ) -> None:
        if correction is not None and not recompute:
            raise ValueError("a correction is made of recomputed log-probabilities; ask for them")
        self._step, self._correction, self._recomputed = step, correction, recompute
        self._others: dict[Who, FollowTerm | None] = {}
        """Act 1: whose log-probabilities are stored, and their term in the advantages."""
        self._estimated = False
        """Act 2: the reward's advantages are stored."""
        self._rewarded: set[str] | None = None
        """Uids of the samples that have them. `None`: all."""
        self._coefs: Mapping[str, float] | None = None
        self._whitened: Sequence[Sample] | None = None
        self._valued: Sequence[Sample] | None = None
        """With a critic, the samples by which its values are judged."""
        self._numbers: dict[str, _SampleNumbers] = {}
        """Act 3: by uid, what each sample adds to step-wide numbers."""
        self._moments = Moments()
        """Of the advantages that are whitened."""
        self._means: dict[Who, dict[str | None, float]] = {}
        """The baseline of each source, by teacher."""
        if recompute:
            step.compute_signal(
                _OLD, step.samples, step.backend.local_logprobs, "the recomputed log-probabilities"
            )

    def add_logprobs(
        self,
        who: Who,
        samples: Sequence[Sample],
        compute: PerSample,
        against: FollowTerm | None = None,
        **lots: Any,
    ) -> None:
        """Store other log-probabilities of `samples`, from `compute`. `against` is their term in the
        advantages, if any. The reference's are of all samples of the step, in some order. A teacher's are of
        the samples that have one. See `StepSamples.compute_signal`.
        """
        self._step.compute_signal(who, samples, compute, f"the {who}'s log-probabilities", **lots)
        self._others[who] = against

    def estimate_advantages(
        self,
        estimator: AdvantageEstimator,
        coefs: Mapping[str, float] | None = None,
        *,
        whiten: Sequence[Sample] | None = None,
        rewarded: Sequence[Sample] | None = None,
    ) -> None:
        """Store the reward's advantages of every sample, times its domain's factor in `coefs`. First they are
        whitened over the tokens of the trained samples `whiten`. Samples outside `rewarded` get 0.
        """
        self._coefs, self._whitened = coefs, whiten
        self._rewarded = None if rewarded is None else {sample.uid for sample in rewarded}
        for group in self._step.groups:
            local = [one for one in self._step.local_group_samples(group) if self._is_rewarded(one)]
            if not local:
                continue
            if isinstance(estimator, UserAdvantage):  # it may look at tokens
                with self._step.with_tokens(group) as loaded:
                    advantages = group_advantages(estimator, loaded)
            else:
                advantages = group_advantages(estimator, group)
            for sample in local:
                self._step.store_signal(_ADVANTAGES, sample, advantages[sample.uid])
        self._estimated = True

    def estimate_gae(
        self, gae: GAE, compute: PerSample, learned: Sequence[Sample], *, coef: float, whiten: bool
    ) -> None:
        """Store a critic's values of every sample, by `compute`, and the advantages of `gae` from them. With
        `whiten` they are whitened over the tokens of the samples `learned`. Those of others are 0. `coef`
        times the log-ratio to the reference is subtracted from each token's reward.
        """
        from opd.train.critic import token_rewards

        self._step.compute_signal(_VALUES, self._step.samples, compute, "the critic's values")
        for lot in self._step.local_samples():
            for sample in lot:
                penalty = coef * self._log_ratio(sample) if coef else None
                values = self._step.read_signal(_VALUES, sample)
                advantages = gae(token_rewards(sample, penalty), values, sample.loss_mask)
                self._step.store_signal(_ADVANTAGES, sample, advantages)
        self._estimated, self._valued, self._whitened = True, learned, learned if whiten else None
        self._rewarded = {sample.uid for sample in learned}

    def values_and_returns(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        """Return the critic's values and the returns of a sample in memory, `[R]` float32 each. A return is
        the reward within the advantages' reach plus the value after it.
        """
        values = self._step.read_signal(_VALUES, sample)
        return values, self._step.read_signal(_ADVANTAGES, sample) + values

    def measure_step(self) -> dict[str, float]:
        """Compute step-wide numbers, and return the metrics of correction and mismatch. For samples with
        teachers they include `log_ratio`, its mean. All ranks call this together.
        """
        mismatch, ratio, tokens = MismatchSums(), 0.0, 0
        for lot in self._step.local_samples():
            for sample in lot:
                self._numbers[sample.uid] = self._numbers_of(sample)
            if not lot or not self._recomputed:
                continue
            old = [self._step.read_signal(_OLD, sample) for sample in lot]
            masks = [sample.loss_mask for sample in lot]
            drawn = [sample.rollout_logprobs for sample in lot]
            mismatch.add(*map(np.concatenate, (drawn, old, masks)))
            parts = [np.zeros(0, np.float32)]
            for sample, logprobs in zip(lot, old, strict=True):
                if "teacher" in self._others and _has_logprobs("teacher", sample):
                    parts.append((logprobs - self._step.read_signal("teacher", sample))[sample.loss_mask])
                    total = float(parts[-1].sum(dtype=np.float64))
                    self._numbers[sample.uid].log_ratios["teacher"] = total
            ratios = np.concatenate(parts)
            if len(ratios):
                ratio += float(ratios.mean()) * len(ratios)  # exact: a float32 times a count in float64
                tokens += len(ratios)
        if self._step.on_disk and not self._step.backend.data.is_alone:  # else this rank has all of them
            mismatch, ratio, tokens = self._gather_sums(mismatch, ratio, tokens)
        self._set_baselines()
        metrics = mismatch.metrics() if mismatch.tokens else {}
        if tokens:
            metrics["log_ratio"] = ratio / tokens
        if self._correction is not None:
            corrections = CorrectionSums()
            for sample in self._step.samples:
                corrections.merge_from(self._numbers_at(sample).correction)
            metrics |= corrections.metrics()
        if self._valued is not None:
            from opd.train.critic import ValueQuality

            metrics |= ValueQuality.metrics(self._numbers_at(sample).values for sample in self._valued)
        return metrics

    def _gather_sums(
        self, mismatch: MismatchSums, ratio: float, tokens: int
    ) -> tuple[MismatchSums, float, int]:
        """Return the sums of all ranks, and complete `self._numbers` with those of their samples."""
        numbers = {uid: asdict(one) for uid, one in self._numbers.items()}
        sums = [numbers, asdict(mismatch), ratio, tokens]
        mismatch, ratio, tokens = MismatchSums(), 0.0, 0
        for one in self._step.gather_local(sums, "the sums of the policy stream"):
            for uid, fields in one[0].items():
                fields["correction"] = CorrectionSums(**fields["correction"])
                fields["advantages"] = Moments(**fields["advantages"])
                self._numbers[uid] = _SampleNumbers(**fields)
            mismatch.merge_from(MismatchSums(**one[1]))
            ratio, tokens = ratio + one[2], tokens + one[3]
        return mismatch, ratio, tokens

    def _set_baselines(self) -> None:
        """Set what is subtracted from advantages: the moments of whitening, and the mean of each source."""
        for sample in self._whitened or ():
            self._moments.merge_from(self._numbers_at(sample).advantages)
        for who, against in self._others.items():
            if against is not None and against.baseline == "batch_mean":
                samples = [sample for sample in self._step.samples if _has_logprobs(who, sample)]
                numbers = [self._numbers_at(sample) for sample in samples]
                parts = [(one.returns.get(who, 0.0), int(one.correction.tokens)) for one in numbers]
                names = [sample.teacher for sample in samples]
                self._means[who] = teacher_means((n, *p) for n, p in zip(names, parts, strict=True))

    def mean_log_ratio(self, who: Who, samples: Sequence[Sample]) -> float | None:
        """Return the mean log-ratio to `who` of the unmasked tokens of `samples`, after `measure_step`.
        `None` without tokens. On-policy it is an estimate of the KL, nats a token (k1).
        """
        numbers = [self._numbers_at(sample) for sample in samples]
        tokens = sum(int(one.correction.tokens) for one in numbers)
        return sum(one.log_ratios.get(who, 0.0) for one in numbers) / tokens if tokens else None

    def accepted_counts(self, samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
        """Return the tokens of each sample that the correction left, and the turns with such a token."""
        numbers = [self._numbers_at(sample) for sample in samples]
        return [int(one.correction.kept) for one in numbers], [one.turns for one in numbers]

    def policy_tokens(self, sample: Sample) -> PolicyTokens:
        """Return the stream's values of `sample`, whose tokens are in memory."""
        old = self._step.read_signal(_OLD, sample) if self._recomputed else None
        # Without a correction they are not used.
        compared = sample.rollout_logprobs if old is None else old
        mask, weight, _ = apply_correction(
            self._correction, sample.rollout_logprobs, compared, sample.loss_mask
        )
        reference = self._step.read_signal("reference", sample) if "reference" in self._others else None
        if self._estimated and self._is_rewarded(sample):
            advantages = self._step.read_signal(_ADVANTAGES, sample)
            if self._whitened is not None:
                advantages = self._moments.whiten_advantages(advantages, sample.loss_mask)
            if self._coefs is not None:
                advantages = self._coefs[sample.domain] * advantages
        else:
            advantages = np.zeros(len(mask), np.float32)
        for who, against, returns in self._follow_terms(sample):
            mean = self._means.get(who, {}).get(sample.teacher, 0.0)
            coef = against.coef if isinstance(against.coef, float | int) else against.coef[sample.domain]
            advantages = with_opd_term(advantages, returns, sample.loss_mask, coef, mean)
        return PolicyTokens(old, advantages, mask, weight, reference)

    def _numbers_at(self, sample: Sample) -> _SampleNumbers:
        return self._numbers.get(sample.uid, _SampleNumbers(CorrectionSums()))  # empty without a response

    def _numbers_of(self, sample: Sample) -> _SampleNumbers:
        mask, sums = sample.loss_mask, CorrectionSums()
        old = self._step.read_signal(_OLD, sample) if self._recomputed else sample.rollout_logprobs
        kept_mask, weights, bounded = apply_correction(self._correction, sample.rollout_logprobs, old, mask)
        sums.add(mask, kept_mask, weights, bounded)
        numbers = _SampleNumbers(sums, turns=turns_of(mask, kept_mask))
        if self._whitened is not None and self._is_rewarded(sample):
            numbers.advantages = Moments.from_values(self._step.read_signal(_ADVANTAGES, sample), mask)
        if "reference" in self._others and self._recomputed:
            numbers.log_ratios["reference"] = float(self._log_ratio(sample)[mask].sum())
        if self._valued is not None:
            from opd.train.critic import ValueQuality

            numbers.values = asdict(ValueQuality.from_sample(*self.values_and_returns(sample), mask))
        for who, _, returns in self._follow_terms(sample):
            numbers.returns[who] = float(returns.sum())
        return numbers

    def _log_ratio(self, sample: Sample) -> np.ndarray:
        """Return the log-ratio to the reference, [R] float64."""
        return self._step.read_signal(_OLD, sample).astype(np.float64) - self._step.read_signal(
            "reference", sample
        )

    def _is_rewarded(self, sample: Sample) -> bool:
        return self._rewarded is None or sample.uid in self._rewarded

    def _follow_terms(self, sample: Sample) -> Iterator[tuple[Who, FollowTerm, np.ndarray]]:
        """Yield the advantage terms of `sample` by source, with their returns `[R]`."""
        for who, against in self._others.items():
            if against is not None and _has_logprobs(who, sample):
                old, other = self._step.read_signal(_OLD, sample), self._step.read_signal(who, sample)
                label = f"sample {sample.uid}, {who} {sample.teacher if who == 'teacher' else 'policy'!r}"
                yield who, against, opd_returns(old, other, sample.loss_mask, against.discount, label)


def group_advantages(estimator: AdvantageEstimator, group: SampleGroup) -> dict[str, np.ndarray]:
    """Return the advantages of the group's samples and branches by uid, `[R]` float32. A branch gets the
    advantage it would have in place of its episode, so the group has its requested size.
    """
    uids = [sample.uid for sample in group.samples]
    advantages = dict(zip(uids, estimator(replace(group, branches=[])), strict=True))
    for branch in group.branches:
        index = uids.index(branch.branch_of)
        samples = [*group.samples[:index], branch, *group.samples[index + 1 :]]
        advantages[branch.uid] = estimator(replace(group, samples=samples, branches=[]))[index]
    return advantages


def _has_logprobs(who: Who, sample: Sample) -> bool:
    """Return whether a source has log-probabilities of `sample`."""
    return who == "reference" or sample.teacher is not None
