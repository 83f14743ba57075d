"""Run the one loop of every trained stage: samples, scores, updates, new engine weights, checkpoint.

`train` does not know losses, teachers and engines. An `Algorithm` defines the learning of a stage
(`distill.py`, `grpo.py`, `supervised.py`). A `SampleSource` provides its samples (`sample_source.py`).
Only the back end knows models and kernels.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from opd.config import OptimConfig
from opd.errors import TrainingError
from opd.metrics import PhaseTimer, combine_updates
from opd.pipelines.stages.alert_rules import StageAlerts
from opd.pipelines.stages.checkpoint_saver import CheckpointSaver
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.last_samples import LastSamples
from opd.pipelines.stages.samples import StepSamples
from opd.train.backend import Backend, Read
from opd.train.optimizer import learning_rate
from opd.types import RolloutBatch, Sample


@dataclass(slots=True)
class LoopState:
    """The state in a checkpoint beside tensors."""

    step: int = 0
    student_tokens: int = 0
    """Response tokens the student generated and was trained on or filtered by."""
    seconds: float = 0.0
    """Wall time of all attempts so far."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds per phase."""
    counters: dict[str, float] = field(default_factory=dict)
    """The stage's counts, such as steps without signal."""
    memory: dict[str, Any] = field(default_factory=dict)  # other state than counts, as JSON
    metrics: str = ""
    flags: str = ""
    """Digests of all metrics, and all flags, up to this step. See `JSONLinesWriter.last_chain`."""
    rate: float = 1.0  # factor of the learning rate after rules that fired
    max_tokens: int = 4096  # of a micro-batch; earlier versions stored none and had this one
    compiled: bool | None = None  # whether layers are

    def checkpoint_state(self, metrics: str) -> dict[str, Any]:
        """Return a copy of this for a checkpoint, with `metrics` as they are now."""
        self.metrics = metrics
        return asdict(self)


@dataclass(slots=True)
class StepContext:
    index: int
    progress: float
    """Share of the stage done before this step, in [0, 1)."""
    timer: PhaseTimer
    counters: dict[str, float]
    """Survive a resume. The step may change them."""
    tokens_left: int | None = None
    """Remaining tokens of the student, if the stage has a budget of tokens."""
    rate: float = 1.0  # factor of the algorithm's learning rate
    memory: dict[str, Any] = field(default_factory=dict)  # survives a resume, as counters do, as JSON
    is_last: bool = False  # of a stage without such a budget


@dataclass(frozen=True, slots=True)
class Extent:
    """The end of a stage: after `steps`, or once the student has generated `tokens`, whichever is given.

    The last step's samples beyond `tokens` are neither trained on nor counted.
    """

    steps: int | None = None
    tokens: int | None = None

    def progress(self, state: LoopState) -> float:
        """Return the finished share, in [0, 1]."""
        if self.tokens is not None:
            return min(1.0, state.student_tokens / self.tokens)
        return min(1.0, state.step / (self.steps or 1))

    def total_steps(self, state: LoopState) -> int:
        """Return the total steps, for a progress bar. An estimate if the extent is in tokens."""
        if self.tokens is None:
            return self.steps or 1
        per_step = state.student_tokens / max(state.step, 1)
        return max(state.step, round(self.tokens / per_step)) if per_step else state.step + 1


class SampleSource(ABC):
    """The source of the steps' samples. `sample_source.py` has the implementations. By default no engine
    generates, so most methods do nothing.
    """

    def start(self, step: int, memory: dict[str, Any]) -> None:
        """Start at the learner's weights of version `step`. After a resume the engine needs them. `memory`
        is in checkpoints, as JSON, and may be changed while a step runs.
        """
        return

    @abstractmethod
    def step_samples(self, index: int) -> AbstractContextManager[StepSamples]:
        """Return the samples of step `index`, for as long as the block runs."""

    def on_weights_updated(self, version: int) -> None:
        """Give the engine the learner's weights of `version`, which may be the same."""
        return

    def idle_engine(self) -> AbstractContextManager[None]:
        """Let others use the engine while the block runs."""
        return nullcontext()

    def on_checkpoint(self) -> Callable[[], None]:
        """Called when a checkpoint starts. Returns a callback. Call it once the checkpoint is on disk to
        release the samples of all steps up to now.
        """
        return lambda: None

    def take_counters(self, totals: dict[str, float]) -> dict[str, float]:
        """Return counts of requests and engines since the last call, as metrics, and add them to `totals`."""
        return {}


@dataclass(slots=True)
class Update:
    samples: list[Sample]
    """In the order of training. See `Backend.accumulate_gradient`, also for `read`."""
    read: Read
    done: Callable[[], None] = lambda: None
    """Called once the gradient is there."""

    @classmethod
    def from_batch(cls, batch: RolloutBatch) -> Update:
        """Return the step on a batch in memory."""
        return cls(batch.samples, lambda parts: (batch.select_samples(part) for part in parts))


@dataclass(slots=True)
class Plan:
    updates: Sequence[Update]
    """Empty if there is nothing to learn from."""
    metrics: dict[str, float] = field(default_factory=dict)


class Algorithm(ABC):
    """The learning of a stage from the samples of a step. It knows no engine and no optimiser."""

    optim: OptimConfig

    def begin_step(self, step: StepContext) -> None:
        """Begin a step. Its samples are read next, or were generated ahead."""
        return

    @abstractmethod
    def score(self, samples: StepSamples, step: StepContext) -> dict[str, float]:
        """Compute rewards and teachers' scores, and return metrics."""

    @abstractmethod
    def plan(self, samples: StepSamples, step: StepContext) -> Plan:
        """Return the step's updates: advantages, and each token's weight in each stream of the loss."""

    def extra_backends(self) -> dict[str, Backend]:
        """Return other trained models that checkpoints save too, by the prefix of their files."""
        return {}

    def count_tokens(self, samples: StepSamples) -> int:
        """Return the number of the student's tokens, or of those it was trained on instead."""
        return samples.tokens

    def finish_step(self, step: StepContext, metrics: dict[str, float]) -> dict[str, float]:
        """Return measurements once the weights are new. `metrics` are the step's."""
        return {}

    def step_rate(self, step: StepContext) -> float:
        return learning_rate(self.optim, step.index, step.progress)

    @abstractmethod
    def progress_text(self, metrics: dict[str, float]) -> str:
        """Return a few words for the progress bar."""


def train(
    context: StageContext,
    algorithm: Algorithm,
    source: SampleSource,
    backend: Backend,
    extent: Extent,
    checkpoint_every: int,
) -> dict[str, Any]:
    """Take steps until `extent` is reached, and return the stage's result numbers.

    A killed stage continues from its newest valid checkpoint. The steps after it are repeated. Every random
    draw is a function of (seed, uid, position), so they repeat bit for bit. A stage that is to stop saves a
    checkpoint and raises `PreemptedError`. If a rule stops it, it saves one and raises `TrainingError`.
    """
    with CheckpointSaver(context, backend, algorithm.extra_backends()) as saver:
        state = LoopState(**saver.restore_latest())
        # Micro-batches of another size would sum in another order, and so would layers compiled otherwise.
        state.max_tokens = backend.packed_as(state.max_tokens if state.step else 0)
        begun_compiled = bool(state.compiled) if state.step else None
        state.compiled = backend.compile_layers(context.recipe.train.compile, begun_compiled)
        last = LastSamples.for_stage(context, algorithm, state.step)
        watch = StageAlerts.resume_rules(context, state.step, state.flags)
        source.start(state.step, state.memory)
        started = time.perf_counter() - state.seconds
        while (progress := extent.progress(state)) < 1.0:
            tokens_left = None if extent.tokens is None else extent.tokens - state.student_tokens
            is_last, timer = state.step + 1 == extent.steps, PhaseTimer(context.memory)
            step = StepContext(
                state.step, progress, timer, state.counters, tokens_left, state.rate, state.memory, is_last
            )
            metrics, tokens, trained = _one_step(algorithm, source, backend, step, last)
            state.step += 1
            state.student_tokens += tokens
            state.seconds = time.perf_counter() - started
            logged = {"tokens/student": state.student_tokens, **metrics, **timer.add_to(state.phases)}
            context.metrics.write(state.step, logged, state.seconds)
            ruling = watch.check_step(state.step, logged, state.seconds)
            state.rate *= ruling.factor
            # The total of steps is an estimate that varies if the extent is in tokens.
            so_far = "" if extent.tokens is None else f", {extent.progress(state):.0%} of its tokens"
            headline = f"{algorithm.progress_text(metrics)}  {step_costs(logged, trained, timer)}{so_far}"
            context.progress(state.step, extent.total_steps(state), headline)
            stopping = context.ranks.any_rank(context.preemption.is_stopping, "the end of a step")
            if saver.pending is not None:
                saver.finish_pending()
            if stopping or ruling.stop or state.step % checkpoint_every == 0:
                state.flags = watch.tail
                saver.save(state.step, state.checkpoint_state, source.on_checkpoint())
            if stopping or ruling.stop:
                saver.wait()
            if ruling.stop:
                raise TrainingError(ruling.stop)
            if stopping:
                context.preemption.stop()  # if only another rank got the signal
                context.preemption.check()
    return {
        "steps": state.step,
        "student_tokens": state.student_tokens,
        "seconds": state.seconds,
        "phases": state.phases,
        "counters": state.counters,
    }


def step_costs(metrics: dict[str, float], tokens: int, timer: PhaseTimer) -> str:
    """Return what a step cost, in words: `grad 0.41  1,290 tok/s  0.2 GB`."""
    norm = f"grad {metrics['grad_norm']:.3g}  " if "grad_norm" in metrics else ""
    rate = tokens / max(sum(timer.seconds.values()), 1e-9)
    size = timer.peak_bytes
    memory = f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
    return f"{norm}{rate:,.0f} tok/s  {memory}"


def _one_step(
    algorithm: Algorithm, source: SampleSource, backend: Backend, step: StepContext, last: LastSamples
) -> tuple[dict[str, float], int, int]:
    """Run samples, scores, updates and new engine weights. Returns metrics, the tokens that count for the
    stage's extent, and all that the loss counts.
    """
    with ExitStack() as stack:
        with step.timer("rollout"):
            algorithm.begin_step(step)
            samples = stack.enter_context(source.step_samples(step.index))
            if step.tokens_left is not None:
                samples.limit_tokens(step.tokens_left)
        tokens, trained = algorithm.count_tokens(samples), samples.tokens
        with step.timer("score"):
            metrics = algorithm.score(samples, step)
            final = step.is_last if step.tokens_left is None else tokens >= step.tokens_left
            last.write(step.index + 1, samples, final=final)
        with step.timer("train"):
            plan = algorithm.plan(samples, step)
            updates: list[dict[str, float]] = []
            for update in plan.updates:
                losses = backend.accumulate_gradient(update.samples, update.read)
                update.done()
                updates.append(losses | backend.step(algorithm.step_rate(step) * step.rate))
            metrics |= plan.metrics | combine_updates(updates)
    with step.timer("sync"):
        source.on_weights_updated(step.index + 1)
    metrics |= source.take_counters(step.counters)
    return metrics | algorithm.finish_step(step, metrics), tokens, trained
