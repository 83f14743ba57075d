"""Stop strings: found however the text is cut into tokens, and across any interruption."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from faulty_engines import FaultyEngine, raises_at, sound
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_log import MemoryLog

from opd.errors import RolloutError
from opd.models.tokenizers import character_tokenizer
from opd.retry import Retry
from opd.rollout.engine_pool import RetryPolicy
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.request_state import StopStrings
from opd.rollout.torch_engine import TorchEngine
from opd.storage.wal import TokenWAL
from opd.types import RolloutRequest, SamplingParams, Status

Fixture = Callable[..., Any]

PIECES = ["a", "b", "ab", "xa", "by", "é", "c", "\n", "\n\n", "axb", *"defghijklmnopq"]
STRINGS = ("ab", "é\n", "axba")
SAMPLING = SamplingParams(max_new_tokens=30, temperature=1.5)
QUICK = RetryPolicy(Retry(attempts=20, pause=0.001, longest=0.01))


def decode(ids: list[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def stops() -> StopStrings:
    return StopStrings(STRINGS, decode)


def cut(ids: list[int]) -> list[int] | None:
    """The shortest beginning of a response whose text holds a stop string; `None` if none does."""
    for length in range(1, len(ids) + 1):
        if any(string in decode(ids[:length]) for string in STRINGS):
            return ids[:length]
    return None


@dataclass
class Case:
    models: list[Any]
    requests: list[RolloutRequest]
    expected: dict[str, tuple[list[int], Status]]
    """What an engine writes without stop strings, cut by hand."""


@pytest.fixture(scope="module")
def case(build: Fixture, collect: Fixture, requests_of: Fixture) -> Case:
    models = [build()[0] for _ in range(2)]
    requests = requests_of(12, samples=2, sampling=SAMPLING, seed=4)
    expected = {}
    for uid, response in collect(TorchEngine(models[0]).generate(requests)).items():
        short = cut(response.token_ids)
        expected[uid] = (short or response.token_ids, Status.COMPLETED if short else response.status)
    return Case(models, requests, expected)


def found(responses: dict[str, Any]) -> dict[str, tuple[list[int], Status]]:
    return {uid: (response.token_ids, response.status) for uid, response in responses.items()}


@pytest.mark.parametrize(("engines", "slots"), [(1, 30), (1, 5), (2, 4)])
def test_a_response_ends_with_the_token_that_completes_the_string(
    case: Case, collect: Fixture, engines: int, slots: int
) -> None:
    log = MemoryLog()
    pool = [FaultyEngine(TorchEngine(model, max_running=slots), sound) for model in case.models[:engines]]
    rollout = FaultTolerantRollout(pool, log, stops=stops())
    responses = collect(rollout.generate(case.requests))
    assert found(responses) == case.expected
    for uid, (ids, status) in case.expected.items():
        logged = log.find(uid)
        assert logged is not None
        assert (logged.token_ids.tolist(), logged.status) == (ids, status)
    ends = [status for _, status in case.expected.values()]
    assert ends.count(Status.COMPLETED) >= 5
    assert ends.count(Status.TRUNCATED) >= 3
    straddling = [i for i, _ in case.expected.values() if cut(i) and not cut(i[-1:]) and len(i) < 30]
    assert len(straddling) >= 3, "no string was split over tokens"
    counters = rollout.counters
    assert counters["requests"] == counters["completed"] + counters["truncated"]
    assert counters["interrupted_requests"] == 0
    # The engines are free for what comes next.
    again = [replace(request, uid=f"again/{request.uid}") for request in case.requests[:3]]
    assert len(collect(rollout.generate(again))) == 3


@pytest.mark.slow
@settings(max_examples=cases(15))
@given(cuts=st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_split_across_interruptions(
    case: Case, collect: Fixture, tmp_path_factory: Any, cuts: list[int]
) -> None:
    """The first token of a string is logged, the process dies, and the next one writes the second."""
    folder, sampled = tmp_path_factory.mktemp("wal"), []
    for steps_before_death in [*cuts, 10**6]:
        with TokenWAL(folder, fsync="os") as log:
            engine = FaultyEngine(TorchEngine(case.models[0], max_running=9), sound)
            steps = FaultTolerantRollout([engine], log, stops=stops()).generate(case.requests)
            seen = [step for step, _ in zip(steps, range(steps_before_death), strict=False)]
            sampled += engine.sampled
    assert found(collect(seen)) == case.expected
    assert len(sampled) == len(set(sampled)), "a logged token was sampled again"


def test_split_by_the_death_of_an_engine_after_every_token(case: Case, collect: Fixture) -> None:
    engine = FaultyEngine(TorchEngine(case.models[0]), raises_at(*range(1, 80, 2)))
    rollout = FaultTolerantRollout([engine], MemoryLog(), stops=stops(), policy=QUICK)
    assert found(collect(rollout.generate(case.requests))) == case.expected
    assert rollout.counters["engine_failures"] >= 20


def test_what_comes_after_a_string_in_its_chunk_is_not_heard(case: Case, collect: Fixture) -> None:
    engine, log = TorchEngine(case.models[0]), MemoryLog()
    engine.chunk_seconds = 1e9
    assert found(collect(FaultTolerantRollout([engine], log, stops=stops()).generate(case.requests))) == (
        case.expected
    )
    assert {uid: len(entry.rows) for uid, entry in log.entries.items()} == {
        uid: len(ids) for uid, (ids, _) in case.expected.items()
    }


def test_a_prefix_that_holds_a_string_has_ended(case: Case, collect: Fixture) -> None:
    uid, (ids, _) = next(item for item in case.expected.items() if cut(item[1][0]))
    request = next(request for request in case.requests if request.uid == uid)
    engine = FaultyEngine(TorchEngine(case.models[0]), sound)
    rollout = FaultTolerantRollout([engine], stops=stops())
    known = replace(request, prefix_ids=np.array(ids, np.int32))
    assert collect(rollout.generate([known]))[uid].status is Status.COMPLETED
    assert not engine.asked


def test_a_string_whose_end_was_not_logged_is_ended_in_the_log(case: Case, collect: Fixture) -> None:
    uid, (ids, _) = next(item for item in case.expected.items() if cut(item[1][0]))
    request = next(request for request in case.requests if request.uid == uid)
    log, engine = MemoryLog(), FaultyEngine(TorchEngine(case.models[0]), sound)
    log.open(request, {})
    log.entries[uid].rows = [(token, -1.0, 0) for token in ids]
    rollout = FaultTolerantRollout([engine], log, stops=stops())
    assert collect(rollout.generate([request]))[uid].status is Status.COMPLETED
    assert log.entries[uid].status is Status.COMPLETED
    assert not engine.asked


def test_a_real_tokenizers_text() -> None:
    tokenizer = character_tokenizer("ab =\n", ["<end>"])
    found = StopStrings(["\n<end>", "= b"], lambda ids: str(tokenizer.decode(ids)))
    for text, expected in (("ab\n<end>", True), ("a= b", True), ("a=b\n", False), ("<end>", False)):
        ids = tokenizer(text)["input_ids"]
        assert found.has_stop(ids[-found.window :]) is expected


@pytest.mark.parametrize("strings", [(), ("",), ("a", "")])
def test_an_empty_string_is_refused(strings: tuple[str, ...]) -> None:
    with pytest.raises(RolloutError, match="none of them empty"):
        StopStrings(strings, decode)
