"""Provide a stage's samples: from an engine, synchronously or ahead of the learner, or static ones.

A source also gives the learner's weights to the engine, and releases samples from the log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from opd.errors import ConfigError
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.loop import SampleSource
from opd.pipelines.stages.samples import SampleBuffer, StepSamples
from opd.pipelines.stages.stage_rollout import StageRollout
from opd.pipelines.stages.student import Student
from opd.rollout.ahead import RolloutAhead
from opd.rollout.collect import EncodedPrompt, SamplingEngine
from opd.rollout.partial import Carried, PartialRollouts
from opd.rollout.shared_groups import share_groups
from opd.types import Sample, SampleGroup


@dataclass(frozen=True, slots=True)
class StageRequest:
    """A stage's request to its student."""

    prompts: Callable[[int], list[EncodedPrompt]]
    """Returns the prompts of a batch, by its number."""
    size: int
    """Number of answers to each."""
    wrap_engine: Callable[[SamplingEngine, list[EncodedPrompt]], SamplingEngine] = lambda engine, prompts: (
        engine
    )
    """Wraps the engine while it answers some prompts."""
    route: Callable[[Sample], str | None] = lambda sample: None
    """Returns the teacher of a sample."""
    in_memory: bool = False
    """The stage needs all samples of a step at once, so they are in memory."""
    more_prompts: Callable[[StepSamples], list[EncodedPrompt]] = lambda samples: []
    """Returns more prompts for a batch, if batches are generated synchronously."""
    steps: int | None = None
    """Steps of the stage, if they are known."""
    given: Callable[[int], list[SampleGroup]] = lambda index: []
    """Returns groups of a batch that others have written, if batches are generated synchronously."""
    kept: Callable[[], Collection[str]] = lambda: ()
    """Returns the uids in the log that such groups of later batches need."""


_CARRIED = "carried"
"""Key of a checkpoint's memory: the groups that the next step goes on with, see `Carried.by_rank`."""


class StaticSource(SampleSource):
    """Static samples: demonstrations, or earlier answers of teachers.

    Args:
        make: Returns the samples of a step, by its number.
    """

    def __init__(self, make: Callable[[int], list[Sample]], student: Student) -> None:
        self._make, self._student = make, student

    def step_samples(self, index: int) -> AbstractContextManager[StepSamples]:
        groups = as_groups(self._make(index))
        self._student.end_rollout()
        return nullcontext(StepSamples(groups, self._student.backend, self._student.ranks))


def as_groups(samples: Sequence[Sample]) -> list[SampleGroup]:
    """Return a group of each of `samples`, with the branches that follow it."""
    groups: list[SampleGroup] = []
    for sample in samples:
        if sample.branch_of:
            groups[-1].branches.append(sample)
        else:
            groups.append(SampleGroup(sample.uid, sample.domain, [sample]))
    return groups


class Rollouts(SampleSource):
    """The student's rollouts, in turn with training. Batch `k` is trained on by weights of version `k`.

    Args:
        student: Generates, and gives its weights to the engine.
        rollouts: The engine behind the stage's token log.
        buffer: The store of samples until they are trained on.
        partial: Takes groups as they finish, if the recipe over-samples.
    """

    def __init__(
        self,
        student: Student,
        rollouts: StageRollout,
        buffer: SampleBuffer,
        request: StageRequest,
        partial: PartialRollouts | None = None,
    ) -> None:
        self._student, self._rollouts, self.buffer, self._request = student, rollouts, buffer, request
        self._partial, self._carried = partial, Carried()
        self._memory: dict[str, Any] = {}

    def write(
        self, engine: SamplingEngine, index: int, prompts: list[EncodedPrompt] | None = None
    ) -> list[SampleGroup]:
        """Let `engine` answer the prompts of batch `index`, or others (`prompts`) that belong to it."""
        request, partial, logged = self._request, self._partial, self._rollouts.engine
        if partial is not None:
            student, version = self._student, logged.policy_version
            own: list[SampleGroup] = []

            def write_own() -> list[SampleGroup]:
                taken = partial.write(engine, index, version, lambda: logged.is_replaying)
                own.extend(self.buffer.store(taken, index))
                return own

            groups, notes = share_groups(
                student.barrier.ranks,
                write_own,
                barrier=student.barrier,
                engine=student.rollout_engine,
                batch=index,
                note=lambda: partial.carried[index].note(),
            )
            partial.carried[index] = partial.carried[index].merge_ranks(notes)
            return self.buffer.after_sharing(own, groups, index)
        prompts = request.prompts(index) if prompts is None else prompts
        if not prompts:
            return []
        return self.buffer.write(request.wrap_engine(engine, prompts), prompts, request.size, index)

    def start(self, step: int, memory: dict[str, Any]) -> None:
        """Start at the learner's weights of version `step`. After a resume the engine needs them. `memory`
        says which groups go on.
        """
        self.buffer.start(step)
        self._student.start(step)
        self._memory = memory
        if self._partial is not None:
            self._partial.restore(step, self._own_entries(step))

    def _own_entries(self, step: int) -> Any:
        """Return what the checkpoint before `step` says of this rank's groups that go on. Raises
        `ConfigError` for another number of ranks, whose logs do not have their tokens.
        """
        by_rank, ranks = self._memory.get(_CARRIED, []), self._student.ranks
        if not isinstance(by_rank, list):
            return by_rank
        if not any(by_rank):
            return []
        if len(by_rank) != ranks.size:
            raise ConfigError(
                f"rollout.over_sample: unfinished responses of step {step} are in the logs of {len(by_rank)}"
                f" rank(s), and {ranks.size} were started; start as many as before."
            )
        return by_rank[ranks.rank]

    def _note_taken(self, index: int) -> None:
        """Note that the learner has the groups of step `index`."""
        if self._partial is not None:
            self._carried = self._partial.pop_carried(index)
            self._memory[_CARRIED] = self._carried.by_rank

    @contextmanager
    def step_samples(self, index: int) -> Iterator[StepSamples]:
        """Yield the samples of batch `index`, for as long as the block runs."""
        groups = [*self._request.given(index), *self.write(self._rollouts.engine, index)]
        self._note_taken(index)
        while True:
            with self.buffer.open(groups, index) as samples:
                prompts = self._request.more_prompts(samples)
                if not prompts:
                    self._student.end_rollout()
                    yield samples
                    return
            groups = groups + self.write(self._rollouts.engine, index, prompts)

    def on_weights_updated(self, version: int) -> None:
        """Give the engine the learner's weights of `version`, also if they have not changed. With the older
        version its tokens would be older than those of a resumed stage.
        """
        self._student.push_weights(version)

    def _kept_uids(self) -> frozenset[str]:
        """Return what the log has of groups that go on, and of steps that wait for the learner."""
        return self._carried.uids.union(() if self._partial is None else self._partial.record_uids())

    def on_checkpoint(self) -> Callable[[], None]:
        """Called when a checkpoint starts. Returns a callback that releases all batches so far."""
        release_log = self._rollouts.on_checkpoint(lambda: self._kept_uids().union(self._request.kept()))
        release_buffer = self.buffer.on_checkpoint()

        def release_samples() -> None:
            release_log()
            release_buffer()

        return release_samples

    def take_counters(self, totals: dict[str, float]) -> dict[str, float]:
        """Return counters as `StageRollout.take_counters`, and numbers of the groups that went on."""
        return self._rollouts.take_counters(totals) | dict(self._carried.metrics)


class AsyncRollouts(Rollouts):
    """Generate during training. `joined`: several batches at once, as their age allows."""

    max_ahead = 1
    joined = False
    _opened: RolloutAhead | None = None

    @property
    def rollout_ahead(self) -> RolloutAhead:
        """The generation thread, from `start` on."""
        if self._opened is None:
            raise RuntimeError("start() comes before the first batch")
        return self._opened

    def start(self, step: int, memory: dict[str, Any]) -> None:
        super().start(step, memory)
        self._student.barrier.order_from(step)
        engine, ranks = self._rollouts.engine, self._student.ranks
        self._opened = RolloutAhead(
            engine,
            self.write,
            step,
            self.max_ahead,
            joined=self.joined,
            agree=lambda count: ranks.max_over_ranks(count, "the batches that were begun"),
        )

    def step_samples(self, index: int) -> AbstractContextManager[StepSamples]:
        groups = self.rollout_ahead.pop_batch(index)
        self._note_taken(index)
        return self.buffer.open(groups, index)

    def on_weights_updated(self, version: int) -> None:
        with self.rollout_ahead.lock.between_chunks():
            self._student.push_weights(version)
            self.rollout_ahead.on_weights_updated(version)

    def idle_engine(self) -> AbstractContextManager[None]:
        return self.rollout_ahead.idle_engine()

    def on_checkpoint(self) -> Callable[[], None]:
        with self.rollout_ahead.lock.between_chunks():
            release_log = self._rollouts.on_checkpoint(
                lambda: self.rollout_ahead.pending_uids | self._kept_uids()
            )
        release_buffer = self.buffer.on_checkpoint()

        def release_samples() -> None:
            with self.rollout_ahead.lock.between_chunks():
                release_log()
            release_buffer()

        return release_samples

    def take_counters(self, totals: dict[str, float]) -> dict[str, float]:
        with self.rollout_ahead.lock.between_chunks():
            return super().take_counters(totals)

    def close(self) -> None:
        """Stop generation."""
        self._student.barrier.exit_barrier()
        if self._opened is not None:
            self._opened.close()


class OneAheadRollouts(AsyncRollouts):
    """Generate batch `k` with weights of version `k - 1`, always. The tokens do not depend on speed.

    New weights wait until the batch that began before them is complete.
    """

    _pending: int | None = None

    def step_samples(self, index: int) -> AbstractContextManager[StepSamples]:
        self._push_pending()
        return super().step_samples(index)

    def on_weights_updated(self, version: int) -> None:
        self._pending = version

    @contextmanager
    def idle_engine(self) -> Iterator[None]:
        if self._pending is not None:
            self.rollout_ahead.wait(self._pending)  # else its writer could be paused before it begins
        with self.rollout_ahead.idle_engine():
            self._push_pending()
            yield

    def _push_pending(self) -> None:
        if self._pending is None:
            return
        version, self._pending = self._pending, None
        self.rollout_ahead.wait(version)
        self._student.push_weights(version)
        self.rollout_ahead.on_weights_updated(version)


def open_source(context: StageContext, student: Student, request: StageRequest, stack: ExitStack) -> Rollouts:
    """Return the student's rollouts, by the recipe's `rollout.schedule` and `storage.trajectories`. They run
    until `stack` is unwound. Every token is logged.
    """
    config = context.recipe.rollout
    logged = student.open_rollouts(context, stack)
    buffer = SampleBuffer(student)
    if context.recipe.storage.trajectories == "disk" and not request.in_memory:
        from opd.pipelines.stages.samples_on_disk import DiskSampleBuffer

        buffer = stack.enter_context(DiskSampleBuffer.open_stage(context, student, request.route))
    partial = None
    if config.over_sample > 1:
        partial = PartialRollouts(
            request.prompts,
            request.size,
            config.early_prompts,
            {name: way.sampling for name, way in student.ways.items()},
            context.recipe.seed,
            request.steps,
            config.most_carried,
            student.barrier.ranks.shard,
        )
        partial.asynchronous, partial.is_stored = config.schedule == "async", buffer.is_stored
        if logged.logs is not None and (partial.asynchronous or type(buffer) is not SampleBuffer):
            partial.log = logged.logs.tokens
    if config.schedule == "in_turn":
        return Rollouts(student, logged, buffer, request, partial)
    if config.schedule == "ahead":
        return stack.enter_context(closing(OneAheadRollouts(student, logged, buffer, request, partial)))
    rollouts = AsyncRollouts(student, logged, buffer, request, partial)
    rollouts.max_ahead = config.max_ahead if partial is None else 1
    # A user's own `generate` may have state, so one batch is generated at a time.
    rollouts.joined = config.generate is None
    return stack.enter_context(closing(rollouts))
