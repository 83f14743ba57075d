"""An SGLang teacher proves its layers: a head that is right, and a version that is due, are not enough."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import tiny
import torch
from little_models import LittleSGLang, little
from recipes import tiny_recipe
from served_models import MODEL, recipe_tokenizer, write_kin

from opd.config.teachers import SGLangTeacherConfig
from opd.errors import TeacherError
from opd.pipelines.doctor.checks import check_kinds
from opd.teachers import weight_probe
from opd.teachers.kinds import Placement
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.served_teacher import Asked
from opd.teachers.sglang_teacher import SGLangTeacher

pytest.importorskip("aiohttp", reason="needs the extra sglang")
TOKENS = len(recipe_tokenizer())
little_sglang = partial(little, LittleSGLang)
SAMPLES = [(3, 4), (1, 1), (5, 0), (9, 7)]
SIGNALS = ["hidden", "topk", "sampled"]
ANOTHER = "serves another model, vocabulary or other weights .* from what the model's own weights give"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_kin(tmp_path_factory.mktemp("kin"), **MODEL)


@contextmanager
def teacher_of(models, url, *, main=True, **settings):
    path = models["published"]
    config = SGLangTeacherConfig(path=path, urls=[url], **({"attempts": 2} | settings))
    asked, placement = Asked(top_k=5, main=main), Placement(vocabulary=TOKENS)
    teacher = SGLangTeacher("a", path, config, asked=asked, placement=placement)
    try:
        yield teacher
    finally:
        teacher.close()


@pytest.mark.some(1)
@pytest.mark.parametrize("plugin", [False, True])
def test_the_right_one_gives_its_models_rows(models, plugin):
    samples = tiny.samples(SAMPLES)
    with little_sglang(models["a"], plugin=plugin) as server, teacher_of(models, server.url) as teacher:
        found = teacher.score(samples).rows
    torch.testing.assert_close(found, LocalTeacher("here", models["a"]).score(samples).rows)


@pytest.mark.some(2)
@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("plugin", [False, True])
def test_other_layers_under_the_same_head_are_refused(models, signal, plugin):
    with (
        little_sglang(models["kin"], plugin=plugin) as server,
        teacher_of(models, server.url, signal=signal) as teacher,
        pytest.raises(TeacherError, match=ANOTHER),
    ):
        teacher.score(tiny.samples(SAMPLES))


def test_a_checksum_takes_the_place_of_reading_the_weights(models, monkeypatch):
    def not_read(*_):
        raise AssertionError("the weights are read")

    monkeypatch.setattr(weight_probe.StreamedTeacher, "score", not_read)
    with little_sglang(models["a"]) as server:
        with teacher_of(models, server.url, checksum=server.checksum()) as teacher:
            teacher.connect()
        with teacher_of(models, server.url, main=False) as teacher:  # another rank reads them
            teacher.connect()
    with (
        little_sglang(models["kin"]) as other,
        teacher_of(models, other.url, checksum=server.checksum()) as teacher,
        pytest.raises(TeacherError, match="have checksum"),
    ):
        teacher.connect()


def test_what_nothing_proves_is_refused_and_told_its_checksum(models, monkeypatch):
    def not_read(*_):
        raise TeacherError("it is a mixture of experts.")

    monkeypatch.setattr(weight_probe.StreamedTeacher, "score", not_read)
    with little_sglang(models["a"]) as server:
        told = f"since it is a mixture .* checksum to {server.checksum()}"
        with teacher_of(models, server.url) as teacher, pytest.raises(TeacherError, match=told):
            teacher.connect()
        with teacher_of(models, server.url, signal="topk") as teacher:
            teacher.connect()


@pytest.mark.parametrize("kind", ["published", "a"])
def test_the_doctor_finds_it(models, kind):
    def found(url):
        entry = {"type": "sglang", "path": str(models[kind]), "urls": [url]}
        local = {"path": str(models["a"])}
        recipe = tiny_recipe(
            model=local, base=None, teachers={"sort": entry, "add3": local}, baselines={"methods": []}
        )
        return next(iter(check_kinds(recipe)))

    with little_sglang(models["a"]) as right, little_sglang(models["kin"]) as wrong:
        assert found(right.url).level == "ok"
        assert "nats of what the model's own weights give" in found(right.url).detail
        assert "serves another model" in found(wrong.url).detail
