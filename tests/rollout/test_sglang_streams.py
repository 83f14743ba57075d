"""What a worker's messages say of a response."""

import asyncio
import json

import numpy as np
import pytest

from opd.rollout.served_engine import ServedModel
from opd.rollout.sglang_engine import MessageReader, SGLangEngine
from opd.served.http_client import PoolOptions, UnavailableError
from opd.types import RolloutRequest, SamplingParams, Status


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


def test_the_others_of_a_prompt_go_on_where_the_first_is_let_go_before_it_began():
    """They wait for it, since its worker then has the prompt in its cache."""
    pytest.importorskip("orjson", reason="needs the extra sglang")
    engine = SGLangEngine(PoolOptions(["http://127.0.0.1:9"]), ServedModel(10, 64))
    first, second = (RolloutRequest(uid, np.ones(3, np.int32), SamplingParams()) for uid in "ab")
    names = object(), object()
    engine._left = {first.uid: names[0]}

    async def let_go() -> None:
        group = asyncio.create_task(engine._stream_group([*zip(names, (first, second), strict=True)]))
        await asyncio.sleep(0)  # the first has a task, which has not begun
        assert list(engine._tasks) == [names[0]]
        await engine._cancel({names[0]})
        await asyncio.wait_for(group, 60)

    engine._workers.loop.run(let_go())
    engine.close()
