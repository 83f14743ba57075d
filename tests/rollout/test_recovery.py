"""What a log may hold for a request, and what is refused."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from by_calls import ByCalls
from memory_log import MemoryLog

from opd.errors import RolloutError
from opd.rollout.collect import EncodedPrompt, collect, stream_samples
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.request_state import RequestState, replay_tokens
from opd.rollout.torch_engine import TorchEngine
from opd.storage.transcript import Tokens, Transcript
from opd.types import Chunk, RolloutRequest, SamplingParams, Status

Fixture = Callable[..., Any]


@pytest.fixture(scope="module")
def model(build: Fixture) -> Any:
    return build()[0]


def begun(model: Any, requests: list[Any], steps: int, version: int = 0) -> MemoryLog:
    """A log of some steps."""
    log = MemoryLog()
    iterator = FaultTolerantRollout([TorchEngine(model, version=version)], log).generate(requests)
    for _ in range(steps):
        next(iterator)
    return log


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "prompt": (lambda r: replace(r, prompt_ids=r.prompt_ids[::-1] + 1), "another prompt"),
    "sampling": (lambda r: replace(r, sampling=SamplingParams(max_new_tokens=9)), "other sampling"),
    "seed": (lambda r: replace(r, seed=99), "another seed"),
    "prefix": (lambda r: replace(r, prefix_ids=np.array([1, 1, 1], dtype=np.int32)), "response tokens"),
    "unknown": (lambda r: replace(r, uid="new", prefix_ids=r.prompt_ids), "does not hold"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_log_of_other_requests_is_refused(case: str, model: Any, requests_of: Fixture) -> None:
    change, message = CHANGES[case]
    requests = requests_of(3, sampling=SamplingParams(max_new_tokens=8))
    log = begun(model, requests, 3)
    with pytest.raises(RolloutError, match=message):
        FaultTolerantRollout([TorchEngine(model)], log).generate([change(requests[0])])


def test_tokens_of_later_weights_are_refused(model: Any, requests_of: Fixture) -> None:
    requests = requests_of(2, sampling=SamplingParams(max_new_tokens=8))
    log = begun(model, requests, 3, version=7)
    with pytest.raises(RolloutError, match="policy version 7, later than 5"):
        FaultTolerantRollout([TorchEngine(model, version=5)], log).generate(requests)


def test_a_uid_given_twice_is_refused(model: Any, requests_of: Fixture) -> None:
    requests = requests_of(2)
    with pytest.raises(RolloutError, match="is given twice"):
        FaultTolerantRollout([TorchEngine(model)], MemoryLog()).generate([*requests, requests[0]])


def test_a_known_prefix_is_not_told_again(model: Any, requests_of: Fixture, collect: Fixture) -> None:
    requests = requests_of(2, sampling=SamplingParams(max_new_tokens=8))
    log = begun(model, requests, 5)
    asked = []
    for request in requests:
        logged = log.find(request.uid)
        assert logged is not None
        asked.append(replace(request, prefix_ids=logged.token_ids[:3]))
    responses = collect(FaultTolerantRollout([TorchEngine(model)], log).generate(asked))
    assert all(response.positions == [3, 4, 5, 6, 7] for response in responses.values())


def test_retired_requests_may_come_again(model: Any, requests_of: Fixture) -> None:
    requests = requests_of(2, sampling=SamplingParams(max_new_tokens=4))
    log = begun(model, requests, 4)
    log.retire(request.uid for request in requests)
    steps = list(FaultTolerantRollout([TorchEngine(model)], log).generate(requests))
    assert sum(len(step.uids) for step in steps) == 8


def test_engines_of_different_versions_are_refused(model: Any) -> None:
    with pytest.raises(RolloutError, match=r"versions \[0, 2\]"):
        FaultTolerantRollout([TorchEngine(model), TorchEngine(model, version=2)])
    with pytest.raises(RolloutError, match="at least one engine"):
        FaultTolerantRollout([])


def test_an_engine_that_misses_an_update_serves_no_more(
    build: Fixture, requests_of: Fixture, collect: Fixture
) -> None:
    good, bad = TorchEngine(build()[0]), TorchEngine(build()[0])
    rollout = FaultTolerantRollout([bad, good])
    weights = [(name, weight.clone()) for name, weight in good.model.weights()]
    rollout.pause()
    bad.resume()  # it was restarted behind the rollout's back: it refuses, because it is not paused
    rollout.update_weights(weights, 1)
    rollout.resume()
    responses = collect(rollout.generate(requests_of(4, sampling=SamplingParams(max_new_tokens=5))))
    assert all(response.versions == [1] * 5 for response in responses.values())
    assert rollout.health[0].stale
    assert rollout.health[0].tokens == 0


def test_replay_keeps_order_and_versions() -> None:
    rng = np.random.default_rng(0)

    def some(count: int) -> Tokens:
        versions = np.sort(rng.integers(0, 3, count)).astype(np.int32)
        return Tokens(rng.integers(0, 9, count).astype(np.int32), -rng.random(count).astype("f4"), versions)

    known = {uid: some(count) for uid, count in (("a", 7), ("b", 5), ("c", 4), ("d", 0), ("e", 1))}
    for start in (0, 2):
        skip = {uid: min(start, len(tokens)) for uid, tokens in known.items()}
        transcript = Transcript(
            {uid: tokens.select_rows(slice(0, skip[uid])) for uid, tokens in known.items()}
        )
        for step in replay_tokens(known, skip):
            assert len(set(step.uids)) == len(step.uids)
            transcript.add_chunk(step)
        for uid, tokens in known.items():
            found = transcript.request_tokens(uid)
            for name in ("token_ids", "logprobs", "policy_versions"):
                np.testing.assert_array_equal(getattr(found, name), getattr(tokens, name))


def step_of(uids: list[str], positions: list[int]) -> Chunk:
    count = len(uids)
    zeros = np.zeros(count, dtype=np.int32)
    return Chunk(uids, np.array(positions, np.int32), zeros, zeros.astype(np.float32), 0, {})


@pytest.mark.parametrize("positions", [[0, 2], [0, 0], [1]])
def test_missing_or_double_positions_are_found(positions: list[int]) -> None:
    transcript = Transcript({"a": Tokens.empty()})
    for position in positions[:-1]:
        transcript.add_chunk(step_of(["a"], [position]))
    with pytest.raises(RolloutError, match="was due"):
        transcript.add_chunk(step_of(["a"], positions[-1:]))


def test_tokens_for_a_stranger_are_found() -> None:
    transcript = Transcript({"a": Tokens.empty()})
    with pytest.raises(RolloutError, match="nobody asked for"):
        transcript.add_chunk(step_of(["b"], [0]))


def test_tokens_are_put_together_whenever_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come and go, chunks hold several steps, some are asked for early, and many wait."""
    monkeypatch.setattr("opd.storage.transcript.FOLD_AT", 50)
    rng = np.random.default_rng(0)
    transcript, expected, begun = Transcript(), {}, 0
    for turn in range(300):
        for _ in range(rng.integers(0, 3)):
            first = rng.integers(0, 99, rng.integers(0, 3)).astype(np.int32)
            transcript.add_requests(
                {f"r{begun}": Tokens(first, np.zeros(len(first), "f4"), np.zeros(len(first), np.int32))}
            )
            expected[f"r{begun}"] = first.tolist()
            begun += 1
        if not expected:
            continue
        uids = rng.choice(list(expected), rng.integers(0, 80)).tolist()
        ids, positions = rng.integers(0, 99, len(uids)).astype(np.int32), []
        for uid, token in zip(uids, ids.tolist(), strict=True):
            positions.append(len(expected[uid]))
            expected[uid].append(token)
        transcript.add_chunk(
            Chunk(uids, np.array(positions, np.int32), ids, (-ids / 7).astype("f4"), turn, {})
        )
        for uid in rng.choice(list(expected), min(2, len(expected)), replace=False).tolist():
            found = transcript.request_tokens(uid)
            assert found.token_ids.tolist() == expected[uid]
            assert (np.diff(found.policy_versions) >= 0).all()
            if rng.random() < 0.3:
                transcript.drop_requests([uid])
                del expected[uid]
    assert begun > 200
    for uid, ids in expected.items():
        assert transcript.request_tokens(uid).token_ids.tolist() == ids


def test_collect_raises_for_failed_samples_unless_told_to_keep_them(model: Any) -> None:
    prompts = [EncodedPrompt("p", "d", np.array([1, 2], dtype=np.int32), None)]
    sampling = SamplingParams(max_new_tokens=4)
    log = MemoryLog()
    rollout = FaultTolerantRollout([TorchEngine(model)], log)
    collect(rollout, prompts, 1, sampling, 0)
    log.entries["p/0"].status, log.entries["p/0"].failure = Status.FAILED, "it was too slow"
    with pytest.raises(RolloutError, match="p/0 ended as failed: it was too slow"):
        collect(rollout, prompts, 1, sampling, 0)
    [group] = collect(rollout, prompts, 1, sampling, 0, keep_failed=True)
    assert group.samples[0].failure == "it was too slow"
    assert len(group.samples[0].response_ids) == 4


class LeavingEngine(ByCalls):
    """Finishes one request of a call, and leaves the others after a token."""

    def write(self, requests: Sequence[RolloutRequest]) -> Iterator[Chunk]:
        uids = [request.uid for request in requests]
        zeros = np.zeros(len(uids), np.int32)
        yield Chunk(uids, zeros, zeros, zeros.astype(np.float32), 0, {uids[0]: Status.COMPLETED})


class EarlyEngine:
    """An engine of somebody's own, whose stream ends as `LeavingEngine` does."""

    def generate(self, requests: Sequence[RolloutRequest], more: object = None) -> Iterator[Chunk]:
        return LeavingEngine().write(requests)


@pytest.mark.parametrize("engine", [LeavingEngine(), EarlyEngine()], ids=["ours", "theirs"])
@pytest.mark.parametrize("call", ["stream", "collect", "keep failed"])
def test_a_request_that_an_engine_leaves_is_an_error(call: str, engine: Any) -> None:
    prompts = [EncodedPrompt(uid, "d", np.array([1, 2], np.int32), None) for uid in "pq"]
    sampling = SamplingParams(max_new_tokens=4)
    samples = [prompt.empty_sample(0) for prompt in prompts]
    calls = {
        "stream": lambda: list(stream_samples(engine, samples, {"d": sampling}, 0)),
        "collect": lambda: collect(engine, prompts, 1, sampling, 0),
        "keep failed": lambda: collect(engine, prompts, 1, sampling, 0, keep_failed=True),
    }
    with pytest.raises(RolloutError, match="ended without finishing request q/0"):
        calls[call]()


def test_nothing_that_waits_is_told_of_what_was_let_go() -> None:
    state, zeros = RequestState(None), np.zeros(2, np.int32)
    state.add_requests([RolloutRequest(uid, np.array([1], np.int32), SamplingParams(), 0) for uid in "ab"], 1)
    state.log_chunk(Chunk(["a", "b"], zeros, zeros, zeros.astype(np.float32), 1, {}))
    state.drop_requests(["a"])
    told = state.next_chunk()
    assert told is not None
    assert told.uids == ["b"]
