"""Store samples on disk (`storage.trajectories: disk`), with two micro-batches at a time in memory.

Each response goes to the stage's files (`sample_files.py`) when it ends. A step has only the metadata of all
its samples. Tokens are mapped when they are needed.
"""

from __future__ import annotations

import hashlib
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
    SignalFiles,
    gather_uids,
    groups_of,
    placeholder_array,
)
from opd.pipelines.stages.samples import SampleBuffer, StepSamples
from opd.pipelines.stages.student import Student
from opd.ranks import Ranks, path_of_rank
from opd.rollout.collect import (
    DomainSampling,
    EncodedPrompt,
    SamplingEngine,
    collect,
    generate_groups,
    is_played,
    start_episodes,
    stream_samples,
)
from opd.rollout.requests import RequestWriter
from opd.rollout.rewards import RewardRunner
from opd.rollout.shared_groups import in_step
from opd.rollout.streams import More, as_list, with_note
from opd.storage.sample_lot import EVERY_FIELD
from opd.storage.sample_store import SampleStore
from opd.train.backend import Backend
from opd.train.packing import PerSample
from opd.types import Chunk, RolloutRequest, Sample, SampleGroup, no_ids

_MIB = 1 << 20
_TOGETHER = 1 << 16
"""Tokens of ended responses that wait, in the log and in memory, to be made durable at once."""
_REWARDED = 1 << 20
"""Tokens in memory at a time, about, while responses are rewarded."""


class DiskSampleBuffer(SampleBuffer):
    """The store of a stage's samples until they are trained on: on disk.

    Args:
        student: Samples and trains.
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
        self._owner = context.folder.owner_id(context.stage)
        signals = context.folder.stage_folder(context.stage) / "signals"
        self._signals = path_of_rank(signals, context.ranks.rank)
        self._opened = 0
        self._teacher_prompts: dict[int, dict[str, np.ndarray]] = {}
        """Batch -> a group's uid -> [C']: the prompt that its teachers read, if another. On every rank."""

    @classmethod
    @contextmanager
    def open_stage(
        cls,
        context: StageContext,
        student: Student,
        route: Callable[[Sample], str | None] = lambda sample: None,
    ) -> Iterator[DiskSampleBuffer]:
        """Open it in the stage's folder, while the block runs."""
        recipe = context.recipe
        log, width = recipe.rollout.log, WIDTH[model_dtype(recipe)]
        folder = context.folder.trajectories_folder(context.stage)
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

    def on_checkpoint(self) -> Callable[[], None]:
        return partial(self._files.retire_before, self._opened)

    @contextmanager
    def open(self, groups: Sequence[SampleGroup], index: int) -> Iterator[StepSamples]:
        ranks = self._student.ranks
        written = gather_uids(groups, ranks)
        store = self._files.open_view(index)
        everyone, rows = groups_of(store, written)
        for past in [batch for batch in list(self._teacher_prompts) if batch < index]:
            del self._teacher_prompts[past]
        for group in everyone:
            for sample in group.samples:
                sample.teacher_prompt_ids = self._teacher_prompts[index].get(group.uid)
        with SignalFiles(self._signals) as signals:
            yield SamplesOnDisk(everyone, rows, store, signals, self._student.backend, ranks)
        self._opened = index + 1

    def write(
        self, engine: SamplingEngine, prompts: Sequence[EncodedPrompt], size: int, index: int
    ) -> list[SampleGroup]:
        """Generate this rank's share of batch number `index`, in the order of the prompts. Returns no tokens.

        Each response goes to disk when it ends, and then leaves log and memory. An earlier attempt's
        responses are reused.
        """
        student = self._student
        ranks = student.barrier.ranks
        read = {prompt.uid: prompt.teacher_ids for prompt in prompts if prompt.teacher_ids is not None}
        self._teacher_prompts.setdefault(index, {}).update(read)
        mine = prompts if ranks.is_alone else ranks.shard(prompts)
        with in_step(student.rollout_engine, student.barrier):
            self._generate_missing(engine, mine, size, index)
        with student.barrier.meet(index):
            pass
        groups = []
        for prompt in mine:
            uids = self._files.group_uids(prompt.uid, self._request_digest(prompt), index)
            samples = [Sample(uids[number], prompt.uid, prompt.domain, no_ids()) for number in range(size)]
            branches = [
                Sample(uid, prompt.uid, prompt.domain, no_ids(), branch_of=episode)
                for uid, episode in self._files.branch_uids(prompt.uid, index).items()
            ]
            groups.append(SampleGroup(prompt.uid, prompt.domain, samples, branches))
        return groups

    def store(self, groups: list[SampleGroup], index: int) -> list[SampleGroup]:
        """Store what an earlier attempt's step has not stored. Nobody has tokens of the returned groups."""
        missing = [group for group in groups if not self.is_stored(group, index)]
        self._put_groups([_prompt_of(group) for group in missing], missing, index)
        return groups

    def is_stored(self, group: SampleGroup, index: int) -> bool:
        stored = self._files.group_uids(group.uid, self._request_digest(_prompt_of(group)), index)
        return len(stored) >= len(group.samples)

    def after_sharing(
        self, own: list[SampleGroup], everyone: list[SampleGroup], index: int
    ) -> list[SampleGroup]:
        read = {group.uid: group.samples[0].teacher_prompt_ids for group in everyone}
        self._teacher_prompts[index] = {uid: ids for uid, ids in read.items() if ids is not None}
        return own

    def _generate_missing(
        self, engine: SamplingEngine, prompts: Sequence[EncodedPrompt], size: int, index: int
    ) -> None:
        """Generate what is not on disk: single answers together with episodes, then the user's own rollouts.
        Groups of the latter two come complete.
        """
        student = self._student
        streamed: list[EncodedPrompt] = []
        user_generated: list[EncodedPrompt] = []
        episodes: dict[DomainSampling, list[EncodedPrompt]] = {}
        for prompt in prompts:
            domain = student.ways[prompt.domain]
            if domain.generate is collect:
                streamed.append(prompt)
            elif len(self._files.group_uids(prompt.uid, self._request_digest(prompt), index)) >= size:
                continue
            elif is_played(domain):
                episodes.setdefault(domain, []).append(prompt)
            else:
                user_generated.append(prompt)
        if episodes:
            with RequestWriter(engine) as writer:
                plays = start_episodes(writer, episodes, size, student.recipe.seed)
                self._stream_responses(writer, streamed, size, index)
                writer.finish()
                for played, play in zip(episodes.values(), plays, strict=True):
                    self._put_groups(played, play.result(), index)
            self._release_responses(writer.asked)
        else:
            self._stream_responses(engine, streamed, size, index)
        if user_generated:
            recorder = _RecordingEngine(engine)
            groups = generate_groups(recorder, user_generated, size, student.ways, student.recipe.seed)
            self._put_groups(user_generated, groups, index)
            self._release_responses(recorder.uids)

    def _stream_responses(
        self, engine: SamplingEngine, prompts: Sequence[EncodedPrompt], size: int, index: int
    ) -> None:
        """Sample missing responses. They go to disk when they end, several short ones at once."""
        places: dict[str, int] = {}
        digests: dict[str, str] = {}
        missing = []
        for prompt in prompts:
            digests[prompt.uid] = self._request_digest(prompt)
            stored = self._files.group_uids(prompt.uid, digests[prompt.uid], index)
            for number in range(size):
                if number not in stored:
                    sample = prompt.empty_sample(number)
                    places[sample.uid] = number
                    missing.append(sample)
        if not missing:
            return
        waiting: list[Sample] = []
        tokens = 0
        sampling = {name: way.sampling for name, way in self._student.ways.items()}
        for ended in stream_samples(engine, missing, sampling, self._student.recipe.seed):
            waiting.append(ended)
            tokens += len(ended.response_ids)
            if tokens >= _TOGETHER:
                self._store_samples(waiting, index, digests, places)
                waiting, tokens = [], 0
        self._store_samples(waiting, index, digests, places)

    def _put_groups(
        self, prompts: Sequence[EncodedPrompt], groups: Sequence[SampleGroup], index: int
    ) -> None:
        """Store complete groups on disk, in place of earlier samples of them."""
        waiting: list[Sample] = []
        digests: dict[str, str] = {}
        places: dict[str, int] = {}
        drops: list[str] = []
        tokens = 0
        for prompt, group in zip(prompts, groups, strict=True):
            digests[prompt.uid] = self._request_digest(prompt)
            drops += self._files.group_uids(prompt.uid, digests[prompt.uid], index).values()
            drops += self._files.branch_uids(prompt.uid, index)
            for part in (group.branches, group.samples):
                places |= {sample.uid: number for number, sample in enumerate(part)}
                waiting += part
                tokens += sum(len(sample.response_ids) for sample in part)
            if tokens >= _TOGETHER:
                self._store_samples(waiting, index, digests, places, drops)
                waiting, drops, tokens = [], [], 0
        self._store_samples(waiting, index, digests, places, drops)

    def _store_samples(
        self,
        samples: Sequence[Sample],
        index: int,
        digests: Mapping[str, str],
        places: Mapping[str, int],
        drops: Iterable[str] = (),
    ) -> None:
        """Store samples on disk, in place of `drops`, and remove them from log and memory."""
        for sample in samples:
            sample.teacher = self._route(sample)
        self._files.put(samples, index, digests, places, drops)
        for sample in samples:
            sample.prompt_ids = sample.response_ids = sample.policy_versions = no_ids()
            sample.rollout_logprobs, sample.loss_mask = np.zeros(0, np.float32), np.zeros(0, bool)
            sample.expert_choices = sample.sampling_masks = None
        self._release_responses(sample.uid for sample in samples)

    def _release_responses(self, uids: Iterable[str]) -> None:
        if self._student.rollouts is not None:
            self._student.rollouts.release_responses(uids)

    def _request_digest(self, prompt: EncodedPrompt) -> str:
        """Return the digest of a request, which differs between requests and between runs."""
        student, ids = self._student, np.ascontiguousarray(prompt.token_ids, np.int32)
        sampling = student.ways[prompt.domain].sampling
        settings = f"{sampling}/{student.recipe.seed}/{len(ids)}/{self._owner}".encode()
        return hashlib.blake2b(ids.tobytes() + settings, digest_size=16).hexdigest()


def _prompt_of(group: SampleGroup) -> EncodedPrompt:
    """Return the prompt of a group whose samples have it."""
    return EncodedPrompt(group.uid, group.domain, group.samples[0].prompt_ids, None)


class _RecordingEngine:
    """An engine that records the uids of its requests."""

    def __init__(self, engine: SamplingEngine) -> None:
        self._engine = engine
        self.uids: list[str] = []

    def generate(
        self, requests: RolloutRequest | Sequence[RolloutRequest], more: More | None = None
    ) -> Iterator[Chunk]:
        def record_requests(requests: Sequence[RolloutRequest]) -> None:
            self.uids += [request.uid for request in requests]

        record_requests(as_list(requests))
        return self._engine.generate(requests, with_note(more, record_requests))


class SamplesOnDisk(StepSamples):
    """The samples of one step, on disk.

    `groups` have everything of their samples but the values of tokens. Arrays have their lengths, and masks
    are right.

    Args:
        groups: Of all ranks, in the order of their prompts.
        rows: Uid of a sample -> its row in `store`.
        store: All ranks' samples.
        ranks: Each rank rewards its own samples.
    """

    on_disk = True

    def __init__(
        self,
        groups: Sequence[SampleGroup],
        rows: Mapping[str, int],
        store: SampleStore,
        signals: SignalFiles,
        backend: Backend,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(groups, backend, ranks)
        self.store, self._rows, self._scratch = store, rows, signals
        self._place = {group.uid: number for number, group in enumerate(self.groups)}

    def reward_responses(self, rewards: RewardRunner) -> None:
        """Reward every response. Each rank rewards its own groups, some tokens at a time."""
        results: dict[str, list[Any]] = {}
        for lot in self._reward_batches(rewards):
            with self._lease_samples(lot) as loaded:
                rewards.score(loaded)
                results |= {s.uid: [s.reward, s.reward_parts, s.feedback] for s in loaded}
        for others in self.ranks.gather_json(results, "the rewards of a batch"):
            results |= others
        for sample in self.responses:
            sample.reward, sample.reward_parts, sample.feedback = results[sample.uid]
        for group in self.groups:
            group.share_rewards()

    def drop_stale(self, version: int, limit: int | None) -> dict[str, float]:
        """Drop stale tokens as in memory. Tokens are read only for samples of several policies."""
        oldest = version - limit if limit is not None else None
        by_uid: dict[str, Any] = {}
        for group in self._local_groups():
            for sample in group.samples_with_branches:
                by_uid[sample.uid] = self._token_ages(sample, version, oldest)
        for others in self.ranks.gather_json(by_uid, "the ages of a batch"):
            by_uid |= others
        samples = self.samples
        ages = np.array([by_uid[sample.uid] for sample in samples], np.float64).reshape(-1, 3)
        tokens = sum(sample.trainable_tokens for sample in samples)
        if not tokens or not ages[:, 1].max():
            return {}
        metrics = {"staleness/mean": float(ages[:, 0].sum() / tokens)}
        metrics["staleness/max"] = float(ages[:, 1].max())
        if oldest is None:
            return metrics
        metrics["staleness/dropped"] = 1.0 - float(ages[:, 2].sum() / tokens)
        for sample, recent in zip(samples, ages[:, 2].astype(np.int64).tolist(), strict=True):
            if not recent:
                sample.loss_mask = placeholder_array(False, len(sample.response_ids))
            elif recent < sample.trainable_tokens:
                sample.loss_mask = sample.loss_mask & (self._token_versions(sample) >= oldest)
        return metrics

    @contextmanager
    def with_tokens(self, group: SampleGroup) -> Iterator[SampleGroup]:
        with self._lease_samples([*group.samples, *group.branches]) as loaded:
            size = len(group.samples)
            yield replace(group, samples=loaded[:size], branches=loaded[size:])

    def local_batches(
        self, samples: Sequence[Sample], max_tokens: int, *, by_teacher: bool
    ) -> Iterator[list[Sample]]:
        parts = self.backend.shares.in_step(samples, max_tokens, by_teacher=by_teacher)
        return self.read(samples, parts)

    def read(self, samples: Sequence[Sample], parts: Sequence[Sequence[int]]) -> Iterator[list[Sample]]:
        rows = [[self._rows[samples[index].uid] for index in part] for part in parts]
        for part, batch in zip(parts, self.store.lease_batches(rows, EVERY_FIELD), strict=True):
            yield [self._read_sample(batch, samples[index]) for index in part]

    def compute_signal(
        self,
        name: str,
        samples: Sequence[Sample],
        compute: PerSample,
        label: str,
        *,
        by_teacher: bool = False,
    ) -> None:
        """Compute as in memory, for this rank's samples, one micro-batch at a time, or one teacher's."""
        for lot in self.local_batches(samples, self.backend.max_tokens, by_teacher=by_teacher):
            for sample, values in zip(lot, compute(lot), strict=True):
                self._scratch.put(name, sample.uid, values)

    def store_signal(self, name: str, sample: Sample, values: np.ndarray) -> None:
        self._scratch.put(name, sample.uid, values)

    def read_signal(self, name: str, sample: Sample) -> np.ndarray:
        return self._scratch.get(name, sample.uid)

    def local_samples(self) -> Iterator[list[Sample]]:
        return self.local_batches(self.samples, self.backend.max_tokens, by_teacher=False)

    def local_group_samples(self, group: SampleGroup) -> list[Sample]:
        return self.backend.shares.local_samples(group.samples_with_branches)

    def gather_local(self, mine: object, label: str) -> list[Any]:
        return self.backend.data.gather_json(mine, label)

    @contextmanager
    def _lease_samples(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        with self.store.lease([self._rows[sample.uid] for sample in samples]) as batch:
            yield [self._read_sample(batch, sample) for sample in samples]

    def _read_sample(self, batch: Any, light: Sample) -> Sample:
        """Return a sample from disk, with its present teacher, mask and reward."""
        sample = batch.get_sample(self._rows[light.uid])
        sample.teacher, sample.loss_mask = light.teacher, light.loss_mask
        sample.teacher_prompt_ids = light.teacher_prompt_ids
        sample.reward, sample.reward_parts = light.reward, light.reward_parts
        sample.feedback = light.feedback
        return sample

    def _local_groups(self) -> list[SampleGroup]:
        """Return the groups that this rank generated."""
        ranks = self.ranks
        return [group for group in self.groups if self._place[group.uid] % ranks.size == ranks.rank]

    def _token_ages(self, sample: Sample, version: int, oldest: int | None) -> tuple[int, int, int]:
        """Return of unmasked tokens the sum of their ages, the largest, and the number of recent ones."""
        record = self.store.records[self._rows[sample.uid]]
        count, first, last = sample.trainable_tokens, record.first_version, record.last_version
        if not count:
            return 0, 0, 0
        if first == last:
            recent = count if oldest is None or first >= oldest else 0
            return count * (version - first), version - first, recent
        versions = self._token_versions(sample)[sample.loss_mask]
        recent = count if oldest is None else int(np.count_nonzero(versions >= oldest))
        ages = version - versions.astype(np.int64)
        return int(ages.sum()), int(ages.max()), recent

    def _token_versions(self, sample: Sample) -> np.ndarray:
        row = self._rows[sample.uid]
        with self.store.lease([row]) as batch:
            return np.array(batch.read(row, "policy_versions"))

    def _reward_batches(self, rewards: RewardRunner) -> Iterator[list[Sample]]:
        """Yield samples to reward in one call: a domain's if its function wants that, else some."""
        by_domain: dict[str, list[Sample]] = {}
        for group in self._local_groups():
            by_domain.setdefault(group.domain, []).extend(group.samples)
        for domain, samples in by_domain.items():
            if rewards.is_batched(domain):
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
