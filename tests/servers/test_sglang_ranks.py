"""Several ranks that write on the same SGLang workers, and no worker twice."""

import json
import os
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
import tiny
from attempts import run_only
from dialects import SGLANG
from fault_proxy import fault_proxy
from little_models import LittleSGLang, little
from real_servers import SGLangServer, running
from recipes import tiny_recipe, write_recipe
from safetensors.torch import load_file

from opd.errors import RolloutError, TeacherError
from opd.loop_thread import LoopThread
from opd.metrics import read_metrics
from opd.pipelines.launch.local import check_ranks
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.served import http_pool
from opd.served.http_client import PoolOptions
from opd.served.http_pool import HTTPPool, UrlsFile, check_distinct

SECONDS = 300


def merge(served_models, engine, **train):
    """A merge of four steps that always writes the most likely token: engines agree on every one."""
    teacher = {"path": str(served_models["b"])}
    return {
        "model": {"path": str(served_models["a"])},
        "base": None,
        "teachers": {"sort": teacher, "add3": teacher},
        "rollout": {"engine": engine, "top_k": 1, "max_new_tokens": 12, "max_sequence": 40},
        "distill": {"steps": 4, "prompts_per_domain": 4, "checkpoint_every": 4, "teachers": "local"},
        "baselines": {"methods": []},
        "train": train,
    }


def served(urls, sync="disk"):
    return {"type": "sglang", "urls": urls, "patience": 60.0, "sync": sync}


def version(server):
    """What a server calls the weights it holds."""
    with urllib.request.urlopen(f"{server.url}/model_info", timeout=60) as answer:
        return json.load(answer)["weight_version"]


@pytest.fixture(scope="module")
def second(sglang, served_models, tmp_path_factory):
    """Another server of the same model."""
    log = tmp_path_factory.mktemp("second") / "sglang.log"
    with running(SGLangServer(served_models["a"], log)) as server:
        yield server


def assert_student_of_one(served_models, out, engine, ranks, **changes):
    """Ranks of FSDP2 on the workers of `engine` make the student of one process that writes itself."""
    settings = merge(served_models, {"type": "torch"}) | {k: v for k, v in changes.items() if k == "model"}
    here = tiny_recipe(**settings)
    run_only(here, out / "one", "merge")
    recipe = write_recipe(out / "recipe.yaml", **merge(served_models, engine, ranks=ranks) | changes)
    command = [sys.executable, "-m", "opd.pipelines.cli", "distill", str(recipe)]
    done = subprocess.run(
        [*command, "--out", str(out / "ranks")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = {name: read_metrics(out / name / "stages/merge/metrics.jsonl") for name in ("one", "ranks")}
    for ours, theirs in zip(steps["one"], steps["ranks"], strict=True):
        assert ours["tokens/student"] == theirs["tokens/student"]
        assert ours["kl/mean"] == pytest.approx(theirs["kl/mean"], abs=1e-4)
    one, other = (load_file(out / name / "merged/model.safetensors") for name in ("one", "ranks"))
    tiny.assert_learnt_alike(other, one, load_file(served_models["a"] / "model.safetensors"))
    return steps["ranks"]


@pytest.mark.slow
@pytest.mark.long  # starts a second server
def test_two_ranks_with_two_workers_make_the_student_of_one(
    sglang, second, served_models, tmp_path, restored
):
    """FSDP2 ranks: the first gives the weights to all workers after every step."""
    assert_student_of_one(served_models, tmp_path, served([sglang.url, second.url], "tensors"), 2)
    for server in (sglang, second):  # and both workers were given every version
        assert version(server).endswith(".4")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_three_ranks_with_two_workers_make_the_student_of_one(padded_models, tmp_path, lora):
    """The first rank gives each worker the weights once a step, or adapters alone."""
    models, changes = padded_models, {}
    if lora is not None:
        pytest.importorskip("peft", reason="needs the extra lora")
        changes["model"] = {"path": str(models["a"]), "lora": lora}
    with little(LittleSGLang, models["a"]) as one, little(LittleSGLang, models["a"]) as other:
        for server in (one, other):
            server.lora = None if lora is None else dict(SGLANG.lora)
        steps = assert_student_of_one(models, tmp_path, served([one.url, other.url]), 3, **changes)
        assert one.received == other.received
        assert version(one).endswith(".base" if lora else ".4")
    # Each version once, and some bytes of a file's header.
    whole = sum((models["a"] / name).stat().st_size for name in ("model.safetensors",))
    for step in steps[1:]:
        assert step["rollout/received_bytes"] < (0.5 if lora else 2.1) * whole
        assert step["rollout/received_bytes"] >= 2 * step["rollout/pushed_bytes"] * (lora is None)


@pytest.mark.slow
def test_ranks_share_the_servers_that_the_run_starts(padded_models, tmp_path):
    ranks, count = 3, 2
    script = Path(__file__).with_name("little_launch.py")
    group = {"count": count, "command": [sys.executable, str(script)], "start_seconds": 300}
    group["environment"] = {"PYTHONPATH": os.pathsep.join([str(script.parent), str(script.parent.parent)])}
    engine = {"type": "sglang", "servers": "own"}
    settings = {"servers": {"own": group}}
    steps = assert_student_of_one(padded_models, tmp_path, engine, ranks, **settings)
    whole = (padded_models["a"] / "model.safetensors").stat().st_size
    for versions, step in zip((2, 1, 1, 1), steps, strict=True):  # that of the start, too
        assert 0 < step["rollout/received_bytes"] <= versions * count * whole


def test_there_may_be_any_number_of_workers(served_models):
    recipe = tiny_recipe(**merge(served_models, served(["http://127.0.0.1:1"]), ranks=2))
    check_ranks(recipe, 2)


@pytest.mark.slow
def test_one_server_given_twice_is_refused(sglang, served_models, tmp_path):
    """To the student, by two URLs. Before it is told anything; one URL twice is refused in the recipe."""
    with ExitStack() as stack:
        other = stack.enter_context(fault_proxy(("127.0.0.1", sglang.port))).endpoint
        recipe = tiny_recipe(**merge(served_models, served([sglang.url, other])))
        folder = stack.enter_context(RunFolder.create(tmp_path / "run", recipe))
        with pytest.raises(RolloutError, match=f"{sglang.url} and {other} lead to one server"):
            run_stage(recipe, folder, "merge")
    assert version(sglang) == "default"


def test_a_server_that_comes_under_another_url_is_left_out(sglang, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(http_pool, "LOOK", 0.0)
    loop = LoopThread("test")
    with fault_proxy(("127.0.0.1", sglang.port)) as proxy:
        (tmp_path / "urls").write_text(f"{proxy.endpoint}\n")
        more = UrlsFile(tmp_path / "urls", [sglang.url]).new_urls
        pool = HTTPPool("pool", PoolOptions([sglang.url], more=more), RolloutError)
        body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 1}}
        for _ in range(6):
            loop.run(pool.post_json("/generate", body, 3, lambda answer: answer, 1 << 20))
        assert [server.url for server in pool.servers] == [sglang.url]
        assert f"{proxy.endpoint} leads to the server at {sglang.url}; it is not used" in caplog.text
        loop.run(pool.close())
    loop.close()


def test_one_server_given_to_a_teacher_twice_or_to_the_student_too_is_refused(sglang):
    """The student's weights would take the place of the teacher's."""
    own = PoolOptions([sglang.url])
    with fault_proxy(("127.0.0.1", sglang.port)) as proxy:
        other = proxy.endpoint
        with pytest.raises(TeacherError, match=f"^math: {sglang.url} and {other} lead to one server"):
            check_distinct({"math": PoolOptions([sglang.url, other])}, TeacherError)
        with pytest.raises(RolloutError, match=f"^engine: {sglang.url} and math: {other} lead to one server"):
            check_distinct({"engine": own, "math": PoolOptions([other])}, RolloutError)
        check_distinct({"engine": own, "math": PoolOptions(["http://127.0.0.1:9"])}, RolloutError)
