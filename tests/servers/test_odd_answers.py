"""What is said of a URL behind which there is something else than a server of the teacher's kind."""

import pytest
from little_models import LittleSGLang, little
from little_web import Reply, serving
from recipes import tiny_recipe
from seaweedfs import absent_port

from opd.pipelines.check.servers import check_kinds

pytest.importorskip("aiohttp", reason="needs the extra sglang")


@pytest.fixture
def model(vllm_models):
    return vllm_models["a"]


def answering(status, content, **headers):
    """The URL of what says the same to everything."""
    return serving(lambda path, body: Reply(status, content, headers))


def said(model, url, **settings):
    """By the doctor, of a teacher at `url`."""
    entry = {"path": str(model), "urls": [url]} | ({"type": "sglang"} | settings)
    local = {"path": str(model)}
    recipe = tiny_recipe(
        model=local, base=None, teachers={"sort": entry, "add3": local}, baselines={"methods": []}
    )
    finding, *_ = check_kinds(recipe)
    assert finding.level == "error"
    return finding.detail


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_redirect_is_named_with_where_it_leads(model, kind):
    with answering(307, b"", Location="https://login.example/?next=x") as url:
        detail = said(model, url, type=kind)
    assert "answered 307, a redirect to https://login.example/?next=x; give the URL of the server" in detail


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_page_is_named_as_one(model, kind):
    with answering(200, b"\n<!DOCTYPE html><html><body>welcome</body></html>") as url:
        assert "with a page of HTML in place of JSON" in said(model, url, type=kind)
    with answering(403, b"<html><body>no</body></html>") as url:
        detail = said(model, url, type=kind)
    assert "403 with a page of HTML;" in detail
    assert "<" not in detail
    with answering(200, b"ok") as url:
        assert "with something that is not JSON" in said(model, url, type=kind)


def test_what_is_posted_may_be_answered_by_a_page_too(model, monkeypatch):
    with little(LittleSGLang, model) as server:
        answer = server.answer
        page = {"/weights_checker": b"<html></html>"}
        monkeypatch.setattr(server, "answer", lambda path, body: page.get(path) or answer(path, body))
        assert "/weights_checker answered 200 with a page of HTML" in said(model, server.url, checksum="7")
        page["/weights_checker"] = b'{"ranks": [{}]}'
        assert "/weights_checker tells no checksum" in said(model, server.url, checksum="7")


def test_an_sglang_server_is_no_vllm_server(model, monkeypatch):
    with little(LittleSGLang, model) as server:
        answer = server.answer
        models = {"/v1/models": {"data": [{"id": "m", "max_model_len": 256}]}}
        monkeypatch.setattr(server, "answer", lambda path, body: models.get(path) or answer(path, body))
        detail = said(model, server.url, type="vllm")
    assert f"{server.url} is no vLLM server but one of SGLang" in detail


def test_plain_http_is_not_said_to_fail_for_its_certificate(model):
    detail = said(model, f"http://127.0.0.1:{absent_port()}")
    assert "Cannot connect to host 127.0.0.1" in detail
    assert "ssl" not in detail
