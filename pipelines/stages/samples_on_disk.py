"""Store samples on disk (`storage.trajectories: disk`), with two micro-batches at a time in memory.

Each response goes to the stage's files (`sample_files.py`) when it ends. A step has only the metadata of all
its samples. Tokens are mapped when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.precision import WIDTH, model_dtype
from opd.pipelines.stages.sample_files import (
    SampleFiles,
    Scratch,
    digest_of,
    groups_of,
    standing_for,
    written_by_all,
)
from opd.pipelines.stages.samples import SampleHome, StepSamples
from opd.pipelines.stages.student import Student
from opd.ranks import Ranks, path_of_rank
from opd.rollout.collect import (
    EncodedPrompt,
    Generates,
    Way,
    collect,
    in_step,
    is_played,
    start_episodes,
    stream,
    write,
)
from opd.rollout.requests import RequestWriter
from opd.rollout.rewards import RewardRunner
from opd.rollout.streams import More, noting, several
from opd.storage.sample_lot import FIELDS
from opd.storage.sample_store import SampleStore
from opd.train.backend import Backend
from opd.train.packing import PerSample
from opd.types import Chunk, RolloutRequest, Sample, SampleGroup, no_ids

_MIB = 1 << 20
_TOGETHER = 1 << 16
"""Tokens of ended responses that wait, in the log and in memory, to be made durable at once."""
_REWARDED = 1 << 20
"""Tokens in memory at a time, about, while responses are rewarded."""


class DiskHome(SampleHome):
    """The store of a stage's samples until they are trained on: on disk.

    Args:
        context: The stage.
        student: Samples and trains.
        files: The files of responses.
        route: Returns the teacher of a sample, for viewers of the store.
    """

    def __init__(
        self,
        context: StageContext,
        student: Student,
        files: SampleFiles,
        route: Callable[[Sample], str | None] = lambda sample: None,
    ) -> None:
        super().__init__(student)
        self._files, self._route = files, route
        self._owner = context.folder.owner(context.stage)
        signals = context.folder.stage(context.stage) / "signals"
        self._signals = path_of_rank(signals, context.ranks.rank)
        self._opened = 0

    @classmethod
    @contextmanager
    def of_stage(
        cls,
        context: StageContext,
        student: Student,
        route: Callable[[Sample], str | None] = lambda sample: None,
    ) -> Iterator[DiskHome]:
        """Open it in the stage's folder, while the block runs."""
        recipe = context.recipe
        log, width = recipe.rollout.log, WIDTH[model_dtype(recipe)]
        folder = context.folder.trajectories(context.stage)
        # Samples that left the token log must survive a power cut too, as far as that was promised.
        durable = log is not None and log.fsync != "os"
        # A micro-batch and the next share the memory. A teacher's hidden state counts as wide as the
        # student's.
        a_token = 13 + student.backend.hidden_size * width
        fitting = recipe.storage.trajectory_mb * _MIB // (2 * a_token)
        student.backend.cap_tokens(max(1, fitting))
        with SampleFiles.open(folder, context.ranks, keep=log is not None, durable=durable) as files:
            yield cls(context, student, files, route)

    def start(self, step: int) -> None:
        self._files.retire_before(step)

    def learnt_from(self) -> Callable[[], None]:
        return partial(self._files.retire_before, self._opened)

    @contextmanager
    def open(self, groups: Sequence[SampleGroup], index: int) -> Iterator[StepSamples]:
        ranks = self._student.ranks
        written = written_by_all(groups, ranks)
        store = self._files.view(index)
        everyone, rows = groups_of(store, written)
        with Scratch(self._signals) as signals:
            yield SamplesOnDisk(everyone, rows, store, signals, self._student.backend, ranks)
        self._opened = index + 1

    def write(
        self, engine: Generates, prompts: Sequence[EncodedPrompt], size: int, index: int
    ) -> list[SampleGroup]:
        """Generate this rank's share of batch number `index`, in the order of the prompts. Returns no tokens.

        Each response goes to disk when it ends, and then leaves log and memory. An earlier attempt's
        responses are reused.
        """
        student = self._student
        mine = prompts if student.writing.alone else student.writing.shard(prompts)
        with in_step(student.writer, student.barrier):
            streamed: list[EncodedPrompt] = []
            own: list[EncodedPrompt] = []
            episodes: dict[Way, list[EncodedPrompt]] = {}
            for prompt in mine:
                way = student.ways[prompt.domain]
                if way.generate is collect:
                    streamed.append(prompt)
                elif not is_played(way):
                    own.append(prompt)
                elif self._is_missing(prompt, size, index):
                    episodes.setdefault(way, []).append(prompt)
            if episodes:
                self._beside(engine, streamed, episodes, size, index)
            else:
                self._stream(engine, streamed, size, index)
            self._generate(engine, own, size, index)
        student.barrier.wait()
        groups = []
        for prompt in mine:
            found = self._files.group(prompt.uid, self._asked(prompt), index)
            samples = [Sample(found[place], prompt.uid, prompt.domain, no_ids()) for place in range(size)]
            branches = [
                Sample(uid, prompt.uid, prompt.domain, no_ids(), branch_of=episode)
                for uid, episode in self._files.branches(prompt.uid, index).items()
            ]
            groups.append(SampleGroup(prompt.uid, prompt.domain, samples, branches))
        return groups

    def _stream(self, engine: Generates, prompts: Sequence[EncodedPrompt], size: int, index: int) -> None:
        """Sample missing responses. They go to disk when they end, several short ones at once."""
        places: dict[str, int] = {}
        asked: dict[str, str] = {}
        missing = []
        for prompt in prompts:
            asked[prompt.uid] = self._asked(prompt)
            known = self._files.group(prompt.uid, asked[prompt.uid], index)
            for place in range(size):
                if place not in known:
                    sample = prompt.sample(place)
                    places[sample.uid] = place
                    missing.append(sample)
        if not missing:
            return
        student = self._student
        waiting: list[Sample] = []
        tokens = 0
        for ended in stream(engine, missing, student.ways, student.seed):
            waiting.append(ended)
            tokens += len(ended.response_ids)
            if tokens >= _TOGETHER:
                self._put(waiting, index, asked, places)
                waiting, tokens = [], 0
        self._put(waiting, index, asked, places)

    def _beside(
        self,
        engine: Generates,
        streamed: Sequence[EncodedPrompt],
        episodes: Mapping[Way, Sequence[EncodedPrompt]],
        size: int,
        index: int,
    ) -> None:
        """Generate single answers and episodes concurrently. Groups of episodes come complete."""
        with RequestWriter(engine) as writer:
            plays = start_episodes(writer, episodes, size, self._student.seed)
            self._stream(writer, streamed, size, index)
            writer.finish()
            for prompts, play in zip(episodes.values(), plays, strict=True):
                self._put_groups(prompts, play.result(), index)
        self._forget(writer.asked)

    def _is_missing(self, prompt: EncodedPrompt, size: int, index: int) -> bool:
        return len(self._files.group(prompt.uid, self._asked(prompt), index)) < size

    def _generate(self, engine: Generates, prompts: Sequence[EncodedPrompt], size: int, index: int) -> None:
        """Run the user's own rollout for prompts with missing groups. They come complete."""
        student = self._student
        missing = [prompt for prompt in prompts if self._is_missing(prompt, size, index)]
        if not missing:
            return
        noted = _Noted(engine)
        self._put_groups(missing, write(noted, missing, size, student.ways, student.seed), index)
        self._forget(noted.asked)

    def _put_groups(
        self, prompts: Sequence[EncodedPrompt], groups: Sequence[SampleGroup], index: int
    ) -> None:
        """Store complete groups on disk, in place of earlier samples of them."""
        waiting: list[Sample] = []
        asked: dict[str, str] = {}
        places: dict[str, int] = {}
        gone: list[str] = []
        tokens = 0
        for prompt, group in zip(prompts, groups, strict=True):
            asked[prompt.uid] = self._asked(prompt)
            gone += self._files.group(prompt.uid, asked[prompt.uid], index).values()
            gone += self._files.branches(prompt.uid, index)
            for part in (group.branches, group.samples):
                places |= {sample.uid: place for place, sample in enumerate(part)}
                waiting += part
                tokens += sum(len(sample.response_ids) for sample in part)
            if tokens >= _TOGETHER:
                self._put(waiting, index, asked, places, gone)
                waiting, gone, tokens = [], [], 0
        self._put(waiting, index, asked, places, gone)

    def _put(
        self,
        samples: Sequence[Sample],
        index: int,
        asked: Mapping[str, str],
        places: Mapping[str, int],
        drops: Iterable[str] = (),
    ) -> None:
        """Store samples on disk, in place of `drops`, and remove them from log and memory."""
        for sample in samples:
            sample.teacher = self._route(sample)
        self._files.put(samples, index, asked, places, drops)
        for sample in samples:
            sample.prompt_ids = sample.response_ids = sample.policy_versions = no_ids()
            sample.rollout_logprobs, sample.loss_mask = np.zeros(0, np.float32), np.zeros(0, bool)
        self._forget(sample.uid for sample in samples)

    def _forget(self, uids: Iterable[str]) -> None:
        if self._student.rollouts is not None:
            self._student.rollouts.forget(uids)

    def _asked(self, prompt: EncodedPrompt) -> str:
        sampling = self._student.ways[prompt.domain].sampling
        return digest_of(prompt.token_ids, sampling, self._student.seed, self._owner)


class _Noted:
    """An engine that records its requests."""

    def __init__(self, engine: Generates) -> None:
        self._engine = engine
        self.asked: list[str] = []

    def generate(
        self, requests: RolloutRequest | Sequence[RolloutRequest], more: More | None = None
    ) -> Iterator[Chunk]:
        def note(asked: Sequence[RolloutRequest]) -> None:
            self.asked += [request.uid for request in asked]

        note(several(requests))
        return self._engine.generate(requests, noting(more, note))


class SamplesOnDisk(StepSamples):
    """The samples of one step, on disk.

    `groups` have everything of their samples but the values of tokens. Arrays have their lengths, and masks
    are right.

    Args:
        groups: Of all ranks, in the order of their prompts.
        rows: Uid of a sample -> its row in `store.table`.
        store: All ranks' samples.
        signals: The files of signals.
        backend: Trains on them.
        ranks: Each rank rewards its own samples.
    """

    on_disk = True

    def __init__(
        self,
        groups: Sequence[SampleGroup],
        rows: Mapping[str, int],
        store: SampleStore,
        signals: Scratch,
        backend: Backend,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(groups, backend, ranks)
        self.store, self._rows, self._scratch = store, rows, signals
        self._place = {group.uid: number for number, group in enumerate(self.groups)}

    def reward(self, rewards: RewardRunner) -> None:
        """Reward every response. Each rank rewards its own groups, some tokens at a time."""
        found: dict[str, list[Any]] = {}
        for lot in self._rewarded_together(rewards):
            with self._reading(lot) as own:
                rewards.score(own)
                found |= {sample.uid: [sample.reward, sample.reward_parts] for sample in own}
        for said in self.ranks.gather_json(found, "the rewards of a batch"):
            found |= said
        for sample in self.responses:
            sample.reward, sample.reward_parts = found[sample.uid]
        for group in self.groups:
            group.share_rewards()

    def drop_stale(self, version: int, limit: int | None) -> dict[str, float]:
        """Drop stale tokens as in memory. Tokens are read only for samples of several policies."""
        oldest = version - limit if limit is not None else None
        found: dict[str, Any] = {}
        for group in self._written():
            for sample in group.everything:
                found[sample.uid] = self._ages(sample, version, oldest)
        for said in self.ranks.gather_json(found, "the ages of a batch"):
            found |= said
        samples = self.samples
        ages = np.array([found[sample.uid] for sample in samples], np.float64).reshape(-1, 3)
        tokens = sum(sample.trainable_tokens for sample in samples)
        if not tokens or not ages[:, 1].max():
            return {}
        metrics = {"staleness/mean": float(ages[:, 0].sum() / tokens)}
        metrics["staleness/max"] = float(ages[:, 1].max())
        if oldest is not None:
            metrics["staleness/dropped"] = 1.0 - float(ages[:, 2].sum() / tokens)
            for sample, kept in zip(samples, ages[:, 2].astype(np.int64).tolist(), strict=True):
                self._keep_recent(sample, kept, oldest)
        return metrics

    @contextmanager
    def whole(self, group: SampleGroup) -> Iterator[SampleGroup]:
        with self._reading([*group.samples, *group.branches]) as own:
            size = len(group.samples)
            yield replace(group, samples=own[:size], branches=own[size:])

    def lots(self, samples: Sequence[Sample], max_tokens: int, *, by_teacher: bool) -> Iterator[list[Sample]]:
        parts = self.backend.shares.in_step(samples, max_tokens, by_teacher=by_teacher)
        return self.read(samples, parts)

    def read(self, samples: Sequence[Sample], parts: Sequence[Sequence[int]]) -> Iterator[list[Sample]]:
        rows = [[self._rows[samples[place].uid] for place in part] for part in parts]
        for part, batch in zip(parts, self.store.batches(rows, tuple(FIELDS)), strict=True):
            yield [self._heavy(batch, samples[place]) for place in part]

    def fill(
        self,
        name: str,
        samples: Sequence[Sample],
        compute: PerSample,
        what: str,
        *,
        by_teacher: bool = False,
    ) -> None:
        """Compute as in memory, for this rank's samples, one micro-batch at a time, or one teacher's."""
        for lot in self.lots(samples, self.backend.max_tokens, by_teacher=by_teacher):
            for sample, values in zip(lot, compute(lot), strict=True):
                self._scratch.put(name, sample.uid, values)

    def keep(self, name: str, sample: Sample, values: np.ndarray) -> None:
        self._scratch.put(name, sample.uid, values)

    def signal(self, name: str, sample: Sample) -> np.ndarray:
        return self._scratch.get(name, sample.uid)

    def held(self) -> Iterator[list[Sample]]:
        return self.lots(self.samples, self.backend.max_tokens, by_teacher=False)

    def holds(self, group: SampleGroup) -> list[Sample]:
        return self.backend.shares.mine(group.everything)

    def told(self, mine: Any, what: str) -> list[Any]:
        return self.backend.data.gather_json(mine, what)

    @contextmanager
    def _reading(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        with self.store.lease([self._rows[sample.uid] for sample in samples]) as batch:
            yield [self._heavy(batch, sample) for sample in samples]

    def _heavy(self, batch: Any, light: Sample) -> Sample:
        """Return a sample from disk, with its present teacher, mask and reward."""
        sample = batch.sample(self._rows[light.uid])
        sample.teacher, sample.loss_mask = light.teacher, light.loss_mask
        sample.reward, sample.reward_parts = light.reward, light.reward_parts
        return sample

    def _written(self) -> list[SampleGroup]:
        """Return the groups that this rank generated."""
        ranks = self.ranks
        return [group for group in self.groups if self._place[group.uid] % ranks.size == ranks.rank]

    def _ages(self, sample: Sample, version: int, oldest: int | None) -> tuple[int, int, int]:
        """Return of unmasked tokens the sum of their ages, the largest, and the number of recent ones."""
        table, row = self.store.table, self._rows[sample.uid]
        count = sample.trainable_tokens
        first, last = int(table.first_version[row]), int(table.last_version[row])
        if not count:
            return 0, 0, 0
        if first == last:
            kept = count if oldest is None or first >= oldest else 0
            return count * (version - first), version - first, kept
        versions = self._versions(sample)[sample.loss_mask]
        kept = count if oldest is None else int(np.count_nonzero(versions >= oldest))
        ages = version - versions.astype(np.int64)
        return int(ages.sum()), int(ages.max()), kept

    def _keep_recent(self, sample: Sample, kept: int, oldest: int) -> None:
        """Mask tokens before version `oldest`, so that `kept` are left."""
        if kept == sample.trainable_tokens:
            return
        if not kept:
            sample.loss_mask = standing_for(False, len(sample.response_ids))
        else:
            sample.loss_mask = sample.loss_mask & (self._versions(sample) >= oldest)

    def _versions(self, sample: Sample) -> np.ndarray:
        row = self._rows[sample.uid]
        with self.store.lease([row]) as batch:
            return np.array(batch.read(row, "policy_versions"))

    def _rewarded_together(self, rewards: RewardRunner) -> Iterator[list[Sample]]:
        """Yield samples to reward in one call: a domain's if its function wants that, else some."""
        own: dict[str, list[Sample]] = {}
        for group in self._written():
            own.setdefault(group.domain, []).extend(group.samples)
        for domain, samples in own.items():
            if rewards.together(domain):
                yield samples
                continue
            waiting: list[Sample] = []
            tokens = 0
            for sample in samples:
                waiting.append(sample)
                tokens += len(sample.prompt_ids) + len(sample.response_ids)
                if tokens >= _REWARDED:
                    yield waiting
                    waiting, tokens = [], 0
            if waiting:
                yield waiting
