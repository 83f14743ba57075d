"""Batches for a stage's learner and new weights for its engine: in turn, or with the writing ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from opd.config import RolloutConfig
from opd.pipelines.stage_rollout import StageRollout
from opd.pipelines.student import Student
from opd.rollout.ahead import RolloutAhead
from opd.rollout.collect import Generates
from opd.types import SampleGroup

Write = Callable[[Generates, int], list[SampleGroup]]
"""Samples batch number `index` with the engine it is given."""


class Batches(ABC):
    """What a stage's learner asks for. Batch `k` is learnt from by weights of version `k`."""

    def __init__(self, student: Student, rollouts: StageRollout, write: Write) -> None:
        self._student, self._rollouts, self._write = student, rollouts, write

    @abstractmethod
    def start(self, step: int) -> None:
        """The learner's weights of version `step` are in place: after a resume the engine needs them."""

    @abstractmethod
    def take(self, index: int) -> list[SampleGroup]:
        """Batch `index`."""

    @abstractmethod
    def learnt(self, version: int, *, changed: bool = True) -> None:
        """The learner has reached `version`: give the engine its weights, if they have `changed`."""

    @abstractmethod
    def idle(self) -> AbstractContextManager[None]:
        """The engine may be used for something else while the block runs."""

    @abstractmethod
    def consumed(self) -> None:
        """A checkpoint holds what was learnt from every batch taken: the log may forget them."""

    @abstractmethod
    def take_counters(self, totals: dict[str, float]) -> dict[str, float]:
        """See `StageRollout.take_counters`."""


class InTurn(Batches):
    """Write, learn, write."""

    def start(self, step: int) -> None:
        self._student.start(step)

    def take(self, index: int) -> list[SampleGroup]:
        return self._write(self._rollouts.engine, index)

    def learnt(self, version: int, *, changed: bool = True) -> None:
        if changed:
            self._student.sync(version)

    def idle(self) -> AbstractContextManager[None]:
        return nullcontext()

    def consumed(self) -> None:
        self._rollouts.consumed()

    def take_counters(self, totals: dict[str, float]) -> dict[str, float]:
        return self._rollouts.take_counters(totals)


class InParallel(Batches):
    """Write while learning. `joined`: responses of several batches at once, as their age allows."""

    def __init__(
        self, student: Student, rollouts: StageRollout, write: Write, max_ahead: int, joined: bool
    ) -> None:
        super().__init__(student, rollouts, write)
        self._max_ahead, self._joined = max_ahead, joined
        self._opened: RolloutAhead | None = None

    @property
    def ahead(self) -> RolloutAhead:
        """The writer, from `start` on."""
        if self._opened is None:
            raise RuntimeError("start() comes before the first batch")
        return self._opened

    def start(self, step: int) -> None:
        self._student.start(step)
        engine = self._rollouts.engine
        self._opened = RolloutAhead(engine, self._write, step, self._max_ahead, joined=self._joined)

    def take(self, index: int) -> list[SampleGroup]:
        return self.ahead.take(index)

    def learnt(self, version: int, *, changed: bool = True) -> None:
        with self.ahead.steps.between():
            if changed:
                self._student.sync(version)
            self.ahead.learnt(version)

    def idle(self) -> AbstractContextManager[None]:
        return self.ahead.idle()

    def consumed(self) -> None:
        with self.ahead.steps.between():
            self._rollouts.consumed(keep=self.ahead.untaken)

    def take_counters(self, totals: dict[str, float]) -> dict[str, float]:
        with self.ahead.steps.between():
            return self._rollouts.take_counters(totals)

    def close(self) -> None:
        """Stop writing."""
        self._student.barrier.abandon()
        if self._opened is not None:
            self._opened.close()


class OneAhead(InParallel):
    """Batch `k` is written by weights of version `k - 1`, always: the same tokens whoever is faster.

    So weights that were learnt wait until the batch that was begun before them is written.
    """

    def __init__(self, student: Student, rollouts: StageRollout, write: Write) -> None:
        super().__init__(student, rollouts, write, max_ahead=1, joined=False)
        self._pending: tuple[int, bool] | None = None

    def take(self, index: int) -> list[SampleGroup]:
        self._hand_over()
        return super().take(index)

    def learnt(self, version: int, *, changed: bool = True) -> None:
        self._pending = (version, changed)

    @contextmanager
    def idle(self) -> Iterator[None]:
        if self._pending is not None:
            self.ahead.wait(self._pending[0])  # else its writer could be held before it begins
        with self.ahead.idle():
            self._hand_over()
            yield

    def _hand_over(self) -> None:
        if self._pending is None:
            return
        (version, changed), self._pending = self._pending, None
        self.ahead.wait(version)
        if changed:
            self._student.sync(version)
        self.ahead.learnt(version)


@contextmanager
def _parallel(batches: InParallel) -> Iterator[Batches]:
    try:
        yield batches
    finally:
        batches.close()


def open_batches(
    config: RolloutConfig, student: Student, rollouts: StageRollout, write: Write, stack: ExitStack
) -> Batches:
    """The batches of a stage, by the recipe's `rollout.schedule`, until `stack` is unwound."""
    if config.schedule == "in_turn":
        return InTurn(student, rollouts, write)
    if config.schedule == "ahead":
        return stack.enter_context(_parallel(OneAhead(student, rollouts, write)))
    # Ranks tell each other a batch's responses in the order of the batches, and a `generate` of the recipe's
    # own may hold state: there one batch is written at a time.
    joined = student.ranks.alone and config.generate is None
    return stack.enter_context(_parallel(InParallel(student, rollouts, write, config.max_ahead, joined)))
