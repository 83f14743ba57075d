"""Engines around a real one that fail on command."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from opd.rollout.torch_engine import TorchEngine
from opd.types import Chunk, RolloutRequest, Status


class FaultyEngine:
    """`fault(engine, uids, number)` runs before chunk `number` since it was last idle, with the requests in
    flight: it may raise, wait, or call `engine.stop`.
    """

    def __init__(self, inner: TorchEngine, fault: Callable[[FaultyEngine, list[str], int], None]) -> None:
        self.inner, self.fault = inner, fault
        self.asked: list[list[str]] = []
        self.prefixes: dict[str, list[int]] = {}
        self.sampled: list[tuple[str, int]] = []
        """(uid, position) of every token it sampled."""
        self._number = 0
        self._stopped: list[str] = []

    @property
    def policy_version(self) -> int:
        return self.inner.policy_version

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self.asked.append([request.uid for request in requests])
        for request in requests:
            self.prefixes.setdefault(request.uid, []).append(len(request.prefix_ids))
        self._number = self._number if self.inner.in_flight else 0
        self.inner.submit(requests)

    def next_chunk(self) -> Chunk | None:
        in_flight = self.inner.in_flight
        if not in_flight:
            return None
        self._number += 1
        try:
            self.fault(self, in_flight, self._number - 1)
        except Exception:
            self.inner.abort(in_flight)
            raise
        if self._stopped:
            ended, self._stopped = dict.fromkeys(self._stopped, Status.ABORTED), []
            nothing = np.zeros(0, np.int32)
            return Chunk([], nothing, nothing, np.zeros(0, np.float32), self.policy_version, ended)
        chunk = self.inner.next_chunk()
        if chunk is not None:
            self.sampled += zip(chunk.uids, chunk.positions.tolist(), strict=True)
        return chunk

    def stop(self, uids: Collection[str]) -> None:
        """End these before their end, and say so in the next chunk."""
        self.inner.abort(uids)
        self._stopped += uids

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
    """Raise before the given chunks, counted over all calls; each once."""
    left, seen = set(numbers), [0]

    def fault(engine: FaultyEngine, uids: list[str], number: int) -> None:
        seen[0] += 1
        if seen[0] - 1 in left:
            left.discard(seen[0] - 1)
            raise error("the engine is gone")

    return fault


def hangs_once(at: int, release: threading.Event) -> Callable[..., None]:
    """Wait before chunk `at`, once, until `release` is set."""
    hung = []

    def fault(engine: FaultyEngine, uids: list[str], number: int) -> None:
        if number == at and not hung:
            hung.append(number)
            release.wait(30)

    return fault


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal tokens and ends; log-probabilities up to rounding, which depends on the shape of the cache."""
    assert set(found) == set(expected)
    for uid, response in expected.items():
        assert found[uid].token_ids == response.token_ids
        assert found[uid].positions == list(range(len(response.token_ids)))
        assert found[uid].status == response.status
        np.testing.assert_allclose(found[uid].logprobs, response.logprobs, atol=1e-5)
