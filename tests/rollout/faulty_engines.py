"""Engines around a real one that fail on command."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from opd.rollout.torch_engine import TorchEngine
from opd.types import Chunk, RolloutRequest


class FaultyEngine:
    """`fault(engine, requests, number)` runs before chunk `number` of each call: it may raise, wait,
    or call `engine.abort`.
    """

    def __init__(self, inner: TorchEngine, fault: Callable[[FaultyEngine, list[str], int], None]) -> None:
        self.inner, self.fault = inner, fault
        self.asked: list[list[str]] = []
        self.prefixes: dict[str, list[int]] = {}
        self.sampled: list[tuple[str, int]] = []
        """(uid, position) of every token it sampled."""

    @property
    def policy_version(self) -> int:
        return self.inner.policy_version

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[Chunk]:
        uids = [request.uid for request in requests]
        self.asked.append(uids)
        for request in requests:
            self.prefixes.setdefault(request.uid, []).append(len(request.prefix_ids))
        steps = self.inner.generate(requests)

        def run() -> Iterator[Chunk]:
            try:
                for number in range(10**9):
                    self.fault(self, uids, number)
                    step = next(steps, None)
                    if step is None:
                        return
                    self.sampled += zip(step.uids, step.positions.tolist(), strict=True)
                    yield step
            finally:
                steps.close()  # pyright: ignore[reportAttributeAccessIssue]

        return run()

    def abort(self, uids: Collection[str]) -> None:
        self.inner.abort(uids)

    def pause(self) -> None:
        self.inner.pause()

    def flush(self) -> None:
        self.inner.flush()

    def update_weights(self, weights: Iterable[Any], version: int) -> str:
        return self.inner.update_weights(weights, version)

    def resume(self) -> None:
        self.inner.resume()


def sound(engine: FaultyEngine, uids: list[str], number: int) -> None:
    """No fault."""


def raises_at(*numbers: int, error: type[Exception] = ConnectionError) -> Callable[..., None]:
    """Raise before the given steps, counted over all calls; each once."""
    left, seen = set(numbers), [0]

    def fault(engine: FaultyEngine, uids: list[str], number: int) -> None:
        seen[0] += 1
        if seen[0] - 1 in left:
            left.discard(seen[0] - 1)
            raise error("the engine is gone")

    return fault


def hangs_once(at: int, release: threading.Event) -> Callable[..., None]:
    """Wait before step `at` of the first call until `release` is set."""
    hung = []

    def fault(engine: FaultyEngine, uids: list[str], number: int) -> None:
        if number == at and not hung:
            hung.append(number)
            release.wait(30)

    return fault
