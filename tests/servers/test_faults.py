"""Whatever happens to servers, little and real: scores are right, or the run stops with one sentence.

The test that kills the server is the last one, so that the others need not wait for the new process.
"""

import functools
import shutil
import threading
import time
from contextlib import ExitStack

import pytest
import tiny
import torch
from dialects import SGLANG, on
from fault_proxy import fault_proxy
from safetensors.torch import load_file, save_file
from seaweedfs import absent_port
from served_models import PADDED, recipe_tokenizer, write_model

from opd.config.teachers import SGLangTeacherConfig
from opd.errors import TeacherError
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.teachers.kinds import Placement
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.served_teacher import SignalNeeds
from opd.teachers.sglang_teacher import SGLangTeacher

TOKENS = len(recipe_tokenizer())
SAMPLES = [(3, 4), (1, 1), (2, 60), (9, 7), (40, 1), (9, 3), (5, 5), (30, 30)]
EACH = on("little-sglang", "real-sglang")
QUICK = {"patience": 60.0, "attempts": 3, "timeout": 120.0}


@functools.cache
def published(folder):
    """Where a folder is published."""
    publish_checkpoint(folder, folder.with_name(f"{folder.name}-published"))
    return str(folder.with_name(f"{folder.name}-published"))


@pytest.fixture
def proxies(server):
    """Makes proxies in front of the server: to a client, replicas of it."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(fault_proxy(("127.0.0.1", server.own.port)))


@pytest.fixture
def served(server, closing):
    def make(urls, model="a", **settings):
        given = QUICK | {"attempts": 3} | settings
        vocabulary = TOKENS if given.get("signal", "hidden") == "hidden" else PADDED
        path = published(server.folders[model])
        made = SGLANG.make_teacher(path, urls, asked=SignalNeeds(top_k=5), vocabulary=vocabulary, **given)
        return closing(made)

    return make


@pytest.fixture
def due(server):
    """The right hidden states of `SAMPLES`."""
    return LocalTeacher("a", server.folders["a"], vocabulary=TOKENS).score(tiny.samples(SAMPLES)).rows


def assert_right(teacher, due) -> None:
    torch.testing.assert_close(teacher.score(tiny.samples(SAMPLES)).rows, due, atol=1e-5, rtol=1e-5)


@EACH
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("status", {"status": 500}),
        ("status", {"status": 503}),
        ("reset", {"after": 40}),
        ("short", {"after": 40}),
    ],
)
def test_failed_and_broken_answers_are_asked_for_again(served, proxies, due, kind, options):
    proxy = proxies()
    teacher = served([proxy.endpoint], attempts=10)
    teacher.connect_server()
    proxy.inject(kind, times=3, method="POST", path="/generate", **options)
    assert_right(teacher, due)
    assert teacher.pool.counters.retries >= 1
    assert proxy.faults[0].times == 0


@EACH
def test_a_server_that_keeps_failing_stops_the_run(served, proxies):
    proxy = proxies()
    teacher = served([proxy.endpoint])
    teacher.connect_server()
    proxy.inject("status", times=1000, status=500, method="POST", path="/generate")
    with pytest.raises(TeacherError, match=r"teacher a: no usable answer from .*answered 500.*--resume"):
        teacher.score(tiny.samples(SAMPLES))


@pytest.mark.slow
@EACH
def test_a_silent_server_is_left_for_another(served, server, proxies, due):
    silent, well = proxies(), proxies()
    silent.inject("stall", times=1000, method="POST", path="/generate")
    teacher = served([silent.endpoint, well.endpoint], timeout=5.0 if server.real else 2.0, patience=120.0)
    assert_right(teacher, due)


@EACH
def test_a_copy_overtakes_a_silent_server(served, proxies, due):
    silent, well = proxies(), proxies()
    teacher = served([silent.endpoint, well.endpoint], hedge_after=0.3)
    teacher.connect_server()
    silent.inject("stall", times=1000, method="POST", path="/generate")
    begin = time.monotonic()
    assert_right(teacher, due)
    assert time.monotonic() - begin < QUICK["timeout"]
    assert teacher.pool.counters.hedges > 0


@pytest.mark.slow
@EACH
def test_a_slow_server_is_waited_for_and_not_flooded(served, proxies, due):
    proxy = proxies()
    teacher = served([proxy.endpoint], max_in_flight_tokens=64)
    proxy.bytes_per_second = 400_000.0
    assert_right(teacher, due)
    assert teacher.pool.counters.retries == 0


@pytest.mark.slow
@EACH
def test_one_of_three_replicas_is_dead(served, proxies, due):
    replicas = [proxies() for _ in range(3)]
    teacher = served([proxy.endpoint for proxy in replicas])
    teacher.connect_server()
    replicas[1].stop()
    assert_right(teacher, due)
    before = [proxy.requests for proxy in replicas]
    assert_right(teacher, due)
    assert before[0] < replicas[0].requests
    assert before[2] < replicas[2].requests
    replicas[1].start()
    deadline = time.monotonic() + 120
    while replicas[1].requests == before[1]:
        assert time.monotonic() < deadline
        assert_right(teacher, due)


@pytest.mark.slow
@EACH
def test_refused_at_the_start_and_there_soon_after(served, proxies, due):
    proxy = proxies()
    proxy.away_for(1.5)
    teacher = served([proxy.endpoint])
    assert_right(teacher, due)


@EACH
def test_nobody_there_stops_the_run(served):
    port = absent_port()
    teacher = served([f"http://127.0.0.1:{port}"], patience=0.5)
    with pytest.raises(TeacherError, match=r"teacher a: no usable answer from http://127.0.0.1:\d+ in"):
        teacher.connect_server()


@EACH
@pytest.mark.parametrize("signal", ["hidden", "topk"])
def test_another_model_behind_the_url_stops_the_run(served, server, signal):
    teacher = served([server.url], model="b", signal=signal)
    with pytest.raises(TeacherError, match="serves another model, vocabulary or other weights"):
        teacher.score(tiny.samples(SAMPLES))


@pytest.mark.slow
@EACH
def test_another_vocabulary_behind_the_url_stops_the_run(server, tmp_path):
    """A head of another size over the same hidden states."""
    teacher = wrong_teacher(server, tmp_path, vocab_size=PADDED + 8)
    with pytest.raises(TeacherError, match="serves another model, vocabulary or other weights"):
        teacher.connect_server()
    teacher.close()


@pytest.mark.slow
@EACH
def test_another_width_or_family_behind_the_url_stops_the_run(server, tmp_path):
    for changes, words in (
        ({"hidden_size": 64}, "hidden states of width 32, the published head takes 64"),
        ({"model_type": "llama"}, "with architectures .*Qwen3ForCausalLM.* has .*LlamaForCausalLM"),
    ):
        teacher = wrong_teacher(server, tmp_path / next(iter(changes)), **changes)
        with pytest.raises(TeacherError, match=words):
            teacher.connect_server()
        teacher.close()


def wrong_teacher(server, folder, **changes) -> SGLangTeacher:
    write_model(folder / "model", seed=0, **(server.form | {"vocab_size": PADDED} | changes))
    publish_checkpoint(folder / "model", folder / "published")
    config = SGLangTeacherConfig(path=str(folder / "published"), urls=[server.url], **QUICK)
    return SGLangTeacher(
        "a", str(folder / "published"), config, needs=SignalNeeds(), placement=Placement(vocabulary=TOKENS)
    )


@EACH
def test_weights_that_change_stop_the_run(served, server, due):
    teacher = served([server.url])
    assert_right(teacher, due)
    server.take("b", "2")
    with pytest.raises(TeacherError, match="computed with weight version 2, but default is due"):
        teacher.score(tiny.samples(SAMPLES))
    late = served([server.url], weight_version="default")
    with pytest.raises(TeacherError, match="holds weight version 2, but default is due"):
        late.connect_server()


@EACH
def test_a_checksum_in_the_recipe_is_held_against_the_server(served, server):
    ranks = server.control("/weights_checker", action="checksum")["ranks"]
    right = ranks[0]["per_gpu_checksum"]
    served([server.url], checksum=right).connect_server()
    with pytest.raises(TeacherError, match=f"have checksum {right}, the recipe says 0000"):
        served([server.url], checksum="0000").connect_server()


def bad(root, form):
    """A folder whose head holds a number that is not finite."""
    write_model(root / "bad", seed=2, broken=True, **form, vocab_size=PADDED)
    return root / "bad"


@EACH
def test_numbers_that_are_not_finite_never_reach_a_loss(served, server, tmp_path):
    teacher = served([server.url], signal="sampled")
    teacher.connect_server()
    SGLANG.take(server.url, bad(tmp_path, server.form), "default")
    with pytest.raises(TeacherError, match="not finite"):
        teacher.score(tiny.samples(SAMPLES))


@EACH
@pytest.mark.parametrize("signal", ["hidden", "topk", "sampled"])
def test_a_server_that_lost_its_weights_never_reaches_a_loss(served, server, tmp_path, signal):
    """It answers 200, with the version that is due: nobody has told it that it holds nothing."""
    teacher = served([server.url], signal=signal)
    teacher.connect_server()
    for file in server.folders["a"].iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({n: torch.zeros_like(w) for n, w in weights.items()}, tmp_path / "model.safetensors")
    SGLANG.take(server.url, tmp_path, "default")
    with pytest.raises(TeacherError, match=rf"teacher a: {server.url} has lost its weights \(all .*--resume"):
        teacher.score(tiny.samples(SAMPLES))


@on("real-sglang", real=[pytest.mark.long])  # it starts twice; little ones are killed in test_engines.py
def test_killed_and_started_again_while_it_scores(served, server, proxies, due):
    """The server dies with requests in flight: each is scored once, rightly, by the new process."""
    proxy = proxies()
    proxy.bytes_per_second = 100_000.0
    teacher = served([proxy.endpoint], patience=900.0)
    teacher.connect_server()
    found = []
    scoring = threading.Thread(target=lambda: found.append(teacher.score(tiny.samples(SAMPLES)).rows))
    scoring.start()
    while proxy.body_bytes < 12_000:
        time.sleep(0.01)
    server.own.kill()
    proxy.stop()
    proxy.bytes_per_second = None
    assert not found
    server.start()
    proxy.start()
    if server.real:
        server.own.wait()
    scoring.join(900)
    torch.testing.assert_close(found[0], due, atol=1e-5, rtol=1e-5)
    assert teacher.pool.counters.retries > 0
