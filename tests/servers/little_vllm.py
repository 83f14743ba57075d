"""A little server that speaks as vLLM does to who writes on it: a real model behind the messages that a real
server was seen to send.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import http.server
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from vllm_server import serving

from opd.kernels.ops import linear_logprobs
from opd.models.causal_lm import CausalLM, bytes_of
from opd.models.peft_folder import merge_into, read_peft
from opd.rollout.weight_proof import FUSED, VOCABULARY_ROWS

RANK = "dp0:pp0:pcp0:tp0:"


class LittleVLLM:
    """What it holds and was told. Tests change what they like of it."""

    def __init__(self, folder: Path) -> None:
        self.start_folder, self.model, self.version = folder, CausalLM.from_pretrained(folder), "default"
        self.settings: dict[str, Any] | None = {
            "dtype": "torch.float32",
            "logprobs_mode": "processed_logprobs",
            "max_model_len": 256,
        }
        self.paused = False
        self.pauses = 0
        self.told: list[str] = []
        self.closed: dict[str, int] = {}
        self.names_checked = True
        """Paths that answer with that status."""
        self.packs = True
        """Whether it packs linear layers away, as on a CPU."""
        self.seconds = 0.0
        """Between two tokens."""
        self.speculates: dict[str, Any] | None = None
        self.pools = False
        """Whether it gives hidden states and writes nothing."""
        self.change: Callable[[bytes], bytes] = lambda content: content
        """Of hidden states, before they are sent."""
        self.reads = True
        """Whether it takes the weights that it is told to read."""
        self.lora: dict[str, Any] | None = None
        """What adapters it was started for."""
        self.loaded: dict[str, CausalLM] = {}
        """The model with each adapter that it has."""
        self.folders: list[Path] = []
        """Those that adapters were loaded from, in turn."""
        self.knows: Callable[[str], bool] = lambda name: True
        """Whether it applies the adapter's tensors for the weight of that name."""

    def reload(self, folder: Path) -> None:
        """Hold the weights of `folder`."""
        if self.reads:
            files = sorted(folder.glob("*.safetensors"))
            self.model.load_weights([item for file in files for item in load_file(file).items()])

    def lose(self) -> None:
        """What it was told, as one that was started again."""
        self.reload(self.start_folder)
        self.loaded.clear()
        self.version, self.paused = "default", False

    def load(self, name: str, folder: Path) -> None:
        """Have the adapter in `folder`."""
        found = read_peft(folder)
        known = {weight: pair for weight, pair in found.pairs.items() if self.knows(weight)}
        model = copy.deepcopy(self.model)
        merge_into(model.module, replace(found, pairs=known, targets=()), folder)
        self.loaded[name] = model
        self.folders.append(folder)

    def logprobs(
        self, ids: list[int], count: int, temperature: float = 1.0, adapter: str | None = None
    ) -> np.ndarray:
        """[count, V] after each of the last `count` of `ids`."""
        model = self.model if adapter is None else self.loaded[adapter]
        with torch.no_grad():
            tokens, rows = torch.tensor(ids), model.vocab_size
            hidden = model.hidden(tokens, torch.arange(len(ids)), [0, len(ids)])[-count:]
            every = torch.arange(rows).expand(len(hidden), rows)
            return linear_logprobs(hidden, model.head(), every, temperature=temperature).numpy()

    def hidden(self, body: dict[str, Any]) -> bytes:
        """Of every token that is sent."""
        ids, dtype = torch.tensor(body.pop("input")), body.pop("embed_dtype")
        assert body == {
            "task": "token_embed",
            "use_activation": False,
            "encoding_format": "bytes_only",
            "endianness": "little",
            "add_special_tokens": False,
        }
        with torch.no_grad():
            found = self.model.hidden(ids, torch.arange(len(ids)), [0, len(ids)])
        return self.change(bytes(bytes_of(found.to(getattr(torch, dtype)))))

    def checksums(self) -> dict[str, str]:
        own, found = dict(self.model.weights()), {}
        for name, tensor in own.items():
            if "proj" in name:
                continue
            if "embed_tokens" in name or "lm_head" in name:
                missing = -len(tensor) % VOCABULARY_ROWS
                tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
            found[name] = hashlib.sha256(bytes_of(tensor)).hexdigest()
        for name in [name for name in own if "proj" in name]:
            fused = next((f for f, parts in FUSED.items() if any(part in name for part in parts)), None)
            parts = [name]
            if fused is not None:
                single = next(part for part in FUSED[fused] if part in name)
                parts = [name.replace(single, part) for part in FUSED[fused]]
                name = name.replace(single, fused)
            whole = bytes_of(torch.cat([own[part] for part in parts]))
            found[name] = hashlib.sha256(b"" if self.packs else whole).hexdigest()
        return {RANK + name: told for name, told in found.items()}

    def refuses(self, path: str, body: dict[str, Any]) -> int | None:
        """The status with which it declines; `None` if it does not."""
        if path in self.closed:
            return self.closed[path]
        if "model" in body and body["model"] not in self.loaded and self.names_checked:
            return 404
        if max(body.get("token_ids", [0])) >= 2**31 - 1:
            return 400
        if self.lora is None or path not in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            return None
        known, loads = body.get("lora_name") in self.loaded, path == "/v1/load_lora_adapter"
        return 400 if loads and (known or not body) else None if loads or known else 404

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """To anything but what is written; `None` if it knows no such path."""
        if path == "/server_info":
            config = {"model_config": self.settings, "instance_id": str(id(self))}
            config |= {"speculative_config": self.speculates, "lora_config": self.lora}
            return None if self.settings is None else {"vllm_config": config}
        if path == "/v1/models":
            own = {"id": "m", "root": str(self.start_folder), "parent": None, "max_model_len": 256}
            return {"data": [own, *({"id": name, "parent": "m"} for name in self.loaded)]}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/weight_checker":
            return {"checksums": self.checksums()}
        if path == "/pooling" and self.pools:
            return self.hidden(body)
        if path == "/v1/completions" and not self.pools:
            assert not self.paused  # a real one would not answer
            ids = body["prompt"]
            rows = self.logprobs(ids, len(ids), adapter=body.get("model"))
            scored = [{str(t): {"logprob": float(rows[at, t])}} for at, t in enumerate(ids[1:])]
            return {"choices": [{"prompt_logprobs": [None, *scored]}]}
        return self._control(path, body)

    def _control(self, path: str, body: dict[str, Any]) -> Any:
        if path.endswith("_lora_adapter") and self.lora is not None:
            return self._adapter(path, body)
        if path == "/pause":
            self.paused, self.pauses = True, self.pauses + 1
        elif path == "/resume":
            self.paused = False
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.reload(Path(body["kwargs"]["weights_path"]))
            return {"results": [None]}
        elif path != "/reset_prefix_cache":
            return None
        return {"success": True}

    def _adapter(self, path: str, body: dict[str, Any]) -> bytes:
        if path == "/v1/unload_lora_adapter":
            del self.loaded[body["lora_name"]]
        else:
            self.load(body["lora_name"], Path(body["lora_path"]))
        return b"Success: done"

    def write(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The choices of a stream's messages: the most likely token always."""
        sampling, ids, pauses, version = body["sampling_params"], list(body["token_ids"]), self.pauses, ""
        adapter = body.get("model")
        while self.paused:
            time.sleep(0.005)
            pauses = self.pauses
        for place in range(sampling["max_tokens"]):
            if self.pauses != pauses:
                yield {"finish_reason": "abort", "token_ids": [], "weight_versions": [_span(version, place)]}
                return
            row = self.logprobs(ids, 1, sampling["temperature"] or 1.0, adapter)[0]
            token, version = int(row.argmax()), self.version
            ids.append(token)
            content = [{"token_id": token, "logprob": float(row[token]), "rank": 1, "top_logprobs": []}]
            choice = {"index": 0, "finish_reason": None, "token_ids": [token], "weight_versions": None}
            choice["logprobs"] = {"content": content}
            if token in sampling["stop_token_ids"] or place == sampling["max_tokens"] - 1:
                stops = token in sampling["stop_token_ids"]
                choice |= {"finish_reason": "stop" if stops else "length"}
                choice |= {"weight_versions": [_span(version, place + 1)]}
            yield choice
            if choice["finish_reason"]:
                return
            time.sleep(self.seconds)


def _span(version: str, end: int) -> dict[str, Any]:
    return {"version": version, "start": 0, "end": end}


@contextlib.contextmanager
def little_vllm(folder: Path, port: int = 0) -> Iterator[tuple[str, LittleVLLM]]:
    """Its URL, and what it is."""
    own = LittleVLLM(folder)

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            path = self.path.partition("?")[0]
            own.told.append(path)
            if (status := own.refuses(path, body)) is not None:
                self._say(status, {"error": "closed"})
            elif path == "/inference/v1/generate":
                self._stream(body) if body else self._say(400, {"error": "token_ids is missing"})
            else:
                found = own.answer(path, body)
                self._say(404 if found is None else 200, found)

        def _say(self, status: int, answer: Any) -> None:
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _stream(self, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # a client that has let it go
                for choice in own.write(body):
                    self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
                    self.wfile.flush()
                self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            pass

    with serving(Answers, port) as url:
        try:
            yield url, own
        finally:
            own.paused = False
