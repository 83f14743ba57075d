"""The rollout engine on a real SGLang server: its tokens, its log-probabilities, its weights."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import tiny
from fault_proxy import fault_proxy
from seaweedfs import free_ports
from served_models import PADDED, recipe_tokenizer
from served_writing import PROMPTS, Corrupting, prompts, requests, rescored, update, written_over_an_update

from opd.errors import RolloutError
from opd.models.causal_lm import CausalLM
from opd.retry import Retry
from opd.rollout.collect import collect
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.served_engine import ServedModel
from opd.rollout.sglang_engine import SGLangEngine
from opd.rollout.sglang_workers import FolderPush, TensorPush
from opd.rollout.weight_proof import Proof
from opd.rollout.weight_sync import WeightFolder
from opd.served.http_client import Patience, PoolOptions
from opd.storage.wal import TokenWAL
from opd.types import RolloutRequest, SamplingParams, Status

ALL_ROWS = ServedModel(PADDED, 250)
QUICK = Patience(timeout=120.0, unreachable=60.0, retry=Retry(attempts=3))


@pytest.fixture(scope="module")
def models(served_models):
    return {name: CausalLM.from_pretrained(served_models[name]) for name in ("a", "b")}


@pytest.fixture
def engine(sglang, served_models, tmp_path):
    """Makes engines; the server holds model `a` under its first name again afterwards."""
    made = []

    def make(urls=None, sync="disk", model=ALL_ROWS) -> SGLangEngine:
        options = PoolOptions(urls or [sglang.url], patience=QUICK)
        pushes = {
            "disk": lambda: FolderPush(WeightFolder(tmp_path / "weights", served_models["a"])),
            "tensors": lambda: TensorPush(bucket_bytes=4096),
        }
        made.append(SGLangEngine(options, model, pushes[sync]()))
        return made[-1]

    yield make
    for one in made:
        if one.paused:
            one.resume()
        one.close()
    sglang.load(served_models["a"], "default")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_model_at_the_temperature(engine, models, temperature):
    served = engine()
    sampling = SamplingParams(temperature=temperature, max_new_tokens=12)
    groups = collect(served, prompts(), 4, sampling, seed=1)
    samples = [sample for group in groups for sample in group.samples]
    for sample, due in zip(samples, rescored(models["a"], samples, temperature), strict=True):
        assert len(sample.response_ids) > 0
        np.testing.assert_allclose(sample.rollout_logprobs, due, atol=1e-4)
        assert (sample.policy_versions == 0).all()
        assert sample.status in (Status.TRUNCATED, Status.COMPLETED)
    assert len({sample.response_ids.tobytes() for sample in samples}) > 4
    # The samples of a prompt share its prefix: all but the first find it in the worker's cache.
    assert served.cached_tokens >= 3 * sum(len(ids) - 1 for ids in PROMPTS)


def test_chunks_hold_the_tokens_of_a_request_in_order(engine):
    written: dict[str, list[int]] = {}
    ended = {}
    for step in engine().generate(requests(6, 9)):
        assert len(step.uids) == len(step.token_ids)
        for uid, position in zip(step.uids, step.positions.tolist(), strict=True):
            assert position == len(written.setdefault(uid, []))
            written[uid].append(position)
        ended |= step.finished
    assert {uid: len(tokens) for uid, tokens in written.items()} == {f"r{i}": 9 for i in range(6)}
    assert set(ended) == set(written) == {f"r{i}" for i in range(6)}


@pytest.mark.parametrize("stop", [(), (5,)])
def test_a_response_ends_where_its_request_says_and_not_where_its_model_would(engine, models, stop):
    """SGLang ends it at the tokenizer's end, too: what follows is asked for again."""
    served = engine()
    sampling = SamplingParams(temperature=3.0, max_new_tokens=40, stop_ids=stop)
    samples = [
        sample for group in collect(served, prompts(), 8, sampling, seed=1) for sample in group.samples
    ]
    end = recipe_tokenizer().eos_token_id
    assert sum(end in sample.response_ids[:-1] for sample in samples) > 2
    for sample, due in zip(samples, rescored(models["a"], samples, 3.0), strict=True):
        *before, last = sample.response_ids.tolist()
        assert not set(stop) & set(before)
        assert sample.status is (Status.COMPLETED if last in stop else Status.TRUNCATED)
        assert last in stop or len(sample.response_ids) == 40
        np.testing.assert_allclose(sample.rollout_logprobs, due, atol=1e-4)


def test_greedy_responses_are_the_same_after_an_interruption(engine):
    served = engine()

    def write(some) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {request.uid: list(request.prefix_ids) for request in some}
        for step in served.generate(some):
            for uid, token in zip(step.uids, step.token_ids.tolist(), strict=True):
                found[uid].append(token)
        return found

    whole = write(requests(2, 10, temperature=0.0))
    cut = [
        RolloutRequest(r.uid, r.prompt_ids, r.sampling, prefix_ids=np.array(whole[r.uid][:4], np.int32))
        for r in requests(2, 10, temperature=0.0)
    ]
    assert write(cut) == whole


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["disk", "tensors"])
def test_new_weights_reach_responses_in_flight(engine, models, sync):
    """Pause, flush, push, verify, resume in the middle: each token has the version that sampled it."""
    served, wanted, names, found = engine(sync=sync), requests(12, 230), ["a"], 0
    while not found and len(names) < 7:  # on a busy machine the server may have written all before the pause
        names.append("b" if names[-1] == "a" else "a")
        version = len(names) - 1
        written = written_over_an_update(served, wanted, models[names[-1]], version)
        samples = tiny.samples([(len(r.prompt_ids), 1) for r in wanted])
        for sample, request in zip(samples, wanted, strict=True):
            sample.prompt_ids = request.prompt_ids
            sample.response_ids = np.array(written[request.uid][0], dtype=np.int32)
        old, new = (rescored(models[name], samples, 0.7) for name in names[-2:])
        for request, before, after in zip(wanted, old, new, strict=True):
            _, logprobs, versions = written[request.uid]
            assert set(versions) <= {version - 1, version}
            assert versions == sorted(versions)
            found += len(set(versions)) == 2
            due = np.where(np.array(versions) == version, after, before)
            np.testing.assert_allclose(np.array(logprobs), due, atol=1e-4)
    assert found > 0


def test_a_worker_that_holds_other_weights_is_found_out(engine, sglang, models):
    update(engine(), models["b"], 1)
    ranks = sglang.control("/weights_checker", action="checksum")["ranks"]
    Proof(models["b"].weights()).check(sglang.url, ranks, {})
    with pytest.raises(RolloutError, match=r"holds another model\.\S+ than the trainer"):
        Proof(models["a"].weights()).check(sglang.url, ranks, {})


@pytest.mark.parametrize("sync", ["disk", "tensors"])
def test_a_worker_sleeps_until_it_has_the_next_weights(engine, sglang, models, served_models, sync):
    """By the server's own verbs, told each part once and in order; on a CPU it has no memory to give back."""
    served, told = engine(sync=sync), []
    ask = served._workers.pool.ask

    def noted(server, method, path, body=None):
        if path in ("/release_memory_occupation", "/resume_memory_occupation", "/weights_checker"):
            told.append((path[1:8], *(body or {}).get("tags", ())))
        return ask(server, method, path, body)

    served._workers.pool.ask = noted
    update(served, models["a"], 1)
    for version, name in ((2, "b"), (3, "a")):
        told.clear()
        served.sleep()
        served.sleep()
        update(served, models[name], version)
        assert told[:2] == [("release", "weights", "kv_cache", "cuda_graph"), ("resume_", "weights")]
        assert told[-2:] == [("weights",), ("resume_", "kv_cache", "cuda_graph")]  # once they are proved
        assert set(told[2:-2]) <= {("weights",)}
        assert {step.policy_version for step in served.generate(requests(2, 3))} == {version}
    served.sleep()
    sglang.control("/resume_memory_occupation", tags=["weights", "kv_cache", "cuda_graph"])
    sglang.load(served_models["a"], "default")  # as one that was started again
    told.clear()
    update(served, models["b"], 4)
    assert {verb for verb, *_ in told} == {"weights"}


def test_an_engine_that_writes_does_not_sleep(engine):
    served = engine()
    served.submit(requests(1, 50))
    with pytest.raises(RolloutError, match="can sleep once none is in flight"):
        served.sleep()
    served.abort(["r0"])


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
@pytest.mark.parametrize("sync", ["disk", "tensors"])
def test_a_bit_that_changed_on_its_way_is_found(engine, models, sync, name):
    served = engine(sync=sync)
    served._workers._push = Corrupting(served._workers._push, name)
    with pytest.raises(RolloutError, match=r"holds another model\.\S+ than the trainer"):
        update(served, models["b"], 1)


@pytest.mark.parametrize("sync", ["disk", "tensors"])
def test_a_worker_that_lost_its_weights_is_given_them_again(engine, sglang, served_models, models, sync):
    """As after a restart: it serves the folder it was started with, under its first version."""
    served = engine(sync=sync)
    update(served, models["b"], 1)
    list(served.generate(requests(2, 3)))
    sglang.load(served_models["a"], "default")
    steps = list(served.generate(requests(4, 10)))
    assert {step.policy_version for step in steps} == {1}
    assert sum(len(step.uids) for step in steps) > 4
    ranks = sglang.control("/weights_checker", action="checksum")["ranks"]
    Proof(models["b"].weights()).check(sglang.url, ranks, {})


class Held:
    """A push whose first load waits until it is told to go on."""

    def __init__(self, push) -> None:
        self._push, self.prepare = push, push.prepare
        self.begun, self.go = threading.Event(), threading.Event()

    async def load(self, *words):
        if not self.begun.is_set():
            self.begun.set()
            await asyncio.to_thread(self.go.wait, 60)
        await self._push.load(*words)


@pytest.mark.parametrize("sync", ["disk", "tensors"])
def test_a_worker_admitted_during_an_update_ends_on_the_newest(engine, sglang, served_models, models, sync):
    """It came back, and is being given what was the newest, when the next version is pushed."""
    served = engine(sync=sync)
    update(served, models["b"], 1)
    sglang.load(served_models["a"], "default")
    served._workers.pool.servers[0].admitted = False
    held = served._workers._push = Held(served._workers._push)
    served.submit(requests(2, 5))
    assert held.begun.wait(60)
    with ThreadPoolExecutor(1) as aside:
        pushing = aside.submit(update, served, models["a"], 2)
        time.sleep(1.0)  # it has come as far as it can
        held.go.set()
        pushing.result(300)
    written = [uid for chunk in iter(served.step, None) for uid in chunk.uids]
    assert set(written) == {"r0", "r1"}
    ranks = sglang.control("/weights_checker", action="checksum")["ranks"]
    Proof(models["a"].weights()).check(sglang.url, ranks, {})
    steps = list(served.generate(requests(4, 10)))
    assert {step.policy_version for step in steps} == {2}


@pytest.mark.parametrize("sync", ["disk", "tensors"])
def test_a_trainer_that_died_while_it_pushed_leaves_nothing_in_the_way(engine, sglang, models, sync):
    """Workers paused, an update begun, requests in flight: the next trainer pushes and samples."""
    dead = engine(sync=sync)
    steps = dead.generate(requests(4, 100))
    next(steps)
    dead.pause()
    if sync == "tensors":
        sglang.control("/begin_weight_update")
    steps.close()
    dead._workers.paused = False  # nobody resumes for it
    served = engine(sync=sync)
    update(served, models["b"], 1)
    groups = collect(served, prompts(), 2, SamplingParams(max_new_tokens=6), seed=2)
    samples = [sample for group in groups for sample in group.samples]
    for sample, due in zip(samples, rescored(models["b"], samples, 1.0), strict=True):
        np.testing.assert_allclose(sample.rollout_logprobs, due, atol=1e-4)


def test_rows_of_the_head_that_are_no_tokens_are_never_sampled(engine, models):
    vocabulary = len(recipe_tokenizer())
    assert vocabulary < PADDED
    served = engine(model=ServedModel(vocabulary, 128, PADDED))
    groups = collect(served, prompts(), 6, SamplingParams(temperature=1.4, max_new_tokens=12), seed=3)
    samples = [sample for group in groups for sample in group.samples]
    assert max(sample.response_ids.max() for sample in samples) < vocabulary
    for sample, due in zip(samples, rescored(models["a"], samples, 1.4, vocabulary), strict=True):
        np.testing.assert_allclose(sample.rollout_logprobs, due, atol=1e-4)


def test_a_prompt_may_leave_room_for_one_token(engine):
    """Of 256 tokens of context SGLang keeps some; see `SGLangEngineConfig.kept`."""
    prompt = np.full(ALL_ROWS.max_sequence - 1, 3, dtype=np.int32)
    served = engine()
    served.submit([RolloutRequest("r", prompt, SamplingParams(max_new_tokens=1), seed=1)])
    chunk = served.step()
    assert (len(chunk.token_ids), dict(chunk.finished)) == (1, {"r": Status.TRUNCATED})


def test_weights_change_only_while_paused(engine, models):
    with pytest.raises(RolloutError, match=r"call pause\(\) before"):
        engine().update_weights(models["b"].weights(), 1)


def test_aborted_requests_are_let_go_and_the_others_go_on(engine):
    """Also one that is asked for again while what was sent for it may still arrive."""
    served = engine()
    served.submit(requests(12, 230))
    ended = dict(served.step().finished)
    served.abort([f"r{i}" for i in range(1, 12)])
    served.submit(requests(2, 230)[1:])
    again = 0
    while (chunk := served.step()) is not None:
        assert {*chunk.uids, *chunk.finished} <= {"r0", "r1"}
        places = [
            place for uid, place in zip(chunk.uids, chunk.positions.tolist(), strict=True) if uid == "r1"
        ]
        assert places == list(range(again, again + len(places)))
        again += len(places)
        ended |= chunk.finished
    assert {"r0", "r1"} <= ended.keys()
    assert again > 0


def test_requests_join_those_in_flight(engine):
    served = engine()
    alone = {}
    for request in requests(3, 20, temperature=0.0):
        ids = [token for chunk in served.generate(request) for token in chunk.token_ids.tolist()]
        alone[request.uid] = ids
    streams = []
    for request in requests(3, 20, temperature=0.0):
        streams.append((request.uid, served.generate(request)))
    for uid, stream in reversed(streams):
        assert [token for chunk in stream for token in chunk.token_ids.tolist()] == alone[uid]


def test_what_cannot_be_served_is_refused(engine):
    served = engine()
    bad = [RolloutRequest("x", np.array([PADDED], np.int32), SamplingParams())]
    with pytest.raises(RolloutError, match="outside the vocabulary"):
        served.generate(bad)


def test_several_workers_and_one_that_dies(engine, sglang, models):
    """Streams that break go on with the other worker, after the tokens that have arrived."""
    with ExitStack() as stack:
        workers = [stack.enter_context(fault_proxy(("127.0.0.1", sglang.port))) for _ in range(2)]
        served = engine([worker.endpoint for worker in workers])
        steps = served.generate(requests(8, 80))
        seen = [next(steps)]
        workers[1].stop()
        seen += list(steps)
        assert all(worker.requests for worker in workers)
    counts = {}
    for step in seen:
        for uid, position in zip(step.uids, step.positions.tolist(), strict=True):
            assert position == counts.get(uid, 0)
            counts[uid] = position + 1
    assert set(counts) == {f"r{i}" for i in range(8)}
    assert all(any(uid in step.finished for step in seen) for uid in counts)


def test_turns_stay_with_the_worker_that_has_their_beginning(engine, sglang):
    """Asked for one by one, as episodes ask: both workers are used, each session stays where it is, and those
    of a worker that dies move once.
    """
    sampling = SamplingParams(max_new_tokens=4, stop_ids=(recipe_tokenizer().eos_token_id,))
    with ExitStack() as stack:
        workers = [stack.enter_context(fault_proxy(("127.0.0.1", sglang.port))) for _ in range(2)]
        served = engine([worker.endpoint for worker in workers])
        homes = served._homes

        def turn(number: int) -> list[str]:
            """Where each session was worked on."""
            for session in range(20):
                ids = np.array([3 + session % 7, 4, 5] * (number + 1), np.int32)
                uid = f"s{session}/{number}"
                served.submit([RolloutRequest(uid, ids, sampling, session=f"s{session}")])
            while served.step() is not None:
                pass
            found = [homes.of(f"s{session}") for session in range(20)]
            return [server.url for server in found if server is not None]

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


def test_every_token_is_in_the_log_before_it_is_seen(engine, tmp_path):
    wanted = requests(4, 8)
    with TokenWAL(tmp_path / "wal") as log:
        rollout = FaultTolerantRollout([engine()], log)
        for step in rollout.generate(wanted):
            for uid, position, token in zip(step.uids, step.positions, step.token_ids, strict=True):
                logged = log.find(uid)
                assert logged is not None
                assert logged.token_ids[position] == token
        assert all(log.find(r.uid).status in (Status.COMPLETED, Status.TRUNCATED) for r in wanted)


def test_nobody_there(served_models, tmp_path):
    pytest.importorskip("orjson", reason="needs the extra sglang")
    options = PoolOptions(
        [f"http://127.0.0.1:{free_ports(1)[0][0]}"], patience=Patience(unreachable=0.3, connect_timeout=1.0)
    )
    engine = SGLangEngine(options, ServedModel(PADDED, 128))
    with pytest.raises(RolloutError, match="no usable answer"):
        list(engine.generate(requests(2, 3)))
    engine.close()
