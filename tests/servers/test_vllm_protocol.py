"""A teacher on vLLM, by what a real server has answered, and by answers that are damaged."""

import json
import math
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from dialects import VLLM
from recipes import tiny_recipe
from recorded import RECORDED, assert_own, recorded_server
from served_models import recipe_tokenizer

from opd.config.servers import ServerGroupConfig
from opd.errors import ConfigError, PreemptedError, TeacherError
from opd.pipelines.check.servers import check_kinds, check_servers
from opd.pipelines.launch.started_server import command_of
from opd.rollout import vllm_engine
from opd.rollout.preemption import Preemption
from opd.rollout.served_engine import ServedModel
from opd.served.http_client import PoolOptions, UnavailableError
from opd.served.http_pool import HTTPPool
from opd.served.scoring import Question
from opd.served.vllm_protocol import OF_NOTHING, most_bytes, scores_of
from opd.teachers.scorer import compare_logprobs
from opd.teachers.served_teacher import SignalNeeds

pytest.importorskip("aiohttp", reason="needs the extra sglang")
TOKENS = len(recipe_tokenizer())
SAMPLES = [(3, 4), (1, 1), (9, 7)]
K = 5


@pytest.fixture
def served(vllm_published):
    made = []

    def make(url, model="a", **settings):
        given = {
            "attempts": 1,
            "signal": "topk",
            "asked": SignalNeeds(top_k=K),
            "vocabulary": TOKENS,
        } | settings
        made.append(VLLM.make_teacher(vllm_published[model], [url], **given))
        return made[-1]

    yield make
    for teacher in made:
        teacher.close()


def test_log_probabilities_are_the_models_own(served, vllm_models):
    with recorded_server() as url:
        topk = served(url).score(tiny.samples(SAMPLES))
        sampled = served(url, signal="sampled").score(tiny.samples(SAMPLES))
    assert_own(vllm_models["a"], tiny.samples(SAMPLES), topk, sampled)


def test_what_was_begun_of_a_sample_is_not_the_score_of_another_of_its_name(served):
    first, _, second = tiny.samples(SAMPLES)
    second.uid = first.uid
    with recorded_server() as url:
        teacher = served(url, signal="sampled")
        expected = teacher.score([second])
        teacher.begin_scoring([first])
        assert torch.equal(teacher.score([second]).logprobs, expected.logprobs)


@pytest.mark.parametrize(("served", "due"), [(0.0, math.nan), (math.nan, 0.0), (0.0, math.inf), (0.0, 0.2)])
def test_a_probe_is_right_by_numbers_alone(served, due):
    assert compare_logprobs("t", np.array([1.0]), np.array([1.1]), 0.15, "a file gives") == pytest.approx(0.1)
    with pytest.raises(TeacherError, match=r"t serves another model, .* from what a file gives; check"):
        compare_logprobs("t", np.array([1.0, served]), np.array([1.0, due]), 0.15, "a file gives")


def test_another_model_behind_the_url_is_found_by_its_outputs(served):
    with recorded_server() as url, pytest.raises(TeacherError, match="what the model's own weights give"):
        served(url, "b").score(tiny.samples(SAMPLES))


def test_ranks_that_do_not_read_the_weights_compare_servers_with_each_other(served):
    def other(path, answer):
        if path == "/v1/completions" and answer is not None:
            for row in answer["choices"][0]["prompt_logprobs"][1:]:
                for entry in row.values():
                    entry["logprob"] -= 0.01
        return answer

    asked = SignalNeeds(top_k=K, main=False)
    with recorded_server() as url, recorded_server(other) as second:
        teacher = served(url, "b", asked=asked)
        teacher.score(tiny.samples(SAMPLES))
        server = teacher.pool.servers[0]
        server.url, server.admitted = second, False
        with pytest.raises(TeacherError, match="from what the first server gave"):
            teacher.score(tiny.samples(SAMPLES))


def test_what_a_server_cannot_give_is_refused_before_it_is_asked(served):
    with recorded_server() as url:
        with pytest.raises(
            ConfigError, match=r"temperature 1 only.*signal to hidden, or the temperature to 1"
        ):
            served(url, asked=SignalNeeds(temperature=0.7))
        with pytest.raises(ConfigError, match=r"count the padding; set teachers.a.signal to hidden"):
            served(url, vocabulary=TOKENS - 1)
        samples = tiny.samples([(2, 3)])
        samples[0].response_ids[1] = TOKENS
        with pytest.raises(TeacherError, match=f"token id {TOKENS}, outside the vocabulary of {TOKENS}"):
            served(url).score(samples)
        with pytest.raises(TeacherError, match="has 256 tokens, the servers of teacher a take 255"):
            served(url).score(tiny.samples([(200, 56)]))
        teacher = served(url)
        assert teacher.score(tiny.samples([(3, 0)])).ids.shape == (0, K)
        assert teacher.pool.counters.requests == 0


def test_too_few_log_probabilities_name_the_flag(served):
    def few(path, answer):
        return None if path == "/v1/completions" else answer  # as 400 is: it was understood and declined

    with (
        recorded_server(few) as url,
        pytest.raises(TeacherError, match=f"start it with --max-logprobs {K} or more"),
    ):
        served(url).score(tiny.samples(SAMPLES))


def test_oversized_and_late_answers_end_in_one_sentence(served):
    released = threading.Event()

    def large(path, answer):
        return b" " * 2**22 if path == "/v1/completions" else answer

    def late(path, answer):
        released.wait(60)
        return answer

    with recorded_server(large) as url, pytest.raises(TeacherError, match=r"more than the \d+ bytes"):
        served(url).score(tiny.samples(SAMPLES))
    with recorded_server(late) as url:
        try:
            with pytest.raises(TeacherError, match=r"timed out: `timeout` is 0.3 s.*--resume"):
                served(url, timeout=0.3, patience=0.1).score(tiny.samples(SAMPLES))
        finally:
            released.set()


def test_a_server_that_is_gone_stops_the_run_when_patience_ends(served):
    with recorded_server() as url:
        teacher = served(url, patience=0.1)
        teacher.score(tiny.samples(SAMPLES))
    with pytest.raises(TeacherError, match=r"no usable answer.*--resume"):
        teacher.score(tiny.samples(SAMPLES))


def test_a_run_that_is_to_stop_waits_for_a_silent_server_half_of_its_grace_period(served):
    released = threading.Event()

    def silent(path, answer):
        released.wait(60)
        return answer

    asked = Preemption(grace=2.0)
    with recorded_server(silent) as url:
        teacher = served(url, timeout=1000.0)
        teacher.check = asked.check_waiting
        threading.Timer(0.1, asked.stop).start()
        try:
            with pytest.raises(PreemptedError, match="--resume"):
                teacher.score(tiny.samples(SAMPLES))
        finally:
            released.set()
    assert asked.seconds_left() < 1.0


VALUES = [
    None, True, -1, 5, 2**70, -0.5, 0.5, 1e300, float("nan"), "", "x", [], [[]], {}, {"a": 1}, {"1": 1},
    {"1": {"logprob": "x"}}, {"1": {"logprob": -1.0}}, {str(2**70): {"logprob": -1.0}},
]  # fmt: skip


async def test_checksums_are_sorted_by_rank_and_say_of_how_many(monkeypatch):
    async def told(pool, server):
        return {"dp0:pp0:pcp0:tp1:w": "b", "dp0:pp0:pcp0:tp0:w": "a", "dp0:pp0:pcp0:tp1:packed": OF_NOTHING}

    monkeypatch.setattr(vllm_engine, "server_checksums", told)
    verbs = vllm_engine.VLLMVerbs(ServedModel(24, 200), "processed_logprobs")
    verbs.use_pool(HTTPPool("pool", PoolOptions(["http://127.0.0.1:9"]), TeacherError))
    ranks, packed = await verbs._rank_checksums(verbs.pool.servers[0])
    places = [{"tp_rank": rank, "tp_size": 2} for rank in range(2)]
    assert [one["parallelism_info"] for one in ranks] == [[place] for place in places]
    assert [one["checksums"] for one in ranks] == [{"w": "a"}, {"w": "b"}]
    assert packed == {"packed"}


def test_answers_of_any_form_are_read_or_refused():
    tokens, k, answer = next(one for one in json.loads(RECORDED.read_text())["/v1/completions"] if one[1])
    question = Question("q", np.array(tokens, dtype=np.int32), 2)
    assert len(json.dumps(answer)) < most_bytes(question, k)
    rows = answer["choices"][0]["prompt_logprobs"]
    entry = next(iter(rows[4]))
    many = Question("q", np.zeros(100_000, np.int32), 2)
    assert len(json.dumps({entry: rows[4][entry]})) * len(many.tokens) < most_bytes(many)
    paths = [
        ("choices",), ("choices", 0), ("choices", 0, "prompt_logprobs"), ("choices", 0, "prompt_logprobs", 4),
        ("choices", 0, "prompt_logprobs", 4, entry), ("choices", 0, "prompt_logprobs", 4, entry, "logprob"),
    ]  # fmt: skip
    sentences: list[str] = []
    for path in paths:
        for value in VALUES:
            damaged = json.loads(json.dumps(answer))
            place = damaged
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            try:
                ids, values, own = scores_of(damaged, question, k, TOKENS)
            except UnavailableError as error:
                sentences.append(str(error))
                continue
            assert ids.shape == values.shape == (len(tokens) - 3, k)
            assert np.isfinite(values).all()
            assert np.isfinite(own).all()
    assert len(sentences) > len(paths) * len(VALUES) // 2
    assert all(sentence.isprintable() for sentence in sentences)
    with pytest.raises(UnavailableError, match="other tokens than were sent"):
        scores_of(answer, Question("q", np.roll(question.tokens, 1), 2), k, TOKENS)
    with pytest.raises(UnavailableError, match="outside the vocabulary"):
        scores_of(answer, question, k, 3)
    with pytest.raises(UnavailableError, match="no JSON object"):
        scores_of(None, question, k, TOKENS)


def recipe(path, entry, **changes):
    settings = {"loss": {"type": "topk", "k": K}}
    return tiny_recipe(
        model={"path": str(path)},
        base=None,
        teachers={
            "sort": {"type": "vllm", "signal": "topk", "path": str(path)} | entry,
            "add3": {"path": str(path)},
        },
        distill=settings | {"steps": 1},
        baselines={"methods": []},
        **changes,
    )


def test_the_doctor_asks_the_servers(vllm_models, vllm_published):
    with recorded_server() as url:
        right, *_ = check_kinds(recipe(vllm_published["a"], {"urls": [url]}))
        assert right.level == "ok"
        assert "tells no checksum" in right.detail
        assert "of what the model's own weights give" in right.detail
        wrong, *_ = check_kinds(recipe(vllm_published["b"], {"urls": [url]}))
        assert (wrong.level, "serves another model" in wrong.detail) == ("error", True)
        other, *_ = check_kinds(recipe(vllm_published["a"], {"urls": [url], "checksum": "7"}))
        assert "checksum none that it tells, the recipe says 7" in other.detail


def test_a_loss_over_the_whole_vocabulary_is_refused(vllm_models):
    asked = {"urls": ["http://127.0.0.1:1"]}
    full = recipe(vllm_models["a"], asked).model_copy(
        update={"distill": tiny_recipe(rollout={"temperature": 1.0}).distill}
    )
    finding, *_ = check_kinds(full)
    assert "too little for distill.loss full" in finding.detail
    assert "set it to hidden, or choose another loss" in finding.detail
    finding, *_ = check_kinds(recipe(vllm_models["a"], asked | {"signal": "sampled"}))
    assert "set it to topk" in finding.detail


@pytest.mark.parametrize(
    ("entry", "changes", "sentence"),
    [
        ({"servers": "own"}, {"servers": {"own": {}}}, "needs vllm servers, but servers.own.type is sglang"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_the_recipe(entry, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        recipe("a", entry, **changes)


def test_a_group_of_vllm_servers_is_started_by_its_own_flags():
    group = ServerGroupConfig(
        type="vllm", tensor_parallel=2, arguments={"dtype": "float32", "max-logprobs": -1}
    )
    module = ["-m", "vllm.entrypoints.openai.api_server"]
    told = ["--model", "m", "--host", "127.0.0.1", "--port", "7", "--tensor-parallel-size", "2"]
    own = ["--dtype", "float32", "--max-logprobs", "-1"]
    assert command_of(group, Path("m"), 7) == [sys.executable, *module, *told, *own]
    finding, *_ = check_servers(recipe("a", {"servers": "own"}, servers={"own": {"type": "vllm"}}))
    assert finding.level == "error"
    assert "needs vllm, which this environment lacks" in finding.detail
