"""A server that is exchanged between two requests, at the same port, proves itself before its numbers are
used: real sockets, servers that are killed.
"""

import time

import pytest
import tiny
import torch
from dialects import SGLANG, VLLM
from little_models import LittleSGLang
from served_models import recipe_tokenizer

from opd.errors import TeacherError
from opd.served import http_pool
from opd.teachers.served_teacher import SignalNeeds

pytest.importorskip("aiohttp", reason="needs the extra sglang")
TOKENS = len(recipe_tokenizer())
SAMPLES = tiny.samples([(3, 4), (9, 7), (2, 12), (5, 5)])
SIGNALS = ["hidden", "topk", "sampled"]


@pytest.fixture
def models(vllm_models):
    return vllm_models


@pytest.fixture
def teacher_of(vllm_published, closing):
    def make(url, dialect=SGLANG, **settings):
        given = {"patience": 30.0, "asked": SignalNeeds(top_k=1), "vocabulary": TOKENS} | settings
        return closing(dialect.make_teacher(vllm_published["a"], [url], **given))

    return make


def assert_same(one, other):
    for name in ("rows", "ids", "logprobs", "sampled"):
        if (found := getattr(one, name, None)) is not None:
            torch.testing.assert_close(found, getattr(other, name))


OF_SGLANG = ((0, 1, 0), (1, 1, 0), (0, 0, 0), (0, 1, 1))
WAYS = [
    *(pytest.param("sglang", s, *way, marks=pytest.mark.slow) for s in SIGNALS for way in OF_SGLANG),
    *(("vllm", s, 0, tells, 0) for s in ("hidden", "sampled") for tells in (1, 0)),
]


@pytest.mark.some(1)
@pytest.mark.parametrize(("kind", "signal", "plugin", "tells", "quiet"), WAYS)
def test_what_comes_at_its_port_proves_itself(
    models, teacher_of, monkeypatch, kind, signal, plugin, tells, quiet
):
    """First the same model in another process, then another model."""
    monkeypatch.setattr(http_pool, "QUIET", 0.1 if quiet else 1000.0)

    def server(name, port=0):
        if kind == "sglang":
            return LittleSGLang(models[name], port, plugin=bool(plugin), tells=bool(tells))
        own = VLLM.little(models[name], port)
        own.pools = signal == "hidden"
        own.settings = own.settings if tells else None
        return own

    own = server("a")
    teacher = teacher_of(own.url, SGLANG if kind == "sglang" else VLLM, signal=signal)
    due = teacher.score(SAMPLES)
    for name in ("a", "kin"):
        own.kill()
        time.sleep(0.2 if quiet else 0.0)
        own = server(name, own.port)
        if name == "a":
            assert_same(teacher.score(SAMPLES), due)
            continue
        with pytest.raises(TeacherError, match="serves another model"):
            teacher.score(SAMPLES)
    own.kill()


def test_it_costs_no_request_a_sample(models, teacher_of):
    server = LittleSGLang(models["a"])
    teacher = teacher_of(server.url, signal="sampled")
    teacher.connect_server()
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
