"""The token log as its callers use it: the contract, mistakes, retiring."""

import numpy as np
import pytest
from wal_helpers import chunk, request, started, tokens

from opd.errors import StorageError
from opd.protocols import TokenLog
from opd.storage.wal import TokenWAL, read_log
from opd.types import Chunk, RolloutRequest, SamplingParams, Status


def test_it_is_a_token_log(tmp_path):
    log: TokenLog = TokenWAL(tmp_path)
    log.open(request("a"), {"label": [1, "x"]})
    found = log.find("a")
    assert found is not None
    assert found.metadata == {"label": [1, "x"]}
    assert found.request.sampling == SamplingParams()
    assert log.find("b") is None


def test_a_chunk_may_hold_several_tokens_of_a_request(tmp_path):
    """In any order between requests; what follows goes on from all of them."""
    uids = ["a", "b", "a", "a", "b"]
    columns = np.array([2, 2, 3, 4, 3], np.int32), np.arange(5, dtype=np.int32), -np.ones(5, np.float32)
    log = started(tmp_path, 2, fsync="os")
    log.append(Chunk(uids, *columns, 7, {"b": Status.COMPLETED}))
    log.append(Chunk(["a"], np.array([5], np.int32), np.array([9], np.int32), -np.ones(1, np.float32), 7, {}))
    log.shutdown()
    with TokenWAL(tmp_path) as again:
        for found in (read_log(tmp_path).requests(), again.requests()):
            assert found["a"].token_ids.tolist()[2:] == [0, 2, 3, 9]
            assert found["b"].token_ids.tolist()[2:] == [1, 4]
            assert found["b"].status is Status.COMPLETED


def test_mistakes_are_one_sentence_and_change_nothing(tmp_path):
    log = started(tmp_path, 3, fsync="os")
    prefixed = RolloutRequest("c", np.array([1], np.int32), SamplingParams(), 0, np.array([5], np.int32))
    size = log.stored_bytes
    twice = Chunk(["a", "a"], *(getattr(chunk(3), n) for n in ("positions", "token_ids", "logprobs")), 1, {})
    short = Chunk(["a"], *(getattr(chunk(3), n) for n in ("positions", "token_ids", "logprobs")), 1, {})
    one = np.ones(1, np.int32)
    later = Chunk(["a"], 3 * one, one, np.zeros(1, np.float32), 3_000_000_000, {})
    stranger = Chunk(["z"], 0 * one, one, np.zeros(1, np.float32), 1, {})
    mistakes = {
        "is opened with tokens": lambda: log.open(prefixed, {}),
        "cannot be written as JSON": lambda: log.open(request("c"), {"x": object()}),
        "a has 4 tokens in the log and was given one for position 3": lambda: log.append(twice),
        "has 1 requests and 2 positions": lambda: log.append(short),
        "cannot end as pending": lambda: log.close("a", Status.PENDING),
        "policy version 3000000000 does not fit": lambda: log.append(later),
        "is not in the log": lambda: log.append(stranger),
        "in the log already": lambda: log.open_many([(request("d"), {}), (request("d"), {})]),
        "3 tokens in the log and was given one for position 2": lambda: log.append(chunk(2)),
    }
    for sentence, call in mistakes.items():
        with pytest.raises(StorageError, match=sentence):
            call()
    assert log.stored_bytes == size
    log.close("a", Status.FAILED, "gone")
    with pytest.raises(StorageError, match="has ended and takes no more tokens"):
        log.append(chunk(3))
    log.shutdown()
    with pytest.raises(StorageError, match="has been shut down"):
        log.append(chunk(3))


def test_retiring_frees_the_disk_and_the_log_goes_on(tmp_path):
    log = TokenWAL(tmp_path, fsync="os", segment_bytes=4000)
    largest = 0
    for batch in range(30):
        uids = [f"{batch}-{i}" for i in range(8)]
        log.open_many([(request(uid), {}) for uid in uids])
        for position in range(20):
            log.append(chunk(position, uids))
        log.retire(uids[:-1] if batch % 10 == 9 else uids)
        largest = max(largest, log.stored_bytes)
    assert largest < 40_000
    assert sum(path.stat().st_size for path in tmp_path.glob("0*")) == log.stored_bytes
    log.shutdown()
    assert sorted(tokens(tmp_path)) == ["19-7", "29-7", "9-7"]
    assert all(found == list(range(100, 120)) for found in tokens(tmp_path).values())


def test_a_prompt_that_its_caller_changes_stays_as_it_was_opened(tmp_path):
    ids = np.array([1, 2, 3], np.int32)
    with TokenWAL(tmp_path) as log:
        log.open(RolloutRequest("a", ids, SamplingParams(), 7), {})
        ids[:] = 9
        assert log.find("a").request.prompt_ids.tolist() == [1, 2, 3]
