"""The seam of engines: requests come and go while others are decoded, and nobody's tokens change by that."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_log import MemoryLog

from opd.errors import RolloutError
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.streams import EngineLock
from opd.rollout.torch_engine import TorchEngine
from opd.types import RolloutRequest, SamplingParams, Status

Fixture = Callable[..., Any]
Response = tuple[list[int], Status]

FRONTS: dict[str, Callable[[Any], Any]] = {
    "engine": lambda model: TorchEngine(model, max_running=5),
    "logged": lambda model: FaultTolerantRollout([TorchEngine(model, max_running=5)], MemoryLog()),
    "threads": lambda model: FaultTolerantRollout([TorchEngine(model), TorchEngine(model)], MemoryLog()),
}
"""Whatever stands before an engine is one, and has the same seam."""


@pytest.fixture(scope="module")
def model(build: Fixture) -> Any:
    return build()[0]


@pytest.fixture(scope="module")
def alone(model: Any, requests_of: Fixture) -> tuple[list[RolloutRequest], dict[str, Response]]:
    """Requests of all kinds, and what is written to each when nothing else is in flight."""
    requests, written = requests_of(9, seed=4), {}
    for request in requests:
        written |= read(TorchEngine(model).generate(request))
    return requests, written


class Reader:
    """Puts responses together."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, Status] = {}

    def take(self, stream: Any) -> bool:
        """Read one chunk; whether there was one."""
        chunk = next(stream, None)
        if chunk is None:
            return False
        places = chunk.positions.tolist()
        for uid, position, token in zip(chunk.uids, places, chunk.token_ids.tolist(), strict=True):
            assert position == len(self.tokens.setdefault(uid, []))
            self.tokens[uid].append(token)
        self.ended |= chunk.finished
        return True

    @property
    def responses(self) -> dict[str, Response]:
        return {uid: (self.tokens.get(uid, []), status) for uid, status in self.ended.items()}


def read(*streams: Any) -> dict[str, Response]:
    """Whole responses, chunk by chunk from each stream in turn."""
    reader, waiting = Reader(), list(streams)
    while waiting:
        waiting = [stream for stream in waiting if reader.take(stream)]
    return reader.responses


@pytest.mark.some(1)
@pytest.mark.parametrize("front", FRONTS)
@settings(max_examples=cases(6))
@given(
    gaps=st.lists(st.integers(0, 6), min_size=9, max_size=9),
    sizes=st.lists(st.integers(1, 3), min_size=9, max_size=9),
    gone=st.integers(0, 8),
)
def test_requests_come_and_go_while_others_are_decoded(
    model: Any, alone: Any, front: str, gaps: list[int], sizes: list[int], gone: int
) -> None:
    """One or several together, after some chunks of the first; one of them is let go in the middle."""
    requests, expected = alone
    engine, reader, streams, uids = FRONTS[front](model), Reader(), [], set()
    for gap, size in zip(gaps, sizes, strict=True):
        together, requests = requests[:size], requests[size:]
        if not together:
            break
        streams.append(engine.generate(together[0] if size == 1 else together))
        if len(streams) - 1 == gone:
            uids = {request.uid for request in together}
        for _ in range(gap):
            reader.take(streams[0])
    if uids:
        streams.pop(gone).close()
    while streams:
        streams = [stream for stream in streams if reader.take(stream)]
    left = {uid: response for uid, response in expected.items() if uid not in uids}
    assert {uid: response for uid, response in reader.responses.items() if uid not in uids} == left


@pytest.mark.parametrize("front", FRONTS)
def test_what_was_let_go_may_be_asked_for_again(model: Any, alone: Any, front: str) -> None:
    requests, expected = alone
    engine = FRONTS[front](model)
    whole = engine.generate(requests[3:])
    for _ in range(3):
        stream = engine.generate(requests[:3])
        next(stream)
        del stream
    assert read(engine.generate(requests[:3]), whole) == expected


@pytest.mark.parametrize("front", FRONTS)
def test_turns_of_agents_are_requests(model: Any, front: str) -> None:
    """Each agent goes on when its own turn has ended, while the others are in theirs."""
    rng = np.random.default_rng(1)
    sampling = SamplingParams(max_new_tokens=12, stop_ids=(2, 3, 5))
    prompts = {f"agent{i}": rng.integers(0, 24, 2 + i).astype(np.int32) for i in range(4)}

    def turn(uid: str, number: int, known: np.ndarray) -> RolloutRequest:
        return RolloutRequest(f"{uid}@{number}", known, sampling, seed=1)

    def act(engine: Any, uid: str) -> Any:
        """One agent, which gives control away at every chunk."""
        known = prompts[uid]
        for number in range(3):
            for chunk in engine.generate(turn(uid, number, known)):
                known = np.concatenate([known, chunk.token_ids])
                yield
            known = np.concatenate([known, np.array([20, 11], np.int32)])
        transcripts[uid] = known.tolist()

    transcripts: dict[str, list[int]] = {}
    for uid in prompts:
        assert list(act(TorchEngine(model), uid))
    expected, transcripts = transcripts, {}
    engine = FRONTS[front](model)
    agents = [act(engine, uid) for uid in prompts]
    while agents:
        agents = [agent for agent in agents if next(agent, agent) is None]
    assert transcripts == expected


def test_a_uid_in_flight_is_refused_and_nothing_of_it_begins(model: Any, alone: Any) -> None:
    requests, expected = alone
    engine = TorchEngine(model)
    stream = engine.generate(requests)
    next(stream)
    with pytest.raises(RolloutError, match="is given twice"):
        engine.generate([RolloutRequest("new", np.ones(1, np.int32), SamplingParams()), requests[0]])
    assert "new" not in engine.in_flight
    del stream
    assert engine.in_flight == []
    assert read(engine.generate(requests)) == expected


def test_room_grows_for_longer_and_more_requests(model: Any) -> None:
    """Slots, stop ids and cache of those that run stay theirs when larger requests join."""
    rng = np.random.default_rng(3)
    requests = [
        RolloutRequest(
            f"r{i}",
            rng.integers(0, 24, 3 + 9 * (i > 1)).astype(np.int32),
            SamplingParams(max_new_tokens=20 + 20 * i, stop_ids=tuple(range(i))),
        )
        for i in range(4)
    ]
    expected = {}
    for request in requests:
        expected |= read(TorchEngine(model).generate(request))
    engine = TorchEngine(model)
    streams = []
    for request in requests:
        streams.append(engine.generate(request))
        next(streams[0])
    found = read(*streams[1:])
    assert found == {uid: response for uid, response in expected.items() if uid != "r0"}


def test_the_learner_gets_in_between_fast_chunks() -> None:
    lock, stop, uses = EngineLock(), threading.Event(), []

    def run():
        while not stop.is_set():
            with lock.use():
                uses.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(50):
            with lock.between_chunks():
                before = len(uses)
                time.sleep(0.0005)
                assert len(uses) == before
    finally:
        stop.set()
        thread.join()
