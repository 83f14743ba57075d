"""Hidden states of a vLLM server that pools: they are its model's, or the answer is not used."""

import contextlib

import numpy as np
import pytest
import tiny
import torch
from dialects import VLLM
from little_models import LittleVLLM, little
from recipes import tiny_recipe
from served_models import recipe_tokenizer

from opd.config.servers import ServerGroupConfig
from opd.config.teachers import VLLMTeacherConfig
from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.pipelines.doctor.checks import check_kinds
from opd.teachers import weight_probe
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.served_teacher import Asked

pytest.importorskip("aiohttp", reason="needs the extra sglang")
TOKENS = len(recipe_tokenizer())
SAMPLES = [(3, 4), (1, 1), (5, 0), (9, 7), (100, 100)]


def samples_of(shapes):
    """Without the last token, which is one too many for the teachers here."""
    made = tiny.samples(shapes)
    for sample in made:
        for ids in (sample.prompt_ids, sample.response_ids):
            np.minimum(ids, TOKENS - 2, out=ids)
    return made


@pytest.fixture
def pooling(vllm_models):
    with little(LittleVLLM, vllm_models["a"]) as server:
        server.pools = True
        yield server.url, server


@contextlib.contextmanager
def teacher_of(vllm_published, url, model="a", **settings):
    given = {"attempts": 1, "asked": Asked(temperature=0.7), "vocabulary": TOKENS - 1} | settings
    teacher = VLLM.make_teacher(vllm_published[model], [url], **given)
    try:
        yield teacher
    finally:
        teacher.close()


def test_they_are_the_models_own_at_any_temperature_and_padding(pooling, vllm_published, vllm_models):
    samples = samples_of(SAMPLES)
    with teacher_of(vllm_published, pooling[0]) as teacher:
        found, head = teacher.score(samples).rows, teacher.load_head()
        assert isinstance(head, Head)
        assert teacher.pool.counters.requests > 0
    torch.testing.assert_close(found, LocalTeacher("here", vllm_models["a"]).score(samples).rows)


def test_what_nothing_proves_is_refused(pooling, vllm_published, monkeypatch):
    def not_read(*_):
        raise TeacherError("it is a mixture of experts.")

    monkeypatch.setattr(weight_probe.StreamedTeacher, "score", not_read)
    with (
        teacher_of(vllm_published, pooling[0]) as teacher,
        pytest.raises(TeacherError, match=r"nothing proves .* since it is a mixture of experts; set signal"),
    ):
        teacher.score(samples_of(SAMPLES))


def test_in_bfloat16_as_the_server_tells(pooling, vllm_published, vllm_models):
    url, server = pooling
    server.settings["dtype"] = "torch.bfloat16"
    samples = samples_of(SAMPLES)
    with teacher_of(vllm_published, url) as teacher:
        found = teacher.score(samples).rows
    due = LocalTeacher("here", vllm_models["a"]).score(samples).rows
    assert torch.equal(found, due.bfloat16().float())


def test_a_server_that_tells_nothing_is_asked_in_float32(pooling, vllm_published, vllm_models):
    url, server = pooling
    server.settings = None
    samples = samples_of(SAMPLES)
    with teacher_of(vllm_published, url) as teacher:
        found = teacher.score(samples).rows
    torch.testing.assert_close(found, LocalTeacher("here", vllm_models["a"]).score(samples).rows)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda content: content[:-4], r"hidden states of \d+ bytes came, due are"),
        (lambda content: b"", "hidden states of 0 bytes came"),
        (lambda content: content * 3, "more than the"),
        (lambda content: np.full(len(content) // 4, np.nan, "<f4").tobytes(), "is not finite"),
        (lambda content: bytes(len(content)), "has lost its weights"),
    ],
)
def test_what_is_damaged_is_never_used(pooling, vllm_published, change, sentence):
    url, server = pooling
    with teacher_of(vllm_published, url, patience=0.1) as teacher:
        teacher.connect()
        server.change = change
        with pytest.raises(TeacherError, match=sentence):
            teacher.score(samples_of([(3, 4)]))


def test_another_model_another_width_and_a_server_that_writes_are_found(pooling, vllm_published, vllm_models):
    url, server = pooling
    with (
        teacher_of(vllm_published, url, "b") as teacher,
        pytest.raises(TeacherError, match="model's own weights give"),
    ):
        teacher.score(samples_of(SAMPLES))
    server.change = lambda content: content * 2
    with (
        teacher_of(vllm_published, url) as teacher,
        pytest.raises(TeacherError, match=r"of width 64, .* takes 32"),
    ):
        teacher.score(samples_of(SAMPLES))
    server.change, server.pools = lambda content: content, False
    with (
        teacher_of(vllm_published, url) as teacher,
        pytest.raises(TeacherError, match="start it with --runner pooling"),
    ):
        teacher.score(samples_of(SAMPLES))
    server.pools = True
    with (
        teacher_of(vllm_published, url) as teacher,
        pytest.raises(TeacherError, match=r"258 tokens.* take 257"),
    ):
        teacher.score(samples_of([(200, 58)]))


def test_the_doctor_asks_for_them(pooling, vllm_published, vllm_models):
    url, server = pooling

    def visited(path):
        entry = {"type": "vllm", "path": str(path), "urls": [url]}
        recipe = tiny_recipe(
            model={"path": str(vllm_models["a"])},
            base=None,
            teachers={"sort": entry, "add3": {"path": str(vllm_models["a"])}},
            distill={"steps": 1},
            baselines={"methods": []},
        )
        return next(iter(check_kinds(recipe)))

    assert "of what the model's own weights give" in visited(vllm_published["a"]).detail
    assert "of what the model's own weights give" in visited(vllm_models["a"]).detail
    assert "serves another model" in visited(vllm_models["b"]).detail
    assert "serves another model" in visited(vllm_published["b"]).detail
    server.pools = False
    assert "--pooler-config" in visited(vllm_models["a"]).detail


def test_a_group_is_started_to_pool():
    group = ServerGroupConfig(
        type="vllm", arguments=VLLMTeacherConfig(path="a", urls=["http://a:1"]).server_arguments
    )
    assert group.words[:4] == ["--runner", "pooling", "--convert", "embed"]
    scores = VLLMTeacherConfig(path="a", urls=["http://a:1"], signal="topk").server_arguments
    assert scores == {"max-logprobs": -1}
