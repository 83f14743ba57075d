"""The rollout engine on servers of every dialect, little and real: its tokens, its log-probabilities, its
weights.

The tests that kill a server are the last.
"""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from dialects import (
    ALL_ROWS,
    DIALECTS,
    EVERY,
    LITTLES,
    MARKS,
    SGLANG,
    SGLANGS,
    SYNCS,
    VLLM,
    VLLMS,
    Served,
    on,
    on_syncs,
)
from fault_proxy import fault_proxy
from real_servers import VLLMServer, require_vllm, running
from recipes import tiny_recipe
from seaweedfs import absent_port
from served_models import MODEL, PADDED, recipe_tokenizer, write_model
from served_writing import (
    Corrupting,
    assert_of,
    assert_written,
    assert_written_over_updates,
    collected,
    requests,
    update,
    written,
)

from opd.errors import RolloutError
from opd.models.causal_lm import CausalLM
from opd.pipelines.check.servers import check_workers
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.served_engine import ServedModel
from opd.rollout.served_workers import FolderPush
from opd.rollout.weight_sync import WeightFolder
from opd.served.http_client import Patience, PoolOptions
from opd.served.http_pool import check_distinct
from opd.storage.wal import TokenWAL
from opd.types import RolloutRequest, SamplingParams, Status

ALMOST = (*LITTLES, "real-sglang")
ANOTHER = r"holds another model\.\S+ than the trainer"


@pytest.fixture
def engine(server: Served, tmp_path):
    """Makes engines that have given nothing yet."""
    made = []

    def make(urls=None, sync="disk", **settings):
        form, other = server.folders["a"], SYNCS[server.dialect.name][sync]
        folder = WeightFolder(tmp_path / f"weights-{len(made)}", form)
        push = other() if other else FolderPush(folder, server.dialect.reads)
        settings = {"patience": server.patience} | settings
        made.append(server.dialect.make_engine(urls or [server.url], form, push, **settings))
        return made[-1]

    yield make
    for one in made:
        if one.paused:
            one.resume()
        one.close()


@pytest.fixture
def given(engine, server):
    """An engine whose servers hold model `a` as version 0."""

    def make(*urls, **settings):
        served = engine(*urls, **settings)
        if server.dialect.first < 0:
            update(served, server.model("a"), 0)
        return served

    return make


def write(served, wanted) -> dict[str, list[int]]:
    return {uid: one.ids for uid, one in written(served.generate(wanted), wanted).items()}


@pytest.mark.some(2)
@on(*EVERY)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_model_at_the_temperature(given, server, temperature):
    served = given()
    samples = collected(served, 4, 1, temperature=temperature, max_new_tokens=12)
    assert_of(server.model("a"), samples, temperature)
    for sample in samples:
        assert len(sample.response_ids) == 12
        assert (sample.policy_versions == 0).all()
        assert sample.status is Status.TRUNCATED
    assert len({sample.response_ids.tobytes() for sample in samples}) > 4
    if server.dialect is SGLANG:  # all of a prompt's but the first find it in the worker's cache
        assert served.cached_tokens >= 3 * sum({len(sample.prompt_ids) - 1 for sample in samples})


@pytest.mark.some(1)
@on(*EVERY)
def test_chunks_hold_the_tokens_of_a_request_in_order(given):
    wanted = requests(6, 9)
    found = written(given().generate(wanted), wanted)
    assert {len(one.ids) for one in found.values()} == {9}
    assert all(one.ended is not None for one in found.values())


@pytest.mark.slow
@on(*SGLANGS)
@pytest.mark.parametrize("stop", [(), (5,)])
def test_a_response_ends_where_its_request_says_and_not_where_its_model_would(given, server, stop):
    """SGLang ends it at the tokenizer's end, too: what follows is asked for again."""
    samples = collected(given(), 8, 1, temperature=3.0, max_new_tokens=40, stop_ids=stop)
    end = recipe_tokenizer().eos_token_id
    assert sum(end in sample.response_ids[:-1] for sample in samples) > 2
    for sample in samples:
        *before, last = sample.response_ids.tolist()
        assert not set(stop) & set(before)
        assert sample.status is (Status.COMPLETED if last in stop else Status.TRUNCATED)
        assert last in stop or len(sample.response_ids) == 40
    assert_of(server.model("a"), samples, 3.0)


@pytest.mark.some(1)
@on(*LITTLES, "real-vllm")
def test_responses_end_where_they_should(given):
    """At a stop id, which stays, or when they are as long as they may be; nowhere else."""
    served, wanted = given(), requests(2, 20, temperature=0.0)
    plain = written(served.generate(wanted), wanted)
    assert {one.ended for one in plain.values()} == {Status.TRUNCATED}
    assert {len(one.ids) for one in plain.values()} == {20}
    stop = plain["r0"].ids[7]
    wanted = requests(2, 20, temperature=0.0, stop=(stop,))
    stopped = written(served.generate(wanted), wanted)
    for uid, one in plain.items():
        place = one.ids.index(stop) + 1 if stop in one.ids else None
        assert stopped[uid].ids == one.ids[:place]
        assert stopped[uid].ended is (Status.TRUNCATED if place is None else Status.COMPLETED)


@pytest.mark.some(1)
@on(*EVERY)
def test_greedy_responses_are_the_same_after_an_interruption(given):
    served, wanted = given(), requests(2, 10, temperature=0.0)
    whole = write(served, wanted)
    cut = [
        RolloutRequest(r.uid, r.prompt_ids, r.sampling, prefix_ids=np.array(whole[r.uid][:4], np.int32))
        for r in wanted
    ]
    assert write(served, cut) == whole


@pytest.mark.some(2)
@on_syncs(*EVERY)
def test_new_weights_reach_responses_in_flight(given, server, sync):
    """Pause, flush, push, verify, resume in the middle: each token has the version that sampled it."""
    if not server.real:
        server.own.seconds = 0.01
    wanted = requests(12 if server.real else 3, server.tokens)
    models = [server.model("a")]
    assert_written_over_updates(given(sync=sync), wanted, models, lambda i: server.model("ab"[i % 2]))


@on("little-vllm")
def test_weights_are_given_their_name_once_they_are_proved(given, server):
    served, told = given(), server.own.told
    update(served, server.model("b"), 1)
    assert server.own.version == next(name for name, held in served._workers.versions.items() if held == 1)
    pushed = told[-told[::-1].index("/collective_rpc") - 1 :]
    assert pushed.index("/v1/completions") < pushed.index("/update_weight_version")


@on(*SGLANGS)
def test_a_worker_that_holds_other_weights_is_found_out(engine, server):
    update(engine(), server.model("b"), 1)
    server.holds(server.model("b"))
    with pytest.raises(RolloutError, match=ANOTHER):
        server.holds(server.model("a"))


@pytest.mark.some(1)
@on_syncs(*SGLANGS)
def test_a_worker_sleeps_until_it_has_the_next_weights(engine, server, sync):
    """By the server's own verbs, told each part once and in order; on a CPU it has no memory to give back."""
    served, told = engine(sync=sync), []
    ask = served._workers.pool.request_json

    def noted(server, method, path, body=None):
        if path in ("/release_memory_occupation", "/resume_memory_occupation", "/weights_checker"):
            told.append((path[1:8], *(body or {}).get("tags", ())))
        return ask(server, method, path, body)

    served._workers.pool.request_json = noted
    update(served, server.model("a"), 1)
    for version, name in ((2, "b"), (3, "a")):
        told.clear()
        served.sleep()
        served.sleep()
        update(served, server.model(name), version)
        assert told[:2] == [("release", "weights", "kv_cache", "cuda_graph"), ("resume_", "weights")]
        assert told[-2:] == [("weights",), ("resume_", "kv_cache", "cuda_graph")]  # once they are proved
        assert set(told[2:-2]) <= {("weights",)}
        assert {step.policy_version for step in served.generate(requests(2, 3))} == {version}
    served.sleep()
    server.control("/resume_memory_occupation", tags=["weights", "kv_cache", "cuda_graph"])
    server.take()
    told.clear()
    update(served, server.model("b"), 4)
    assert {verb for verb, *_ in told} == {"weights"}


@on(*SGLANGS)
def test_an_engine_that_writes_does_not_sleep(engine):
    served = engine()
    served.submit(requests(1, 50))
    with pytest.raises(RolloutError, match="can sleep once none is in flight"):
        served.sleep()
    served.abort(["r0"])


@on("little-vllm")
def test_an_engine_over_vllm_does_not_sleep(given):
    with pytest.raises(RolloutError, match="vLLM workers do not sleep"):
        given().sleep()


BITS = [
    ("model.norm.weight", 0),
    ("model.embed_tokens.weight", 0),
    ("model.layers.1.self_attn.k_proj.weight", 0),
    # A bit that makes a number some powers of two larger.
    ("model.layers.1.self_attn.v_proj.weight", 25),
]
CHANGED = [
    pytest.param(kind, sync, name, bit, marks=MARKS[kind])
    for kind in EVERY
    for sync in SYNCS[kind.partition("-")[2]]
    for name, bit in BITS
    if kind in SGLANGS or bit or "proj" not in name
]


@pytest.mark.some(4)
@pytest.mark.parametrize(("server", "sync", "name", "bit"), CHANGED, indirect=["server"])
def test_a_bit_that_changed_on_its_way_is_found(engine, server, sync, name, bit):
    """By vLLM, which packs layers away on a CPU, in the outputs."""
    packed = server.dialect is VLLM and "proj" in name
    words = "holds other weights than the trainer: its log-prob" if packed else ANOTHER
    served = engine(sync=sync)
    served._workers._push = Corrupting(served._workers._push, name, bit)
    with pytest.raises(RolloutError, match=words):
        update(served, server.model("b"), 1)


@on("little-vllm")
@pytest.mark.parametrize("packs", [True, False])
def test_weights_that_were_not_taken_are_found(engine, server, packs):
    server.own.packs, server.own.reads = packs, False
    with pytest.raises(RolloutError, match=rf"{ANOTHER}|proves none of its"):
        update(engine(), server.model("b"), 1)


@on("little-vllm")
def test_what_is_packed_away_is_found_in_the_outputs(engine, server, monkeypatch):
    taken = server.own.reload

    def reload(folder):
        taken(folder)
        server.own.model.module.model.layers[0].mlp.down_proj.weight.data.mul_(1.5)

    monkeypatch.setattr(server.own, "reload", reload)
    with pytest.raises(RolloutError, match="its log-probabilities of a few tokens differ by up to"):
        update(engine(), server.model("b"), 1)
    assert server.own.paused
    assert ".reading" in server.own.version


@pytest.mark.some(2)
@on_syncs(*EVERY)
def test_a_worker_that_lost_its_weights_is_given_them_again(engine, server, sync):
    """As after a restart of which nobody has noticed: it serves what it was started with."""
    served = engine(sync=sync)
    update(served, server.model("b"), 1)
    list(served.generate(requests(2, 3)))
    server.take()
    wanted = requests(4, 10)
    assert_written(wanted, written(served.generate(wanted), wanted), {1: server.model("b")})
    server.holds(server.model("b"))


@on("little-vllm")
def test_a_server_that_was_not_told_to_go_on_is_told_when_it_comes_back(given, server):
    served = given()
    server.own.paused = True  # whoever was to tell it did not reach it
    [one] = served._workers.pool.servers
    one.admitted = False
    assert sum(len(step.uids) for step in served.generate(requests(2, 5))) == 10


@on("little-vllm")
def test_what_waits_for_room_does_not_reach_a_server_that_is_paused(given, server):
    server.own.seconds = 0.01
    served, told = given(room=100), server.own.told
    steps = served.generate(requests(3, 60))
    seen = [next(steps)]
    served.pause()
    begun = told.count("/inference/v1/generate")
    time.sleep(0.5)
    assert told.count("/inference/v1/generate") == begun
    served.resume()
    assert sum(len(step.uids) for step in [*seen, *steps]) == 180


class Held:
    """A push whose first load waits until it is told to go on."""

    def __init__(self, push) -> None:
        self._push, self.prepare = push, push.prepare
        self.begun, self.go = threading.Event(), threading.Event()

    async def load(self, *words):
        if not self.begun.is_set():
            self.begun.set()
            await asyncio.to_thread(self.go.wait, 60)
        return await self._push.load(*words)


@pytest.mark.some(1)
@on_syncs(*ALMOST)
def test_a_worker_admitted_during_an_update_ends_on_the_newest(engine, server, sync):
    """It came back, and is being given what was the newest, when the next version is pushed."""
    served = engine(sync=sync)
    update(served, server.model("b"), 1)
    server.take()
    served._workers.pool.servers[0].admitted = False
    held = served._workers._push = Held(served._workers._push)
    served.submit(requests(2, 5))
    assert held.begun.wait(60)
    with ThreadPoolExecutor(1) as aside:
        pushing = aside.submit(update, served, server.model("a"), 2)
        time.sleep(1.0 if server.real else 0.3)  # it has come as far as it can
        held.go.set()
        pushing.result(300)
    assert {uid for chunk in iter(served.next_chunk, None) for uid in chunk.uids} == {"r0", "r1"}
    server.holds(server.model("a"))
    assert {step.policy_version for step in served.generate(requests(4, 10))} == {2}


@pytest.mark.slow
@on_syncs(*ALMOST)
def test_a_trainer_that_died_while_it_pushed_leaves_nothing_in_the_way(given, engine, server, sync):
    """Workers paused, an update begun, requests in flight: the next trainer pushes and samples."""
    dead = given(sync=sync)
    steps = dead.generate(requests(4, 100))
    next(steps)
    dead.pause()
    if sync == "tensors":
        server.control("/begin_weight_update")
    steps.close()
    dead._workers._stopped = False  # nobody resumes for it
    served = engine(sync=sync)
    update(served, server.model("b"), 1)
    assert_of(server.model("b"), collected(served, 2, 2, max_new_tokens=6))


@pytest.mark.slow
@on(*EVERY)
def test_rows_of_the_head_that_are_no_tokens_are_never_sampled(given, server):
    vocabulary = len(recipe_tokenizer())
    assert vocabulary < PADDED
    served = given(model=ServedModel(vocabulary, 128, PADDED))
    samples = collected(served, 6, 3, temperature=1.4, max_new_tokens=12)
    assert max(sample.response_ids.max() for sample in samples) < vocabulary
    assert_of(server.model("a"), samples, 1.4, vocabulary)


@on(*SGLANGS)
def test_a_prompt_may_leave_room_for_one_token(given):
    """Of 256 tokens of context SGLang keeps some; see `SGLangEngineConfig.kept`."""
    prompt = np.full(ALL_ROWS.max_sequence - 1, 3, dtype=np.int32)
    served = given()
    served.submit([RolloutRequest("r", prompt, SamplingParams(max_new_tokens=1), seed=1)])
    chunk = served.next_chunk()
    assert (len(chunk.token_ids), dict(chunk.finished)) == (1, {"r": Status.TRUNCATED})


@pytest.mark.some(1)
@on(*ALMOST)
def test_weights_change_only_while_paused(engine, server):
    with pytest.raises(RolloutError, match=r"call pause\(\) before"):
        engine().update_weights(server.model("b").weights(), 1)


@pytest.mark.slow
@on(*EVERY)
def test_aborted_requests_are_let_go_and_the_others_go_on(given, server):
    """Also one that is asked for again while what was sent for it may still arrive."""
    served = given()
    served.submit(requests(12, server.tokens))
    ended = dict(served.next_chunk().finished)
    served.abort([f"r{i}" for i in range(1, 12)])
    served.submit(requests(2, server.tokens)[1:])
    again = 0
    while (chunk := served.next_chunk()) is not None:
        assert {*chunk.uids, *chunk.finished} <= {"r0", "r1"}
        places = [
            place for uid, place in zip(chunk.uids, chunk.positions.tolist(), strict=True) if uid == "r1"
        ]
        assert places == list(range(again, again + len(places)))
        again += len(places)
        ended |= chunk.finished
    assert (ended["r0"], ended["r1"]) == (Status.TRUNCATED, Status.TRUNCATED)
    assert again > 0


@pytest.mark.slow
@on(*ALMOST)
def test_requests_join_those_in_flight(given):
    served, wanted = given(), requests(3, 20, temperature=0.0)
    alone = {request.uid: write(served, [request])[request.uid] for request in wanted}
    streams = [(request.uid, served.generate(request)) for request in wanted]
    for uid, stream in reversed(streams):
        assert [token for chunk in stream for token in chunk.token_ids.tolist()] == alone[uid]


@pytest.mark.some(1)
@on(*ALMOST)
def test_what_cannot_be_served_is_refused(given):
    bad = [RolloutRequest("x", np.array([PADDED], np.int32), SamplingParams())]
    with pytest.raises(RolloutError, match="outside the vocabulary"):
        given().generate(bad)


@pytest.mark.slow
@on(*SGLANGS)
def test_several_workers_and_one_that_dies(given, server):
    """Streams that break go on with the other worker, after the tokens that have arrived."""
    with ExitStack() as stack:
        workers = [stack.enter_context(fault_proxy(("127.0.0.1", server.own.port))) for _ in range(2)]
        wanted = requests(8, 80 if server.real else 30)
        steps = given([worker.endpoint for worker in workers]).generate(wanted)
        seen = [next(steps)]
        workers[1].stop()
        found = written([*seen, *steps], wanted)
        assert all(worker.requests for worker in workers)
    assert all(one.ids and one.ended is not None for one in found.values())


@on(*SGLANGS)
def test_turns_stay_with_the_worker_that_has_their_beginning(given, server):
    """Asked for one by one, as episodes ask: both workers are used, each session stays where it is, and those
    of a worker that dies move once.
    """
    sampling = SamplingParams(max_new_tokens=4, stop_ids=(recipe_tokenizer().eos_token_id,))
    with ExitStack() as stack:
        workers = [stack.enter_context(fault_proxy(("127.0.0.1", server.own.port))) for _ in range(2)]
        served = given([worker.endpoint for worker in workers])
        homes = served._homes

        def turn(number: int) -> list[str]:
            """Where each session was worked on."""
            for session in range(20):
                ids = np.array([3 + session % 7, 4, 5] * (number + 1), np.int32)
                uid = f"s{session}/{number}"
                served.submit([RolloutRequest(uid, ids, sampling, session=f"s{session}")])
            while served.next_chunk() is not None:
                pass
            found = [homes.get_worker(f"s{session}") for session in range(20)]
            return [one.url for one in found if one is not None]

        first = turn(0)
        assert sorted(map(first.count, set(first))) == [10, 10]
        before = [worker.requests for worker in workers]
        assert turn(1) == first
        asked = [worker.requests - count for worker, count in zip(workers, before, strict=True)]
        assert asked == [10, 10]
        workers[1].stop()
        assert set(turn(2)) == {workers[0].endpoint}
        workers[1].start()
        assert set(turn(3)) == {workers[0].endpoint}


@pytest.mark.slow
@on(*ALMOST)
def test_every_token_is_in_the_log_before_it_is_seen(given, tmp_path):
    wanted = requests(4, 8)
    with TokenWAL(tmp_path / "wal") as log:
        rollout = FaultTolerantRollout([given()], log)
        for step in rollout.generate(wanted):
            for uid, position, token in zip(step.uids, step.positions, step.token_ids, strict=True):
                logged = log.find(uid)
                assert logged is not None
                assert logged.token_ids[position] == token
        assert all(log.find(r.uid).status in (Status.COMPLETED, Status.TRUNCATED) for r in wanted)


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_nobody_there(dialect, padded_models, tmp_path):
    pytest.importorskip("orjson", reason="needs the extra sglang")
    patience = Patience(unreachable=0.3, connect_timeout=1.0)
    urls = [f"http://127.0.0.1:{absent_port()}"]
    push = FolderPush(WeightFolder(tmp_path / "weights", padded_models["a"]), dialect.reads)
    engine = dialect.make_engine(urls, padded_models["a"], push, patience=patience, version=0)
    with pytest.raises(RolloutError, match="no usable answer"):
        list(engine.generate(requests(2, 3)))
    engine.close()


@on(*VLLMS)
def test_what_it_was_started_with_has_to_fit(engine, server):
    for settings, words in (
        ({"mode": "raw_logprobs"}, "tells processed_logprobs.*start it with --logprobs-mode raw_logprobs"),
        ({"model": ServedModel(PADDED, 300)}, "takes 256 tokens.*start it with --max-model-len 300"),
    ):
        with pytest.raises(RolloutError, match=words):
            update(engine(**settings), server.model("a"), 1)


@on("little-vllm")
@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": None}, "start it with VLLM_SERVER_DEV_MODE=1"),
        ({"closed": {"/inference/v1/generate": 403}}, "start it with --enable-scale-out"),
        ({"logprobs_mode": "raw_logprobs"}, "start it with --logprobs-mode processed_logprobs"),
        ({"speculates": {"method": "ngram"}}, "speculates: .*; start it without --speculative-config"),
        ({"max_model_len": 100}, "takes 100 tokens a request, and responses may need 250"),
    ],
)
def test_what_it_was_started_with_is_said(engine, server, change, words):
    for name, value in change.items():
        if name in server.own.settings:
            server.own.settings[name] = value
        else:
            setattr(server.own, name, value)
    with pytest.raises(RolloutError, match=words):
        update(engine(), server.model("a"), 1)


@on("little-vllm")
def test_two_urls_of_one_server_are_found(server):
    other = server.url.replace("127.0.0.1", "localhost")
    with pytest.raises(RolloutError, match="lead to one server"):
        check_distinct({"rollout.engine.urls": PoolOptions([server.url, other])}, RolloutError)


@on(*EVERY)
def test_the_doctor_looks_at_every_worker(server):
    """A real one, of which it changes nothing."""
    absent = f"http://127.0.0.1:{absent_port()}"
    engine = {"type": server.dialect.name, "urls": [server.url, absent], "connect_timeout": 1.0}
    settings = {"base": None, "rollout": {"engine": engine, "max_sequence": 250}}

    def found(**model):
        return [(one.level, one.detail) for one in check_workers(tiny_recipe(model=model, **settings))]

    path = str(server.folders["a"])
    (level, said), (wrong, why) = found(path=path)
    assert (level, wrong) == ("ok", "error")
    assert f"{server.url} serves" in said
    assert server.dialect is SGLANG or "with processed_logprobs" in said
    assert f"{absent}/" in why
    other = {"model_type": "qwen3", "hidden_size": 48, "num_hidden_layers": 2}
    assert "with hidden_size 32, the student has 48" in found(config=other)[0][1]
    if server.dialect is VLLM and not server.real:
        server.own.settings["logprobs_mode"] = "raw_logprobs"
        level, said = found(path=path)[0]
        assert (level, "start it with --logprobs-mode processed" in said) == ("error", True)
        server.own.settings = None
        level, said = found(path=path)[0]
        assert (level, "VLLM_SERVER_DEV_MODE=1" in said) == ("error", True)


@pytest.mark.slow
@on(*LITTLES, "real-vllm")
def test_another_architecture_is_refused_before_it_is_given(engine, server, tmp_path):
    write_model(tmp_path / "other", seed=0, **(MODEL | {"num_hidden_layers": 3}), vocab_size=PADDED)
    other = CausalLM.from_pretrained(tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    with pytest.raises(RolloutError, match="with num_hidden_layers 2, the student has 3"):
        update(engine(model=ServedModel(PADDED, 250, config=config)), other, 1)
    with pytest.raises(RolloutError, match=r"without model\.layers\.2\.\S+, which the student has"):
        update(engine(), other, 1)
    update(engine(), server.model("a"), 1)  # it is still there


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_server_that_speculates_is_refused(padded_models, tmp_path):
    """Its log-probabilities would be 0 and -9999."""
    require_vllm()
    own = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    told = {"enable-scale-out": True, "generation-config": "vllm", "logprobs-mode": "processed_logprobs"}
    told |= {"speculative-config": json.dumps(own)}
    developers = {"VLLM_SERVER_DEV_MODE": "1"}
    with running(VLLMServer(padded_models["a"], tmp_path / "log", developers, **told)) as server:
        held = Served(VLLM, padded_models, server, real=True)
        push = FolderPush(WeightFolder(tmp_path / "weights", padded_models["a"]), VLLM.reads)
        served = VLLM.make_engine([server.url], padded_models["a"], push, patience=held.patience)
        try:
            with pytest.raises(RolloutError, match="start it without --speculative-config"):
                update(served, held.model("a"), 0)
        finally:
            served.close()


@pytest.mark.slow
@on(*LITTLES, "real-vllm")
def test_a_server_that_is_killed_while_it_writes_loses_nothing(engine, server):
    """It is started again with its first weights, is given the newest, and goes on where it was."""
    served = engine(patience=server.unreachable(1500.0))
    update(served, server.model("b"), 1)
    wanted = requests(8 if server.real else 3, server.tokens, temperature=1.0)
    steps = served.generate(wanted)
    seen = [next(steps)]
    restarting = threading.Thread(target=server.restart)
    restarting.start()
    seen += list(steps)
    restarting.join()
    assert_written(wanted, written(seen, wanted), {1: server.model("b")})
    assert served._workers.pool.counters.retries > 0
