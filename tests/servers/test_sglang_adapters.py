"""Adapters alone on a real SGLang server: what it writes with them, how they are proved, and that they go."""

import json
import sys
import urllib.request

import numpy as np
import pytest
import tiny
import torch
from recipes import tiny_recipe, write_recipe
from safetensors.torch import load_file
from served_models import PADDED, VARIETY, recipe_tokenizer
from served_stage import run
from served_writing import Corrupting, requests, rescored, update, written_over_an_update
from sglang_server import CPU_SERVER, installing, sglang_server
from test_served_run import Run

from opd.config.train import LoRAConfig
from opd.errors import RolloutError
from opd.models.adapters import AdaptedLM
from opd.models.causal_lm import CausalLM
from opd.pipelines.doctor.servers import check_workers
from opd.pipelines.stages.served_engine import unfit
from opd.retry import Retry
from opd.rollout.adapted_student import AdaptedStudent, AdapterFolder
from opd.rollout.adapter_workers import AdapterPush
from opd.rollout.served_engine import ServedModel
from opd.rollout.sglang_engine import SGLangEngine
from opd.rollout.sglang_workers import FolderPush
from opd.rollout.weight_sync import WeightFolder
from opd.served.http_client import Patience, PoolOptions

pytest.importorskip("peft", reason="needs the extra lora")
pytestmark = pytest.mark.long
QUICK = Patience(timeout=120.0, unreachable=60.0, retry=Retry(attempts=3))
LORA = LoRAConfig(rank=4, alpha=8.0, targets=["q_proj", "v_proj", "up_proj", "down_proj"])
"""Not all of what servers fuse."""
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ARGUMENTS = {"enable-lora": True, "max-lora-rank": 16, "lora-target-modules": EVERY, "max-loras-per-batch": 2}


@pytest.fixture(scope="module")
def server(served_models, tmp_path_factory):
    """One that was started for adapters."""
    pytest.importorskip("orjson", reason="needs the extra sglang")
    reason = installing().result()
    if reason is not None:
        pytest.skip(f"no SGLang server: {reason}")
    with sglang_server(served_models["a"], tmp_path_factory.mktemp("sglang"), ARGUMENTS) as running:
        yield running


@pytest.fixture
def engine(server, served_models, tmp_path):
    """Makes engines; the server holds model `a` under its first name again afterwards."""
    made = []

    def make(patience=QUICK) -> SGLangEngine:
        root = tmp_path / f"weights-{len(made)}"
        base = FolderPush(WeightFolder(root / "base", served_models["a"]))
        push = AdapterPush(root, AdaptedStudent(served_models["a"], LORA, "float32"), base)
        options = PoolOptions([server.url], patience=patience)
        made.append(SGLangEngine(options, ServedModel(PADDED, 250), push, version=-1))
        return made[-1]

    yield make
    for one in made:
        if one.paused:
            one.resume()
        one.close()
    server.load(served_models["a"], "default")


@pytest.fixture
def student(served_models):
    """Makes what a trainer holds after some steps."""

    def make(seed: int, size: float = 0.3) -> AdaptedLM:
        model = AdaptedLM(CausalLM.from_pretrained(served_models["a"]), LORA, served_models["a"])
        noise = torch.Generator().manual_seed(seed)
        for _, tensor in model.adapters():
            tensor.copy_(torch.randn(tensor.shape, generator=noise) * size)
        return model

    return make


def adapters(server):
    """Names of those it has."""
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as answer:
        return [entry["id"] for entry in json.load(answer)["data"] if entry["parent"]]


def test_what_is_written_is_of_the_adapter_that_its_version_says(engine, server, student):
    """Changed in the middle of requests, which are written to their end; the adapters before are gone."""
    served, wanted, models, found = engine(), requests(8, 200), [student(0)], 0
    update(served, models[0], 0)
    while not found and len(models) < 7:  # on a busy machine the server may have written all before the pause
        models.append(student(len(models)))
        version = len(models) - 1
        written = written_over_an_update(served, wanted, models[-1], version)
        samples = tiny.samples([(len(r.prompt_ids), 1) for r in wanted])
        for sample, request in zip(samples, wanted, strict=True):
            sample.prompt_ids = request.prompt_ids
            sample.response_ids = np.array(written[request.uid][0], dtype=np.int32)
        old, new = (rescored(model, samples, 0.7) for model in models[-2:])
        for request, before, after in zip(wanted, old, new, strict=True):
            ids, logprobs, versions = written[request.uid]
            assert len(ids) == 200 or ids[-1] == recipe_tokenizer().eos_token_id
            assert set(versions) <= {version - 1, version}
            assert versions == sorted(versions)
            found += len(set(versions)) == 2
            due = np.where(np.array(versions) == version, after, before)
            np.testing.assert_allclose(np.array(logprobs), due, atol=1e-4)
    assert found > 0
    assert adapters(server) == [served._workers.newest.name]


def test_layers_that_are_left_out_are_found_before_anything_is_learnt(engine, student, monkeypatch):
    """At the first push, when adapters change nothing yet: by the adapter that the server is tried with."""
    fill = AdapterFolder._fill

    def partly(self, folder, weights):
        fill(self, folder, [item for item in weights if "down_proj" not in item[0]])

    monkeypatch.setattr(AdapterFolder, "_fill", partly)
    with pytest.raises(RolloutError, match=r"does not apply the adapter opd-\w+\.trial as the trainer does"):
        update(engine(), student(0, size=0.0), 0)


def test_a_wrong_adapter_is_found(engine, student):
    served = engine()
    update(served, student(0), 0)
    name = "model.layers.1.mlp.down_proj.lora_A.weight"
    served._workers._push = Corrupting(served._workers._push, name, bit=29)
    with pytest.raises(RolloutError, match=r"does not apply the adapter opd-\w+\.1 as the trainer does"):
        update(served, student(1), 1)


def test_a_worker_that_lost_base_or_adapter_is_given_them_again(engine, server, served_models, student):
    served, model = engine(), student(0)
    update(served, model, 1)
    for lose in (
        lambda: server.control("/unload_lora_adapter", lora_name=served._workers.newest.name),
        lambda: server.load(served_models["b"], "default"),
    ):
        list(served.generate(requests(2, 3)))
        lose()
        steps = list(served.generate(requests(4, 10)))
        assert {step.policy_version for step in steps} == {1}
        assert sum(len(step.uids) for step in steps) == 40
        said = served._workers.loop.run(
            served._workers.verbs.score(served._workers.pool.servers[0], served._workers.newest.name)
        )
        due = served._workers.verbs._push.student.outputs(model.weights())
        np.testing.assert_allclose(said, due, atol=1e-4)


def test_adapters_before_are_forgotten(engine, server, student):
    served = engine()
    folder = served._workers._push.prepare(student(0).weights(), 9).folder
    server.control("/load_lora_adapter", lora_name="opd-01234567.9", lora_path=str(folder))
    assert "opd-01234567.9" in adapters(server)
    for version in range(6):
        update(served, student(version), version)
        assert adapters(server) == [served._workers.newest.name]


def test_a_stage_whose_servers_take_adapters_sends_them_alone(server, served_models, tmp_path):
    """It ends in the student of the engine of the process, and sends next to nothing."""
    lora = {"rank": 4, "alpha": 8}
    changes = {"model": {"path": str(served_models["a"]), "lora": lora}, "rollout": {"top_k": 1}}
    found = {}
    for name, engine in {
        "torch": {"type": "torch"},
        "adapters": {"type": "sglang", "urls": [server.url]},
        "merged": {"type": "sglang", "urls": [server.url], "lora": "merged"},
    }.items():
        steps = run(tmp_path / name, "merge", engine, served_models, **changes)
        found[name] = load_file(tmp_path / name / "merged/model.safetensors"), steps
    start, (here, one) = load_file(served_models["a"] / "model.safetensors"), found["torch"]
    moved = max(float((here[name] - start[name]).abs().max()) for name in here)
    for name in ("adapters", "merged"):
        there, steps = found[name]
        assert max(float((here[n] - there[n]).abs().max()) for n in here) <= 1e-2 * moved
        for ours, theirs in zip(one, steps, strict=True):
            assert ours["kl/mean"] == pytest.approx(theirs["kl/mean"], abs=1e-4)
    sent = {name: {row["rollout/pushed_bytes"] for row in steps[1:]} for name, (_, steps) in found.items()}
    assert sent["merged"] == {sum(tensor.nbytes for tensor in here.values())}
    assert sent["adapters"] == sent["torch"]
    assert max(sent["adapters"]) < min(sent["merged"])
    assert not list((tmp_path / "adapters").rglob("version-*"))


def test_servers_that_were_not_started_for_adapters_say_what_is_missing(sglang, server):
    pool = PoolOptions([sglang.url])
    assert "was not started with --enable-lora --max-lora-rank 4" in unfit(pool, "sglang", LORA)
    assert unfit(PoolOptions([server.url]), "sglang", LORA) is None
    larger = LORA.model_copy(update={"rank": 32})
    assert "--max-lora-rank 32" in unfit(PoolOptions([server.url]), "sglang", larger)
    assert unfit(PoolOptions(["http://127.0.0.1:9"]), "sglang", LORA) is None


def test_the_doctor_says_what_workers_are_sent(sglang, server, served_models):
    model = {"path": str(served_models["a"]), "lora": {"rank": 4}}
    engine = {"type": "sglang", "urls": [server.url, sglang.url]}
    alone, merged = check_workers(tiny_recipe(model=model, base=None, rollout={"engine": engine}))
    assert alone.detail.endswith("with adapters alone")
    assert "merged into all weights: it was not started with --enable-lora" in merged.detail
    asked = {"engine": engine | {"lora": "adapters"}}
    alone, refused = check_workers(tiny_recipe(model=model, base=None, rollout=asked))
    assert (alone.level, refused.level) == ("ok", "error")
    assert f"{sglang.url} takes no adapters: it was not started with --enable-lora" in refused.detail


HERE = {"type": "sglang", "urls": ["http://127.0.0.1:1"]}


@pytest.mark.parametrize(
    ("engine", "others", "words"),
    [
        (HERE | {"lora": "adapters"}, {}, "no adapters are trained; set model.lora"),
        (
            HERE | {"lora": "adapters", "sync": "tensors"},
            {"lora": {}},
            "sync is tensors, and adapters alone need a folder; set it to merged",
        ),
        (HERE | {"lora": "adapters"}, {"lora": {"targets": ["router"]}}, "model.lora.targets has router"),
    ],
)
def test_what_cannot_be_sent_alone_is_refused_where_it_is_asked_for(engine, others, words):
    with pytest.raises(ValueError, match=words):
        tiny_recipe(model={"path": "x", **others}, base=None, rollout={"engine": engine})


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_specialist_learns_on_a_server_that_its_recipe_starts(server, served_models, tmp_path):
    """The server is told what adapters need; each step's are sampled with."""
    sort = {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 50, "reward": VARIETY}
    group = {
        "command": ["bash", str(CPU_SERVER / "serve.sh")],
        "arguments": {"context-length": 256},
        "environment": {"PYTHON": sys.executable},
        "start_seconds": 1500,
    }
    rollout = {"max_new_tokens": 8, "max_sequence": 32}
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        model={"path": str(served_models["a"]), "lora": {"rank": 4, "alpha": 8}},
        base=None,
        domains={"sort": sort},
        servers={"student": group},
        teachers={},
        rollout={"engine": {"type": "sglang", "servers": "student", "lora": "adapters"}, **rollout},
        specialist={"steps": 3, "prompts_per_step": 4, "group_size": 4, "optim": {"lr": 3e-3}},
        distill={"steps": 1},
        baselines={"methods": []},
        evaluation={"prompts_per_domain": 4, "curve_prompts": 4},
    )
    run = Run(recipe, tmp_path / "run")
    run.whole()
    assert "adapters are sent alone" in run.said()
    lines = (run.out / "stages" / "specialist-sort" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == 3
    assert max(step.get("mismatch/max_abs", 0.0) for step in steps) < 1e-3
    whole = (served_models["a"] / "model.safetensors").stat().st_size
    assert max(step["rollout/pushed_bytes"] for step in steps) < whole / 2


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_server_that_is_killed_while_it_writes_loses_nothing(engine, server, student):
    """It is started again without any adapter, is given the newest, and goes on where it was."""
    patience = Patience(timeout=120.0, unreachable=1000.0, retry=Retry(attempts=3))
    served, model, wanted = engine(patience), student(0), requests(8, 200, temperature=1.0)
    update(served, model, 1)
    steps = served.generate(wanted)
    seen = [next(steps)]
    server.kill()
    server.launch()
    seen += list(steps)
    found = {request.uid: ([], []) for request in wanted}
    for chunk in seen:
        assert chunk.policy_version == 1
        for uid, place, token, logprob in zip(
            chunk.uids, chunk.positions, chunk.token_ids, chunk.logprobs, strict=True
        ):
            assert place == len(found[uid][0])
            found[uid][0].append(token)
            found[uid][1].append(logprob)
    samples = tiny.samples([(len(r.prompt_ids), 1) for r in wanted])
    for sample, request in zip(samples, wanted, strict=True):
        sample.prompt_ids = request.prompt_ids
        sample.response_ids = np.array(found[request.uid][0], dtype=np.int32)
    for request, due in zip(wanted, rescored(model, samples, 1.0), strict=True):
        ids, logprobs = found[request.uid]
        assert len(ids) == 200 or ids[-1] == recipe_tokenizer().eos_token_id
        np.testing.assert_allclose(np.array(logprobs), due, atol=1e-4)
    assert served._workers.pool.counters.retries > 0
    assert adapters(server) == [served._workers.newest.name]
