"""A little server that scores as SGLang does: a real model behind the messages that a real server was seen to
send, over connections that stay open. It can be killed, and another started at its port.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opd.kernels.ops import linear_logprobs
from opd.models.causal_lm import CausalLM, bytes_of
from opd.served.plugin.opd_hidden_states import FORMAT, KEY, Header, tokens_digest


class LittleSGLang:
    """Serves the model in `folder`; `tells` when it started, or is too old to. Tests change what they like of
    it.
    """

    def __init__(self, folder: Path, port: int = 0, *, plugin: bool = False, tells: bool = True) -> None:
        self.folder, self.model, self.plugin = folder, CausalLM.from_pretrained(folder), plugin
        self.startup_time = time.time() if tells else None
        self.told: list[str] = []
        """Paths that were asked for."""
        self._segments: dict[str, bytes] = {}
        self._open: set[socket.socket] = set()
        self._server = _Threads(("127.0.0.1", port), _answers(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Its connections break, as those of a process that is gone."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """`None` if it knows no such path."""
        if path == "/model_info":
            return {"model_path": str(self.folder), "weight_version": "default"}
        if path == "/server_info":
            told = {"dtype": "float32", "enable_return_hidden_states": True, "host": "h", "port": 1}
            return told if self.startup_time is None else told | {"startup_time": self.startup_time}
        if path == "/weights_checker":
            return {"ranks": [{"per_gpu_checksum": self.checksum()}]}
        if path == "/generate":
            return self.generate(body)
        if path == "/opd/hidden" and self.plugin:
            return {"format": FORMAT, "folder": "elsewhere", "proof": ""}
        return self._segments.pop(path.rpartition("/")[2], None)

    def checksum(self) -> str:
        whole = hashlib.sha256()
        for _, tensor in sorted(self.model.weights()):
            whole.update(bytes_of(tensor))
        return whole.hexdigest()

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Scores, and hidden states as JSON or in a segment."""
        ids, start = torch.tensor(body["input_ids"]), body.get("logprob_start_len", 0)
        with torch.no_grad():
            hidden = self.model.hidden(ids, torch.arange(len(ids)), [0, len(ids)])
            every = torch.arange(self.model.vocab_size).expand(len(ids), -1)
            logprobs = linear_logprobs(hidden, self.model.head(), every)
        meta: dict[str, Any] = {"weight_version": "default", "cached_tokens": 0}
        if body.get("return_logprob"):
            meta |= _scores(ids, logprobs, start, body.get("top_logprobs_num", 0))
        if asked := body["sampling_params"].get("custom_params", {}).get(KEY):
            meta[KEY] = [self._segment(body["input_ids"], hidden, **asked)]
        elif body.get("return_hidden_states"):
            meta["hidden_states"] = [hidden.tolist()]
        return {"meta_info": meta}

    def _segment(self, ids: list[int], hidden: Tensor, segment: str, start: int) -> dict[str, Any]:
        rows = hidden[start:].float().contiguous()
        numbers = bytes(bytes_of(rows))
        digests = tokens_digest(ids, start), hashlib.sha256(numbers).digest()
        header = Header(segment, "float32", *rows.shape, *digests)
        self._segments[segment] = header.packed() + numbers
        return {"width": rows.shape[1]}


def _scores(ids: Tensor, logprobs: Tensor, start: int, top_k: int) -> dict[str, Any]:
    entries = [[None, int(ids[start]), None]]
    for at in range(start, len(ids) - 1):
        entries.append([float(logprobs[at, ids[at + 1]]), int(ids[at + 1]), None])
    top: list[Any] = [None]
    for at in range(start, len(ids) - 1):
        values, found = logprobs[at].topk(top_k)
        top.append([[v, i, None] for v, i in zip(values.tolist(), found.tolist(), strict=True)])
    return {"input_token_logprobs": entries} | ({"input_top_logprobs": top} if top_k else {})


class _Threads(http.server.ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False


def _answers(own: LittleSGLang) -> type[http.server.BaseHTTPRequestHandler]:
    class Answers(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            own._open.add(self.connection)

        def finish(self) -> None:
            own._open.discard(self.connection)
            with contextlib.suppress(OSError):
                super().finish()

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            path = self.path.partition("?")[0]
            own.told.append(path)
            found = own.answer(path, body)
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return Answers


@contextlib.contextmanager
def little_sglang(folder: Path, **options: Any) -> Iterator[LittleSGLang]:
    """One, gone when the block ends."""
    server = LittleSGLang(folder, **options)
    try:
        yield server
    finally:
        server.kill()
