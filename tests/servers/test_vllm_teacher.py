"""A teacher on a real vLLM server gives what the same model gives in this process; whatever happens to the
server, scores are right or the run stops with one sentence.

The test that kills the server is the last of those that share it.
"""

import contextlib
import threading
import time
from pathlib import Path

import pytest
import tiny
import torch
from real_servers import SERVE_VLLM, VLLMServer, require_vllm, running
from recipes import tiny_recipe
from recorded import assert_own
from served_models import recipe_tokenizer

from opd.config.teachers import VLLMTeacherConfig
from opd.errors import TeacherError
from opd.metrics import read_metrics
from opd.pipelines.check.servers import check_kinds
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_pipeline
from opd.teachers.kinds import Placement
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.served_teacher import SignalNeeds
from opd.teachers.vllm_teacher import VLLMTeacher

pytestmark = pytest.mark.long
TOKENS = len(recipe_tokenizer())
SAMPLES = [(3, 4), (1, 1), (5, 0), (2, 60), (9, 7), (40, 1), (9, 3), (100, 100)]
DEVELOPERS = {"VLLM_SERVER_DEV_MODE": "1"}
"""It tells then that it computes in float32."""


@pytest.fixture(scope="module")
def vllm(vllm_models, tmp_path_factory):
    """A real server of model `a`, which prefills a few tokens at once: what is longer comes in chunks."""
    require_vllm()
    few = {"max-num-batched-tokens": 64, "max-num-seqs": 8, "max-logprobs": 8}
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    with running(VLLMServer(vllm_models["a"], log, DEVELOPERS, **few)) as server:
        yield server


@pytest.fixture
def served(vllm, vllm_published, closing):
    def make(signal="topk", model="a", top_k=5, **settings):
        config = VLLMTeacherConfig(path=vllm_published[model], urls=[vllm.url], signal=signal, **settings)
        asked, placement = SignalNeeds(top_k=top_k), Placement(vocabulary=TOKENS)
        return closing(VLLMTeacher(model, vllm_published[model], config, needs=asked, placement=placement))

    return make


def test_log_probabilities_are_the_models_own(served, vllm_models):
    samples = tiny.samples(SAMPLES)
    found = [served(signal).score(samples) for signal in ("topk", "sampled")]
    assert_own(vllm_models["a"], samples, *found)


def test_hidden_states_are_the_models_own_however_it_prefills(vllm_models, vllm_published, tmp_path):
    """A real server that pools a few tokens at once, asked twice: a cached prefix hides nothing."""
    require_vllm()
    few = {"max-num-batched-tokens": 64, "max-num-seqs": 8}
    config = VLLMTeacherConfig(path=vllm_published["a"], urls=["http://127.0.0.1:1"])
    samples = tiny.samples(SAMPLES)
    with running(
        VLLMServer(vllm_models["a"], tmp_path / "log", DEVELOPERS, **few | config.server_arguments)
    ) as server:
        config = config.model_copy(update={"urls": [server.url]})
        placement = Placement(vocabulary=TOKENS)
        teacher = VLLMTeacher("a", vllm_published["a"], config, needs=SignalNeeds(0.7), placement=placement)
        found = [teacher.score(samples).rows for _ in range(2)]
        teacher.close()
    due = LocalTeacher("here", vllm_models["a"]).score(samples).rows
    for rows in found:
        torch.testing.assert_close(rows, due, atol=1e-4, rtol=1e-4)


def test_what_is_wrong_is_said_in_one_sentence(served):
    with pytest.raises(TeacherError, match="what the model's own weights give"):
        served(model="b").score(tiny.samples([(2, 3)]))
    with pytest.raises(TeacherError, match=r"max allowed: 8.*start it with --max-logprobs 9 or more"):
        served(top_k=9).score(tiny.samples([(2, 3)]))
    with pytest.raises(TeacherError, match="has 300 tokens, the servers of teacher a take 255"):
        served().score(tiny.samples([(200, 100)]))


def test_the_doctor_visits_it(vllm, vllm_models, vllm_published):
    def found(**entry):
        entry = {"type": "vllm", "signal": "topk", "urls": [vllm.url], "path": vllm_published["a"]} | entry
        recipe = tiny_recipe(
            model={"path": str(vllm_models["a"])},
            base=None,
            teachers={"sort": entry, "add3": {"path": str(vllm_models["b"])}},
            distill={"steps": 1, "loss": {"type": "topk", "k": 5}},
            baselines={"methods": []},
        )
        return next(iter(check_kinds(recipe)))

    assert found().level == "ok"
    assert "tells no checksum" in found().detail  # on a CPU it packs weights away
    assert "serves another model" in found(path=vllm_published["b"]).detail


def test_a_server_that_is_killed_is_asked_again_once_it_proves_its_weights(vllm, served, vllm_models):
    samples = tiny.samples(SAMPLES)
    teacher = served(patience=900.0, timeout=60.0)
    teacher.connect_server()

    def restart():
        vllm.kill()
        vllm.launch()

    restarting = threading.Thread(target=restart)
    restarting.start()
    time.sleep(0.05)
    found = teacher.score(samples)
    restarting.join()
    assert_own(vllm_models["a"], samples, found, served("sampled", patience=900.0).score(samples))
    vllm.end()
    with pytest.raises(TeacherError, match=r"no usable answer.*--resume"):
        served(patience=0.1).score(samples)


@pytest.mark.parametrize("loss", [{"type": "topk", "k": 5}, {"type": "full"}])
def test_a_merge_starts_its_vllm_teacher_and_ends_it(vllm_models, tmp_path, loss):
    """Beside one in this process: what is learned is what two teachers in this process teach."""
    require_vllm()
    group = {"type": "vllm", "command": SERVE_VLLM, "arguments": {"max-model-len": 64, "max-num-seqs": 8}}
    found = []
    for server in (False, True):
        signal = "topk" if loss["type"] == "topk" else "hidden"
        own = {"type": "vllm", "servers": "own", "signal": signal} if server else {}
        recipe = tiny_recipe(
            model={"path": str(vllm_models["b"])},
            base=None,
            servers={"own": group} if server else {},
            teachers={"sort": {"path": str(vllm_models["a"])} | own, "add3": {"path": str(vllm_models["a"])}},
            rollout={"max_new_tokens": 5, "max_sequence": 32},
            distill={"steps": 2, "prompts_per_domain": 4, "loss": loss, "teachers": "local"},
            baselines={"methods": []},
            evaluation={"prompts_per_domain": 4},
        )
        with RunFolder.create(tmp_path / str(server), recipe) as folder:
            run_pipeline(recipe, folder)
            found.append(read_metrics(folder.metrics_path("merge")))
    here, there = found
    assert len(here) == len(there) == 2
    for one, other in zip(here, there, strict=True):
        assert one["kl/mean"] == pytest.approx(other["kl/mean"], abs=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert one["tokens/student"] == other["tokens/student"]
    (log,) = tmp_path.glob("True/logs/servers/own-0.log")
    assert "EngineCore" in log.read_text()
    assert not [line for line in _commands() if str(tmp_path) in line]


def _commands():
    """Of every process."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield (folder / "cmdline").read_bytes().decode(errors="replace")
