"""The shell of every trained stage: resume, metrics, checkpoints, progress. It knows nothing of losses."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

from opd.pipelines.context import StageContext
from opd.protocols import TrainBackend


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
    metrics: str = ""
    """What stands for all metrics up to this step; see `MetricsWriter.tail`."""


class PhaseTimer:
    """Attributes a step's wall time to its phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


@dataclass(slots=True)
class Step:
    """What one step is told."""

    index: int
    progress: float
    """Share of the stage done before this step, in [0, 1)."""
    timer: PhaseTimer
    counters: dict[str, float]
    """Survive a resume; the step may change them."""
    tokens_left: int | None = None
    """How many more the student may write, where the stage has a budget of tokens: see `within`."""


@dataclass(slots=True)
class StepResult:
    """What one step tells."""

    metrics: dict[str, float]
    student_tokens: int
    headline: str
    """A few words for the progress bar."""


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


Written = TypeVar("Written")


def within(
    items: Sequence[Written], tokens_of: Callable[[Written], int], budget: int | None
) -> list[Written]:
    """The first of `items`, up to the one that takes their tokens to `budget`: beyond it by less than one
    item. All of them without a budget.
    """
    if budget is None:
        return list(items)
    ends = list(accumulate(map(tokens_of, items)))
    return list(items[: bisect_left(ends, budget) + 1])


def run_loop(
    context: StageContext,
    backend: TrainBackend,
    extent: Extent,
    checkpoint_every: int,
    step_fn: Callable[[Step], StepResult],
    on_start: Callable[[int], None] = lambda step: None,
    on_checkpoint: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Step until `extent` is reached; returns the stage's result numbers.

    A killed stage goes on from its newest valid checkpoint: steps after it are repeated, and since every
    random draw is a function of (seed, uid, position) they repeat bit for bit. `on_start(step)` runs once the
    weights are in place, to sync the engine; `on_checkpoint()` runs after each checkpoint. A stage that is
    asked to stop writes one and raises `PreemptedError`.
    """
    state = _restore(context, backend)
    on_start(state.step)
    begin = time.perf_counter() - state.seconds
    while extent.progress(state) < 1.0:
        timer = PhaseTimer()
        step = Step(state.step, extent.progress(state), timer, state.counters, extent.left(state))
        result = step_fn(step)
        state.step += 1
        state.student_tokens += result.student_tokens
        state.seconds = time.perf_counter() - begin
        for phase, seconds in timer.seconds.items():
            state.phases[phase] = state.phases.get(phase, 0.0) + seconds
        times = {f"time/{phase}": seconds for phase, seconds in timer.seconds.items()}
        context.metrics.write(
            state.step, {"tokens/student": state.student_tokens, **result.metrics, **times}, state.seconds
        )
        context.progress(state.step, extent.total(state), result.headline)
        stopping = context.ranks.any(context.preemption.stopping, "the end of a step")
        if stopping or state.step % checkpoint_every == 0:
            _save(context, backend, state)
            on_checkpoint()
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


def _save(context: StageContext, backend: TrainBackend, state: LoopState) -> None:
    """Every rank gathers, the first one writes, and none goes on before the checkpoint is durable."""
    tensors = backend.state()
    if context.ranks.main:
        context.metrics.sync()
        state.metrics = context.metrics.tail
        context.checkpoints.save(state.step, tensors, asdict(state))
    context.ranks.barrier("a checkpoint")


def _restore(context: StageContext, backend: TrainBackend) -> LoopState:
    checkpoint = context.checkpoints.latest()
    if checkpoint is None:
        context.metrics.truncate(0)
        return LoopState()
    backend.load_state({name: checkpoint.load(name) for name in ("model", "optimizer")})
    state = LoopState(**checkpoint.state)
    context.metrics.truncate(state.step, state.metrics)
    context.note(f"resumed from step {state.step}")
    return state
