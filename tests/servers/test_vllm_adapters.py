"""Adapters alone on vLLM servers: what a little one that speaks as a real one shows, and a real one."""

import json
import urllib.request

import numpy as np
import pytest
import tiny
import torch
from little_vllm import little_vllm
from recipes import tiny_recipe
from served_models import PADDED
from served_writing import requests, rescored, update, written_over_an_update
from sglang_server import running
from vllm_server import VLLMServer, require_vllm, write_vllm_models

from opd.config.train import LoRAConfig
from opd.errors import ModelError, RolloutError
from opd.models.adapters import AdaptedLM
from opd.models.causal_lm import CausalLM
from opd.pipelines.stages.served_engine import unfit
from opd.retry import Retry
from opd.rollout.adapted_student import AdaptedStudent
from opd.rollout.adapter_workers import AdapterPush
from opd.rollout.served_engine import ServedModel
from opd.rollout.vllm_adapters import LOADS
from opd.rollout.vllm_engine import VLLMEngine
from opd.rollout.vllm_workers import FolderPush, Outputs
from opd.rollout.weight_sync import WeightFolder
from opd.served.http_client import Patience, PoolOptions

pytest.importorskip("orjson", reason="needs the extra sglang")
pytest.importorskip("peft", reason="needs the extra lora")
QUICK = Patience(timeout=30.0, unreachable=30.0, retry=Retry(attempts=3, pause=0.01))
LORA = LoRAConfig(rank=4, alpha=8.0, targets=["q_proj", "v_proj", "up_proj", "down_proj"])
"""Not all of what servers fuse."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_vllm_models(tmp_path_factory.mktemp("vllm"), vocab_size=PADDED)


@pytest.fixture
def little(folders):
    with little_vllm(folders["a"]) as (url, own):
        own.url, own.lora = url, {"max_lora_rank": 8, "target_modules": None}
        yield own


@pytest.fixture
def engine_at(folders, tmp_path):
    made = []

    def make(url: str) -> VLLMEngine:
        root = tmp_path / f"weights-{len(made)}"
        student = AdaptedStudent(folders["a"], LORA, "float32")
        push = AdapterPush(root, student, FolderPush(WeightFolder(root / "base", folders["a"])), LOADS)
        options, outputs = PoolOptions([url], patience=QUICK), Outputs(folders["a"], "float32")
        made.append(VLLMEngine(options, ServedModel(PADDED, 250), push, version=-1, outputs=outputs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def engine(little, engine_at):
    return lambda: engine_at(little.url)


@pytest.fixture
def student(folders):
    """Makes what a trainer holds after some steps."""

    def make(seed: int, path: str = "a", size: float = 0.3) -> AdaptedLM:
        model = AdaptedLM(CausalLM.from_pretrained(folders[path]), LORA, folders[path])
        noise = torch.Generator().manual_seed(seed)
        for _, tensor in model.adapters():
            tensor.copy_(torch.randn(tensor.shape, generator=noise) * size)
        return model

    return make


def assert_written(wanted, written, models) -> set[int]:
    """Each token has the log-probability of the model that its version says; the versions of those requests
    that have several.
    """
    mixed: set[int] = set()
    for request in wanted:
        ids, logprobs, versions = written[request.uid]
        assert len(ids) == request.sampling.max_new_tokens
        assert versions == sorted(versions)
        assert set(versions) <= models.keys()
        mixed |= set(versions) if len(set(versions)) > 1 else set()
        (sample,) = tiny.samples([(len(request.prompt_ids), 1)])
        sample.prompt_ids, sample.response_ids = request.prompt_ids, np.array(ids, np.int32)
        for version, model in models.items():
            of = np.array(versions) == version
            (due,) = rescored(model, [sample], request.sampling.temperature)
            np.testing.assert_allclose(np.array(logprobs)[of], due[of], atol=1e-4)
    return mixed


def test_what_is_written_is_of_the_adapter_that_its_version_says(engine, little, student):
    """Changed in the middle of requests; the adapter before is gone there then, and here after the next."""
    little.seconds = 0.01
    served, models, wanted = engine(), {0: student(0), 1: student(1)}, requests(3, 60)
    update(served, models[0], 0)
    written = written_over_an_update(served, wanted, models[1], 1)
    assert assert_written(wanted, written, models) == {0, 1}
    assert list(little.loaded) == [served._workers.newest.name]
    _, before, newest = little.folders  # the first is that by which it was tried
    assert newest.exists()
    assert before.exists()  # for what a server reads anew of it
    update(served, student(2), 2)
    assert newest.exists()
    assert not before.exists()


@pytest.mark.slow
def test_base_and_adapters_come_to_servers_that_hold_others(engine, little, folders, student):
    """Once: the second push is of adapters alone."""
    little.reload(folders["b"])
    served, model = engine(), student(0)
    update(served, model, 1)
    assert little.model.quick_digest() == CausalLM.from_pretrained(folders["a"]).quick_digest()
    assert little.told.count("/collective_rpc") == 1
    update(served, student(1), 2)
    assert little.told.count("/collective_rpc") == 1
    assert little.told.count("/v1/load_lora_adapter") == 1 + 1 + 2  # asked what it lacks, tried, twice
    list(served.generate(requests(2, 3)))
    little.lose()
    little.load("opd-01234567.9", little.folders[-1])  # of a run that is gone
    steps = list(served.generate(requests(4, 10)))
    assert {step.policy_version for step in steps} == {2}
    assert sum(len(step.uids) for step in steps) == 40
    assert list(little.loaded) == [served._workers.newest.name]


def test_layers_that_a_server_leaves_out_are_found_before_anything_is_learnt(engine, little, student):
    """At the first push, when adapters change nothing yet."""
    little.knows = lambda name: "v_proj" not in name
    with pytest.raises(RolloutError, match=r"does not apply the adapter opd-\w+\.trial as the trainer does"):
        update(engine(), student(0, size=0.0), 0)


@pytest.mark.some(1)
@pytest.mark.parametrize("wrong", ["another", "none"])
def test_a_wrong_adapter_is_found(engine, little, student, wrong, monkeypatch):
    served = engine()
    update(served, student(0), 1)
    if wrong == "none":
        little.knows = lambda name: False
    else:
        load = little.load
        monkeypatch.setattr(little, "load", lambda name, folder: load(name, little.folders[0]))
    with pytest.raises(RolloutError, match=r"does not apply the adapter opd-\w+\.2 as the trainer does"):
        update(served, student(1), 2)
    assert little.paused


def test_adapters_of_another_base_are_refused(engine, student):
    with pytest.raises(ModelError, match="belong to a base of digest"):
        update(engine(), student(0, "b"), 1)


def test_nothing_is_written_before_there_is_an_adapter(engine):
    served = engine()
    served.submit(requests(1, 3))
    with pytest.raises(RolloutError, match="holds no adapter yet"):
        served.step()


@pytest.mark.some(1)
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
def test_what_it_was_started_with_is_said(engine, little, student, change, words):
    for name, value in change.items():
        setattr(little, name, value)
    with pytest.raises(RolloutError, match=words):
        update(engine(), student(0), 1)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_real_server(engine_at, folders, student, tmp_path):
    """It writes with each adapter in turn, also in the middle of requests, on the base that it was started
    with or given, and keeps none of those before.
    """
    require_vllm()
    few = {"max-num-batched-tokens": 64, "max-num-seqs": 12, "enable-lora": True, "max-lora-rank": 8}
    told = {"enable-scale-out": True, "generation-config": "vllm", "logprobs-mode": "processed_logprobs"}
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    log, wanted = tmp_path / "vllm.log", requests(6, 200)
    with running(VLLMServer(folders["a"], log, environment, **few, **told)) as server:
        assert unfit(PoolOptions([server.url]), "vllm", LORA) is None
        served, models, mixed = engine_at(server.url), {0: student(0)}, set()
        update(served, models[0], 0)
        while not mixed and len(models) < 7:  # it may have written all before the pause
            version = len(models)
            models[version] = student(version)
            written = written_over_an_update(served, wanted, models[version], version)
            mixed = assert_written(wanted, written, {v: models[v] for v in (version - 1, version)})
        assert mixed
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as answer:
            there = [entry["id"] for entry in json.load(answer)["data"] if entry.get("parent")]
        assert there == [served._workers.newest.name]
        kwargs = {"weights_path": str(folders["b"])}
        server.control("/collective_rpc", method="reload_weights", kwargs=kwargs)
        server.control("/update_weight_version", new_version="another")
        version += 1
        update(served, models.setdefault(version, student(version)), version)
        written = {r.uid: ([], [], []) for r in wanted}
        for chunk in served.generate(wanted):
            for uid, token, logprob in zip(chunk.uids, chunk.token_ids, chunk.logprobs, strict=True):
                for column, value in zip(written[uid], (token, logprob, chunk.policy_version), strict=True):
                    column.append(value)
        assert_written(wanted, written, {version: models[version]})


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
