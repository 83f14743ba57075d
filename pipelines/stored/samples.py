"""A merge whose responses are on disk: written as they end, rewarded, counted and trained on piece by piece.

What a step knows of all its responses at once is metadata: lengths, rewards, teachers, versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from opd.config import Recipe, SampledTokenK1
from opd.errors import ConfigError
from opd.models.causal_lm import CausalLM
from opd.models.hf_folder import layer_windows
from opd.pipelines.context import StageContext
from opd.pipelines.loop import Step
from opd.pipelines.merge_loss import needs_policy_stream
from opd.pipelines.precision import WIDTH, model_dtype
from opd.pipelines.rollout_metrics import rollout_metrics
from opd.pipelines.route_shares import route_shares
from opd.pipelines.stored.batch import StoredBatch, written_by_all
from opd.pipelines.stored.files import SampleFiles, digest_of
from opd.pipelines.stored.policy import StoredPolicy
from opd.pipelines.stored.step import StoredSettings, StoredStep
from opd.pipelines.student import Student
from opd.ranks import path_of_rank
from opd.rewards.runner import RewardRunner
from opd.rollout.collect import EncodedPrompt, Generates, collect, stream
from opd.teachers.schedule import Router, TeacherSchedule
from opd.train.plan_cost import CostModel, DeviceBudget
from opd.train.torch_backend import TorchBackend
from opd.types import DecodeStep, RolloutRequest, Sample, SampleGroup, no_ids

_MIB = 1 << 20
_TOGETHER = 1 << 16
"""Tokens of ended responses that wait, in the log and in memory, to be made durable together."""


class StoredSamples:
    """Writes batches of the merge to disk and learns from them there.

    Args:
        context: The stage.
        files: Where responses go.
        student: Who writes and learns.
        rewards: Of the domains.
        schedule: The teachers.
    """

    def __init__(
        self,
        context: StageContext,
        files: SampleFiles,
        student: Student,
        rewards: RewardRunner,
        schedule: TeacherSchedule,
    ) -> None:
        assert isinstance(student.backend, TorchBackend)  # by `check_stored`
        self._context, self._recipe = context, context.recipe
        self._files, self._student, self._rewards, self._schedule = files, student, rewards, schedule
        self._backend = student.backend
        self._router = Router.from_recipe(context.recipe)
        self._learnt = 0

    @classmethod
    @contextmanager
    def open(
        cls, context: StageContext, student: Student, rewards: RewardRunner, schedule: TeacherSchedule
    ) -> Iterator[StoredSamples]:
        """In the stage's folder, while the block runs. Raises `ConfigError` as `check_stored`."""
        recipe = context.recipe
        check_stored(recipe)
        log = recipe.rollout.log
        folder = context.folder.trajectories(context.stage)
        # What has left the token log must not go with the power either, as far as that was promised.
        durable = log is not None and log.fsync != "os"
        with SampleFiles.open(folder, context.ranks, keep=log is not None, durable=durable) as files:
            yield cls(context, files, student, rewards, schedule)

    def start(self, step: int) -> None:
        """The learner begins with batch `step`: what came before it is learnt."""
        self._files.retire_before(step)

    def consumed(self) -> None:
        """A checkpoint holds what was learnt from every batch so far: forget them."""
        self._files.retire_before(self._learnt)

    def write(self, engine: Generates, prompts: Sequence[EncodedPrompt], index: int) -> list[SampleGroup]:
        """Batch number `index`: this rank's share of its groups, in the order of the prompts, without tokens.

        Each response goes to disk when it ends, and then leaves log and memory. What an earlier attempt has
        written is not written again.
        """
        student = self._student
        mine = prompts if student.writing.alone else student.writing.mine(prompts)
        try:
            (self._stream if student.generate is collect else self._generate)(engine, mine, index)
        except BaseException:
            student.barrier.abandon()  # the others need not wait for this rank's share
            raise
        student.barrier.wait()
        groups = []
        for prompt in mine:
            found = self._files.group(prompt.uid, self._asked(prompt))
            samples = [
                Sample(found[place], prompt.uid, prompt.domain, no_ids())
                for place in range(self._recipe.distill.samples_per_prompt)
            ]
            groups.append(SampleGroup(prompt.uid, prompt.domain, samples))
        return groups

    def learn(self, mine: Sequence[SampleGroup], step: Step) -> tuple[int, dict[str, float]]:
        """The gradient of step `step` on the groups this rank has written, and all others their own; tokens
        of the student, and metrics.

        Raises what `StoredStep.train` raises.
        """
        ranks, recipe = self._context.ranks, self._recipe
        written = written_by_all(mine, ranks)
        with self._files.view() as union:
            with step.timer("score"):
                batch = StoredBatch.of(union, written, ranks)
                batch.reward(self._rewards)
            tokens = int(batch.trainable.sum())
            metrics = rollout_metrics(batch.groups, batch.lengths)
            metrics |= batch.drop_stale(step.index, recipe.rollout.max_staleness)
            with step.timer("train"), ExitStack() as stack:
                settings = stored_settings(recipe, self._backend.model, route_shares(recipe, batch.samples))
                work = StoredStep(
                    union,
                    batch.rows,
                    self._router.teachers,
                    settings,
                    data=self._backend.data,
                    counted=batch.counted,
                )
                plan = work.plan(step.index)
                work.score(self._schedule, plan)
                policy = None
                if needs_policy_stream(recipe.distill) and len(work.rows):
                    folder = self._context.folder.stage(self._context.stage) / "signals"
                    opened = StoredPolicy.open(
                        recipe.distill, work, batch.groups, path_of_rank(folder, ranks.rank)
                    )
                    policy = stack.enter_context(opened)
                    metrics |= policy.prepare(self._backend, self._schedule, plan)
                metrics |= work.train(self._backend, self._schedule, plan, policy)
        self._learnt = step.index + 1
        return tokens, metrics

    def _stream(self, engine: Generates, prompts: Sequence[EncodedPrompt], index: int) -> None:
        """Sample what is not there yet; responses go to disk when they end, short ones several together."""
        places: dict[str, int] = {}
        asked: dict[str, str] = {}
        missing = []
        for prompt in prompts:
            asked[prompt.uid] = self._asked(prompt)
            known = self._files.group(prompt.uid, asked[prompt.uid])
            for place in range(self._recipe.distill.samples_per_prompt):
                if place not in known:
                    sample = prompt.sample(place)
                    places[sample.uid] = place
                    missing.append(sample)
        if not missing:
            return
        student = self._student
        waiting: list[Sample] = []
        tokens = 0
        for ended in stream(engine, missing, student.sampling, student.seed):
            waiting += ended
            tokens += sum(len(sample.response_ids) for sample in ended)
            if tokens >= _TOGETHER:
                self._put(waiting, index, asked, places)
                waiting, tokens = [], 0
        self._put(waiting, index, asked, places)

    def _generate(self, engine: Generates, prompts: Sequence[EncodedPrompt], index: int) -> None:
        """The recipe's own rollout of the prompts whose groups are not there: they come whole."""
        size, student = self._recipe.distill.samples_per_prompt, self._student
        missing = [p for p in prompts if len(self._files.group(p.uid, self._asked(p))) < size]
        if not missing:
            return
        noted = _Noted(engine)
        groups = student.generate(noted, missing, size, student.sampling, student.seed)
        for prompt, group in zip(missing, groups, strict=True):
            places = {sample.uid: place for place, sample in enumerate(group.samples)}
            self._files.retire(self._files.group(prompt.uid, self._asked(prompt)).values())
            self._put(group.samples, index, {prompt.uid: self._asked(prompt)}, places)
        self._forget(noted.asked)

    def _put(
        self, samples: Sequence[Sample], index: int, asked: Mapping[str, str], places: Mapping[str, int]
    ) -> None:
        """To disk, and out of log and memory."""
        for sample in samples:
            sample.teacher = self._router.route(sample.domain, sample.group_uid).name
        self._files.put(samples, index, asked, places)
        for sample in samples:
            sample.prompt_ids = sample.response_ids = sample.policy_versions = no_ids()
            sample.rollout_logprobs, sample.loss_mask = np.zeros(0, np.float32), np.zeros(0, bool)
        self._forget(sample.uid for sample in samples)

    def _forget(self, uids: Iterable[str]) -> None:
        if self._student.rollouts is not None:
            self._student.rollouts.forget(uids)

    def _asked(self, prompt: EncodedPrompt) -> str:
        owner = self._context.folder.owner(self._context.stage)
        return digest_of(prompt.token_ids, self._student.sampling, self._student.seed, owner)


class _Noted:
    """An engine, and what it was asked for."""

    def __init__(self, engine: Generates) -> None:
        self._engine = engine
        self.asked: list[str] = []

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[DecodeStep]:
        self.asked += [request.uid for request in requests]
        return self._engine.generate(requests)


def stored_settings(recipe: Recipe, model: CausalLM, shares: Mapping[str, float] | None) -> StoredSettings:
    """How a step of the recipe is planned; `shares` are the routes' of the loss."""
    config = model.config
    return StoredSettings(
        cost=CostModel.of_model(model.parameter_count, config.hidden_size, layer_windows(config)),
        budget=DeviceBudget(recipe.storage.trajectory_mb * _MIB, max_tokens=recipe.distill.batch.max_tokens),
        # A teacher's hidden state, taken to be as wide as the student's: teachers need not be open yet.
        hidden_bytes=config.hidden_size * WIDTH[model_dtype(recipe)],
        shares=shares,
        seed=recipe.seed,
        taught=not isinstance(recipe.distill.loss, SampledTokenK1),
    )


def check_stored(recipe: Recipe) -> None:
    """`ConfigError` where samples on disk do not go with the rest of the recipe."""
    backend, config = recipe.train.backend, recipe.distill
    corrected = config.weighs_samples and config.policy_loss.correction is not None
    reasons = {
        f"train.backend {backend} takes a step's samples together": backend != "torch",
        "distill.to_batch is given the samples of a whole step": config.to_batch is not None,
        f"the correction of distill.loss {config.loss.type} is made for a whole step": corrected,
    }
    for reason, met in reasons.items():
        if met:
            raise ConfigError(
                f"storage.trajectories disk cannot be used here: {reason}; set it to memory, or change that."
            )
