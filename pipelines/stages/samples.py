"""Provide the samples of a step to an algorithm, with the version in memory.

`samples_on_disk.py` has the other version. Both have one interface, so no algorithm knows where its samples
are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import numpy as np

from opd.pipelines.stages.student import Student
from opd.ranks import Ranks
from opd.rollout.collect import EncodedPrompt, SamplingEngine
from opd.rollout.rewards import RewardRunner
from opd.train.advantages import zero_variance_fraction
from opd.train.backend import Backend
from opd.train.loss_weights import drop_stale, staleness_metrics
from opd.train.packing import PerSample
from opd.types import RolloutBatch, Sample, SampleGroup, Status, TokenTerms

Terms = Callable[[Sample], TokenTerms]
"""Returns the loss terms of a sample whose tokens are in memory."""


class StepSamples:
    """The samples of one step, in memory.

    Every rank has the same `groups`, and makes the same calls. Lengths, masks, rewards, domains and teachers
    are available anywhere. Tokens are only available in the results of `local_batches` and `read`, and in a
    group from `with_tokens`.

    Args:
        groups: In the order of their prompts.
        backend: Trains on them, and deals them out to the ranks.
        ranks: The ranks that share the rewards.
    """

    on_disk = False

    def __init__(self, groups: Sequence[SampleGroup], backend: Backend, ranks: Ranks | None = None) -> None:
        self.groups = list(groups)
        self.backend = backend
        self.ranks = Ranks() if ranks is None else ranks
        self._signals: dict[tuple[str, str], np.ndarray] = {}

    @property
    def samples(self) -> list[Sample]:
        """All trained samples, with branches of episodes, group by group."""
        return [sample for group in self.groups for sample in group.samples_with_branches]

    @property
    def responses(self) -> list[Sample]:
        """One sample for each requested response. An episode counts once, however many branches it has."""
        return [sample for group in self.groups for sample in group.samples]

    @property
    def tokens(self) -> int:
        """Response tokens that the loss counts."""
        return sum(sample.trainable_tokens for sample in self.samples)

    def limit_tokens(self, tokens: int) -> None:
        """Retain the first groups, up to the one whose tokens reach `tokens`: less than a group too many."""
        counts = [sum(s.trainable_tokens for s in group.samples_with_branches) for group in self.groups]
        self.groups = self.groups[: bisect_left(list(accumulate(counts)), tokens) + 1]

    def deal_samples(self) -> None:
        """Deal the samples out again: each rank gets those it scores and trains."""
        self.backend.assign_samples(self.samples)

    def reward_responses(self, rewards: RewardRunner) -> None:
        """Reward every response, each on one rank. Its branches have its reward."""
        rewards.score_shared(self.ranks, self.responses)
        for group in self.groups:
            group.share_rewards()

    def drop_stale(self, version: int, limit: int | None) -> dict[str, float]:
        """Return the tokens' ages for a learner at `version`, if any, and mask tokens older than `limit`."""
        metrics = staleness_metrics(self.samples, version)
        if not metrics.get("staleness/max"):
            return {}
        return metrics | (drop_stale(self.samples, version, limit) if limit is not None else {})

    def with_tokens(self, group: SampleGroup) -> AbstractContextManager[SampleGroup]:
        """Yield `group` with its tokens, while the block runs."""
        return nullcontext(group)

    def local_batches(
        self, samples: Sequence[Sample], max_tokens: int, *, by_teacher: bool
    ) -> Iterator[list[Sample]]:
        """Yield this rank's share of `samples`, with their tokens. In memory it is one list. From disk each
        list has at most `max_tokens`, with `by_teacher` of one teacher. All ranks get the same number of
        lists.
        """
        yield self.backend.shares.local_samples(samples)

    def read(self, samples: Sequence[Sample], parts: Sequence[Sequence[int]]) -> Iterator[list[Sample]]:
        """Yield the samples at the indices `parts[0]`, `parts[1]`, ... of `samples`, with their tokens. From
        disk at most two of these lists are in memory. One is used while the next is read, and released after
        it.
        """
        for part in parts:
            yield [samples[index] for index in part]

    def batch_reader(self, samples: Sequence[Sample], terms: Terms) -> Callable[..., Iterator[RolloutBatch]]:
        """Return the reader of `samples` for a back end. It makes `terms` for one micro-batch at a time."""

        def read(parts: Sequence[Sequence[int]]) -> Iterator[RolloutBatch]:
            for loaded in self.read(samples, parts):
                yield RolloutBatch(loaded, [terms(sample) for sample in loaded])

        return read

    def compute_signal(
        self, name: str, samples: Sequence[Sample], compute: PerSample, label: str, **lots: Any
    ) -> None:
        """Store the signal `name` of `samples`: `[R]` float32 each, computed on the rank that trains them.
        `lots` are options of the version on disk. `label` names the signal in errors.
        """
        signals = self.backend.shares.compute_on_ranks(samples, compute, label)
        self._signals |= {(name, s.uid): values for s, values in zip(samples, signals, strict=True)}

    def store_signal(self, name: str, sample: Sample, values: np.ndarray) -> None:
        """Store one signal, `[R]` float32, of one of `local_samples`."""
        self._signals[name, sample.uid] = values

    def read_signal(self, name: str, sample: Sample) -> np.ndarray:
        """Return the stored signal of one of `local_samples`, `[R]` float32."""
        return self._signals[name, sample.uid]

    def local_samples(self) -> Iterator[list[Sample]]:
        """Yield the samples whose signals this rank stores, with their tokens, batch by batch."""
        yield self.samples

    def local_group_samples(self, group: SampleGroup) -> list[Sample]:
        """Return the samples of `group` whose signals this rank stores."""
        return group.samples_with_branches

    def gather_local(self, mine: object, label: str) -> list[Any]:
        """Return each rank's value for its samples, or one value if all ranks have all samples."""
        return [mine]


class SampleBuffer:
    """The store of a stage's samples until they are trained on: in memory."""

    def __init__(self, student: Student) -> None:
        self._student = student

    def write(
        self, engine: SamplingEngine, prompts: Sequence[EncodedPrompt], size: int, index: int
    ) -> list[SampleGroup]:
        """Generate `size` answers of `engine` to each of the `prompts` of batch `index`."""
        return self._student.sample_groups(prompts, size, engine, index)

    def store(self, groups: list[SampleGroup], index: int) -> list[SampleGroup]:
        """Store finished groups that this rank takes in step `index`, and return them."""
        return groups

    def is_stored(self, group: SampleGroup, index: int) -> bool:
        """Return whether step `index` of an earlier attempt has stored `group`, with all its answers."""
        return False

    def after_sharing(
        self, own: list[SampleGroup], everyone: list[SampleGroup], index: int
    ) -> list[SampleGroup]:
        """Return what `open` needs of such groups, once ranks have told each other theirs."""
        return everyone

    def open(self, groups: Sequence[SampleGroup], index: int) -> AbstractContextManager[StepSamples]:
        """Return the samples of `write`'s result for batch `index`, for as long as the block runs."""
        return nullcontext(StepSamples(groups, self._student.backend, self._student.ranks))

    def start(self, step: int) -> None:
        """Start at batch `step`. Earlier ones are trained on."""

    def on_checkpoint(self) -> Callable[[], None]:
        """Return a callback for a checkpoint that covers all opened batches."""
        return lambda: None


def rollout_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return rewards (overall, by domain, and their parts), lengths and truncation. If prompts have several
    responses, also the share of them without signal.
    """
    samples = [sample for group in groups for sample in group.samples]
    rewards = np.array([s.reward for s in samples], dtype=np.float64)
    lengths = np.array([len(s.response_ids) for s in samples])
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "truncated": float(np.mean([s.status is Status.TRUNCATED for s in samples])),
    }
    for share, value in zip((10, 50, 90), np.quantile(lengths, (0.1, 0.5, 0.9)), strict=True):
        metrics[f"length/p{share}"] = float(value)
    if any(len(group.samples) > 1 for group in groups):
        metrics["frac_reward_zero_std"] = zero_variance_fraction(groups)
    episodes = [episode for s in samples if (episode := s.metadata.get("episode"))]
    if episodes:
        ends = [(episode["turns"], episode["ended"] == "done") for episode in episodes]
        metrics["episode/turns"], metrics["episode/done"] = np.mean(ends, axis=0).tolist()
    if counts := [episode["branches"] for episode in episodes if "branches" in episode]:
        metrics["episode/branches"] = float(np.mean(counts))
    for domain in dict.fromkeys(s.domain for s in samples):
        answers = [s for s in samples if s.domain == domain]
        metrics[f"reward/{domain}"] = float(np.array([s.reward for s in answers], dtype=np.float64).mean())
        for part in dict.fromkeys(name for s in answers for name in s.reward_parts):
            values = [s.reward_parts[part] for s in answers if part in s.reward_parts]
            metrics[f"reward/{domain}/{part}"] = float(np.mean(values))
    return metrics
