"""Little servers that score and write as those of SGLang and of vLLM do: a real model behind the messages
that real ones were seen to send. A server program more is one class more.
"""

import base64
import contextlib
import copy
import functools
import hashlib
import itertools
import json
import re
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from little_web import LittleWeb, Reply
from safetensors.torch import load_file
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from opd.models.causal_lm import CausalLM, bytes_of
from opd.models.hf_folder import ADAPTER_WEIGHTS
from opd.models.peft_folder import merge_into, read_peft
from opd.models.stored_form import StoredForm
from opd.rollout.sglang_engine import GroupMember, weight_group
from opd.rollout.weight_proof import FUSED, VOCABULARY_ROWS
from opd.served.plugin.opd_hidden_states import FORMAT, KEY, SegmentHeader, tokens_digest

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
RANK = "dp0:pp0:pcp0:tp0:"
CONTEXT = 256
ROUTED = "enable_return_routed_experts"
"""The setting without which SGLang gives no expert choices."""
END = 1
"""The end of the recipe's tokenizer, at which SGLang ends what it writes."""


@dataclass(frozen=True)
class Asked:
    """What is to be written."""

    ids: list[int]
    most: int
    stops: Sequence[int]
    temperature: float
    seed: int
    never: Sequence[int] = ()
    """Tokens that a bias forbids."""
    adapter: str | None = None
    cut: bool = False
    """Whether the most likely token alone is left."""


_model = functools.cache(CausalLM.from_pretrained)


@dataclass
class _Question:
    """Whose hidden states are to be computed."""

    ids: list[int]
    adapter: str | None
    found: Tensor | None = None


class LittleServer:
    """Serves the model in `folder`. Tests change what they like of it."""

    host = "127.0.0.1"
    nested = ""
    """Stands between a layer's experts and their tensors in its names."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder, self.model, self.version = folder, copy.deepcopy(_model(folder)), "default"
        self.told: list[str] = []
        """Paths that were asked for."""
        self.closed: dict[str, int] = {}
        """Paths that answer with that status."""
        self.paused = False
        self.ends = 0
        """How often all that was being written was ended."""
        self.seconds = 0.0
        """Between two tokens."""
        self.reads = True
        """Whether it takes the weights that it is told to read."""
        self.lora: dict[str, Any] | None = None
        """What adapters it was started for."""
        self.loaded: dict[str, CausalLM] = {}
        """The model with each adapter that it has."""
        self.folders: list[Path] = []
        """Those that adapters were loaded from, in turn."""
        self.received = 0
        """Bytes of weights that it was given."""
        self.knows: Callable[[str], bool] = lambda name: True
        """Whether it applies the adapter's tensors for the weight of that name."""
        self._waiting: list[_Question] = []
        self._computing = threading.Lock()
        self._web = LittleWeb(self._say, port, self.host)
        self.port, self.url = self._web.port, self._web.url

    def kill(self) -> None:
        """End it as a process that is gone ends."""
        self.paused, self.ends = False, self.ends + 1
        self._web.kill()

    def _say(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/received":
            return {"bytes": self.received}
        self.told.append(path)
        status = self.refuses(path, body)
        return Reply(status) if status is not None else self.answer(path, body)

    def refuses(self, path: str, body: dict[str, Any]) -> int | None:
        """The status with which it declines; `None` if it does not."""
        if path in self.closed:
            return self.closed[path]
        if self.lora is None or not path.endswith("load_lora_adapter"):
            return None
        known, loads = body.get("lora_name") in self.loaded, path.endswith("/load_lora_adapter")
        return 400 if loads and (known or not body) else None if loads or known else 404

    @abstractmethod
    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """See `little_web.Say`."""

    def reload(self, folder: Path) -> None:
        """Hold the weights of `folder`."""
        files = sorted(folder.glob("*.safetensors"))
        self.take([item for file in files for item in load_file(file).items()])

    def take(self, weights: list[tuple[str, Tensor]]) -> None:
        """Hold `weights`, which have the names of published files, as servers read them."""
        self.received += sum(tensor.nbytes for _, tensor in weights)
        if self.reads:
            form = StoredForm(self.model.module)
            assert {name for name, _ in weights} == form.saved.keys()
            self.model.load_weights(form.of_module(dict(weights)).items())

    def lose(self) -> None:
        """What it was told, as one that was started again."""
        self.reload(self.folder)
        self.loaded.clear()
        self.version, self.paused = "default", False

    def load(self, name: str, folder: Path) -> None:
        """Have the adapter in `folder`."""
        found = read_peft(folder)
        known = {weight: pair for weight, pair in found.pairs.items() if self.knows(weight)}
        model = copy.deepcopy(self.model)
        merge_into(model.module, replace(found, pairs=known, targets=()), folder)
        self.loaded[name] = model
        self.received += (folder / ADAPTER_WEIGHTS).stat().st_size
        self.folders.append(folder)

    def adapter(self, path: str, body: dict[str, Any]) -> None:
        """Load or forget one, as `path` says."""
        if path.endswith("/unload_lora_adapter"):
            del self.loaded[body["lora_name"]]
        else:
            self.load(body["lora_name"], Path(body["lora_path"]))

    def models(self) -> dict[str, Any]:
        """What both kinds say of the base and the adapters that they have."""
        own = {"id": "m", "root": str(self.folder), "parent": None, "max_model_len": CONTEXT}
        return {"data": [own, *({"id": name, "parent": "m"} for name in self.loaded)]}

    def hidden(self, ids: list[int], adapter: str | None = None) -> Tensor:
        """[T, D] of every token. Who asks while something is computed is computed next, all in one pass."""
        question = _Question(ids, adapter)
        self._waiting.append(question)
        with self._computing:
            if question.found is None:
                batch = [one for one in self._waiting if one.adapter == adapter]
                self._waiting = [one for one in self._waiting if one.adapter != adapter]
                model, lengths = self._with(adapter), [len(one.ids) for one in batch]
                every = torch.tensor([token for one in batch for token in one.ids])
                places = torch.cat([torch.arange(length) for length in lengths])
                with torch.no_grad():
                    rows = model.hidden(every, places, [0, *itertools.accumulate(lengths)])
                for one, part in zip(batch, rows.split(lengths), strict=True):
                    one.found = part
        assert question.found is not None
        return question.found

    def logprobs(self, hidden: Tensor, adapter: str | None = None, temperature: float = 1.0) -> Tensor:
        """[N, V] after hidden states [N, D]."""
        with torch.no_grad():
            logits = hidden.float() @ self._with(adapter).head().weight.float().T
            return torch.log_softmax(logits / temperature, -1)

    def _with(self, adapter: str | None) -> CausalLM:
        return self.model if adapter is None else self.loaded[adapter]

    def write(self, asked: Asked) -> Iterator[tuple[int, float, str, str | None]]:
        """Token, log-probability, version of the weights, and why it ends there; what is ended in its middle
        has a last entry without a token.
        """
        ids, version = list(asked.ids), self.version
        while self.paused:
            time.sleep(0.005)
        ends = self.ends
        for place in range(asked.most):
            while self.paused and self.ends == ends:
                time.sleep(0.005)
            if self.ends != ends:
                yield -1, 0.0, version, "abort"
                return
            version = self.version
            token, logprob = self._draw(ids, asked)
            ids.append(token)
            done = "stop" if token in asked.stops else "length" if place == asked.most - 1 else None
            yield token, logprob, version, done
            if done:
                return
            time.sleep(self.seconds)

    def _draw(self, ids: list[int], asked: Asked) -> tuple[int, float]:
        """One token by the noise of its seed and place."""
        last = self.hidden(ids, asked.adapter)[-1:]
        row = self.logprobs(last, asked.adapter, asked.temperature or 1.0)[0].numpy()
        if asked.never:
            row[list(asked.never)] = -np.inf
            row -= np.logaddexp.reduce(row)
        greedy = asked.cut or not asked.temperature
        noise = 0.0 if greedy else np.random.default_rng([asked.seed, len(ids)]).gumbel(size=len(row))
        token = int((row + noise).argmax())
        return token, float(row[token])

    def tensors(self) -> dict[str, bytes]:
        """What it holds of its model by name, fused and padded."""
        form, found = StoredForm(self.model.module), {}
        own = {key: one for item in self.model.weights() for key, one in form.of_files(*item).items()}
        for name, tensor in own.items():
            if (match := EXPERT.fullmatch(name)) is not None:
                block, number, single = match.groups()
                if number == "0" and single in ("gate_proj", "w1"):
                    up, down = ("up_proj", "down_proj") if single == "gate_proj" else ("w3", "w2")
                    numbers = (key.removeprefix(f"{block}.") for key in own if key.startswith(f"{block}."))
                    every = [f"{block}.{n}" for n in sorted({int(key.split(".")[0]) for key in numbers})]
                    both = [torch.cat([own[f"{e}.{single}.weight"], own[f"{e}.{up}.weight"]]) for e in every]
                    rows = [own[f"{e}.{down}.weight"] for e in every]
                    found[f"{block}{self.nested}.w13_weight"] = bytes_of(torch.stack(both))
                    found[f"{block}{self.nested}.w2_weight"] = bytes_of(torch.stack(rows))
                continue
            if "embed_tokens" in name or "lm_head" in name:
                missing = -len(tensor) % VOCABULARY_ROWS
                tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
            fused = next((f for f, parts in FUSED.items() if any(part in name for part in parts)), None)
            if fused is not None:
                single = next(part for part in FUSED[fused] if part in name)
                tensor = torch.cat([own[name.replace(single, part)] for part in FUSED[fused]])
                name = name.replace(single, fused)
            found[name] = bytes_of(tensor)
        return found

    def checksum(self) -> str:
        """Of all weights."""
        whole = hashlib.sha256()
        for _, tensor in sorted(self.model.weights()):
            whole.update(bytes_of(tensor))
        return whole.hexdigest()


class LittleSGLang(LittleServer):
    """It `tells` when it started, or is too old to, and gives hidden states as bytes with the `plugin`."""

    def __init__(self, folder: Path, port: int = 0, *, plugin: bool = False, tells: bool = True) -> None:
        self.plugin, self.startup_time = plugin, time.time() if tells else None
        self.settings: dict[str, Any] = {
            "dtype": "float32",
            "device": "cpu",
            "context_length": CONTEXT,
            "enable_return_hidden_states": True,
            "host": "h",
            "port": 1,
        }
        self._segments: dict[str, bytes] = {}
        self._groups: dict[str, Any] = {}
        self._received: list[tuple[str, Tensor]] = []
        self._seen: list[list[int]] = []
        super().__init__(folder, port)

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """See `LittleServer`."""
        if path == "/model_info":
            config = json.loads((self.folder / "config.json").read_text())
            kind = {key: config.get(key) for key in ("architectures", "model_type")}
            return {"model_path": str(self.folder), "weight_version": self.version} | kind
        if path == "/server_info":
            started = {} if self.startup_time is None else {"startup_time": self.startup_time}
            return self.settings | started | ({"enable_lora": True} | self.lora if self.lora else {})
        if path == "/v1/models" and self.lora is not None:
            return self.models()
        if path == "/weights_checker":
            sums = {name: hashlib.sha256(content).hexdigest() for name, content in self.tensors().items()}
            return {"ranks": [{"per_gpu_checksum": self.checksum(), "checksums": sums}]}
        if path == "/generate":
            return self._stream(body) if body.get("stream") else self.generate(body)
        if path == "/opd/hidden" and self.plugin:
            return {"format": FORMAT, "folder": "elsewhere", "proof": ""}
        if path.startswith("/opd/hidden/"):
            return self._segments.pop(path.rpartition("/")[2], None)
        return self._control(path, body)

    def _control(self, path: str, body: dict[str, Any]) -> Any:
        if path.endswith("load_lora_adapter") and self.lora is not None:
            self.adapter(path, body)
        elif path in ("/pause_generation", "/abort_request"):
            self.paused = self.paused or path == "/pause_generation"
            self.ends += body.get("mode") == "abort" or body.get("abort_all", False)
        elif path == "/continue_generation":
            self.paused = False
        elif path == "/update_weights_from_disk":
            self.reload(Path(body["model_path"]))
            self.version = body["weight_version"]
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/init_weights_update_group":
            store = TCPStore(body["master_address"], body["master_port"], is_master=False)
            member = GroupMember(body["group_name"], body["rank_offset"], body["world_size"])
            self._groups[member.name] = weight_group(store, member)
        elif path == "/update_weights_from_distributed":
            self._receive(body)
        elif path not in VERBS:
            return None
        return {"success": True}

    def _receive(self, body: dict[str, Any]) -> None:
        """One bucket of weights from the trainer."""
        kept = zip(body["names"], body["dtypes"], body["shapes"], strict=True)
        empty = [(name, torch.empty(shape, dtype=getattr(torch, dtype))) for name, dtype, shape in kept]
        sizes = [tensor.nbytes for _, tensor in empty]
        content = torch.empty(sum(sizes), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._groups[body["group_name"]].broadcast([content], options).wait()
        for (_, tensor), part in zip(empty, content.split(sizes), strict=True):
            tensor.view(-1).view(torch.uint8).copy_(part)
        self._received += empty
        if "weight_version" in body:
            self.take(self._received)
            self.version, self._received = body["weight_version"], []

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Cumulative messages; each token's version is told."""
        told, ids, versions = body["sampling_params"], body["input_ids"], []
        asked = Asked(
            ids,
            told["max_new_tokens"],
            [*told["stop_token_ids"], END],
            told["temperature"],
            told["sampling_seed"],
            [*map(int, told.get("logit_bias", {}))],
            body.get("lora_path"),
            told["top_k"] == 1,
        )
        meta = {"cached_tokens": self._cached(ids), "output_token_logprobs": []}
        for token, logprob, version, done in self.write(asked):
            if token >= 0:
                versions.append(version)
                meta["output_token_logprobs"].append([logprob, token, None])
            spans = [(i, key) for i, key in enumerate(versions) if i == 0 or versions[i - 1] != key]
            ends = [start for start, _ in spans[1:]] + [len(versions)]
            meta["weight_versions"] = [
                {"version": key, "start": start, "end": end}
                for (start, key), end in zip(spans, ends, strict=True)
            ]
            reason = {"type": done} if done else None
            if done and body.get("return_routed_experts") and self.settings.get(ROUTED):
                written = [token for _, token, _ in meta["output_token_logprobs"]]
                meta["routed_experts"] = self._routed(
                    [*ids, *written], body.get("routed_experts_start_len", 0)
                )
            yield {
                "meta_info": meta
                | {"completion_tokens": len(versions), "weight_version": version, "finish_reason": reason}
            }

    def _routed(self, ids: list[int], start: int) -> str:
        """Base64 of int32 [T - 1 - start, layers, K]: zeros for layers without experts."""
        tokens = torch.tensor(ids[:-1])
        with self._computing, torch.no_grad():  # finding the routing runs the model, too
            routing = self.model.routing
            assert routing is not None
            with routing.record(routing.new_choices(len(tokens))) as choices:
                self.model.hidden(tokens, torch.arange(len(tokens)), [0, len(tokens)])
        rows = np.zeros((len(tokens), routing.depth, routing.per_token), "<i4")
        rows[:, list(routing.block_layers)] = choices.numpy()
        return base64.b64encode(rows[start:].tobytes()).decode()

    def _cached(self, ids: list[int]) -> int:
        """How many of its first tokens requests before had."""
        most = 0
        for seen in self._seen:
            same = next((i for i, (a, b) in enumerate(zip(ids, seen, strict=False)) if a != b), len(seen))
            most = max(most, min(same, len(ids) - 1))
        self._seen = [*self._seen[-20:], ids]
        return most

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Scores, and hidden states as JSON or in a segment."""
        assert not self.paused  # a real one would not answer
        ids, start, adapter = body["input_ids"], body.get("logprob_start_len", 0), body.get("lora_path")
        meta: dict[str, Any] = {"weight_version": self.version, "cached_tokens": 0}
        hidden = self.hidden(ids, adapter)
        if body.get("return_logprob"):
            meta |= _scores(ids, self.logprobs(hidden, adapter), start, body.get("top_logprobs_num", 0))
        if asked := body["sampling_params"].get("custom_params", {}).get(KEY):
            meta[KEY] = [self._segment(ids, hidden, **asked)]
        elif body.get("return_hidden_states"):
            meta["hidden_states"] = [hidden.tolist()]
        return {"meta_info": meta}

    def _segment(self, ids: list[int], hidden: Tensor, segment: str, start: int) -> dict[str, Any]:
        rows = hidden[start:].float().contiguous()
        numbers = bytes(bytes_of(rows))
        digests = tokens_digest(ids, start), hashlib.sha256(numbers).digest()
        header = SegmentHeader(segment, "float32", len(rows), rows.shape[1], *digests)
        self._segments[segment] = header.pack() + numbers
        return {"width": rows.shape[1]}


VERBS = (
    "/flush_cache",
    "/begin_weight_update",
    "/end_weight_update",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)
"""To which a little server of SGLang has nothing to do."""


def _scores(ids: list[int], logprobs: Tensor, start: int, top_k: int) -> dict[str, Any]:
    entries = [[None, ids[start], None]]
    entries += [[float(logprobs[at, ids[at + 1]]), ids[at + 1], None] for at in range(start, len(ids) - 1)]
    top: list[Any] = [None]
    for at in range(start, len(ids) - 1):
        values, found = logprobs[at].topk(top_k)
        top.append([[v, i, None] for v, i in zip(values.tolist(), found.tolist(), strict=True)])
    return {"input_token_logprobs": entries} | ({"input_top_logprobs": top} if top_k else {})


class LittleVLLM(LittleServer):
    """It writes or, if it `pools`, gives hidden states."""

    nested = ".routed_experts"

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.settings: dict[str, Any] | None = {
            "dtype": "torch.float32",
            "logprobs_mode": "processed_logprobs",
            "max_model_len": CONTEXT,
        }
        self.names_checked = True
        """Whether it declines what names an adapter that it has not."""
        self.packs = True
        """Whether it packs linear layers away, as on a CPU."""
        self.speculates: dict[str, Any] | None = None
        self.pools = False
        self.change: Callable[[bytes], bytes] = lambda content: content
        """Of hidden states, before they are sent."""
        self._noise = itertools.count()
        super().__init__(folder, port)

    def refuses(self, path: str, body: dict[str, Any]) -> int | None:
        """See `LittleServer`."""
        if path in self.closed:
            return self.closed[path]
        if "model" in body and body["model"] not in self.loaded and self.names_checked:
            return 404
        if max(body.get("token_ids", [0])) >= 2**31 - 1:
            return 400
        if path == "/inference/v1/generate" and not body:
            return 400
        return super().refuses(path, body)

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """See `LittleServer`."""
        if path == "/server_info":
            config = {"model_config": self.settings, "instance_id": str(id(self))}
            config |= {"speculative_config": self.speculates, "lora_config": self.lora}
            return None if self.settings is None else {"vllm_config": config}
        if path == "/v1/models":
            return self.models()
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/weight_checker":
            return {"checksums": self.checksums()}
        if path == "/inference/v1/generate":
            return self._stream(body)
        if path == "/pooling" and self.pools:
            return self._pooled(body)
        if path == "/v1/completions" and not self.pools:
            assert not self.paused  # a real one would not answer
            ids = body["prompt"]
            adapter = body.get("model")
            rows = self.logprobs(self.hidden(ids, adapter), adapter)
            likely = rows.topk(body.get("prompt_logprobs") or 0).indices.tolist()
            scored = [
                {str(i): {"logprob": float(rows[at, i])} for i in (token, *likely[at])}
                for at, token in enumerate(ids[1:])
            ]
            return {"choices": [{"prompt_logprobs": [None, *scored]}]}
        return self._control(path, body)

    def _control(self, path: str, body: dict[str, Any]) -> Any:
        if path.endswith("load_lora_adapter") and self.lora is not None:
            self.adapter(path, body)
            return b"Success: done"
        if path == "/pause":
            self.paused, self.ends = True, self.ends + 1
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

    def _pooled(self, body: dict[str, Any]) -> bytes:
        """Hidden states of every token that is sent."""
        ids, dtype = body.pop("input"), body.pop("embed_dtype")
        assert body == {
            "task": "token_embed",
            "use_activation": False,
            "encoding_format": "bytes_only",
            "endianness": "little",
            "add_special_tokens": False,
        }
        return self.change(bytes(bytes_of(self.hidden(ids).to(getattr(torch, dtype)))))

    def checksums(self) -> dict[str, str]:
        """Of each tensor, by a name that begins with its rank."""
        packed = hashlib.sha256(b"").hexdigest()
        return {
            RANK + name: packed if self.packs and "proj" in name else hashlib.sha256(content).hexdigest()
            for name, content in self.tensors().items()
        }

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A message a token; the last tells the version."""
        told = body["sampling_params"]
        asked = Asked(
            body["token_ids"],
            told["max_tokens"],
            told["stop_token_ids"],
            told["temperature"],
            next(self._noise),
            [*map(int, told.get("logit_bias", {}))],
            body.get("model"),
        )
        for place, (token, logprob, version, done) in enumerate(self.write(asked)):
            tokens = [token] if token >= 0 else []
            content = [{"token_id": t, "logprob": logprob, "rank": 1, "top_logprobs": []} for t in tokens]
            span = {"version": version, "start": 0, "end": place + len(tokens)}
            choice = {
                "index": 0,
                "finish_reason": done,
                "token_ids": tokens,
                "logprobs": {"content": content},
            }
            yield {"choices": [choice | {"weight_versions": [span] if done else None}]}


@contextlib.contextmanager
def little(kind: type[LittleServer], folder: Path, port: int = 0, **options: Any) -> Iterator[Any]:
    """One of that kind, gone when the block ends."""
    server = kind(folder, port, **options)
    try:
        yield server
    finally:
        server.kill()
