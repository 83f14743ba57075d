"""Responses of several turns: the environment's tokens are logged, masked, and survive interruptions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from faulty_engines import FaultyEngine, raises_at
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_log import MemoryLog

from opd.errors import StorageError
from opd.rollout.collect import EncodedPrompt, collect
from opd.rollout.engine_pool import RetryPolicy
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.torch_engine import TorchEngine
from opd.rollout.transcript import Tokens
from opd.types import RolloutRequest, SamplingParams, Status

Fixture = Callable[..., Any]

STOPS = (2, 3, 4, 5, 6, 7)
SAMPLING = SamplingParams(max_new_tokens=40, stop_ids=STOPS)
QUICK = RetryPolicy(backoff=0.001, backoff_limit=0.01, attempts=20)


class Tool:
    """Answers the first two turns of a response; the answer ends in a stop id, as chat templates do."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def observe(self, request: RolloutRequest, response: Tokens) -> np.ndarray | None:
        self.asked.append((request.uid, len(response)))
        assert int(response.token_ids[-1]) in STOPS
        turns = int((np.diff(response.loss_mask.astype(int)) > 0).sum()) + 1
        if turns > 2:
            return None
        return np.array([20, 10 + turns, len(response) % 20, STOPS[0]], dtype=np.int32)


def prompts() -> list[EncodedPrompt]:
    rng = np.random.default_rng(0)
    return [EncodedPrompt(f"p{i}", "d", rng.integers(0, 24, 3 + i).astype(np.int32), None) for i in range(4)]


def written(rollout: FaultTolerantRollout) -> dict[str, Any]:
    groups = collect(rollout, prompts(), 3, SAMPLING, seed=1)
    return {sample.uid: sample for group in groups for sample in group.samples}


@pytest.fixture(scope="module")
def model(build: Fixture) -> Any:
    return build()[0]


@pytest.fixture(scope="module")
def undisturbed(model: Any) -> dict[str, Any]:
    return written(FaultTolerantRollout([TorchEngine(model)], MemoryLog(), environment=Tool()))


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for uid, sample in expected.items():
        assert found[uid].response_ids.tolist() == sample.response_ids.tolist()
        assert found[uid].loss_mask.tolist() == sample.loss_mask.tolist()
        assert found[uid].status == sample.status
        np.testing.assert_allclose(found[uid].rollout_logprobs, sample.rollout_logprobs, atol=1e-5)


def test_observations_are_masked_and_in_their_place(undisturbed: dict[str, Any]) -> None:
    several = 0
    for sample in undisturbed.values():
        ids, mask = sample.response_ids, sample.loss_mask
        starts = np.flatnonzero((ids[:-1] == 20) & ~mask[:-1])
        several += len(starts) == 2
        for start in starts:
            assert mask[start - 1]
            assert int(ids[start - 1]) in STOPS
            assert not mask[start : start + 4].any()
            assert ids[start : start + 4].tolist()[2:] == [start % 20, STOPS[0]]
        assert (~mask).sum() == 4 * len(starts)
        assert (sample.rollout_logprobs[~mask] == 0).all()
        inside = np.isin(ids[mask], STOPS)
        assert inside.sum() == len(starts) + (sample.status is Status.COMPLETED)
    assert several >= 3
    assert {s.status for s in undisturbed.values()} <= {Status.COMPLETED, Status.TRUNCATED}


def test_logprobs_of_later_turns_are_the_models(
    undisturbed: dict[str, Any], build: Fixture, reference: Fixture
):
    _, plain = build()
    for sample in undisturbed.values():
        expected = reference(plain, sample.prompt_ids, sample.response_ids.tolist())
        mask = sample.loss_mask
        np.testing.assert_allclose(sample.rollout_logprobs[mask], expected[mask], atol=1e-5)


def test_engine_deaths_between_and_within_turns(model: Any, undisturbed: dict[str, Any]) -> None:
    engine = FaultyEngine(TorchEngine(model), raises_at(1, 2, 5, 9, 12, 17, 23, 30))
    rollout = FaultTolerantRollout([engine], MemoryLog(), environment=Tool(), policy=QUICK)
    same(written(rollout), undisturbed)
    assert rollout.counters["engine_failures"] == 8


class DiskFull(MemoryLog):
    """Stops taking anything after a number of commits: what a process leaves that dies there."""

    def __init__(self, commits: int) -> None:
        super().__init__()
        self.left = commits

    def _commit(self) -> None:
        self.left -= 1
        self.broken = self.left < 0
        super()._commit()


@settings(max_examples=15)
@given(commits=st.integers(12, 140))
def test_death_after_any_commit(model: Any, undisturbed: dict[str, Any], commits: int) -> None:
    """Also between a turn, the environment's answer, and the end of the response."""
    log = DiskFull(commits)
    tool = Tool()
    with contextlib.suppress(StorageError):
        written(FaultTolerantRollout([TorchEngine(model)], log, environment=tool))
    log.left, log.broken = 10**9, False
    again = Tool()
    same(written(FaultTolerantRollout([TorchEngine(model)], log, environment=again)), undisturbed)
    assert len(tool.asked) + len(again.asked) >= len(undisturbed)
    same(written(FaultTolerantRollout([TorchEngine(model)], log, environment=Tool())), undisturbed)
