"""Generate responses on vLLM workers: requests, messages, control verbs, new weights, adapters.

A stream is of one version throughout. A pause ends it, and the rest is requested again after the tokens that
have arrived. The server's weights are read once a stream has begun, and again at its end.

Workers report checksums of the tensors that they hold in their original form. On a CPU they pack linear
layers. Those are verified by outputs: the log-probabilities of a probe must equal those of the new weights
here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from opd.config import Recipe
from opd.config.servers import Argument
from opd.config.teachers import COLDEST, SPECULATES, least_rank
from opd.config.train import LoRAConfig
from opd.errors import RolloutError
from opd.models.sharded import ForwardRoot, open_empty
from opd.models.stored_form import StoredForm
from opd.ranks import Ranks
from opd.rollout import served_messages
from opd.rollout.adapted_student import probe_logprobs
from opd.rollout.adapter_workers import AdapterPush, AdapterVerbs, rank_fits
from opd.rollout.served_engine import (
    Dialect,
    ServedEngine,
    ServedModel,
    StudentForm,
    WorkerProgram,
    never_sampled,
)
from opd.rollout.served_messages import MessageContent
from opd.rollout.served_workers import READING, Ask, ExpectedAnswers, Push, TargetWeights, Verbs, Workers
from opd.rollout.weight_proof import apart_at_most
from opd.served.http_client import HTTPClient, PoolOptions, RefusedError, Server, UnavailableError
from opd.served.scoring import logprob_tolerance
from opd.served.vllm_protocol import (
    OF_NOTHING,
    fetch_logprobs,
    model_of,
    model_settings,
    server_checksums,
    server_settings,
)
from opd.types import RolloutRequest, SamplingParams
from opd.untrusted import convert_decode_errors, safe_excerpt

GENERATE = "/inference/v1/generate"


async def read_folder(send: Ask, server: Server, name: str, folder: Path) -> None:
    """Have `server` load the weights in a folder that it sees. It ends if it cannot. See `Push.load`."""
    await send(server, "POST", "/update_weight_version", {"new_version": name + READING})
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    done = await send(server, "POST", "/collective_rpc", body)
    if not isinstance(done, dict) or "results" not in done:
        raise RolloutError(f"{server.url} did not take the weights {name}; look at its log.")
    await _drop_cache(send, server)


async def _drop_cache(send: Ask, server: Server) -> None:
    done = await send(server, "POST", "/reset_prefix_cache?reset_running_requests=true", {})
    if not (done or {}).get("success"):
        raise UnavailableError(f"{server.url} has not dropped its cache", answered=True)


class Outputs:
    """Computes a probe's log-probabilities with a model of the student's form and any weights.

    Args:
        model: A Hugging Face folder of that form, whose weights are not read.
    """

    def __init__(self, model: Path, dtype: str) -> None:
        self._model = open_empty(model, dtype=dtype)
        self._form = StoredForm(self._model.module)

    def __call__(self, weights: Iterable[tuple[str, Tensor]]) -> np.ndarray:
        """[len(PROBE) - 1] float32: log-probabilities of the probe's tokens, in one pass on the CPU. The
        names of `weights` are those of files or of the module.
        """
        compute = partial(probe_logprobs, self._model)
        with torch.no_grad():
            parameters = {f"module.{n}": t for n, t in self._form.of_module(dict(weights)).items()}
            return (
                torch.func.functional_call(ForwardRoot(self._model.module), parameters, (compute,))
                .float()
                .numpy()
            )


class VLLMVerbs(Verbs):
    """See `Verbs`.

    Args:
        mode: The `--logprobs-mode` they have to be started with.
        outputs: See `Outputs`. With `None` new weights cannot be verified.
    """

    pause_ends_streams = True

    def __init__(
        self,
        model: ServedModel,
        mode: str,
        outputs: Callable[[Iterable[tuple[str, Tensor]]], np.ndarray] | None = None,
    ) -> None:
        super().__init__(model.config)
        self._model, self._mode = model, mode
        self.requirement = f", with {mode}"
        self._expected = None if outputs is None else ExpectedAnswers(outputs)
        self._asked: dict[str, asyncio.Task[str]] = {}
        """URL -> the task that will ask for the server's weights and has not yet."""
        self._asking: dict[str, asyncio.Lock] = {}

    async def pause(self, server: Server) -> None:
        """See `Verbs`: abort requests in progress, and drop every cached key and value."""
        await self.request_json(server, "POST", "/pause?mode=abort", {})

    async def flush(self, server: Server) -> None:
        await _drop_cache(self.pool.request_json, server)

    async def go_on(self, server: Server) -> None:
        await self.request_json(server, "POST", "/resume", {})

    async def loaded_version(self, server: Server) -> str:
        return str((await self.pool.request_json(server, "GET", "/weight_info")).get("weight_version"))

    async def weights_of(self, server: Server) -> str:
        """See `Verbs`. Asks for `loaded_version` after this call. Concurrent callers share an answer."""
        waiting = self._asked.get(server.url)
        if waiting is None:
            waiting = self._asked[server.url] = asyncio.create_task(self._held_in_turn(server))
            waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(waiting)

    async def _held_in_turn(self, server: Server) -> str:
        async with self._asking.setdefault(server.url, asyncio.Lock()):
            del self._asked[server.url]
            return await self.loaded_version(server)

    async def set_version_name(self, server: Server, name: str) -> None:
        await self.request_json(server, "POST", "/update_weight_version", {"new_version": name})

    async def free_memory(self, server: Server, parts: list[str]) -> None:
        raise RolloutError("vLLM workers do not sleep; leave runtime.offload.engine out.")

    restore_memory = free_memory

    async def check_settings(self, server: Server) -> None:
        """See `Verbs`: check that it reports its settings, takes as many tokens as a request may have, and
        gives the log-probabilities we need.
        """
        config = await server_settings(self.pool, server)
        if config is None:
            raise RolloutError(
                f"{server.url} tells nothing of its settings and takes no weights; start it with"
                " VLLM_SERVER_DEV_MODE=1 in its environment."
            )
        if config.get("speculative_config") is not None:
            raise RolloutError(
                f"{server.url} speculates: {SPECULATES}; start it without --speculative-config."
            )
        settings = config["model_config"]
        if (mode := settings.get("logprobs_mode")) != self._mode:
            raise RolloutError(
                f"{server.url} tells {safe_excerpt(mode)}, and the recipe's temperature, top_p and top_k need"
                f" {self._mode}; start it with --logprobs-mode {self._mode}."
            )
        most = settings.get("max_model_len")
        if not isinstance(most, int) or most < self._model.max_sequence:
            raise RolloutError(
                f"{server.url} takes {safe_excerpt(most)} tokens a request, and responses may need"
                f" {self._model.max_sequence}; start it with --max-model-len {self._model.max_sequence}."
            )
        try:
            await self.pool.request_json(server, "POST", GENERATE, {})
        except RefusedError as refusal:
            if refusal.status == 401:
                raise RolloutError(f"{server.url} does not take the key; check api_key_env.") from None
            if refusal.status in (403, 404):
                raise RolloutError(
                    f"{server.url} does not take token ids ({refusal}); start it with --enable-scale-out,"
                    " as vLLM 0.32 has it."
                ) from None

    async def model_info(self, server: Server) -> Mapping[str, Any]:
        path, _ = model_of(await self.pool.request_json(server, "GET", "/v1/models"))
        return {"model_path": path}

    async def tensor_names(self, server: Server) -> Collection[str] | None:
        ranks, packed = await self._rank_checksums(server)
        return [*ranks[0]["checksums"], *packed] if len(ranks) == 1 else None

    async def verify(self, server: Server, newest: TargetWeights) -> None:
        """Compare checksums, if there are any, and the outputs."""
        settings = await model_settings(self.pool, server) or {}
        ranks, packed = await self._rank_checksums(server)
        dtype = str(settings.get("dtype")).removeprefix("torch.")
        with convert_decode_errors(
            lambda cause: RolloutError(f"{server.url}/weight_checker answered {cause}.")
        ):
            await asyncio.to_thread(
                newest.proof.check, server.url, ranks, {"dtype": dtype, "device": "cpu"}, packed
            )
        due = await asyncio.to_thread(self._expected_logprobs, newest)
        await self.go_on(server)  # a paused server scores nothing, and no other request comes meanwhile
        try:
            logprobs = await fetch_logprobs(self.pool, server, 0, self._model.rows or self._model.vocabulary)
        finally:
            await self.pause(server)
        apart = float(np.abs(logprobs - due).max())
        if not apart <= apart_at_most(logprob_tolerance(settings), newest.prepared.weights):
            raise RolloutError(
                f"after the push {server.url} holds other weights than the trainer: its log-probabilities of"
                f" a few tokens differ by up to {apart:.3g} nats; restart it and --resume."
            )

    def _expected_logprobs(self, newest: TargetWeights) -> np.ndarray:
        if self._expected is None:
            raise RolloutError("the engine cannot prove new weights; make it with Outputs.")
        return self._expected.logprobs_for(newest)

    async def _rank_checksums(self, server: Server) -> tuple[list[dict[str, Any]], set[str]]:
        """Return each rank's place and its tensors' checksums, and the names of packed tensors."""
        answer = await server_checksums(self.pool, server) or {}
        ranks: dict[tuple[str, int], dict[str, str]] = {}
        packed: set[str] = set()
        with convert_decode_errors(
            lambda cause: RolloutError(f"{server.url}/weight_checker answered {cause}.")
        ):
            for key, checksum in answer.items():
                data, *_, tensor, name = key.split(":", 4)
                name = name.replace(".base_layer.", ".")  # a layer that adapters are applied to
                if checksum == OF_NOTHING:
                    packed.add(name)
                else:
                    ranks.setdefault((data, int(tensor.removeprefix("tp"))), {})[name] = checksum
        size = 1 + max((rank for _, rank in ranks), default=0)
        checksums = [
            {"checksums": rank_sums, "parallelism_info": [{"tp_rank": rank, "tp_size": size}]}
            for (_, rank), rank_sums in sorted(ranks.items())
        ]
        return checksums, packed


LOADS = "/v1"
"""Begins the paths of the requests that load and unload adapters."""
_OF_NOBODY = {"model": "opd-nobody", "token_ids": [2**31 - 1], "sampling_params": {"max_tokens": 1}}
"""Names a missing adapter, and a token that no model has, so nothing is generated."""


async def missing_flags(pool: HTTPClient, server: Server, lora: LoRAConfig) -> str | None:
    """Return the flags that adapters of this form need and `server` was not started with, or None if there
    are none. Raises `UnavailableError` and `RefusedError`.
    """
    settings = (await server_settings(pool, server) or {}).get("lora_config")
    config = settings if isinstance(settings, dict) else {}
    if not rank_fits(config, "max_lora_rank", lora.rank):
        return f"--enable-lora --max-lora-rank {least_rank(lora)}"
    if config.get("target_modules") is not None:
        return "no --lora-target-modules"
    try:
        await pool.request_json(server, "POST", f"{LOADS}/load_lora_adapter", {})
    except RefusedError as refusal:
        if refusal.status in (403, 404, 405):
            return "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
    try:
        await pool.request_json(server, "POST", GENERATE, _OF_NOBODY)
    except RefusedError as refusal:
        if refusal.status == HTTPStatus.NOT_FOUND:
            return None
    # It uses the base alone for a request that names a missing adapter.
    return "VLLM_SKIP_MODEL_NAME_VALIDATION=0 in its environment"


class VLLMAdapterVerbs(AdapterVerbs):
    """See `AdapterVerbs`."""

    def __init__(self, model: ServedModel, plain: Verbs, push: AdapterPush) -> None:
        super().__init__(plain, push)
        self._rows = model.rows or model.vocabulary

    async def pause(self, server: Server) -> None:
        await self.plain.pause(server)

    async def missing_flags(self, server: Server) -> str | None:
        return await missing_flags(self.pool, server, self._push.student.lora)

    async def logprob_tolerance(self, server: Server) -> float:
        return logprob_tolerance(await model_settings(self.pool, server))

    async def score(self, server: Server, name: str) -> np.ndarray:
        return await fetch_logprobs(self.pool, server, 0, self._rows, name)

    def adapter_fields(self, name: str) -> dict[str, Any]:
        return {"model": name}


Mode = Literal["processed_logprobs", "raw_logprobs"]
"""Form of a server's log-probabilities: at the temperature and after top-p and top-k, or at 1 and before."""


def mode_for(cuts: bool) -> Mode:
    """Log-probability mode of workers that a run needs. `cuts`: a `top_p` or `top_k` is set."""
    return "raw_logprobs" if cuts else "processed_logprobs"


_NO_NUMBER = -9999.0
"""Sent in place of minus infinity and NaN."""
_TOKEN_BYTES, _OTHER_BYTES = 512, 2**16


def is_cut(sampling: SamplingParams) -> bool:
    """Return True if some tokens cannot be drawn. Greedy sampling does not count, because it draws the most
    likely one anyway.
    """
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


class VLLMMessageReader(served_messages.MessageReader):
    """Messages have the new tokens. The last names the weights that sampled all of them."""

    def _parse_message(self, message: Any) -> MessageContent | None:
        self._refuse_error(message)
        if not message["choices"]:
            return None
        (choice,) = message["choices"]
        ids = list(choice.get("token_ids") or [])
        fields = (choice.get("logprobs") or {}).get("content") or []
        if [entry["token_id"] for entry in fields] != ids:
            raise UnavailableError(f"{self.uid} got log-probabilities of other tokens", answered=True)
        numbers = [float(entry["logprob"]) for entry in fields]
        finished = choice.get("finish_reason")
        versions = {span["version"] for span in choice.get("weight_versions") or []}
        if finished != "abort" and versions - {self.base or self.weights}:
            raise RolloutError(
                f"{self.uid} was sampled with weights {safe_excerpt(sorted(map(str, versions)))} in its"
                " middle, and not"
                " with this run's alone; let nobody else give its servers weights, and --resume."
            )
        entries = [
            (value if value > _NO_NUMBER else np.nan, id) for value, id in zip(numbers, ids, strict=True)
        ]
        return MessageContent(entries, finished, lambda _: self.weights)


class VLLMDialect(Dialect):
    """`POST /inference/v1/generate`: token ids in and out. Noise is the servers' own. With a seed for each
    request vLLM draws row by row, and one on a CPU ends at the first prompt that it prefills in pieces.
    """

    path, reader = GENERATE, VLLMMessageReader

    def __init__(self, model: ServedModel, mode: Mode) -> None:
        self._mode, self._never = mode, never_sampled(model)
        if self._never and mode == "raw_logprobs":
            raise RolloutError(
                f"the student's head has {len(self._never)} rows beyond its tokens, which vLLM counts in"
                " log-probabilities before top_p and top_k; leave these out, or take engine sglang or torch."
            )

    def check_request(self, request: RolloutRequest) -> None:
        sampling = request.sampling
        if 0 < sampling.temperature < COLDEST:
            raise RolloutError(
                f"request {request.uid!r}: vLLM takes temperature {COLDEST} in place of"
                f" {sampling.temperature:g}; raise it, or take engine sglang or torch."
            )
        if self._mode == "processed_logprobs" and is_cut(sampling):
            raise RolloutError(
                f"request {request.uid!r}: workers in the mode processed_logprobs tell what is left after"
                " top_p and top_k; leave these out, or set every temperature to 1."
            )
        if self._mode == "raw_logprobs" and sampling.temperature not in (0, 1):
            raise RolloutError(
                f"request {request.uid!r}: workers in the mode raw_logprobs tell log-probabilities at"
                " temperature 1; set it to that, or leave top_p and top_k out everywhere."
            )

    def request_body(self, request: RolloutRequest, written: Sequence[int]) -> dict[str, Any]:
        sampling = request.sampling
        cut = is_cut(sampling)
        return {
            "token_ids": [*map(int, request.prompt_ids), *written],
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p if cut else 1.0,
                "top_k": sampling.top_k if cut else 0,
                "max_tokens": sampling.max_new_tokens - len(written),
                "stop_token_ids": list(sampling.stop_ids),
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
                **({"logit_bias": dict(self._never)} if self._never else {}),
            },
            "stream": True,
        }

    def most_bytes(self, request: RolloutRequest) -> int:
        return _OTHER_BYTES + _TOKEN_BYTES * request.sampling.max_new_tokens


class VLLMEngine(ServedEngine):
    """See `ServedEngine`. A pause ends requests in progress, which are continued after it.

    Args:
        push: Sends new weights. With `None` the engine cannot update weights.
        version: Version of the weights they hold now. Below 0 if they are to be given the first.
        outputs: Computes the probe's log-probabilities with new weights (`Outputs`).
    """

    def __init__(
        self,
        options: PoolOptions,
        model: ServedModel,
        push: Push | None = None,
        version: int = 0,
        ranks: Ranks | None = None,
        *,
        mode: Mode = "processed_logprobs",
        outputs: Callable[[Iterable[tuple[str, Tensor]]], np.ndarray] | None = None,
    ) -> None:
        verbs: Verbs = VLLMVerbs(model, mode, outputs)
        if isinstance(push, AdapterPush):
            verbs = VLLMAdapterVerbs(model, verbs, push)
        workers = Workers(options, push, version, verbs, model.files, ranks)
        super().__init__(VLLMDialect(model, mode), workers, model)


def _started_with(recipe: Recipe) -> dict[str, Argument]:
    return {"logprobs-mode": mode_for(recipe.cuts_tokens)}


def _open_engine(
    options: PoolOptions, model: ServedModel, push: Push, student: StudentForm, ranks: Ranks
) -> VLLMEngine:
    outputs = Outputs(student.folder, student.dtype)
    return VLLMEngine(options, model, push, -1, ranks, mode=mode_for(student.cuts), outputs=outputs)


PROGRAM = WorkerProgram(
    _open_engine,
    lambda model, cuts: VLLMVerbs(model, mode_for(cuts)),
    read_folder,
    missing_flags,
    _started_with,
    LOADS,
)
