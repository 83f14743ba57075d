"""What the engine refuses, each with one sentence, before anything is sampled."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from opd.errors import RolloutError
from opd.rollout.batch import EngineLimits, RunningBatch, queue_requests
from opd.rollout.torch_engine import TorchEngine
from opd.types import RolloutRequest, SamplingParams, Status

Fixture = Callable[..., Any]


def request(uid: str = "r", ids: tuple[int, ...] = (1, 2), prefix: tuple[int, ...] = (), **sampling: Any):
    return RolloutRequest(
        uid,
        np.array(ids, dtype=np.int32),
        SamplingParams(**sampling),
        prefix_ids=np.array(prefix, dtype=np.int32),
    )


REFUSED = {
    "empty prompt": ([request(ids=())], "'r' has an empty prompt"),
    "id too large": ([request("ok"), request(ids=(1, 24))], "'r' holds token id 24"),
    "negative id": ([request(ids=(-1,))], "token id -1"),
    "bad prefix": ([request(prefix=(99,))], "token id 99"),
    "too long": ([request(max_new_tokens=31)], "may take 33 tokens"),
    "duplicate": ([request(), request()], "'r' is given twice"),
    "temperature": ([request(temperature=-0.1)], "temperature -0.1"),
    "temperature nan": ([request(temperature=float("nan"))], "temperature nan"),
    "top_p": ([request(top_p=0.0)], "top_p 0.0"),
    "top_k": ([request(top_k=-1)], "top_k -1"),
    "limit": ([request(max_new_tokens=-1)], "max_new_tokens -1"),
    "stop": ([request(stop_ids=(24,))], "stop_ids"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, build: Fixture) -> None:
    requests, message = REFUSED[case]
    engine = TorchEngine(build()[0], max_sequence=32)
    with pytest.raises(RolloutError, match=message):
        engine.generate(requests)
    assert len(list(engine.generate([request(max_new_tokens=3)]))) == 3


def test_the_models_own_length_limits_too(build: Fixture) -> None:
    with pytest.raises(RolloutError, match="serves 128"):
        TorchEngine(build()[0], max_sequence=4096).generate([request(max_new_tokens=127)])


@pytest.mark.parametrize("at_a_time", [4, 1])
def test_resumed_requests_that_had_ended_are_reported_without_tokens(
    at_a_time: int, build: Fixture, collect: Fixture
) -> None:
    requests = [
        request("stopped", prefix=(4, 7), stop_ids=(7,), max_new_tokens=9),
        request("full", prefix=(4, 5, 6), max_new_tokens=3),
        request("nothing", max_new_tokens=0),
        request("going", prefix=(4, 7), max_new_tokens=4),
    ]
    engine = TorchEngine(build()[0])
    for first in range(0, len(requests), at_a_time):
        engine.submit(requests[first : first + at_a_time])
    responses = collect(iter(engine.next_chunk, None))
    assert {uid: (len(r.token_ids), r.status) for uid, r in responses.items()} == {
        "stopped": (0, Status.COMPLETED),
        "full": (0, Status.TRUNCATED),
        "nothing": (0, Status.TRUNCATED),
        "going": (2, Status.TRUNCATED),
    }


@pytest.mark.parametrize(("running", "sequence"), [(0, 16), (4, 1)])
def test_impossible_engines_are_refused(running: int, sequence: int, build: Fixture) -> None:
    with pytest.raises(RolloutError, match="at least"):
        TorchEngine(build()[0], max_running=running, max_sequence=sequence)


def test_who_joins_where_there_is_room_copies_nothing():
    batch = RunningBatch(4, 0, 16)
    batch.admit_requests(
        queue_requests(
            [request("a", max_new_tokens=8), request("b", (3, 4), max_new_tokens=8)], EngineLimits(24, 16)
        )
    )
    assert batch.with_capacity(3, 0, 16) is batch
    for size in ((5, 0, 16), (4, 1, 16), (4, 0, 17)):
        grown = batch.with_capacity(*size)
        assert grown is not batch
        assert (grown.slots, grown.stops.shape[1], grown.tokens.shape[1]) == size
        for row in range(2):
            assert grown.known_tokens(row).tolist() == batch.known_tokens(row).tolist()


def test_a_few_wait_for_others_but_not_for_long():
    """Each time some come, a pass of their own is made, for which the running ones wait."""
    batch = RunningBatch(64, 0, 16)

    def come(first: int, number: int) -> int:
        new = [request(str(i), (i % 20 + 1,), max_new_tokens=8) for i in range(first, first + number)]
        return batch.admit_requests(queue_requests(new, EngineLimits(24, 16)))

    assert come(0, 24) == 24, "nobody runs"
    assert come(24, 3) == 3, "an eighth"
    assert [come(27, 1) for _ in range(4)] == [0, 0, 0, 1]
    assert [come(28, 3), come(28, 4)] == [0, 4]
    assert [come(32, 1) for _ in range(4)] == [0, 0, 0, 1], "counted anew"
