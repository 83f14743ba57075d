"""The one loop of every trained stage: samples, scores, updates, new weights for the engine, checkpoint.

`train` knows nothing of losses, teachers and engines. What a stage learns is an `Algorithm` (`distill.py`,
`grpo.py`, `supervised.py`), where its samples come from and where they are is a `Source`
(`source.py`, `samples.py`), and the only place that knows models and kernels is the back end.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from opd.config import OptimConfig
from opd.metrics import PhaseTimer, of_updates
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.last_samples import LastSamples
from opd.pipelines.stages.samples import StepSamples
from opd.pipelines.stages.saving import Saver
from opd.pipelines.stages.watch import Watch
from opd.train.backend import PLAIN, Backend, Read, learning_rate
from opd.types import RolloutBatch, Sample


@dataclass(slots=True)
class LoopState:
    """What a checkpoint knows beside tensors."""

    step: int = 0
    student_tokens: int = 0
    """Response tokens the student generated and was trained on or filtered by."""
    seconds: float = 0.0
    """Wall time of all attempts that led here."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds per phase."""
    counters: dict[str, float] = field(default_factory=dict)
    """Counts the stage keeps, such as steps without signal."""
    memory: dict[str, Any] = field(default_factory=dict)  # what is no count; JSON
    metrics: str = ""
    flags: str = ""
    """What stands for all metrics, and all flags, up to this step; see `Lines.tail`."""
    rate: float = 1.0  # what rules that fired have left of the learning rate
    max_tokens: int = 0  # of a micro-batch

    def described(self, metrics: str) -> dict[str, Any]:
        """What a checkpoint keeps of this, with `metrics` as they stand now; a copy."""
        self.metrics = metrics
        return asdict(self)


@dataclass(slots=True)
class StepContext:
    """What one step is told."""

    index: int
    progress: float
    """Share of the stage done before this step, in [0, 1)."""
    timer: PhaseTimer
    counters: dict[str, float]
    """Survive a resume; the step may change them."""
    tokens_left: int | None = None
    """How many more the student may write, where the stage has a budget of tokens: see `within`."""
    rate: float = 1.0  # what the algorithm's learning rate is multiplied with
    memory: dict[str, Any] = field(default_factory=dict)  # survives a resume, as counters do; JSON
    is_last: bool = False  # of a stage without such a budget


@dataclass(frozen=True, slots=True)
class Extent:
    """When a stage ends: after `steps`, or once the student has written `tokens`, whichever is given.

    What a last step writes beyond `tokens` it does not learn from and does not count.
    """

    steps: int | None = None
    tokens: int | None = None

    def progress(self, state: LoopState) -> float:
        """Share done, in [0, 1]."""
        if self.tokens is not None:
            return min(1.0, state.student_tokens / self.tokens)
        return min(1.0, state.step / (self.steps or 1))

    def left(self, state: LoopState) -> int | None:
        """Tokens that are left of the budget; `None` without one."""
        return None if self.tokens is None else self.tokens - state.student_tokens

    def total(self, state: LoopState) -> int:
        """Steps in all, for a progress bar; an estimate where the extent is in tokens."""
        if self.tokens is None:
            return self.steps or 1
        per_step = state.student_tokens / max(state.step, 1)
        return max(state.step, round(self.tokens / per_step)) if per_step else state.step + 1


class Source(Protocol):
    """Where the samples of the steps come from; `source.py` has those that there are."""

    def start(self, step: int) -> None:
        """The learner's weights of version `step` are in place: after a resume the engine needs them."""

    def take(self, index: int) -> AbstractContextManager[StepSamples]:
        """The samples of step `index`, for as long as the block runs."""
        ...

    def learnt(self, version: int) -> None:
        """The learner has reached `version`: give the engine its weights, which may be the same."""

    def learnt_from(self) -> Callable[[], None]:
        """A checkpoint is taken of what was learnt from every step so far; the returned call, made once it is
        durable, says that their samples may be forgotten.
        """
        ...

    def take_counters(self, totals: dict[str, float]) -> dict[str, float]:
        """What happened to requests and engines since this was last called, as metrics; added to `totals`."""
        ...


@dataclass(slots=True)
class Update:
    """One optimiser step."""

    samples: list[Sample]
    """In the order in which they are trained; see `Backend.accumulate`, of `read` too."""
    read: Read
    done: Callable[[], None] = lambda: None
    """Once the gradient is there."""

    @classmethod
    def of(cls, batch: RolloutBatch, done: Callable[[], None] = lambda: None) -> Update:
        """The step on a batch in memory."""
        return cls(batch.samples, lambda parts: (batch.take(part) for part in parts), done)


@dataclass(slots=True)
class Plan:
    """What a step learns."""

    updates: Sequence[Update]
    """None, where there is nothing to learn from."""
    metrics: dict[str, float] = field(default_factory=dict)


class Algorithm(ABC):
    """What a stage learns from the samples of a step. It knows no engine and no optimiser."""

    optim: OptimConfig

    def begin(self, step: StepContext) -> None:
        """A step begins: its samples are taken next, or have been written ahead."""
        return

    @abstractmethod
    def score(self, samples: StepSamples, step: StepContext) -> dict[str, float]:
        """Rewards, and what teachers say; returns metrics."""

    @abstractmethod
    def plan(self, samples: StepSamples, step: StepContext) -> Plan:
        """The step's updates: advantages, and what each token weighs in each stream of the loss."""

    def learners(self) -> dict[str, Backend]:
        """What learns beside the student and is kept with it, by the name that its files begin with."""
        return {}

    def tokens(self, samples: StepSamples) -> int:
        """How many the student wrote, or was trained on in their place."""
        return samples.tokens

    def ended(self, step: StepContext, metrics: dict[str, float]) -> dict[str, float]:
        """What is measured once the weights are new, in which `metrics` are the step's."""
        return {}

    def rate(self, step: StepContext) -> float:
        """The learning rate of the step."""
        return learning_rate(self.optim, step.index, step.progress)

    @abstractmethod
    def headline(self, metrics: dict[str, float]) -> str:
        """A few words for the progress bar."""


def train(
    context: StageContext,
    algorithm: Algorithm,
    source: Source,
    backend: Backend,
    extent: Extent,
    checkpoint_every: int,
) -> dict[str, Any]:
    """Take step after step until `extent` is reached; returns the stage's result numbers.

    A killed stage goes on from its newest valid checkpoint: steps after it are repeated, and since every
    random draw is a function of (seed, uid, position) they repeat bit for bit. A stage that is asked to stop
    writes one and raises `PreemptedError`; one that a rule stops writes one and raises `TrainingError`.
    """
    with Saver(context, backend, algorithm.learners()) as saver:
        state = LoopState(**saver.restore())
        begun = state.max_tokens or (PLAIN if state.step else 0)  # what earlier versions did not keep
        state.max_tokens = backend.packed_as(begun)  # others would sum in another order
        last = LastSamples.of(context, algorithm, state.step)
        watch = Watch.resumed(context, state.step, state.flags)
        source.start(state.step)
        begin = time.perf_counter() - state.seconds
        while extent.progress(state) < 1.0:
            left, timer = extent.left(state), PhaseTimer(context.memory)
            step = StepContext(state.step, extent.progress(state), timer, state.counters, left, state.rate)
            step.memory, step.is_last = state.memory, state.step + 1 == extent.steps
            metrics, tokens = _one_step(algorithm, source, backend, step, last)
            state.step += 1
            state.student_tokens += tokens
            state.seconds = time.perf_counter() - begin
            logged = {"tokens/student": state.student_tokens, **metrics, **step.timer.add_to(state.phases)}
            context.metrics.write(state.step, logged, state.seconds)
            ruling = watch.look(state.step, logged, state.seconds)
            state.rate *= ruling.factor
            # The total of steps is an estimate, and wanders, where the extent is in tokens.
            so_far = "" if extent.tokens is None else f", {extent.progress(state):.0%} of its tokens"
            headline = f"{algorithm.headline(metrics)}  {step_costs(logged, tokens, step.timer)}{so_far}"
            context.progress(state.step, extent.total(state), headline)
            stopping = context.ranks.any(context.preemption.stopping, "the end of a step")
            if saver.pending is not None:
                saver.settle()
            if stopping or ruling.stop or state.step % checkpoint_every == 0:
                state.flags = watch.tail
                saver.save(state.step, state.described, source.learnt_from())
            if stopping or ruling.stop:
                saver.wait()
            ruling.check()
            if stopping:
                context.preemption.stop()  # where only another rank was asked
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
    return f"{norm}{rate:,.0f} tok/s  {timer.peak_bytes / 1e9:.1f} GB"


def _one_step(
    algorithm: Algorithm, source: Source, backend: Backend, step: StepContext, last: LastSamples
) -> tuple[dict[str, float], int]:
    """Samples, scores, updates, new weights for the engine; returns metrics, and the tokens learnt from."""
    with ExitStack() as stack:
        with step.timer("rollout"):
            algorithm.begin(step)
            samples = stack.enter_context(source.take(step.index))
            samples.limit(step.tokens_left)
        tokens = algorithm.tokens(samples)
        with step.timer("score"):
            metrics = algorithm.score(samples, step)
            final = step.is_last if step.tokens_left is None else tokens >= step.tokens_left
            last.write(step.index + 1, samples, final=final)
        with step.timer("train"):
            plan = algorithm.plan(samples, step)
            taken: list[dict[str, float]] = []
            for update in plan.updates:
                found = backend.accumulate(update.samples, update.read)
                update.done()
                taken.append(found | backend.step(algorithm.rate(step) * step.rate))
            metrics |= plan.metrics | of_updates(taken)
    with step.timer("sync"):
        source.learnt(step.index + 1)
    metrics |= source.take_counters(step.counters)
    return metrics | algorithm.ended(step, metrics), tokens
