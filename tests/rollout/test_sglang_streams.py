"""What a worker's messages say of a response."""

import json

import pytest

from opd.rollout.sglang_engine import MessageReader
from opd.served.http_pool import UnavailableError
from opd.types import Status


def line(ids: list[int], reason: str | None = None, version: str = "a") -> bytes:
    """A cumulative message: all tokens so far."""
    meta = {
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "completion_tokens": len(ids),
        "weight_version": version,
        "finish_reason": {"type": reason} if reason else None,
    }
    return b"data: " + json.dumps({"meta_info": meta}).encode()


@pytest.mark.parametrize(
    ("ids", "reason", "status"),
    [
        ([3, 4, 1], "stop", Status.COMPLETED),
        ([3, 4, 5], "length", Status.TRUNCATED),
        # As long as it may be, and ended all the same: servers look at the length first.
        ([3, 4, 1], "length", Status.COMPLETED),
        ([1, 4, 5], "length", Status.TRUNCATED),
        ([3], "abort", Status.ABORTED),
    ],
)
def test_how_a_response_has_ended(ids, reason, status):
    whole = MessageReader("r", 0, {"a": 0}, 10, stop_ids=(1, 2)).read(line(ids, reason))
    assert whole.finished is status
    parts = MessageReader("r", 0, {"a": 0}, 10, stop_ids=(1, 2))
    first = parts.read(line(ids[:-1])) if len(ids) > 1 else None
    assert first is None or first.finished is None
    last = parts.read(line(ids, reason))
    assert (last.token_ids, last.finished) == (ids[-1:], status)
    late = MessageReader("r", 0, {"a": 0}, 10, stop_ids=(1, 2))
    late.read(line(ids))
    assert late.read(line(ids, reason)).finished is status


def test_tokens_of_unknown_weights_or_vocabulary_are_refused():
    with pytest.raises(UnavailableError, match="unknown weights b"):
        MessageReader("r", 0, {"a": 0}, 10).read(line([3], version="b"))
    with pytest.raises(UnavailableError, match="outside the vocabulary"):
        MessageReader("r", 0, {"a": 0}, 3).read(line([3]))
