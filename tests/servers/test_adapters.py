"""Adapters alone on servers of every dialect, little and real: what they write with them, how they are
proved, and that they go.

The test that kills a server is the last.
"""

import json

import numpy as np
import pytest
import torch
from dialects import DIALECTS, EVERY, LITTLES, SGLANG, VLLM, Served, on
from little_models import little
from real_servers import GROUPS, SGLangServer, VLLMServer, require_sglang, require_vllm, running
from recipes import tiny_recipe, write_recipe
from safetensors.torch import load_file
from served_models import VARIETY
from served_stage import run
from served_writing import Corrupting, assert_written, assert_written_over_updates, requests, update, written
from test_served_run import Run, assert_nothing_is_left

from opd.config.teachers import SGLangEngineConfig
from opd.config.train import LoRAConfig
from opd.errors import ModelError, RolloutError
from opd.models.adapters import AdaptedLM
from opd.models.causal_lm import CausalLM
from opd.models.peft_folder import LORA_A, LORA_B
from opd.pipelines.check.servers import check_workers
from opd.pipelines.stages.served_engine import adapter_fault
from opd.rollout.adapted_student import AdaptedStudent, AdapterFolder
from opd.served.http_client import PoolOptions

pytest.importorskip("orjson", reason="needs the extra sglang")
pytest.importorskip("peft", reason="needs the extra lora")
LONG = [pytest.mark.long, pytest.mark.timeout(3000)]
LORA = LoRAConfig(rank=4, alpha=8.0, targets=["q_proj", "v_proj", "up_proj", "down_proj"])
"""Not all of what servers fuse."""
EVERY_LAYER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SGLANG_TOLD = {"enable-lora": True, "max-lora-rank": 16, "max-loras-per-batch": 2}
SGLANG_TOLD |= {"lora-target-modules": EVERY_LAYER}
VLLM_TOLD = {"max-num-batched-tokens": 64, "max-num-seqs": 12, "enable-lora": True, "max-lora-rank": 8}
VLLM_TOLD |= {"enable-scale-out": True, "generation-config": "vllm", "logprobs-mode": "processed_logprobs"}
UPDATING = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
SGLANGS, ALMOST = ("little-sglang", "real-sglang"), (*LITTLES, "real-sglang")


@pytest.fixture(scope="module")
def sglang_with_adapters(served_models, tmp_path_factory):
    require_sglang()
    log = tmp_path_factory.mktemp("sglang") / "sglang.log"
    with running(SGLangServer(served_models["a"], log, **SGLANG_TOLD)) as server:
        yield server


@pytest.fixture(scope="module")
def vllm_with_adapters(padded_models, tmp_path_factory):
    require_vllm()
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with running(VLLMServer(padded_models["a"], log, UPDATING, **VLLM_TOLD)) as server:
        yield server


@pytest.fixture
def server(request):
    """One that was started for adapters; see the fixture of that name for all tests."""
    how, _, name = request.param.partition("-")
    dialect = DIALECTS[name]
    folders = request.getfixturevalue("served_models" if request.param == "real-sglang" else "padded_models")
    if how == "real":
        own = request.getfixturevalue(f"{name}_with_adapters")
        yield (made := Served(dialect, folders, own, real=True))
        made.take()
        return
    own = dialect.little(folders["a"])
    own.lora = dict(dialect.lora)
    yield (made := Served(dialect, folders, own))
    made.own.kill()


@pytest.fixture
def plain(server, request):
    """The URL of another, which was not."""
    if server.real:
        yield request.getfixturevalue(server.dialect.name).url
        return
    with little(server.dialect.little, server.folders["a"]) as own:
        yield own.url


@pytest.fixture
def engine(server, tmp_path):
    """Makes engines."""
    made = []

    def make(patience=None):
        push = server.dialect.adapters_alone(tmp_path / f"weights-{len(made)}", server.folders["a"], LORA)
        settings = {"patience": patience or server.patience, "version": -1}
        made.append(server.dialect.make_engine([server.url], server.folders["a"], push, **settings))
        return made[-1]

    yield make
    for one in made:
        if one.paused and server.real:
            one.resume()
        one.close()


@pytest.fixture
def student(server):
    """Makes what a trainer holds after some steps."""

    def make(seed: int, name: str = "a", size: float = 0.3) -> AdaptedLM:
        model = AdaptedLM(CausalLM.from_pretrained(server.folders[name]), LORA, server.folders[name])
        noise = torch.Generator().manual_seed(seed)
        for _, tensor in model.adapters():
            tensor.copy_(torch.randn(tensor.shape, generator=noise) * size)
        return model

    return make


@pytest.mark.some(2)
@on(*EVERY, real=LONG)
def test_what_is_written_is_of_the_adapter_that_its_version_says(engine, server, student):
    """Changed in the middle of requests, which are written to their end; the adapters before are gone."""
    if not server.real:
        server.own.seconds = 0.01
    served, models, wanted = engine(), [student(0)], requests(6 if server.real else 3, server.tokens)
    assert adapter_fault(PoolOptions([server.url]), server.dialect.name, LORA) is None
    update(served, models[0], 0)
    assert_written_over_updates(served, wanted, models, student)
    assert server.adapters() == [served._workers.target_weights.name]
    if server.dialect is VLLM and server.real:  # and one that was given another base
        server.take("b", "another")
        version = len(models)
        update(served, student(version), version)
        found = written(served.generate(wanted), wanted)
        assert_written(wanted, found, {version: student(version)})


@on("little-vllm")
def test_an_adapter_stays_on_the_disk_until_the_next_is_there(engine, server, student):
    """For what a server reads anew of it."""
    served = engine()
    for version in (0, 1):
        update(served, student(version), version)
    _, before, newest = server.own.folders  # the first is that by which it was tried
    assert newest.exists()
    assert before.exists()
    update(served, student(2), 2)
    assert newest.exists()
    assert not before.exists()


@pytest.mark.some(1)
@on(*ALMOST, real=LONG)
def test_layers_that_are_left_out_are_found_before_anything_is_learnt(engine, server, student, monkeypatch):
    """At the first push, when adapters change nothing yet: by the adapter that the server is tried with."""
    fill = AdapterFolder._write_files

    def partly(self, folder, weights):
        fill(self, folder, [item for item in weights if "down_proj" not in item[0]])

    if server.real:
        monkeypatch.setattr(AdapterFolder, "_write_files", partly)
    else:
        server.own.knows = lambda name: "v_proj" not in name
    with pytest.raises(RolloutError, match=r"does not apply the adapter opd-\w+\.trial as the trainer does"):
        update(engine(), student(0, size=0.0), 0)


@pytest.mark.slow
@on(*ALMOST, real=LONG)
def test_an_adapter_that_changed_on_its_way_is_found(engine, student):
    served = engine()
    update(served, student(0), 0)
    name = "model.layers.1.mlp.down_proj.lora_A.weight"
    served._workers._push = Corrupting(served._workers._push, name, bit=29)
    with pytest.raises(RolloutError, match=r"does not apply the adapter opd-\w+\.1 as the trainer does"):
        update(served, student(1), 1)


@pytest.mark.some(1)
@on("little-vllm", "little-sglang")
@pytest.mark.parametrize("wrong", ["another", "none"])
def test_a_wrong_adapter_is_found(engine, server, student, wrong, monkeypatch):
    served = engine()
    update(served, student(0), 1)
    if wrong == "none":
        server.own.knows = lambda name: False
    else:
        load = server.own.load
        monkeypatch.setattr(server.own, "load", lambda name, folder: load(name, server.own.folders[0]))
    with pytest.raises(RolloutError, match=r"does not apply the adapter opd-\w+\.2 as the trainer does"):
        update(served, student(1), 2)
    assert server.own.paused


@pytest.mark.slow
@on(*ALMOST, real=LONG)
def test_a_worker_that_lost_base_or_adapter_is_given_them_again(engine, server, student):
    served, model = engine(), student(0)
    update(served, model, 1)
    unload = f"{server.dialect.loads}/unload_lora_adapter"
    losses = [lambda: server.control(unload, lora_name=served._workers.target_weights.name)]
    if server.dialect is SGLANG:  # of vLLM another base under the same adapter ends the run
        losses.append(lambda: server.take("b"))
    for lose in losses:
        list(served.generate(requests(2, 3)))
        lose()
        wanted = requests(4, 10)
        assert_written(wanted, written(served.generate(wanted), wanted), {1: model})
        verbs = served._workers.verbs
        said = served._workers.event_loop.run(
            verbs.score(served._workers.pool.servers[0], served._workers.target_weights.name)
        )
        np.testing.assert_allclose(said, verbs._push.student.compute_logprobs(model.weights()), atol=1e-4)


@pytest.mark.slow
@on("little-vllm")
def test_base_and_adapters_come_to_servers_that_hold_others(engine, server, student):
    """Once: the second push is of adapters alone."""
    own, served = server.own, engine()
    own.reload(server.folders["b"])
    update(served, student(0), 1)
    assert own.model.quick_digest() == server.model("a").quick_digest()
    assert own.told.count("/collective_rpc") == 1
    update(served, student(1), 2)
    assert own.told.count("/collective_rpc") == 1
    assert own.told.count("/v1/load_lora_adapter") == 1 + 1 + 2  # asked what it lacks, tried, twice
    list(served.generate(requests(2, 3)))
    own.lose()
    own.load("opd-01234567.9", own.folders[-1])  # of a run that is gone
    wanted = requests(4, 10)
    assert_written(wanted, written(served.generate(wanted), wanted), {2: student(1)})
    assert list(own.loaded) == [served._workers.target_weights.name]


@pytest.mark.slow
@on(*ALMOST, real=LONG)
def test_adapters_before_are_forgotten(engine, server, student):
    served = engine()
    folder = served._workers._push.prepare(student(0).weights(), 9).folder
    load = f"{server.dialect.loads}/load_lora_adapter"
    server.control(load, lora_name="opd-01234567.9", lora_path=str(folder))
    assert "opd-01234567.9" in server.adapters()
    for version in range(6 if server.real else 2):
        update(served, student(version), version)
        assert server.adapters() == [served._workers.target_weights.name]


@on("little-vllm")
def test_adapters_of_another_base_are_refused(engine, student):
    with pytest.raises(ModelError, match="belong to a base of digest"):
        update(engine(), student(0, "b"), 1)


@on("little-vllm")
def test_nothing_is_written_before_there_is_an_adapter(engine):
    served = engine()
    served.submit(requests(1, 3))
    with pytest.raises(RolloutError, match="holds no adapter yet"):
        served.next_chunk()


@on("real-sglang", real=LONG)
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


@on(*SGLANGS, real=LONG)
def test_servers_that_were_not_started_for_adapters_say_what_is_missing(plain, server):
    missing = adapter_fault(PoolOptions([plain]), "sglang", LORA) or ""
    assert "was not started with --enable-lora --max-lora-rank 4" in missing
    assert adapter_fault(PoolOptions([server.url]), "sglang", LORA) is None
    larger = LORA.model_copy(update={"rank": 32})
    assert "--max-lora-rank 32" in (adapter_fault(PoolOptions([server.url]), "sglang", larger) or "")
    assert adapter_fault(PoolOptions(["http://127.0.0.1:9"]), "sglang", LORA) is None


@on(*SGLANGS, real=LONG)
def test_the_doctor_says_what_workers_are_sent(plain, server):
    model = {"path": str(server.folders["a"]), "lora": {"rank": 4}}
    engine = {"type": "sglang", "urls": [server.url, plain]}
    alone, merged = check_workers(tiny_recipe(model=model, base=None, rollout={"engine": engine}))
    assert alone.detail.endswith("with adapters alone")
    assert "merged into all weights: it was not started with --enable-lora" in merged.detail
    asked = {"engine": engine | {"lora": "adapters"}}
    alone, refused = check_workers(tiny_recipe(model=model, base=None, rollout=asked))
    assert (alone.level, refused.level) == ("ok", "error")
    assert f"{plain} takes no adapters: it was not started with --enable-lora" in refused.detail


@pytest.mark.some(1)
@on("little-vllm")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora": None}, r"start it with --enable-lora --max-lora-rank 8, or set rollout\.engine\.lora"),
        ({"lora": {"max_lora_rank": 1}}, "start it with --enable-lora --max-lora-rank 8"),
        ({"lora": {"max_lora_rank": "x"}}, "start it with --enable-lora --max-lora-rank 8"),
        ({"lora": {"max_lora_rank": 8, "target_modules": ["q_proj"]}}, "with no --lora-target-modules"),
        ({"closed": {"/v1/load_lora_adapter": 404}}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"names_checked": False}, "VLLM_SKIP_MODEL_NAME_VALIDATION=0 in its environment"),
    ],
)
def test_what_it_was_started_with_is_said(engine, server, student, change, words):
    for name, value in change.items():
        setattr(server.own, name, value)
    with pytest.raises(RolloutError, match=words):
        update(engine(), student(0), 1)


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


def test_trial_adapters_change_each_layer_by_half_of_its_spread(padded_models):
    base = load_file(padded_models["a"] / "model.safetensors")
    tried = dict(AdaptedStudent(padded_models["a"], LORA, "float32").trial_adapters)
    layers = [name.removesuffix(LORA_A) for name in tried if name.endswith(LORA_A)]
    assert layers
    for layer in layers:
        change = LORA.alpha / LORA.rank * tried[layer + LORA_B] @ tried[layer + LORA_A]
        assert float(change.std() / base[f"{layer}.weight"].std()) == pytest.approx(0.5, rel=0.5)


def test_servers_are_started_for_adapters():
    settings = {
        "rollout": {"engine": {"type": "vllm", "servers": "own"}},
        "servers": {"own": {"type": "vllm"}},
    }
    recipe = tiny_recipe(model={"path": "x", "lora": {"rank": 20}}, base=None, **settings)
    told = recipe.rollout.engine.lora_arguments(recipe.model.lora)
    assert told == {"enable-lora": True, "max-lora-rank": 32}
    assert recipe.rollout.engine.server_environment(told)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert recipe.merged_because is None
    larger = tiny_recipe(model={"path": "x", "lora": {"rank": 600}}, base=None, **settings)
    assert "vLLM's adapters have 512 at most" in larger.merged_because
    sglang = SGLangEngineConfig(type="sglang", urls=["http://localhost:1"])
    told = sglang.lora_arguments(LoRAConfig(rank=20, targets=["v_proj", "q_proj"]))
    assert told["max-lora-rank"] == 20
    assert told["lora-target-modules"] == ["q_proj", "v_proj"]


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("kind", "lora", "rollout"),
    [
        ("sglang", {"rank": 4, "alpha": 8}, {}),
        # With a cut, so that log-probabilities are those before it.
        ("vllm", None, {"top_p": 0.9}),
        ("vllm", {"rank": 4, "alpha": 8}, {"top_p": 0.9}),
    ],
)
def test_a_specialist_learns_on_a_server_that_its_recipe_starts(
    vllm_models, served_models, tmp_path, kind, lora, rollout
):
    """The server is told what adapters need; each step's are sampled with, and nothing is left of it."""
    (require_sglang if kind == "sglang" else require_vllm)()
    path = (served_models if kind == "sglang" else vllm_models)["a"]
    sort = {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 50, "reward": VARIETY}
    few = {} if kind == "sglang" else {"max-num-batched-tokens": 64}
    group = GROUPS[kind] | {"arguments": GROUPS[kind]["arguments"] | few}
    engine = {"type": kind, "servers": "student"} | ({"lora": "adapters"} if kind == "sglang" else {})
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        model={"path": str(path), "lora": lora},
        base=None,
        domains={"sort": sort},
        servers={"student": group},
        teachers={},
        rollout={"engine": engine, "max_new_tokens": 8, "max_sequence": 32} | rollout,
        specialist={"steps": 3, "prompts_per_step": 4, "group_size": 4, "optim": {"lr": 3e-3}},
        distill={"steps": 1},
        baselines={"methods": []},
        evaluation={"prompts_per_domain": 4, "curve_prompts": 4},
    )
    made = Run(recipe, tmp_path / "run")
    made.whole()
    assert_nothing_is_left(made, set())
    assert kind == "vllm" or "adapters are sent alone" in made.said()
    lines = (made.out / "stages" / "specialist-sort" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == 3
    # A step whose responses are all worth the same learns nothing, and its noise is the server's own.
    apart = [step["mismatch/max_abs"] for step in steps if "mismatch/max_abs" in step]
    assert apart or kind == "sglang"
    assert max(apart, default=0.0) < 1e-3
    sent, whole = steps[-1]["rollout/pushed_bytes"], (path / "model.safetensors").stat().st_size
    assert sent < whole / 2 if lora else sent > whole / 2
    models = json.loads((made.out / "stages/evaluate/models.json").read_text())["models"]
    assert kind in {model["engine"] for model in models.values()}


@pytest.mark.slow
@on(*ALMOST, real=LONG)
def test_a_server_that_is_killed_while_it_writes_loses_nothing(engine, server, student):
    """It is started again without any adapter, is given the newest, and goes on where it was."""
    served, model = engine(server.unreachable(1000.0)), student(0)
    wanted = requests(8 if server.real else 3, server.tokens, temperature=1.0)
    update(served, model, 1)
    steps = served.generate(wanted)
    seen = [next(steps)]
    server.restart()
    assert_written(wanted, written([*seen, *steps], wanted), {1: model})
    assert served._workers.pool.counters.retries > 0
    assert server.adapters() == [served._workers.target_weights.name]
