"""A vLLM server on localhost: a real one, in an environment of its own that is installed once and kept, or
what a real one has answered.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served_models import QWEN3, write_model
from sglang_server import SGLangServer, install

from opd.config.servers import ServerGroupConfig
from opd.kernels.ops import linear_logprobs, linear_topk
from opd.pipelines.launch.started_server import StartedServer
from opd.teachers.local_teacher import LocalTeacher
from opd.types import Sample, TeacherTargets, TokenLogprobs, TopKLogprobs

CPU_SERVER = Path(__file__).resolve().parents[2] / "examples" / "served" / "vllm_cpu_server"
SERVE = ["bash", str(CPU_SERVER / "serve.sh")]
MODEL = QWEN3 | {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Its attention on a CPU knows heads of 32 and more."""
RECORDED = Path(__file__).with_name("vllm_recorded.json")
"""What vllm-cpu 0.32.0 answered of the first of `write_vllm_models`, in float32."""


def write_vllm_models(folder: Path, **changes: int) -> dict[str, Path]:
    """`a` and `b` below `folder`, whose heads have a row for each token and no more, but for `changes`."""
    paths = {name: folder / name for name in ("a", "b")}
    for seed, path in enumerate(paths.values()):
        write_model(path, seed=seed, **MODEL, **changes)
    return paths


def require_vllm() -> None:
    """Skip the test where no vLLM server can be installed."""
    reason = install(CPU_SERVER)
    if reason is not None:
        pytest.skip(f"no vLLM server: {reason}")


def assert_own(model: Path, samples: Sequence[Sample], topk: TeacherTargets, sampled: TeacherTargets) -> None:
    """Both are the log-probabilities that `model` gives in this process; of tokens that are equally likely
    any may be among the most likely ones.
    """
    assert isinstance(topk, TopKLogprobs)
    assert isinstance(sampled, TokenLogprobs)
    teacher = LocalTeacher("here", model)
    rows, head = teacher.score(samples).rows, teacher.load_head()
    ids = torch.from_numpy(np.concatenate([sample.response_ids for sample in samples]).astype(np.int64))
    due, (_, most, *_) = linear_logprobs(rows, head, ids), linear_topk(rows, head, topk.ids.shape[1])
    assert all(len(set(row)) == len(row) for row in topk.ids.tolist())
    for found, wanted in (
        (topk.logprobs, most),
        (topk.logprobs, linear_logprobs(rows, head, topk.ids)),
        (topk.sampled, due),
        (sampled.logprobs, due),
    ):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


class VLLMServer(SGLangServer):
    """A real one."""

    start_seconds = 1500
    """Three processes, each of which imports all of it."""

    def __init__(
        self,
        model: Path,
        log: Path,
        environment: dict[str, str] | None = None,
        **arguments: bool | int | str,
    ) -> None:
        self.model, self.log = model, log
        self._group = ServerGroupConfig(
            type="vllm",
            command=SERVE,
            arguments={"max-model-len": 256, **arguments},
            environment={"PYTHON": sys.executable} | (environment or {}),
        )
        self._server = StartedServer("vllm", self._group, 0, model, log)


@contextlib.contextmanager
def serving(answers: type[http.server.BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """The URL of a server that answers so, in this process, until the block ends."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


Change = Callable[[str, Any], Any]


@contextlib.contextmanager
def recorded_server(change: Change = lambda path, answer: answer) -> Iterator[str]:
    """The URL of a server that says what was recorded, as `change(path, answer)` leaves it."""
    found = json.loads(RECORDED.read_text())
    scored = {(tuple(tokens), k): answer for tokens, k, answer in found["/v1/completions"]}

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            self._say(path, found.get(path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked = tuple(body.get("prompt", ())), body.get("prompt_logprobs")
            self._say(self.path, scored.get(asked))

        def _say(self, path: str, answer: Any) -> None:
            answer = change(path, json.loads(json.dumps(answer)))
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(OSError):  # a client that has heard enough
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Answers) as url:
        yield url
