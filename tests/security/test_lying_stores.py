"""A store that lists, sizes and sends what is not there, and adapters that others have published."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hostile import NAMES, SIZES

from opd.errors import StorageError
from opd.retry import Retry
from opd.storage.object_store import ObjectStore, StoreOptions
from opd.teachers.published_adapter import PublishedAdapter, _adapter_digest


class Liar:
    """What a small S3 server on loopback says, whatever it is asked."""

    def __init__(self) -> None:
        self.size: Any = 5
        self.body = b"hello"
        self.range: str | None = None


@contextlib.contextmanager
def served(liar: Liar) -> Iterator[ObjectStore]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(liar.size))
            self.end_headers()

        def do_GET(self) -> None:
            body = liar.body
            self.send_response(206)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Range", liar.range or f"bytes 0-{len(body) - 1}/{liar.size}")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = StoreOptions(
        retry=Retry(attempts=2, pause=0.01, longest=0.01),
        stall_seconds=2.0,
        endpoint=f"http://127.0.0.1:{server.server_port}",
    )
    try:
        with ObjectStore.open("s3://b/models", options=options) as store:
            yield store
    finally:
        server.shutdown()
        server.server_close()


def one_sentence(call: Callable[[], Any]) -> None:
    with pytest.raises(StorageError) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.fixture
def liar(monkeypatch):
    pytest.importorskip("s3fs")
    for name, value in {"AWS_ACCESS_KEY_ID": "anybody", "AWS_SECRET_ACCESS_KEY": "anything"}.items():
        monkeypatch.setenv(name, value)
    return Liar()


@pytest.mark.parametrize("size", SIZES, ids=lambda size: repr(size)[:12])
def test_a_size_that_is_a_lie_is_one_sentence(liar, size):
    """No memory is asked for, and nothing else is returned, for what is not there."""
    liar.size = size
    with served(liar) as store:
        if type(size) is int and size in (0, 1, 2**31):
            return
        one_sentence(lambda: store.get("x"))


@pytest.mark.parametrize(
    "span",
    [
        "bytes 1-5/5",
        "bytes 0-4/3",
        "bytes 0-3/4",
        "bytes -1-4/5",
        "bytes 0-99999999999999999999/*",
        "x",
        "",
        "*",
    ],
)
def test_a_range_that_is_a_lie_is_one_sentence(liar, span):
    liar.range, liar.body = span or " ", b"hell" if span == "bytes 0-3/4" else b"hello"
    with served(liar) as store, contextlib.suppress(StorageError):
        assert store.get("x") == b"hello"  # all of what was asked for, whatever it is called


def made(folder: Path) -> dict[str, Any]:
    """A published adapter of one layer; its description."""
    weights = {"model.x.lora_A.weight": torch.ones(2, 4), "model.x.lora_B.weight": torch.ones(4, 2)}
    data = safetensors.torch.save(weights)
    sha256, base = hashlib.sha256(data).hexdigest(), "a" * 64
    digest = _adapter_digest(base, 2.0, sha256)
    path = f"{digest[:16]}/adapter.safetensors"
    (folder / path).parent.mkdir(parents=True)
    (folder / path).write_bytes(data)
    return {
        "format": "opd-published-adapter", "format_version": 1, "digest": digest,
        "base": {"url": str(folder / "base"), "digest": base}, "scaling": 2.0,
        "weights": {"path": path, "sha256": sha256},
    }  # fmt: skip


def sealed(described: dict[str, Any]) -> dict[str, Any]:
    """With the digest that its content has, if it has one."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        base, weights = described["base"], described["weights"]
        described["digest"] = _adapter_digest(base["digest"], described["scaling"], weights["sha256"])
    return described


FOREIGN = ["http://127.0.0.1:9/x", "ftp://h/x", "gs://b/x", "memory://x", "simplecache::s3://b/x",
           "S3 ://b/x", "github://a:b@c", "zip://x::http://h/x",
           "", "a\nb", "\0", "x" * 5000, None, 3, [], {}]  # fmt: skip
CASES = [
    *[("base", "url", url) for url in FOREIGN],
    *[("base", "digest", digest) for digest in [*SIZES, "a" * 63, "A" * 64, "g" * 64, "../" * 21 + "a"]],
    *[("weights", "path", name) for name in NAMES],
    *[("weights", "sha256", digest) for digest in [*SIZES, "b" * 64, "../../escaped"]],
    *[("digest", None, name) for name in [*NAMES, *SIZES, "b" * 64]],
    *[("scaling", None, value) for value in SIZES if type(value) is not float],
    *[("format_version", None, value) for value in SIZES if value != 1],
    *[(key, None, value) for key in ("format", "base", "weights") for value in SIZES],
]


def test_descriptions_of_adapters_that_nobody_published_are_refused(tmp_path):
    """Also with the digest that belongs to the changed content."""
    good, target = made(tmp_path / "store"), tmp_path / "store" / "adapter.json"
    target.write_text(json.dumps(good))
    assert PublishedAdapter.open(tmp_path / "store").scaling == 2.0
    before = {path for path in tmp_path.rglob("*")}
    for key, inner, value in CASES:
        for resealed in (False, True):
            changed = json.loads(json.dumps(good))
            (changed if inner is None else changed[key])[inner or key] = value
            if resealed and key != "digest":
                changed = sealed(changed)
            target.write_text(json.dumps(changed))
            one_sentence(lambda: PublishedAdapter.open(tmp_path / "store"))
    for data in (b"", b"{", b"[]", b"null", b"[" * 60_000, b"{}" + b" " * 70_000, b"\xff\xfe", b"NaN"):
        target.write_bytes(data)
        one_sentence(lambda: PublishedAdapter.open(tmp_path / "store"))
    assert {path for path in tmp_path.rglob("*")} == before
