"""Expert choices in the token log: with their tokens or not at all, and shared where requests share them."""

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from wal_helpers import UIDS, cut_logs, request, started
from wal_helpers import chunk as chunk_of

from opd.errors import RolloutError, StorageError
from opd.storage import logged_choices, wal
from opd.storage.logged_choices import decode_choices, encode_choices
from opd.storage.transcript import Tokens, choices_of
from opd.storage.wal import TokenWAL, read_log
from opd.types import Chunk, ExpertSpan, LoggedRequest

PROMPT, FORM = 3, (4, 2)


def rows(seed: int, count: int = 2, dtype: Any = np.uint8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, (count, *FORM)).astype(dtype)


def routed(position: int, dtype: Any = np.uint8) -> Chunk:
    """A chunk of both requests. The first brings the choices of the prompt that they share."""
    chunk = chunk_of(position)
    chunk.expert_choices = rows(position, dtype=dtype)
    if not position:
        prompt = rows(99, PROMPT - 1, dtype)
        chunk.expert_spans = [(uid, ExpertSpan(0, prompt)) for uid in UIDS]
    return chunk


def due(uid: str, count: int, dtype: Any = np.uint8) -> np.ndarray:
    """[N, L, K] of a request with `count` tokens."""
    tokens = [rows(position, dtype=dtype)[UIDS.index(uid)] for position in range(count)]
    return np.concatenate([rows(99, PROMPT - 1, dtype), tokens])


def logged(request: LoggedRequest) -> np.ndarray:
    choices = choices_of([(PROMPT, Tokens.from_logged(request))])
    assert choices is not None
    return choices


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_choices_come_back_also_from_a_snapshot(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(wal, "_TOKENS_PER_FRAME", 2)
    log = started(tmp_path, 0)
    for position in range(5):
        log.append(routed(position, dtype))
    for requests in (log.requests(), read_log(tmp_path).requests()):
        spans = [requests[uid].expert_spans[0].choices for uid in UIDS]
        assert spans[0] is spans[1]
    log.compact()
    log.append(routed(5, dtype))
    for requests in (log.requests(), read_log(tmp_path).requests()):
        for uid in UIDS:
            choices = logged(requests[uid])
            assert choices.dtype == dtype
            assert np.array_equal(choices, due(uid, 6, dtype))
    log.shutdown()


def test_a_log_that_was_opened_again_counts_its_choices(tmp_path):
    """So that it is not taken for mostly forgotten, and written anew."""
    sizes = []
    with started(tmp_path, 0) as log:
        for position in range(5):
            log.append(routed(position))
        sizes.append(log._table.live_bytes)
    with TokenWAL(tmp_path) as log:
        sizes.append(log._table.live_bytes)
    assert sizes[0] == sizes[1]


def test_a_chunk_cut_anywhere_has_its_choices_or_no_tokens(tmp_path):
    """Also when the next process has written on behind what was left."""
    counts = []
    for folder in cut_logs(tmp_path, [routed(0), routed(1)]):
        count = len(read_log(folder).requests()["a"].token_ids)
        counts.append(count)
        assert np.array_equal(logged(read_log(folder).requests()["b"]), due("b", count))
        with TokenWAL(folder) as log:  # the frame of choices may be there without its tokens
            plain = routed(count)
            plain.expert_choices, plain.expert_spans = None, []
            plain.logprobs = plain.logprobs - 1  # other tokens than those of the lost frame
            log.append(plain if count == 1 else routed(count))
        requests = read_log(folder).requests()
        assert len(requests["a"].token_ids) == count + 1
        assert (requests["a"].expert_choices is None) == (count == 1)
    assert set(counts) == {1, 2}


def test_a_request_has_choices_for_all_of_its_tokens_or_for_none(tmp_path):
    log = started(tmp_path, 1)
    log.append(routed(1))
    log.open(request("c"), {})
    nothing = np.zeros(1, np.int32)
    mixed = Chunk(["c"], nothing, nothing, np.zeros(1, np.float32), 1, {}, rows(7, 1))
    log.append(mixed)
    for requests in (log.requests(), read_log(tmp_path).requests()):
        assert requests["a"].expert_choices is None
        choices = requests["c"].expert_choices
        assert choices is not None
        assert np.array_equal(choices, rows(7, 1))
    log.shutdown()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"expert_choices": rows(0, 1)}, "2 tokens and 1 expert choices"),
        ({"expert_choices": rows(0).astype(np.int64)}, "give uint8 or uint16"),
        ({"expert_choices": rows(0).reshape(2, -1)}, "give uint8 or uint16"),
        ({"expert_spans": [("a", ExpertSpan(0, rows(0, dtype=np.uint16)))]}, "all of one model"),
        ({"expert_spans": [("z", ExpertSpan(0, rows(0)))]}, "request z is not in the log"),
    ],
)
def test_choices_that_do_not_fit_are_refused_and_nothing_is_written(tmp_path, change, words):
    log = started(tmp_path, 0)
    size = log.stored_bytes
    chunk = routed(0)
    for name, value in change.items():
        setattr(chunk, name, value)
    with pytest.raises(StorageError, match=words):
        log.append(chunk)
    assert log.stored_bytes == size
    log.append(routed(0))
    log.shutdown()


def test_many_prompts_are_frames_of_bounded_size(monkeypatch):
    monkeypatch.setattr(logged_choices, "_LARGEST", 64)
    spans = [(number, ExpertSpan(0, rows(number // 2, 4))) for number in range(6)]
    frames = list(encode_choices(b"tokens", rows(50), spans))
    decoded = [decode_choices(memoryview(frame)) for frame in frames]
    assert len(frames) > 2
    assert [one.rows is not None for one in decoded] == [False] * (len(frames) - 1) + [True]
    back = [(number, span) for one in decoded for number, span in one.spans]
    assert [number for number, _ in back] == list(range(6))
    for (_, span), (_, sent) in zip(back, spans, strict=True):
        assert span.first == sent.first
        assert np.array_equal(span.choices, sent.choices)


def test_damaged_choices_are_an_error_or_choices(monkeypatch):
    shared = rows(1, 3)
    (frame,) = encode_choices(b"tokens", rows(0), [(0, ExpertSpan(2, shared)), (1, ExpertSpan(2, shared))])
    wrong = 0
    for at in range(len(frame)):
        for bit in (1, 128):
            data = bytearray(frame)
            data[at] ^= bit
            try:
                choices = decode_choices(memoryview(bytes(data)))
            except (ValueError, struct.error):
                wrong += 1
                continue
            assert all(span.choices.ndim == 3 for _, span in choices.spans)
    assert wrong > 20
    for size in range(0, len(frame), 8):
        with pytest.raises((ValueError, struct.error)):
            decode_choices(memoryview(frame[:size]))


def test_positions_end_before_the_first_without_choices():
    columns = [np.zeros(2, kind) for kind in (np.int32, np.float32, np.int32)]
    first = Tokens(*columns, expert_choices=rows(0), expert_spans=(ExpertSpan(0, rows(1)),))
    later = Tokens(*columns, expert_choices=rows(2), expert_spans=(ExpertSpan(4, rows(3)),))
    assert first.routed_positions(3) == 4
    assert replace(first, expert_choices=None).routed_positions(3) == 2
    assert Tokens(*columns).routed_positions(3) == 0
    whole = choices_of([(3, first), (7, later)])
    cut = choices_of([(3, first), (8, later)])  # nobody gave position 6
    assert whole is not None
    assert cut is not None
    assert np.array_equal(whole, np.concatenate([rows(1), rows(0), rows(3), rows(2)]))
    assert np.array_equal(cut, whole[:6])
    assert choices_of([(4, later)]) is None
    assert choices_of([(3, Tokens.empty())]) is None


@pytest.mark.parametrize(
    "prompt", [rows(1, dtype=np.uint16), rows(1)[:, :, :1], rows(1)[:, :3]], ids=["dtype", "K", "L"]
)
def test_choices_of_two_models_in_one_response_are_refused(prompt):
    columns = [np.zeros(2, kind) for kind in (np.int32, np.float32, np.int32)]
    tokens = Tokens(*columns, expert_choices=rows(0), expert_spans=(ExpertSpan(0, prompt),))
    with pytest.raises(RolloutError, match=r"of one response are uint.* and uint.*; replace the engine"):
        choices_of([(PROMPT, tokens)])
