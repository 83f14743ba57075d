"""Whatever happens to the engines, every request ends with the tokens of an undisturbed one."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from faulty_engines import FaultyEngine, assert_same, hangs_once, raises_at, sound
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_log import MemoryLog

from opd.errors import RolloutError, StorageError
from opd.retry import Retry
from opd.rollout.engine_pool import RetryPolicy
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.torch_engine import TorchEngine
from opd.types import SamplingParams, Status

Fixture = Callable[..., Any]

QUICK = RetryPolicy(Retry(attempts=3, pause=0.001, longest=0.01))


def logged_equals(log: MemoryLog, responses: dict[str, Any]) -> None:
    """The log holds exactly what the caller was given."""
    for uid, response in responses.items():
        entry = log.find(uid)
        assert entry is not None
        assert entry.token_ids.tolist() == response.token_ids
        assert entry.policy_versions.tolist() == response.versions
        assert entry.logprobs.tolist() == response.logprobs
        assert entry.status == response.status


@pytest.fixture
def undisturbed(
    build: Fixture, collect: Fixture, requests_of: Fixture
) -> tuple[Any, list[Any], dict[str, Any]]:
    """A model, ten requests and their responses."""
    model, _ = build()
    requests = requests_of(5, samples=2, seed=2)
    return model, requests, collect(TorchEngine(model, max_running=6).generate(requests))


def test_without_faults_it_is_the_engine(undisturbed: Any, collect: Fixture) -> None:
    model, requests, expected = undisturbed
    log = MemoryLog()
    rollout = FaultTolerantRollout([TorchEngine(model, max_running=6)], log)
    responses = collect(rollout.generate(requests))
    assert responses == expected
    logged_equals(log, responses)
    counters = rollout.take_counters()
    assert counters["requests"] == counters["completed"] + counters["truncated"] == len(requests)
    assert counters["tokens"] == sum(len(r.token_ids) for r in expected.values())
    assert not rollout.take_counters()


@pytest.mark.parametrize("logged", [True, False])
def test_an_engine_that_dies_again_and_again(undisturbed: Any, collect: Fixture, logged: bool) -> None:
    model, requests, expected = undisturbed
    log = MemoryLog() if logged else None
    engine = FaultyEngine(TorchEngine(model, max_running=6), raises_at(0, 3, 4, 9, 15, 16, 17, 25, 40))
    rollout = FaultTolerantRollout([engine], log, policy=QUICK)
    responses = collect(rollout.generate(requests))
    assert_same(responses, expected)
    if log is not None:
        logged_equals(log, responses)
    assert rollout.counters["engine_failures"] >= 8
    assert len(engine.sampled) == len(set(engine.sampled)), "a token was sampled twice"


@settings(max_examples=cases(15))
@given(seed=st.integers(0, 2**31), hazard=st.sampled_from([0.02, 0.1, 0.3]), engines=st.integers(1, 3))
def test_chaos(undisturbed_session: Any, collect: Fixture, seed: int, hazard: float, engines: int) -> None:
    """Random deaths, random aborts, one to three engines."""
    models, requests, expected = undisturbed_session
    rng = random.Random(seed)

    def fault(engine: FaultyEngine, uids: list[str], number: int) -> None:
        draw = rng.random()
        if draw < hazard:
            raise OSError("gone")
        if draw < 2 * hazard:
            engine.stop(rng.sample(uids, min(2, len(uids))))

    pool = [FaultyEngine(TorchEngine(model, max_running=4), fault) for model in models[:engines]]
    log = MemoryLog()
    policy = replace(QUICK, retry=replace(QUICK.retry, attempts=50))
    rollout = FaultTolerantRollout(pool, log, policy=policy)
    responses = collect(rollout.generate(requests))
    assert_same(responses, expected)
    logged_equals(log, responses)
    counters = rollout.counters
    assert counters["requests"] == counters["completed"] + counters["truncated"]


@pytest.fixture(scope="module")
def undisturbed_session(build: Fixture, collect: Fixture, requests_of: Fixture) -> Any:
    """Three equal models, requests, and their responses."""
    models = [build()[0] for _ in range(3)]
    requests = requests_of(5, samples=2, seed=2)
    return models, requests, collect(TorchEngine(models[0], max_running=6).generate(requests))


@settings(max_examples=cases(25))
@given(cuts=st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_process_death_at_any_step(undisturbed_session: Any, collect: Fixture, cuts: list[int]) -> None:
    """Drop the rollout after some chunks and open a new one on the same log, several times."""
    models, requests, expected = undisturbed_session
    log, sampled = MemoryLog(), []
    for cut in cuts:
        engine = FaultyEngine(TorchEngine(models[0], max_running=6), sound)
        chunks = FaultTolerantRollout([engine], log).generate(requests)
        for _ in range(cut):
            next(chunks, None)
        sampled += engine.sampled
        del chunks
    engine = FaultyEngine(TorchEngine(models[0], max_running=6), sound)
    responses = collect(FaultTolerantRollout([engine], log).generate(requests))
    sampled += engine.sampled
    assert_same(responses, expected)
    logged_equals(log, responses)
    assert len(sampled) == len(set(sampled)), "a logged token was sampled again"


def test_closed_requests_need_no_engine(undisturbed: Any, collect: Fixture) -> None:
    model, requests, expected = undisturbed
    log = MemoryLog()
    first = collect(FaultTolerantRollout([TorchEngine(model)], log).generate(requests))
    engine = FaultyEngine(TorchEngine(model), sound)
    rollout = FaultTolerantRollout([engine], log)
    assert collect(rollout.generate(requests)) == first
    assert engine.asked == []
    assert rollout.counters["replayed_requests"] == len(requests)
    assert rollout.counters["tokens"] == 0
    assert_same(first, expected)


def test_every_token_is_logged_before_it_is_seen(undisturbed: Any) -> None:
    model, requests, _ = undisturbed
    log = MemoryLog()
    for chunk in FaultTolerantRollout([TorchEngine(model)], log).generate(requests):
        for uid, position, token in zip(chunk.uids, chunk.positions, chunk.token_ids, strict=True):
            assert log.entries[uid].rows[position][0] == token
        assert all(log.entries[uid].status == status for uid, status in chunk.finished.items())


def test_after_a_failed_write_nothing_is_given_out(undisturbed: Any) -> None:
    model, requests, _ = undisturbed
    log = MemoryLog()
    chunks = FaultTolerantRollout([TorchEngine(model)], log).generate(requests)
    next(chunks)
    log.broken = True
    before = sum(len(entry.rows) for entry in log.entries.values())
    for _ in range(2):
        with pytest.raises(StorageError, match="disk is full"):
            next(chunks)
    assert sum(len(entry.rows) for entry in log.entries.values()) == before


def test_a_hung_engine_is_left_and_its_late_tokens_are_ignored(
    undisturbed_session: Any, collect: Fixture
) -> None:
    models, requests, expected = undisturbed_session
    release = threading.Event()
    hung = FaultyEngine(TorchEngine(models[0]), hangs_once(3, release))
    other = FaultyEngine(TorchEngine(models[1]), sound)
    policy = replace(QUICK, chunk_timeout=3.0)  # no chunk of the other takes so long, even on a busy machine
    rollout = FaultTolerantRollout([hung, other], MemoryLog(), policy=policy)
    chunks = rollout.generate(requests)
    responses = collect(chunks)
    release.set()
    assert_same(responses, expected)
    assert rollout.counters["engine_timeouts"] == 1
    assert rollout.health[0].failures == 1
    assert "no tokens in" in (rollout.health[0].last_error or "")
    # It answers again, and serves again.
    again = [replace(request, uid=f"again/{request.uid}") for request in requests]
    until = time.monotonic() + 60
    while rollout._pool.ready_engines() != [0, 1] and time.monotonic() < until:
        time.sleep(0.02)
    collect(rollout.generate(again))
    assert len(hung.asked) == 2


def test_a_poisonous_request_fails_alone(undisturbed: Any, collect: Fixture) -> None:
    model, requests, expected = undisturbed
    poison = requests[4].uid

    def fault(engine: FaultyEngine, uids: list[str], number: int) -> None:
        if poison in uids:
            raise OSError("illegal memory access")

    log = MemoryLog()
    policy = replace(QUICK, exhausted="fail")
    rollout = FaultTolerantRollout([FaultyEngine(TorchEngine(model), fault)], log, policy=policy)
    responses = collect(rollout.generate(requests))
    assert responses.pop(poison).status is Status.FAILED
    expected.pop(poison)
    assert_same(responses, expected)
    assert rollout.failures == {poison: "OSError: illegal memory access"}
    counters = rollout.counters
    assert counters["failed"] == 1
    assert counters["requests"] == counters["completed"] + counters["truncated"] + counters["failed"]
    # The failure is final: it is in the log with its reason.
    again = FaultTolerantRollout([TorchEngine(model)], log)
    assert collect(again.generate(requests))[poison].status is Status.FAILED
    assert again.failures == {poison: "OSError: illegal memory access"}


def test_a_dead_engine_raises_and_leaves_the_requests_open(undisturbed: Any, collect: Fixture) -> None:
    model, requests, expected = undisturbed
    log = MemoryLog()

    def dies(engine: FaultyEngine, uids: list[str], number: int) -> None:
        if number >= 2 or len(engine.asked) > 1:
            raise OSError("no route to host")

    rollout = FaultTolerantRollout([FaultyEngine(TorchEngine(model), dies)], log, policy=QUICK)
    with pytest.raises(RolloutError, match=r"OSError: no route to host; .* restart with --resume"):
        list(rollout.generate(requests))
    assert any(entry.rows for entry in log.entries.values())
    assert rollout.health[0].in_a_row >= 3
    assert_same(collect(FaultTolerantRollout([TorchEngine(model)], log).generate(requests)), expected)


def test_an_engines_own_sentence_comes_through(build: Fixture, requests_of: Fixture) -> None:
    model, _ = build()
    engine = TorchEngine(model)
    rollout = FaultTolerantRollout([engine], MemoryLog())
    rollout.pause()
    rollout.update_weights([(name, weight * float("nan")) for name, weight in model.weights()], 1)
    rollout.resume()
    with pytest.raises(RolloutError, match="not finite"):
        list(rollout.generate(requests_of(3)))


def test_the_deadline_ends_what_is_late(
    undisturbed: Any, collect: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, requests, _ = undisturbed
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr("opd.rollout.dispatch.time", clock)

    def crawls(engine: FaultyEngine, uids: list[str], number: int) -> None:
        now[0] += 0.05

    policy = RetryPolicy(deadline=0.3, exhausted="fail")
    log = MemoryLog()
    rollout = FaultTolerantRollout([FaultyEngine(TorchEngine(model), crawls)], log, policy=policy)
    responses = collect(rollout.generate(requests))
    failed = [uid for uid, response in responses.items() if response.status is Status.FAILED]
    assert failed
    assert all("deadline of 0.3 s" in rollout.failures[uid] for uid in failed)
    assert set(responses) == {request.uid for request in requests}
    # The engine is free for the next call.
    fresh = [replace(requests[0], uid="fresh", sampling=SamplingParams(max_new_tokens=1))]
    assert len(collect(rollout.generate(fresh))["fresh"].token_ids) == 1


def test_a_rebuilt_engine_takes_over(undisturbed: Any, collect: Fixture) -> None:
    model, requests, expected = undisturbed

    def broken(engine: FaultyEngine, uids: list[str], number: int) -> None:
        if number == 3 or len(engine.asked) > 1:
            raise OSError("dead for good")

    built = []

    def revive(index: int) -> TorchEngine:
        built.append(index)
        return TorchEngine(model, max_running=6)

    rollout = FaultTolerantRollout(
        [FaultyEngine(TorchEngine(model), broken)], MemoryLog(), policy=replace(QUICK, revive=revive)
    )
    assert_same(collect(rollout.generate(requests)), expected)
    assert built == [0]


def test_dropping_the_iterator_frees_threaded_engines(undisturbed_session: Any, collect: Fixture) -> None:
    models, requests, expected = undisturbed_session
    rollout = FaultTolerantRollout([TorchEngine(m) for m in models], None, policy=QUICK)
    chunks = rollout.generate(requests)
    next(chunks)
    with pytest.raises(RolloutError, match="is given twice"):
        rollout.generate(requests)
    del chunks
    assert_same(collect(rollout.generate(requests)), expected)
    names = [thread.name for thread in threading.enumerate()]
    until = time.monotonic() + 60
    while "rollout-engine" in names and time.monotonic() < until:
        time.sleep(0.02)
        names = [thread.name for thread in threading.enumerate()]
    assert "rollout-engine" not in names
