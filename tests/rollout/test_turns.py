"""Responses of several turns, by a rollout of the user's own: each turn is a request, and survives as one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from faulty_engines import FaultyEngine, raises_at
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_log import MemoryLog

from opd.retry import Retry
from opd.rollout.collect import EncodedPrompt, collect
from opd.rollout.engine_pool import RetryPolicy
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.torch_engine import TorchEngine
from opd.types import SamplingParams

Fixture = Callable[..., Any]

STOPS = (2, 3, 4, 5, 6, 7)
SAMPLING = SamplingParams(max_new_tokens=20, stop_ids=STOPS)
QUICK = RetryPolicy(Retry(attempts=20, pause=0.001, longest=0.01))
ANSWER = np.array([20, 11, STOPS[0]], np.int32)
"""It ends in a stop id, as chat templates do."""
TURNS = 3


class StopsError(Exception):
    """The process would be gone."""


class Killed:
    """Stands before an engine and ends after so many steps."""

    def __init__(self, engine: FaultTolerantRollout, steps: int) -> None:
        self.engine, self.left = engine, steps

    def generate(self, requests: Any) -> Any:
        for step in self.engine.generate(requests):
            if self.left == 0:
                raise StopsError
            self.left -= 1
            yield step


def turns(engine: Any) -> dict[str, list[tuple[bytes, bytes]]]:
    """What a rollout of `TURNS` turns wrote: token ids and versions of each turn, by response."""
    rng = np.random.default_rng(0)
    prompts = {f"p{i}": rng.integers(0, 24, 3 + i).astype(np.int32) for i in range(4)}
    found: dict[str, list[tuple[bytes, bytes]]] = {uid: [] for uid in prompts}
    for turn in range(TURNS):
        asked = [EncodedPrompt(f"{uid}@{turn}", "d", ids, None) for uid, ids in prompts.items()]
        for uid, group in zip(prompts, collect(engine, asked, 1, SAMPLING, seed=1), strict=True):
            (sample,) = group.samples
            found[uid].append((sample.response_ids.tobytes(), sample.policy_versions.tobytes()))
            prompts[uid] = np.concatenate([prompts[uid], sample.response_ids, ANSWER])
    return found


@pytest.fixture(scope="module")
def model(build: Fixture) -> Any:
    return build()[0]


@pytest.fixture(scope="module")
def undisturbed(model: Any) -> Any:
    return turns(TorchEngine(model))


@settings(max_examples=cases(15))
@given(cuts=st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_killed_in_any_turn_and_resumed_the_turns_are_the_same(model, undisturbed, cuts: list[int]) -> None:
    log = MemoryLog()
    for steps in cuts:
        try:
            turns(Killed(FaultTolerantRollout([TorchEngine(model)], log), steps))
        except StopsError:
            continue
    assert turns(FaultTolerantRollout([TorchEngine(model)], log)) == undisturbed


def test_engines_that_die_in_turns_change_nothing(model, undisturbed) -> None:
    engine = FaultyEngine(TorchEngine(model), raises_at(*range(2, 40, 5)))
    rollout = FaultTolerantRollout([engine], MemoryLog(), policy=QUICK)
    assert turns(rollout) == undisturbed
    assert rollout.counters["engine_failures"] >= 4
