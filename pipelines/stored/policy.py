"""The policy-gradient stream of samples on disk: a pass before the training makes what every token needs.

Log-probabilities under the weights at the start of the step, and advantages, go into a trajectory store of
their own, micro-batch by micro-batch; what needs the whole step (a baseline, the normaliser of a correction)
is a sum by then, over all ranks. The training reads them back, micro-batch by micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from opd.algorithms.advantages import build_advantage
from opd.algorithms.corrections import correct, correction_metrics
from opd.algorithms.opd_term import opd_advantages
from opd.config import DistillConfig, SampledTokenK1
from opd.config.rl import CustomAdvantage
from opd.pipelines.merge_loss import policy_loss
from opd.pipelines.stored.step import StoredStep
from opd.storage.trajectories import Field, TrajectoryRecord, TrajectoryStore, TrajectoryWriter
from opd.teachers.schedule import TeacherSchedule, sampled_logprobs
from opd.train.backend import Backend
from opd.train.plan import TrainingPlan
from opd.types import Sample, SampleGroup, TokenTerms

SIGNALS = (Field("old_logprobs", "float32"), Field("advantages", "float32"))


class StoredPolicy:
    """The stream of one step.

    Args:
        config: Loss, reward's coefficient, estimator.
        step: The step.
        groups: All of its groups, rewarded; tokens are not needed.
        writer: Where this rank's signals go, and are read again.
    """

    def __init__(
        self,
        config: DistillConfig,
        step: StoredStep,
        groups: Sequence[SampleGroup],
        writer: TrajectoryWriter,
    ) -> None:
        self._config, self._step, self._writer = config, step, writer
        self._groups = {group.uid: group for group in groups}
        self._rows = {step.store.table.uid[row]: row for row in step.rows.tolist()}
        self._estimate = build_advantage(config.advantage)
        self._values = self._sample_advantages() if config.rl_coef > 0 else {}
        self._custom: tuple[str, dict[str, np.ndarray]] = "", {}
        """The group whose advantages were estimated last, by somebody's own estimator."""
        self._sums: dict[str, float] = defaultdict(float)
        self._signals: TrajectoryStore | None = None
        self._found: dict[str, int] = {}
        self._scales: dict[str, float] = {}

    @classmethod
    @contextmanager
    def open(
        cls, config: DistillConfig, step: StoredStep, groups: Sequence[SampleGroup], folder: Path
    ) -> Iterator[StoredPolicy]:
        """A stream whose signals lie in `folder` while the block runs."""
        with TrajectoryWriter(folder, fields=SIGNALS, durable=False) as writer:
            writer.retire(writer.uids)
            policy = cls(config, step, groups, writer)
            try:
                yield policy
            finally:
                if policy._signals is not None:
                    policy._signals.close()
                writer.retire(writer.uids)

    def prepare(self, backend: Backend, schedule: TeacherSchedule, plan: TrainingPlan) -> dict[str, float]:
        """The pass; returns metrics. All ranks make it together."""
        with backend.shares.apart():
            for samples in self._step.samples(schedule, plan):
                self._put(samples, backend, schedule)
        whole: dict[str, float] = defaultdict(float)
        for said in backend.data.gather_json(self._sums, "the sums of the policy stream"):
            for name, value in said.items():
                whole[name] += value
        self._sums = whole
        self._signals = TrajectoryStore.open(self._writer.folder)
        self._found = {uid: row for row, uid in enumerate(self._signals.table.uid)}
        self._scales = self._step.scales(_below("kept/", whole))
        return self._metrics()

    def fill(self, terms: TokenTerms, sample: Sample) -> None:
        """See `step.Policy`."""
        assert self._signals is not None  # `prepare` comes first
        row = self._found[sample.uid]
        with self._signals.lease([row]) as batch:
            terms.old_logprobs = np.array(batch.read(row, "old_logprobs"))
            terms.advantages = np.array(batch.read(row, "advantages"))
        loss, mask = self._config.loss, sample.loss_mask
        if isinstance(loss, SampledTokenK1) and loss.baseline == "batch_mean":
            route = sample.teacher or ""
            mean = self._sums[f"terms/{route}"] / max(self._sums[f"ratios/{route}"], 1)
            terms.advantages[mask] += np.float32(loss.coef * mean)
        correction = correct(
            policy_loss(self._config).correction, [sample.rollout_logprobs], [terms.old_logprobs], [mask]
        )
        scale = self._scales.get(sample.teacher or "", 0.0)
        kept = np.where(correction.masks[0], scale, 0.0).astype(np.float32)
        terms.policy_weight = kept * correction.weights[0]

    def _put(self, samples: list[Sample], backend: Backend, schedule: TeacherSchedule) -> None:
        old = backend.logprobs(samples)
        advantages = self._advantages(samples, old, backend, schedule)
        masks = [sample.loss_mask for sample in samples]
        correction = correct(
            policy_loss(self._config).correction, [s.rollout_logprobs for s in samples], old, masks
        )
        sums = self._sums
        tokens = sum(int(np.count_nonzero(mask)) for mask in masks)
        sums["tokens"] += tokens
        sums["truncated"] += correction.metrics.get("correction/truncated", 0.0) * tokens
        for sample, kept, weights in zip(samples, correction.masks, correction.weights, strict=True):
            sums[f"kept/{sample.teacher or ''}"] += int(np.count_nonzero(kept))
            sums["weights"] += float(weights.sum(dtype=np.float64))
            sums["squares"] += float(np.square(weights, dtype=np.float64).sum())
        signals = zip(samples, old, advantages, strict=True)
        self._writer.put_many(
            [
                (
                    TrajectoryRecord(sample.uid, 0, len(sample.response_ids)),
                    {"old_logprobs": own.astype(np.float32), "advantages": advantage.astype(np.float32)},
                )
                for sample, own, advantage in signals
            ]
        )

    def _advantages(
        self, samples: list[Sample], old: list[np.ndarray], backend: Backend, schedule: TeacherSchedule
    ) -> list[np.ndarray]:
        """[R] float32 each: the reward's, with the k1 term but for its baseline."""
        loss = self._config.loss
        base = [self._base(sample) for sample in samples]
        if not isinstance(loss, SampledTokenK1):
            return base
        schedule.score(samples)
        teacher = sampled_logprobs(schedule, samples, self._config.mixture, backend.temperature)
        schedule.forget(samples)
        masks, routes = [s.loss_mask for s in samples], [s.teacher for s in samples]
        terms = opd_advantages(
            [np.zeros(len(own)) for own in old],
            old,
            teacher,
            masks,
            coef=1.0,
            baseline="none",
            discount=loss.discount,
            teachers=routes,
        )
        columns = zip(base, terms, old, teacher, masks, routes, strict=True)
        for advantage, term, own, other, mask, route in columns:
            self._sums[f"terms/{route or ''}"] -= float(term[mask].sum())
            self._sums[f"ratios/{route or ''}"] += int(np.count_nonzero(mask))
            self._sums["ratio"] += float((own.astype(np.float64) - other)[mask].sum())
            advantage[:] = np.where(mask, advantage, 0.0)
            advantage[mask] += loss.coef * term[mask]
        return base

    def _base(self, sample: Sample) -> np.ndarray:
        """[R] float32: the reward's advantages times `rl_coef`."""
        coef = self._config.rl_coef
        if coef == 0:
            return np.zeros(len(sample.response_ids), np.float32)
        if not isinstance(self._config.advantage, CustomAdvantage):
            return np.where(sample.loss_mask, coef * self._values[sample.uid], 0.0).astype(np.float32)
        if self._custom[0] != sample.group_uid:
            self._custom = sample.group_uid, self._custom_advantages(self._groups[sample.group_uid])
        return coef * self._custom[1][sample.uid]

    def _custom_advantages(self, group: SampleGroup) -> dict[str, np.ndarray]:
        """[R] float32 of each sample: somebody's own estimator may look at tokens, so it is given the whole
        group, mapped.
        """
        rows = [self._rows[sample.uid] for sample in group.samples if sample.uid in self._rows]
        with self._step.store.lease(rows) as batch:
            whole = {own.uid: own for own in (batch.sample(row) for row in rows)}
            members = [
                replace(whole.get(o.uid, o), reward=o.reward, teacher=o.teacher) for o in group.samples
            ]
            found = self._estimate(replace(group, samples=members))
        named = zip(group.samples, found, strict=True)
        return {sample.uid: np.array(advantages, np.float32) for sample, advantages in named}

    def _sample_advantages(self) -> dict[str, float]:
        """The advantage of each sample: the estimators here give all tokens that count the same."""
        values: dict[str, float] = {}
        if isinstance(self._config.advantage, CustomAdvantage):
            return values
        for group in self._groups.values():
            one = {"response_ids": np.zeros(1, np.int32), "loss_mask": np.ones(1, bool)}
            light = [replace(sample, **one) for sample in group.samples]
            for sample, found in zip(light, self._estimate(replace(group, samples=light)), strict=True):
                values[sample.uid] = float(found[0])
        return values

    def _metrics(self) -> dict[str, float]:
        sums = self._sums
        metrics: dict[str, float] = {}
        tokens = sums["tokens"]
        if tokens and isinstance(self._config.loss, SampledTokenK1):
            metrics["kl/mean"] = sums["ratio"] / tokens
        if tokens and policy_loss(self._config).correction is not None:
            kept = sum(_below("kept/", sums).values())
            metrics |= correction_metrics(tokens, kept, sums["truncated"], sums["weights"], sums["squares"])
        return metrics


def _below(prefix: str, sums: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in sums.items() if name.startswith(prefix)}
