"""The fault-tolerant rollout on the real write-ahead log; `tests/crash` kills it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_engines import FaultyEngine, sound
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.errors import StorageError
from opd.pipelines.stages.stage_rollout import StageLogs, StageRollout
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.torch_engine import TorchEngine
from opd.storage.wal import TokenWAL
from opd.types import Status

Fixture = Callable[..., Any]


@pytest.mark.slow
@settings(max_examples=cases(12))
@given(cuts=st.lists(st.integers(0, 12), min_size=1, max_size=4), data=st.data())
def test_a_log_reopened_again_and_again(
    build: Fixture, collect: Fixture, requests_of: Fixture, tmp_path_factory: Any, cuts: list[int], data: Any
) -> None:
    """Each round decodes some steps, closes the log, and opens it in a new rollout."""
    model, _ = build()
    requests = requests_of(5, samples=2, seed=2)
    expected = collect(TorchEngine(model, max_running=6).generate(requests))
    folder, sampled = tmp_path_factory.mktemp("wal"), []
    policy = data.draw(st.sampled_from(["always", "interval", "os"]))
    for cut in [*cuts, 10**6]:
        with TokenWAL(folder, fsync=policy) as log:
            engine = FaultyEngine(TorchEngine(model, max_running=6), sound)
            steps = FaultTolerantRollout([engine], log).generate(requests)
            seen = [step for step, _ in zip(steps, range(cut), strict=False)]
            sampled += engine.sampled
    assert len(sampled) == len(set(sampled)), "a logged token was sampled again"
    for uid, response in collect(seen).items():
        assert response.token_ids == expected[uid].token_ids
        assert response.status == expected[uid].status
        np.testing.assert_allclose(response.logprobs, expected[uid].logprobs, atol=1e-5)


def test_ended_requests_come_back_and_retired_ones_are_forgotten(
    build: Fixture, collect: Fixture, requests_of: Fixture, tmp_path: Path
) -> None:
    model, _ = build()
    requests = requests_of(4, samples=2, seed=1)
    uids = [request.uid for request in requests]
    with TokenWAL(tmp_path) as log:
        first = collect(FaultTolerantRollout([TorchEngine(model)], log).generate(requests))
    with TokenWAL(tmp_path) as log:
        engine = FaultyEngine(TorchEngine(model), sound)
        assert collect(FaultTolerantRollout([engine], log).generate(requests)) == first
        assert not engine.asked
        log.retire(uids)
        assert collect(FaultTolerantRollout([engine], log).generate(requests)) == first
        assert sorted(engine.asked[0]) == sorted(uids)


def test_failures_keep_their_reason(build: Fixture, requests_of: Fixture, tmp_path: Path) -> None:
    model, _ = build()
    requests = requests_of(2)
    with TokenWAL(tmp_path) as log:
        steps = FaultTolerantRollout([TorchEngine(model)], log).generate(requests)
        next(steps)
        open_now = [uid for uid in log.uids() if log.requests()[uid].status is Status.PENDING]
        log.close(open_now[0], Status.FAILED, "too slow")
    with TokenWAL(tmp_path) as log:
        rollout = FaultTolerantRollout([TorchEngine(model)], log)
        ended = {uid: status for step in rollout.generate(requests) for uid, status in step.finished.items()}
    assert ended[open_now[0]] is Status.FAILED
    assert rollout.failures == {open_now[0]: "too slow"}


def test_two_rollouts_cannot_share_a_log(tmp_path: Path) -> None:
    with TokenWAL(tmp_path), pytest.raises(StorageError):
        TokenWAL(tmp_path)


def test_a_checkpoint_releases_no_request_that_is_asked_for_meanwhile(
    build: Fixture, collect: Fixture, requests_of: Fixture, tmp_path: Path
) -> None:
    """An earlier attempt has begun it for a later step, and its tokens come from the log."""
    model, _ = build()
    first, later, carried = requests_of(3, seed=1)
    expected = collect(TorchEngine(model).generate([first, later, carried]))
    with TokenWAL(tmp_path) as log:
        chunks = FaultTolerantRollout([TorchEngine(model)], log).generate([first, later, carried])
        for _ in range(2):
            next(chunks)
    with TokenWAL(tmp_path) as log:
        rollout = FaultTolerantRollout([TorchEngine(model)], log)
        collect(rollout.generate([first]))
        stage = StageRollout(rollout, StageLogs(log), {})
        release = stage.on_checkpoint(lambda: [carried.uid])
        chunks = rollout.generate([later])
        chunk = next(chunks)
        release_newer = stage.on_checkpoint()  # starts before the older checkpoint is on the disk
        release()
        assert sorted(log.uids()) == sorted([later.uid, carried.uid])
        seen = collect([chunk, *chunks])
        assert seen[later.uid].token_ids == expected[later.uid].token_ids
        release_newer()
        assert log.uids() == []
