"""The rollout engine on a real vLLM server: its tokens, its log-probabilities, its weights.

The test that kills the server is the last.
"""

import json
import sys
import threading

import numpy as np
import pytest
import served_models
import tiny
from recipes import tiny_recipe, write_recipe
from served_models import PADDED, recipe_tokenizer, write_model
from served_writing import Corrupting, prompts, requests, rescored, update, written_over_an_update
from sglang_server import running
from test_served_run import Run, assert_nothing_is_left
from vllm_server import MODEL, SERVE, VLLMServer, require_vllm, write_vllm_models

from opd.errors import RolloutError
from opd.models.causal_lm import CausalLM
from opd.pipelines.doctor.servers import check_workers
from opd.retry import Retry
from opd.rollout.collect import collect
from opd.rollout.served_engine import ServedModel
from opd.rollout.vllm_engine import VLLMEngine
from opd.rollout.vllm_workers import FolderPush, Outputs
from opd.rollout.weight_sync import WeightFolder
from opd.served.http_client import Patience, PoolOptions
from opd.types import RolloutRequest, SamplingParams, Status

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]
ALL_ROWS = ServedModel(PADDED, 250)
QUICK = Patience(timeout=120.0, unreachable=60.0, retry=Retry(attempts=3))
TOLD = {"enable-scale-out": True, "generation-config": "vllm", "logprobs-mode": "processed_logprobs"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of one form, with a head padded beyond the tokenizer."""
    return write_vllm_models(tmp_path_factory.mktemp("vllm"), vocab_size=PADDED)


@pytest.fixture(scope="module")
def models(folders):
    return {name: CausalLM.from_pretrained(path) for name, path in folders.items()}


@pytest.fixture(scope="module")
def vllm(folders, tmp_path_factory):
    """A real server of model `a`, which prefills a few tokens at once: what is longer comes in chunks."""
    require_vllm()
    few = {"max-num-batched-tokens": 64, "max-num-seqs": 12}
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    with running(VLLMServer(folders["a"], log, environment, **few, **TOLD)) as server:
        yield server


@pytest.fixture
def engine(vllm, folders, tmp_path):
    made = []

    def make(model=ALL_ROWS, patience=QUICK, **settings) -> VLLMEngine:
        push = FolderPush(WeightFolder(tmp_path / f"weights-{len(made)}", folders["a"]))
        outputs = Outputs(folders["a"], "float32")
        options = PoolOptions([vllm.url], patience=patience)
        made.append(VLLMEngine(options, model, push, version=-1, outputs=outputs, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def given(engine, models):
    """An engine that has been given model `a` as version 0."""

    def make(**settings):
        served = engine(**settings)
        update(served, models["a"], 0)
        return served

    return make


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_model_at_the_temperature(given, models, temperature):
    sampling = SamplingParams(temperature=temperature, max_new_tokens=12)
    groups = collect(given(), prompts(), 4, sampling, seed=1)
    samples = [sample for group in groups for sample in group.samples]
    for sample, due in zip(samples, rescored(models["a"], samples, temperature), strict=True):
        assert len(sample.response_ids) == 12
        np.testing.assert_allclose(sample.rollout_logprobs, due, atol=1e-4)
        assert (sample.policy_versions == 0).all()
        assert sample.status is Status.TRUNCATED
    assert len({sample.response_ids.tobytes() for sample in samples}) > 4


def written(served, some) -> tuple[dict[str, list[int]], dict[str, Status]]:
    found = {request.uid: [int(token) for token in request.prefix_ids] for request in some}
    ended: dict[str, Status] = {}
    for chunk in served.generate(some):
        for uid, position, token in zip(chunk.uids, chunk.positions, chunk.token_ids.tolist(), strict=True):
            assert position == len(found[uid])
            found[uid].append(token)
        ended |= chunk.finished
    return found, ended


def test_responses_end_where_they_should(given):
    """At a stop id, which stays, or when they are as long as they may be; nowhere else."""
    served = given()
    plain, ended = written(served, requests(2, 20, temperature=0.0))
    assert set(ended.values()) == {Status.TRUNCATED}
    assert {len(tokens) for tokens in plain.values()} == {20}
    stop = plain["r0"][7]
    stopped, ended = written(served, requests(2, 20, temperature=0.0, stop=(stop,)))
    for uid, tokens in plain.items():
        place = tokens.index(stop) + 1 if stop in tokens else None
        assert stopped[uid] == tokens[:place]
        assert ended[uid] is (Status.TRUNCATED if place is None else Status.COMPLETED)


def test_responses_go_on_after_what_was_written_before(given):
    served, some = given(), requests(2, 10, temperature=0.0)
    whole, _ = written(served, some)
    cut = [
        RolloutRequest(r.uid, r.prompt_ids, r.sampling, prefix_ids=np.array(whole[r.uid][:4], np.int32))
        for r in some
    ]
    assert written(served, cut)[0] == whole


def test_new_weights_reach_responses_in_flight(given, models):
    """Pause, flush, push, verify, resume in the middle: each token has the version that sampled it."""
    served, wanted, names, found = given(), requests(12, 200), ["a"], 0
    while not found and len(names) < 7:
        names.append("b" if names[-1] == "a" else "a")
        version = len(names) - 1
        tokens = written_over_an_update(served, wanted, models[names[-1]], version)
        samples = tiny.samples([(len(r.prompt_ids), 1) for r in wanted])
        for sample, request in zip(samples, wanted, strict=True):
            sample.prompt_ids = request.prompt_ids
            sample.response_ids = np.array(tokens[request.uid][0], dtype=np.int32)
            assert len(sample.response_ids) == 200
        old, new = (rescored(models[name], samples, 0.7) for name in names[-2:])
        for request, before, after in zip(wanted, old, new, strict=True):
            _, logprobs, versions = tokens[request.uid]
            assert versions == sorted(versions)
            assert set(versions) <= {version - 1, version}
            found += len(set(versions)) == 2
            due = np.where(np.array(versions) == version, after, before)
            np.testing.assert_allclose(np.array(logprobs), due, atol=1e-4)
    assert found > 0


@pytest.mark.parametrize(
    ("name", "bit", "words"),
    [
        ("model.norm.weight", 0, r"holds another model\.norm\.weight than the trainer"),
        ("model.embed_tokens.weight", 0, r"holds another model\.embed_tokens\.weight than"),
        # Packed away on a CPU: a bit that makes a number some powers of two larger is seen in the outputs.
        ("model.layers.1.self_attn.v_proj.weight", 25, "holds other weights than the trainer: its log-prob"),
    ],
)
def test_weights_that_changed_on_their_way_are_found(engine, models, name, bit, words):
    served = engine()
    served._workers._push = Corrupting(served._workers._push, name, bit)
    with pytest.raises(RolloutError, match=words):
        update(served, models["b"], 1)


def lose(vllm, folder) -> None:
    """As a server that was started again, of which nobody has noticed it."""
    vllm.control("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(folder)})
    vllm.control("/update_weight_version", new_version="default")


def test_a_worker_that_lost_its_weights_is_given_them_again(given, vllm, models, folders):
    served = given()
    update(served, models["b"], 1)
    written(served, requests(2, 3))
    lose(vllm, folders["a"])
    groups = collect(served, prompts(), 2, SamplingParams(max_new_tokens=10), seed=4)
    samples = [sample for group in groups for sample in group.samples]
    for sample, due in zip(samples, rescored(models["b"], samples, 1.0), strict=True):
        assert (sample.policy_versions == 1).all()
        np.testing.assert_allclose(sample.rollout_logprobs, due, atol=1e-4)


def test_rows_of_the_head_that_are_no_tokens_are_never_sampled(given, models):
    vocabulary = len(recipe_tokenizer())
    served = given(model=ServedModel(vocabulary, 128, PADDED))
    groups = collect(served, prompts(), 6, SamplingParams(temperature=1.4, max_new_tokens=12), seed=3)
    samples = [sample for group in groups for sample in group.samples]
    assert max(sample.response_ids.max() for sample in samples) < vocabulary
    for sample, due in zip(samples, rescored(models["a"], samples, 1.4, vocabulary), strict=True):
        np.testing.assert_allclose(sample.rollout_logprobs, due, atol=1e-4)


def test_aborted_requests_are_let_go_and_the_others_go_on(given):
    served = given()
    served.submit(requests(12, 200))
    ended = dict(served.step().finished)
    served.abort([f"r{i}" for i in range(1, 12)])
    while (chunk := served.step()) is not None:
        assert {*chunk.uids, *chunk.finished} <= {"r0"}
        ended |= chunk.finished
    assert ended == {"r0": Status.TRUNCATED}


def test_what_it_was_started_with_has_to_fit(engine, models):
    for settings, words in (
        ({"mode": "raw_logprobs"}, "tells processed_logprobs.*start it with --logprobs-mode raw_logprobs"),
        ({"model": ServedModel(PADDED, 300)}, "takes 256 tokens.*start it with --max-model-len 300"),
    ):
        with pytest.raises(RolloutError, match=words):
            update(engine(**settings), models["a"], 1)


def test_a_server_that_speculates_is_refused(folders, models, tmp_path):
    """Its log-probabilities would be 0 and -9999."""
    require_vllm()
    own = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    environment, told = {"VLLM_SERVER_DEV_MODE": "1"}, {"speculative-config": json.dumps(own), **TOLD}
    with running(VLLMServer(folders["a"], tmp_path / "log", environment, **told)) as server:
        push = FolderPush(WeightFolder(tmp_path / "weights", folders["a"]))
        options = PoolOptions([server.url], patience=QUICK)
        served = VLLMEngine(options, ALL_ROWS, push, version=-1, outputs=Outputs(folders["a"], "float32"))
        try:
            with pytest.raises(RolloutError, match="start it without --speculative-config"):
                update(served, models["a"], 0)
        finally:
            served.close()


def test_another_architecture_is_refused_before_it_is_given(vllm, engine, models, tmp_path):
    write_model(tmp_path / "other", seed=0, **(MODEL | {"num_hidden_layers": 3}), vocab_size=PADDED)
    other = CausalLM.from_pretrained(tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    with pytest.raises(RolloutError, match="with num_hidden_layers 2, the student has 3"):
        update(engine(model=ServedModel(PADDED, 250, config=config)), other, 1)
    with pytest.raises(RolloutError, match=r"without model\.layers\.2\.\S+, which the student has"):
        update(engine(), other, 1)
    update(engine(), models["a"], 1)  # it is still there


def test_the_doctor_looks_at_it(vllm, folders):
    engine = {"type": "vllm", "urls": [vllm.url]}
    settings = {"base": None, "rollout": {"engine": engine, "max_sequence": 200}}
    findings = check_workers(tiny_recipe(model={"path": str(folders["a"])}, **settings))
    assert [finding.level for finding in findings] == ["ok"]
    assert "with processed_logprobs" in findings[0].detail
    other = {"model_type": "qwen3", "hidden_size": 48, "num_hidden_layers": 2}
    findings = check_workers(tiny_recipe(model={"config": other}, **settings))
    assert "with hidden_size 32, the student has 48" in findings[0].detail


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
def test_a_specialist_learns_on_a_server_that_its_recipe_starts(vllm, tmp_path, lora):
    """With a cut, so that log-probabilities are those before it; nothing is left of the server. Adapters come
    alone.
    """
    path = write_vllm_models(tmp_path)["a"]
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        model={"path": str(path), "lora": lora},
        base=None,
        domains={
            "sort": {
                "source": "procedural:sort",
                "params": {"digits": 3},
                "prompts": 50,
                "reward": served_models.VARIETY,
            }
        },
        servers={
            "student": {
                "type": "vllm",
                "command": SERVE,
                "arguments": {"max-model-len": 256, "max-num-batched-tokens": 64, "max-num-seqs": 16},
                "environment": {"PYTHON": sys.executable},
                "start_seconds": 1500,
            }
        },
        teachers={},
        rollout={
            "engine": {"type": "vllm", "servers": "student"},
            "top_p": 0.9,
            "max_new_tokens": 8,
            "max_sequence": 32,
        },
        specialist={"steps": 3, "prompts_per_step": 4, "group_size": 4, "optim": {"lr": 3e-3}},
        distill={"steps": 1},
        baselines={"methods": []},
        evaluation={"prompts_per_domain": 4, "curve_prompts": 4},
    )
    run = Run(recipe, tmp_path / "run")
    run.whole()
    assert_nothing_is_left(run, set())
    lines = (run.out / "stages" / "specialist-sort" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == 3
    # A step whose responses are all worth the same learns nothing, and its noise is the server's own.
    apart = [step["mismatch/max_abs"] for step in steps if "mismatch/max_abs" in step]
    assert apart
    assert max(apart) < 1e-3
    sent, whole = steps[-1]["rollout/pushed_bytes"], (path / "model.safetensors").stat().st_size
    assert sent < whole / 2 if lora else sent > whole / 2
    models = json.loads((run.out / "stages/evaluate/models.json").read_text())["models"]
    assert "vllm" in {model["engine"] for model in models.values()}


def test_a_server_that_is_killed_while_it_writes_loses_nothing(given, vllm, models):
    """It is started again with its first weights, is given the newest, and goes on where it was."""
    served = given(patience=Patience(timeout=120.0, unreachable=1500.0, retry=Retry(attempts=3)))
    update(served, models["b"], 1)
    wanted = requests(8, 230, temperature=1.0)
    steps = served.generate(wanted)
    seen = [next(steps)]

    def restart() -> None:
        vllm.kill()
        vllm.launch()

    restarting = threading.Thread(target=restart)
    restarting.start()
    seen += list(steps)
    restarting.join()
    found = {request.uid: ([], []) for request in wanted}
    for chunk in seen:
        assert chunk.policy_version == 1
        for uid, position, token, logprob in zip(
            chunk.uids, chunk.positions, chunk.token_ids, chunk.logprobs, strict=True
        ):
            assert position == len(found[uid][0])
            found[uid][0].append(token)
            found[uid][1].append(logprob)
    samples = tiny.samples([(len(r.prompt_ids), 1) for r in wanted])
    for sample, request in zip(samples, wanted, strict=True):
        sample.prompt_ids = request.prompt_ids
        sample.response_ids = np.array(found[request.uid][0], dtype=np.int32)
        assert len(sample.response_ids) == 230
    for request, due in zip(wanted, rescored(models["b"], samples, 1.0), strict=True):
        np.testing.assert_allclose(np.array(found[request.uid][1]), due, atol=1e-4)
    assert served._workers.pool.counters.retries > 0
