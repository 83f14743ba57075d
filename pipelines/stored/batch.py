"""What is known of a batch on disk while its tokens stay there; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opd.pipelines.stored.files import rows_by_uid
from opd.pipelines.stored.step import Counted
from opd.ranks import Ranks
from opd.rewards.runner import RewardRunner
from opd.storage.trajectories import TrajectoryUnion
from opd.types import Sample, SampleGroup, no_ids

_TOKENS = 1 << 20
"""Tokens in memory at a time, about, while responses are rewarded."""

GroupUids = list[tuple[str, list[str]]]
"""The groups of a rank: their uid, and their samples'."""


def written_by_all(mine: Sequence[SampleGroup], ranks: Ranks) -> list[GroupUids]:
    """What every rank has written, from the groups of each; all ranks call this."""
    own = [[group.uid, [sample.uid for sample in group.samples]] for group in mine]
    return ranks.gather_json(own, "the responses of a batch")


@dataclass(slots=True)
class StoredBatch:
    """All groups of a batch, in the order of its prompts; their samples have everything but tokens."""

    union: TrajectoryUnion
    ranks: Ranks
    groups: list[SampleGroup]
    rows: np.ndarray
    """[n] int64: of `union.table`, sample by sample."""
    trainable: np.ndarray
    """[n] int64: how many tokens of each the loss counts."""
    counted: Counted | None = None
    """Where some of them are too old."""

    @classmethod
    def of(cls, union: TrajectoryUnion, written: Sequence[GroupUids], ranks: Ranks) -> StoredBatch:
        """The batch of which the ranks have `written` these groups, which `union` has."""
        found = [rows_by_uid(union, rank) for rank in range(ranks.size)]
        placed = [
            [(uid, [found[rank][sample] for sample in samples]) for uid, samples in part]
            for rank, part in enumerate(written)
        ]
        groups, rows = [], []
        for uid, places in ranks.dealt(placed):
            samples = [_light(union, row) for row in places]
            groups.append(SampleGroup(uid, samples[0].domain, samples))
            rows += places
        at = np.array(rows, np.int64)
        return cls(union, ranks, groups, at, union.table.trainable_tokens[at])

    @property
    def samples(self) -> list[Sample]:
        """All of them, without tokens."""
        return [sample for group in self.groups for sample in group.samples]

    @property
    def lengths(self) -> np.ndarray:
        """[n] int64: response tokens."""
        return self.union.table.response_tokens[self.rows]

    def reward(self, rewards: RewardRunner) -> None:
        """Reward every sample; each rank does those of the groups it has written, some tokens at a time."""
        found: dict[str, float | None] = {}
        for rows in self._pieces(rewards):
            with self.union.lease(rows) as batch:
                samples = [batch.sample(row) for row in rows]
                rewards.score(samples)
                found |= {sample.uid: sample.reward for sample in samples}
        everyone = self._of_all(lambda sample, row: found[sample.uid], "the rewards of a batch")
        for sample, reward in zip(self.samples, everyone, strict=True):
            sample.reward = reward

    def drop_stale(self, version: int, limit: int | None) -> dict[str, float]:
        """Ages of the tokens for a learner at `version`; those beyond `limit` will not count. Empty if all
        are of `version`. Tokens are read only of samples that several policies have written.
        """
        oldest = version - limit if limit is not None else None
        seen = self._of_all(lambda sample, row: self._ages(row, version, oldest), "the ages of a batch")
        ages = np.array(seen, np.float64).reshape(-1, 3)
        tokens = int(self.trainable.sum())
        if not tokens or not ages[:, 1].max():
            return {}
        metrics = {"staleness/mean": float(ages[:, 0].sum() / tokens)}
        metrics["staleness/max"] = float(ages[:, 1].max())
        if oldest is not None:
            self.counted = Counted(ages[:, 2].astype(np.int64), oldest)
            metrics["staleness/dropped"] = 1.0 - float(ages[:, 2].sum() / tokens)
        return metrics

    def _ages(self, row: int, version: int, oldest: int | None) -> tuple[int, int, int]:
        """Of the tokens that count: the sum of their ages, the largest, and how many are recent enough."""
        table = self.union.table
        count = int(table.trainable_tokens[row])
        first, last = int(table.first_version[row]), int(table.last_version[row])
        if not count:
            return 0, 0, 0
        if first == last:
            return (
                count * (version - first),
                version - first,
                count if oldest is None or first >= oldest else 0,
            )
        with self.union.lease([row]) as batch:
            versions = batch.read(row, "policy_versions")[batch.read(row, "loss_mask")]
            kept = count if oldest is None else int(np.count_nonzero(versions >= oldest))
            ages = version - versions.astype(np.int64)
            return int(ages.sum()), int(ages.max()), kept

    def _mine(self) -> Iterator[tuple[int, SampleGroup]]:
        """The groups this rank has written, each with the place of its first sample."""
        place = 0
        for number, group in enumerate(self.groups):
            if number % self.ranks.size == self.ranks.rank:
                yield place, group
            place += len(group.samples)

    def _of_all(self, compute: Callable[[Sample, int], Any], what: str) -> list[Any]:
        """`compute(sample, row)` of every sample, each on the rank that has written it."""
        mine = [
            [compute(s, int(self.rows[place + i])) for i, s in enumerate(group.samples)]
            for place, group in self._mine()
        ]
        everyone = self.ranks.dealt(self.ranks.gather_json(mine, what))
        return [value for group in everyone for value in group]

    def _pieces(self, rewards: RewardRunner) -> Iterator[list[int]]:
        """Rows that are rewarded together: a domain's if its function wants that, else about `_TOKENS`."""
        own: dict[str, list[int]] = {}
        for place, group in self._mine():
            own.setdefault(group.domain, []).extend(self.rows[place : place + len(group.samples)].tolist())
        for domain, rows in own.items():
            if rewards.together(domain):
                yield rows
                continue
            waiting: list[int] = []
            tokens = 0
            for row in rows:
                waiting.append(row)
                tokens += int(self.union.table.tokens[row])
                if tokens >= _TOKENS:
                    yield waiting
                    waiting, tokens = [], 0
            if waiting:
                yield waiting


def _light(union: TrajectoryUnion, row: int) -> Sample:
    """What the metadata says of a sample."""
    table = union.table
    record = table.record(row)
    return Sample(
        record.uid,
        record.group_uid,
        record.domain,
        no_ids(),
        teacher=record.teacher or None,
        status=record.status,
    )
