"""A server that is exchanged between two requests, at the same port, proves itself before its numbers are
used: real sockets, servers that are killed.
"""

from __future__ import annotations

import time

import pytest
import tiny
import torch
from little_sglang import LittleSGLang
from little_vllm import little_vllm
from served_models import recipe_tokenizer, write_kin
from vllm_server import MODEL

from opd.config.teachers import SGLangTeacherConfig, VLLMTeacherConfig
from opd.errors import TeacherError
from opd.served import http_pool
from opd.teachers.kinds import Placement
from opd.teachers.served_teacher import Asked
from opd.teachers.sglang_teacher import SGLangTeacher
from opd.teachers.vllm_teacher import VLLMTeacher

pytest.importorskip("aiohttp", reason="needs the extra sglang")
TOKENS = len(recipe_tokenizer())
SAMPLES = tiny.samples([(3, 4), (9, 7), (2, 12), (5, 5)])
SIGNALS = ["hidden", "topk", "sampled"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_kin(tmp_path_factory.mktemp("kin"), **MODEL)


@pytest.fixture
def teacher_of(models):
    made = []

    def make(url, kind=SGLangTeacher, **settings):
        path, config = models["published"], SGLangTeacherConfig
        if kind is VLLMTeacher:
            config = VLLMTeacherConfig
        given = config(path=path, urls=[url], **({"patience": 30.0} | settings))
        asked, placement = Asked(top_k=1), Placement(vocabulary=TOKENS)
        made.append(kind("a", path, given, asked=asked, placement=placement))
        return made[-1]

    yield make
    for teacher in made:
        teacher.close()


def assert_same(one, other):
    for name in ("rows", "ids", "logprobs", "sampled"):
        if (found := getattr(one, name, None)) is not None:
            torch.testing.assert_close(found, getattr(other, name))


@pytest.mark.slow
@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize(
    ("plugin", "tells", "quiet"),
    [(False, True, False), (True, True, False), (False, False, False), (False, True, True)],
)
def test_sglang(models, teacher_of, monkeypatch, signal, plugin, tells, quiet):
    monkeypatch.setattr(http_pool, "QUIET", 0.1 if quiet else 1000.0)
    server = LittleSGLang(models["a"], plugin=plugin, tells=tells)
    teacher = teacher_of(server.url, signal=signal)
    due = teacher.score(SAMPLES)

    def exchange(model):
        server.kill()
        time.sleep(0.2 if quiet else 0.0)
        return LittleSGLang(models[model], server.port, plugin=plugin, tells=tells)

    server = exchange("a")  # the same model in another process
    assert_same(teacher.score(SAMPLES), due)
    server = exchange("kin")
    with pytest.raises(TeacherError, match="serves another model"):
        teacher.score(SAMPLES)
    server.kill()


@pytest.mark.some(1)
@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("signal", ["hidden", "sampled"])
def test_vllm(models, teacher_of, signal, tells):
    def server(folder, port=0):
        return little_vllm(models[folder], port)

    def settle(own):
        own.pools = signal == "hidden"
        own.settings = own.settings if tells else None

    with server("a") as (url, own):
        settle(own)
        teacher, port = teacher_of(url, VLLMTeacher, signal=signal), int(url.rpartition(":")[2])
        due = teacher.score(SAMPLES)
    with server("a", port) as (url, own):
        settle(own)
        assert_same(teacher.score(SAMPLES), due)
    with server("kin", port) as (url, own):
        settle(own)
        with pytest.raises(TeacherError, match="serves another model"):
            teacher.score(SAMPLES)


def test_it_costs_no_request_a_sample(models, teacher_of):
    server = LittleSGLang(models["a"])
    teacher = teacher_of(server.url, signal="sampled")
    teacher.connect()
    many = tiny.samples([(3, 4)] * 40)
    for _ in range(3):
        before = len(server.told)
        teacher.score(many)
        asked = server.told[before:]
        assert asked.count("/generate") == len(many)
    assert asked.count("/server_info") <= 2
    server.kill()
    assert teacher.pool.counters.retries == 0


def test_behind_a_proxy_that_keeps_its_connection_it_is_asked_after_it_was_quiet(models, teacher_of):
    server = LittleSGLang(models["a"])
    teacher = teacher_of(server.url, signal="sampled")
    teacher.score(SAMPLES)
    other = LittleSGLang(models["kin"])
    server.model, server.startup_time = other.model, other.startup_time  # the connections stay
    time.sleep(http_pool.QUIET + 0.1)
    with pytest.raises(TeacherError, match="serves another model"):
        teacher.score(SAMPLES)
    server.kill()
    other.kill()
