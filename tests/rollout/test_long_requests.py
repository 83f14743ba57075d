"""Work for a token does not grow with what was written before: copies, sorts, reallocations are counted."""

import math
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from by_calls import ByCalls
from hypothesis import given
from hypothesis import strategies as st

from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.kv_cache import KVCache
from opd.storage.transcript import FOLD_AT, Tokens, Transcript
from opd.storage.wal import TokenWAL
from opd.types import Chunk, RolloutRequest, SamplingParams, Status


def make_chunk(uids: list[str], position: int, version: int = 0) -> Chunk:
    at = np.full(len(uids), position, np.int32)
    ids = at * 7 + np.arange(len(uids), dtype=np.int32)
    return Chunk(uids, at, ids, -at.astype(np.float32), version, {})


def test_asking_after_every_token_copies_less_than_twice_what_was_written():
    count = 5000
    transcript = Transcript({"a": Tokens.empty()})
    for position in range(count):
        transcript.add_chunk(make_chunk(["a"], position))
        assert len(transcript.request_tokens("a")) == position + 1
    assert transcript.moved < 2 * count
    assert transcript.request_tokens("a").token_ids.tolist() == [7 * p for p in range(count)]


def test_steps_are_not_kept_for_ever():
    transcript = Transcript({"a": Tokens.empty(), "b": Tokens.empty()})
    for position in range(FOLD_AT // 2 + 10):
        chunk = make_chunk(["a", "b"], position)
        transcript.add_chunk(chunk)
        assert sys.getrefcount(chunk) == 2
        assert len(transcript._waiting) == FOLD_AT
    assert transcript._size == 20
    assert len(transcript.request_tokens("b")) == FOLD_AT // 2 + 10


@given(st.lists(st.integers(0, 6), max_size=30), st.integers(0, 5))
def test_what_was_given_out_stays_as_it_was(lengths: list[int], known: int):
    """Against plain lists: pieces of any length, the transcript asked in between."""
    numbers = np.arange(known, dtype=np.int32)
    transcript = Transcript({"a": Tokens(numbers, numbers.astype(np.float32), numbers * 0)})
    expected = numbers.tolist()
    given_out = []
    for length in lengths:
        for token in range(100 * len(expected), 100 * len(expected) + length):
            row = np.array([len(expected)], np.int32)
            transcript.add_chunk(Chunk(["a"], row, np.array([token]), np.zeros(1, np.float32), 3, {}))
            expected.append(token)
        given_out.append((transcript.request_tokens("a"), list(expected)))
    for tokens, then in given_out:
        assert tokens.token_ids.tolist() == then


def test_a_log_copies_a_long_request_less_than_twice(tmp_path, monkeypatch):
    monkeypatch.setattr("opd.storage.transcript.FOLD_AT", FOLD_AT // 16)
    count = 3 * FOLD_AT // 16
    with TokenWAL(tmp_path, fsync="os") as log:
        log.open(RolloutRequest("a", np.ones(1, np.int32), SamplingParams()), {})
        for position in range(count):
            log.append(make_chunk(["a"], position))
        found = log.find("a")
        assert found is not None
        assert len(found.token_ids) == count
        assert log._table.transcript.moved < 2 * count


def test_keys_and_values_are_moved_a_number_of_times_that_grows_like_the_logarithm():
    cache, grown = KVCache(), 0
    cache.reset(1)
    for tokens in range(1, 20_000):
        before = cache.capacity
        cache.ensure_capacity(1, tokens, 10**6, 1)
        if tokens == 1:
            cache.get_layer(0, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        grown += cache.capacity != before
    assert grown <= 16 + math.log(20_000, 9 / 8)


class PlainEngine(ByCalls):
    """Writes `count` tokens that end on the stop id 0, each by counting its position."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def write(self, requests: Sequence[RolloutRequest]) -> Iterator[Chunk]:
        (request,) = requests
        for position in range(len(request.prefix_ids), self.count):
            last = position == self.count - 1
            ended = {request.uid: Status.COMPLETED} if last else {}
            ids = np.array([0 if last else 1 + position], np.int32)
            yield Chunk([request.uid], np.array([position], np.int32), ids, -np.ones(1, np.float32), 0, ended)


def test_a_long_request_is_not_copied_again_and_again(tmp_path):
    count, asked = 2000, SamplingParams(max_new_tokens=10**6, stop_ids=(0,))
    request = RolloutRequest("a", np.array([3], np.int32), asked)
    with TokenWAL(tmp_path, fsync="os") as log:
        rollout = FaultTolerantRollout([PlainEngine(count)], log)  # type: ignore[list-item]
        told = np.concatenate([one.token_ids for one in rollout.generate(request)])
        assert len(told) == count
        assert log._table.transcript.moved < 2 * count
        found = log.find("a")
        assert found is not None
        assert found.token_ids.tolist() == told.tolist()
