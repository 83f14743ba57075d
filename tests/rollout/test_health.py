"""Rest and return, hung engines: whatever happens, the counts add up."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from faulty_engines import FaultyEngine, hangs_once
from memory_log import MemoryLog

from opd.errors import RolloutError
from opd.retry import Retry
from opd.rollout import dispatch
from opd.rollout.engine_pool import EngineHealth, RetryPolicy
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.request_state import Recovery
from opd.rollout.torch_engine import TorchEngine
from opd.types import RolloutRequest, SamplingParams, Status

Fixture = Callable[..., Any]

QUICK = RetryPolicy(Retry(attempts=3, pause=0.001, longest=0.01))
SAMPLING = SamplingParams(max_new_tokens=12)
LONG = 3.0
"""Seconds that no chunk of an engine that is well takes, on a busy machine either."""


@pytest.fixture(scope="module")
def models(build: Fixture) -> list[Any]:
    return [build()[0] for _ in range(2)]


@pytest.fixture
def requests(requests_of: Fixture) -> list[RolloutRequest]:
    return requests_of(4, samples=2, sampling=SAMPLING, seed=7)


@pytest.fixture
def expected(models: list[Any], requests: list[RolloutRequest], collect: Fixture) -> dict[str, list[int]]:
    return tokens(collect(TorchEngine(models[0]).generate(requests)))


def tokens(responses: dict[str, Any]) -> dict[str, list[int]]:
    return {uid: response.token_ids for uid, response in responses.items()}


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Frees whoever hangs, at the latest when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_rests_double_to_a_limit_and_a_token_ends_the_row() -> None:
    policy, health = RetryPolicy(Retry(pause=1.0, longest=6.0)), EngineHealth()
    rests = []
    for _ in range(5):
        health.record_failure(100.0, OSError("gone"), policy)
        rests.append(health.resting_until - 100.0)
        assert health.resting_until > 100.0
    for rest, plain in zip(rests, (1.0, 2.0, 4.0, 6.0, 6.0), strict=True):
        assert plain / 2 <= rest <= plain
    health.record_chunk(0)
    assert health.in_a_row == 5
    health.record_chunk(3)
    assert (health.in_a_row, health.tokens) == (0, 3)


def test_what_fails_is_tried_as_often_as_is_said() -> None:
    policy = Retry(attempts=3, pause=0.001)
    tries: list[str] = []

    def fails() -> None:
        tries.append("plain")
        raise OSError("gone")

    async def fails_later() -> None:
        tries.append("coroutine")
        raise OSError("gone")

    with pytest.raises(RolloutError, match="gone"):
        policy.call(fails, OSError, lambda error, _: RolloutError(str(error)))
    with pytest.raises(OSError, match="gone"):
        asyncio.run(policy.call_async(fails_later, OSError))
    assert tries == ["plain"] * 3 + ["coroutine"] * 3


def test_an_engine_that_fails_rests_and_comes_back(
    models: list[Any], requests: list[RolloutRequest], expected: dict[str, list[int]], collect: Fixture
) -> None:
    def healed() -> bool:
        """It fails till then, however long the other takes to notice."""
        return rollout.health[0].failures > 2

    def ill(engine: FaultyEngine, uids: list[str], number: int) -> None:
        if not healed():
            raise OSError("out of order")

    def waits(engine: FaultyEngine, uids: list[str], number: int) -> None:
        until = time.monotonic() + 60
        while not healed() and number == 2 and time.monotonic() < until:
            time.sleep(0.002)

    bad, good = FaultyEngine(TorchEngine(models[0]), ill), FaultyEngine(TorchEngine(models[1]), waits)
    rollout = FaultTolerantRollout([bad, good], MemoryLog(), policy=QUICK)
    many = [replace(r, uid=f"{r.uid}/{i}") for i in range(3) for r in requests]
    assert len(collect(rollout.generate(many))) == len(many)
    assert rollout.health[0].failures == 3
    assert "out of order" in (rollout.health[0].last_error or "")
    until = time.monotonic() + 60
    while rollout._pool.ready_engines() != [0, 1] and time.monotonic() < until:
        time.sleep(0.02)
    assert tokens(collect(rollout.generate(requests))) == expected
    assert rollout.health[0].tokens > 0, "it did not come back"
    assert rollout.health[0].in_a_row == 0


@pytest.mark.parametrize("exhausted", ["raise", "fail"])
def test_engines_that_all_hang_are_given_up(
    models: list[Any],
    requests: list[RolloutRequest],
    collect: Fixture,
    release: threading.Event,
    exhausted: Any,
) -> None:
    hung = FaultyEngine(TorchEngine(models[0]), hangs_once(3, release))
    policy = replace(QUICK, chunk_timeout=0.1, silence_limit=0.3, exhausted=exhausted)
    log = MemoryLog()
    rollout = FaultTolerantRollout([hung], log, policy=policy)
    if exhausted == "raise":
        with pytest.raises(RolloutError, match=r"no engine has answered for 0.3 s; .*--resume"):
            list(rollout.generate(requests))
        assert all(entry.status is Status.PENDING for entry in log.entries.values())
        return
    responses = collect(rollout.generate(requests))
    assert {response.status for response in responses.values()} == {Status.FAILED}
    assert rollout.counters["failed"] == rollout.counters["requests"] == len(requests)
    assert set(rollout.failures.values()) == {"no engine has answered for 0.3 s"}


def test_a_hung_engine_that_can_be_replaced_is(
    models: list[Any],
    requests: list[RolloutRequest],
    expected: dict[str, list[int]],
    collect: Fixture,
    release: threading.Event,
) -> None:
    hung = FaultyEngine(TorchEngine(models[0]), hangs_once(3, release))
    rollout = FaultTolerantRollout(
        [hung],
        MemoryLog(),
        policy=replace(QUICK, chunk_timeout=LONG, revive=lambda index: TorchEngine(models[1])),
    )
    assert tokens(collect(rollout.generate(requests))) == expected
    assert rollout.counters["engine_timeouts"] == 1


def test_a_step_within_its_time_is_waited_for(
    models: list[Any],
    requests: list[RolloutRequest],
    expected: dict[str, list[int]],
    collect: Fixture,
    release: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often somebody looks while no engine says a word."""

    looks, look = [], dispatch.Dispatch._check_time_outs

    def looking(run: Any) -> None:
        look(run)
        looks.append(run)
        if len(looks) == 3:
            release.set()

    monkeypatch.setattr(dispatch.Dispatch, "_check_time_outs", looking)
    slow = FaultyEngine(TorchEngine(models[0]), hangs_once(1, release))
    other = FaultyEngine(TorchEngine(models[1]), lambda engine, uids, number: None)
    rollout = FaultTolerantRollout([slow, other], MemoryLog(), policy=replace(QUICK, chunk_timeout=300.0))
    assert tokens(collect(rollout.generate(requests))) == expected
    assert len(looks) >= 3
    assert rollout.counters["engine_timeouts"] == 0
    assert [health.failures for health in rollout.health] == [0, 0]


def test_a_step_that_a_pause_could_not_wait_for_ends_its_call_and_not_the_requests(
    models: list[Any],
    requests: list[RolloutRequest],
    expected: dict[str, list[int]],
    collect: Fixture,
    release: threading.Event,
) -> None:
    slow = FaultyEngine(TorchEngine(models[0]), hangs_once(3, release))
    rollout = FaultTolerantRollout([slow], MemoryLog(), policy=replace(QUICK, chunk_timeout=LONG))
    chunks = rollout.generate(requests)
    seen = [next(chunks) for _ in range(3)]
    while rollout._pool.gate._sources[0].busy_since is None:
        time.sleep(0.01)
    rollout.pause()
    release.set()
    while not rollout._pool.gate._sources[0].done:
        time.sleep(0.01)
    rollout.resume()
    assert tokens(collect([*seen, *chunks])) == expected


def test_counters_say_which_path_keys_and_values_took(
    models: list[Any], requests: list[RolloutRequest], collect: Fixture
) -> None:
    class Store:
        kept: Any = None

        def save(self, tensors: Any) -> None:
            self.kept = dict(tensors)

        def load(self) -> Any:
            return self.kept

        def clear(self) -> None:
            self.kept = None

    prefilled = {}
    for name, store in (("restored", Store()), ("computed", None)):
        rollout = FaultTolerantRollout([TorchEngine(models[0])], MemoryLog(), recovery=Recovery(store))
        chunks = rollout.generate(requests)
        for _ in range(5):
            next(chunks)
        rollout.suspend()
        rollout.wake()
        collect(chunks)
        counters = rollout.take_counters()
        prefilled[name] = counters["prefilled_tokens"]
        assert (counters.get("kv_restored_tokens", 0) > 0) == (store is not None)
    assert prefilled["computed"] >= prefilled["restored"] + 4 * len(requests)


@pytest.mark.parametrize("attempts", [0, -1])
def test_less_than_one_attempt_is_none(attempts):
    with pytest.raises(ValueError, match="must be at least 1"):
        Retry(attempts=attempts)
