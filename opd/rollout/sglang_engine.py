"""Generate responses on SGLang workers: requests, messages, control verbs, new weights, adapters.

Workers read new weights from a folder, or receive them in a process group with each of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from opd.config import Recipe
from opd.config.servers import Argument
from opd.config.teachers import SGLangEngineConfig
from opd.config.train import USUAL_TARGETS, LoRAConfig
from opd.errors import RolloutError, reason_of
from opd.models.causal_lm import raw_bytes, torch_device
from opd.ranks import Ranks, gloo_device, host_store, local_address
from opd.rollout import served_messages
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
from opd.rollout.served_workers import (
    READING,
    RETRY,
    Ask,
    PreparedWeights,
    Push,
    TargetWeights,
    Verbs,
    Workers,
    copy_to_cpu,
)
from opd.rollout.weight_proof import FUSED
from opd.rollout.weight_sync import Weights, bucket_tensors
from opd.served.http_client import HTTPClient, PoolOptions, RefusedError, Server, UnavailableError
from opd.served.routed_experts import FLAG
from opd.served.scoring import PROBE, Question, logprob_tolerance
from opd.served.sglang_protocol import (
    check_finished,
    logprob_body,
    logprobs_of,
    most_bytes,
    most_tokens,
    ranks_of,
)
from opd.types import RolloutRequest
from opd.untrusted import convert_decode_errors

TIMEOUT = 120.0
"""Seconds a member waits for another."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One member's place in a weight group."""

    name: str
    """Name of the group, the same for all members."""
    rank: int
    """0 is the trainer."""
    world: int
    backend: str = "gloo"
    """`gloo`, or `nccl` if every member has CUDA (which has not been run yet)."""


def weight_group(store: Store, member: GroupMember, timeout: float = TIMEOUT, host: str = "127.0.0.1") -> Any:
    """Return the back end of the group at `member`, once every member has come.

    This member listens on its own address `host`, and with gloo on no other. Members meet under the keys that
    `torch.distributed` uses for a group of that name. So an engine which makes its group with it, as SGLang
    does, meets this one. Raises `RolloutError` if one stays away.
    """
    device = "cuda" if member.backend == "nccl" else "cpu"
    for prefix in (member.name, f"{member.name}/", f"{device}/"):
        store = PrefixStore(prefix, store)
    waits = timedelta(seconds=timeout)
    try:
        if member.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = waits
            return dist.ProcessGroupNCCL(store, member.rank, member.world, options)
        gloo = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        gloo._devices, gloo._timeout = [gloo_device(host)], waits
        return dist.ProcessGroupGloo(store, member.rank, member.world, gloo)
    except RuntimeError as error:
        raise RolloutError(
            f"not every member of the weight group {member.name} has come within {timeout:g} s"
            f" ({reason_of(error)[:200]}); look at the engine's log."
        ) from None


async def read_folder(send: Ask, server: Server, name: str, folder: Path) -> None:
    """Have `server` load the weights in a folder that it sees. See `Push.load`."""
    body = {"model_path": str(folder), "weight_version": name + READING, "flush_cache": True}
    done = await send(server, "POST", "/update_weights_from_disk", body | {"keep_pause": True})
    _check_success(server, name, done)


BUCKET_BYTES = 256 << 20


class TensorPush:
    """Broadcasts, in buckets, in a process group with each worker, so that one worker's failure does not end
    the others.

    Args:
        host: This machine's address, as workers reach it. `None` is the one by which it reaches each of them.
        bucket_bytes: Approximate size of a bucket, which holds at least one tensor.
    """

    def __init__(self, host: str | None = None, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._host, self._size = host, bucket_bytes
        self._device = torch.device("cpu")
        """The trainer's device, with its index, because the sending threads' current one is the first."""
        self._groups: dict[str, tuple[str, Any, torch.device]] = {}
        """URL -> name of the group, its back end, the device it sends from."""

    def prepare(self, weights: Weights, version: int) -> PreparedWeights:
        """See `Push`."""
        return self.prepare_static(copy_to_cpu(weights))

    def prepare_static(self, weights: Weights) -> PreparedWeights:
        """See `Push`."""
        self._device = torch_device("auto")
        return PreparedWeights(list(weights))

    async def load(self, send: Ask, server: Server, name: str, prepared: PreparedWeights) -> int:
        """See `Push`. A worker that fails in the middle holds parts of two versions. It is not used again
        before it has loaded a full one.
        """
        if server.url not in self._groups:
            self._groups[server.url] = await self._join_group(send, server)
        try:
            try:
                _check_success(server, name, await send(server, "POST", "/begin_weight_update", {}))
            except RefusedError:  # a trainer that died has left its update open
                await send(server, "POST", "/end_weight_update", {})
                _check_success(server, name, await send(server, "POST", "/begin_weight_update", {}))
            buckets: list[list[tuple[str, Tensor]]] = []
            # Of one dtype each, because receivers cut a bucket at its dtypes.
            for _, alike in groupby(prepared.weights, key=lambda item: item[1].dtype):
                buckets += bucket_tensors(alike, self._size)
            for index, bucket in enumerate(buckets):
                last = index == len(buckets) - 1
                await self._send_bucket(send, server, bucket, name if last else None)
            _check_success(server, name, await send(server, "POST", "/end_weight_update", {}))
            return sum(tensor.nbytes for bucket in buckets for _, tensor in bucket)
        except (UnavailableError, RefusedError) as error:
            # It may have been restarted, with no memory of the group.
            del self._groups[server.url]
            raise UnavailableError(str(error), answered=True) from None

    async def _send_bucket(
        self, send: Ask, server: Server, bucket: list[tuple[str, Tensor]], version: str | None
    ) -> None:
        from torch.distributed import BroadcastOptions

        group, backend, device = self._groups[server.url]
        content = torch.cat([raw_bytes(tensor.cpu()) for _, tensor in bucket]).to(device)
        options = BroadcastOptions()
        options.rootRank = 0
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": group,
            "flush_cache": version is not None,
            "load_format": "flattened_bucket",
        }
        if version is not None:
            body["weight_version"] = version + READING
        answer = asyncio.ensure_future(send(server, "POST", "/update_weights_from_distributed", body))
        sending = asyncio.ensure_future(
            asyncio.to_thread(lambda: backend.broadcast([content], options).wait())
        )
        # A worker that refuses does not receive, and the broadcast would wait for it until its time-out.
        await asyncio.wait([answer, sending], return_when=asyncio.FIRST_EXCEPTION)
        if sending.done() and (error := sending.exception()) is not None:
            answer.cancel()
            raise UnavailableError(f"{server.url} left the weight group ({reason_of(error)})", answered=False)
        sending.cancel()
        _check_success(server, version or "", await answer)

    async def _join_group(self, send: Ask, server: Server) -> tuple[str, Any, torch.device]:
        """Make a new group of this process and all ranks of `server`."""
        settings = await send(server, "GET", "/server_info", {}) or {}
        cuda = settings.get("device") == "cuda" and torch.cuda.is_available()
        ranks = int(settings.get("tp_size") or 1)
        member = GroupMember(f"opd-{uuid.uuid4().hex[:8]}", 0, 1 + ranks, "nccl" if cuda else "gloo")
        host = self._host or await asyncio.to_thread(local_address, urlsplit(server.url).hostname or "")
        store, port = host_store(host, TIMEOUT)
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": member.world,
            "group_name": member.name,
            "backend": member.backend,
        }
        answer = asyncio.ensure_future(send(server, "POST", "/init_weights_update_group", body))
        met = asyncio.ensure_future(asyncio.to_thread(weight_group, store, member, TIMEOUT, host))
        await asyncio.wait([answer, met], return_when=asyncio.FIRST_EXCEPTION)
        if answer.done() and answer.exception() is not None:
            met.cancel()
        _check_success(server, member.name, await answer)
        return member.name, await met, self._device if cuda else torch.device("cpu")


def _check_success(server: Server, name: str, done: Any) -> None:
    if not (done or {}).get("success"):
        raise RolloutError(f"{server.url} did not take the weights {name}: {(done or {}).get('message')}.")


class SGLangVerbs(Verbs):
    """See `Verbs`. A pause returns running requests to the queue of their worker."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model.config)
        self._longest = model.max_sequence

    async def pause(self, server: Server) -> None:
        await self.request_json(server, "POST", "/pause_generation", {"mode": "retract"})

    async def flush(self, server: Server) -> None:
        await self.request_json(server, "POST", "/flush_cache", {})

    async def go_on(self, server: Server) -> None:
        await self.request_json(server, "POST", "/continue_generation", {})

    async def loaded_version(self, server: Server) -> str:
        return str((await self.pool.request_json(server, "GET", "/model_info")).get("weight_version"))

    async def free_memory(self, server: Server, parts: list[str]) -> None:
        await self.pool.request_json(server, "POST", "/release_memory_occupation", {"tags": parts})

    async def restore_memory(self, server: Server, parts: list[str]) -> None:
        await self.pool.request_json(server, "POST", "/resume_memory_occupation", {"tags": parts})

    async def check_settings(self, server: Server) -> None:
        """See `Verbs`: check that it takes as many tokens as a request may have."""
        settings = await self.pool.request_json(server, "GET", "/server_info") or {}
        with convert_decode_errors(lambda cause: RolloutError(f"{server.url}/server_info answered {cause}.")):
            most = most_tokens(settings)
        wanted = self._longest + SGLangEngineConfig.kept
        if most is not None and most < wanted:
            raise RolloutError(
                f"{server.url} takes {most} tokens a request, and responses may need {self._longest} beside"
                f" {SGLangEngineConfig.kept} that it keeps; give it a context-length of {wanted} or more, or"
                " lower rollout.max_sequence."
            )
        if self.records_experts and settings.get(FLAG.replace("-", "_")) is not True:
            raise RolloutError(
                f"{server.url} was not started with --{FLAG}, and rollout.replay_experts true asks for expert"
                " choices; start it so, or set it to auto or false."
            )

    async def set_version_name(self, server: Server, name: str) -> None:
        body = {"new_version": name, "abort_all_requests": False}
        await self.request_json(server, "POST", "/update_weight_version", body)

    async def model_info(self, server: Server) -> Mapping[str, Any]:
        return await self.pool.request_json(server, "GET", "/model_info") or {}

    async def tensor_names(self, server: Server) -> Collection[str] | None:
        answer = await self.request_json(server, "POST", "/weights_checker", {"action": "checksum"})
        ranks = ranks_of(answer)
        return ranks[0]["checksums"] if len(ranks) == 1 and "checksums" in ranks[0] else None

    async def verify(self, server: Server, newest: TargetWeights) -> None:
        """Compare the checksums of every tensor with those of the weights themselves."""
        answer = await self.request_json(server, "POST", "/weights_checker", {"action": "checksum"})
        settings = await self.pool.request_json(server, "GET", "/server_info") or {}
        ranks = ranks_of(answer)
        with convert_decode_errors(
            lambda cause: RolloutError(f"{server.url}/weights_checker answered {cause}.")
        ):
            await asyncio.to_thread(newest.proof.check, server.url, ranks, settings)


ABORT_SECONDS = 0.05
"""Seconds in which aborted requests have mostly left."""
ALL = "all"
"""Instead of names: every layer that can be adapted."""


async def missing_flags(pool: HTTPClient, server: Server, lora: LoRAConfig) -> str | None:
    """Return the flags that adapters of this form need and `server` was not started with, or None if there
    are none. Raises `UnavailableError` and `RefusedError`.
    """
    settings = await pool.request_json(server, "GET", "/server_info") or {}
    targets = lora.targets or USUAL_TARGETS
    if settings.get("enable_lora") is not True or not rank_fits(settings, "max_lora_rank", lora.rank):
        return f"--enable-lora --max-lora-rank {lora.rank} --lora-target-modules {' '.join(targets)}"
    present = settings.get("lora_target_modules")
    present = [str(name) for name in present] if isinstance(present, list) else []
    if ALL not in present and not _fused_names(targets) <= _fused_names(present):
        return f"--lora-target-modules {' '.join(targets)}"
    return None if settings.get("dp_size") in (None, 1) else "--dp-size 1"


class SGLangAdapterVerbs(AdapterVerbs):
    """See `AdapterVerbs`."""

    def __init__(self, model: ServedModel, push: AdapterPush) -> None:
        super().__init__(SGLangVerbs(model), push)
        self._rows = model.rows or model.vocabulary

    async def pause(self, server: Server) -> None:
        """See `Verbs`: abort requests in progress, which would go on with the adapter they began with."""
        # A server that still has requests when it is told to pause checks again after a second.
        await self.request_json(server, "POST", "/abort_request", {"abort_all": True})
        await asyncio.sleep(ABORT_SECONDS)
        await self.request_json(server, "POST", "/pause_generation", {"mode": "abort"})

    async def flush(self, server: Server) -> None:
        """See `Verbs`: retry, because it declines until aborted requests have left."""
        await RETRY.call_async(partial(super().flush, server), RefusedError)

    async def missing_flags(self, server: Server) -> str | None:
        return await missing_flags(self.pool, server, self._push.student.lora)

    async def logprob_tolerance(self, server: Server) -> float:
        return logprob_tolerance(await self.pool.request_json(server, "GET", "/server_info"))

    async def score(self, server: Server, name: str) -> np.ndarray:
        body = logprob_body(Question("probe", PROBE, 0)) | self.adapter_fields(name)
        answer = await self.pool.request_json(server, "POST", "/generate", body, most_bytes(body))
        check_finished(answer)
        return logprobs_of(answer, PROBE, 0, self._rows)

    def adapter_fields(self, name: str) -> dict[str, Any]:
        return {"lora_path": name}


def _fused_names(names: Collection[str]) -> set[str]:
    """Names of layers in a server's fused form."""
    joined = {part: fused for fused, parts in FUSED.items() for part in parts}
    return {joined.get(name, name) for name in names}


class SGLangMessageReader(served_messages.MessageReader):
    """Messages may be cumulative or not. They name the version that sampled each token."""

    def _parse_message(self, message: Any) -> MessageContent:
        self._refuse_error(message)
        meta: dict[str, Any] = message["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        total = int(meta.get("completion_tokens", len(entries)))
        fresh = entries[self.seen :] if len(entries) == total else entries
        if self.seen + len(fresh) != total:
            raise UnavailableError(f"tokens of {self.uid} are missing", answered=True)
        self.cached_tokens = int(meta.get("cached_tokens") or 0)
        spans: Sequence[Mapping[str, Any]] = meta.get("weight_versions") or []

        def weights_at(index: int) -> Any:
            versions = (s["version"] for s in spans if s["start"] <= index < s["end"])
            version = next(versions, meta.get("weight_version"))
            return self.weights if self.base is not None and version == self.base else version

        finished = (meta.get("finish_reason") or {}).get("type", "")
        new = [(entry[0], entry[1]) for entry in fresh]
        return MessageContent(new, finished, weights_at, meta.get("routed_experts"))


class SGLangDialect(Dialect):
    """`POST /generate`."""

    path, reader = "/generate", SGLangMessageReader
    gives_experts = True

    def __init__(self, model: ServedModel) -> None:
        self._never = never_sampled(model)

    def check_request(self, request: RolloutRequest) -> None:
        """Accept everything: log-probabilities are at the temperature and before any cut."""

    def request_body(self, request: RolloutRequest, written: Sequence[int]) -> dict[str, Any]:
        sampling, name = request.sampling, f"{request.seed}/{request.uid}".encode()
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big") >> 1
        return {
            "input_ids": [*map(int, request.prompt_ids), *written],
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "max_new_tokens": sampling.max_new_tokens - len(written),
                "stop_token_ids": list(sampling.stop_ids),
                "sampling_seed": seed,
                "skip_special_tokens": False,
                "no_stop_trim": True,
                **({"logit_bias": dict(self._never)} if self._never else {}),
            },
            "return_logprob": True,
            "stream": True,
            **({} if self.routing is None else {"return_routed_experts": True}),
            **({"routed_experts_start_len": request.routed} if self.routing and request.routed else {}),
        }

    def most_bytes(self, request: RolloutRequest) -> int:
        positions = len(request.prompt_ids) + request.sampling.max_new_tokens
        experts = 0 if self.routing is None else self.routing.most_bytes(positions)
        return most_bytes(self.request_body(request, [])) + experts


class SGLangEngine(ServedEngine):
    """See `ServedEngine`. Paused requests free their cache and rebuild it with the new weights. With an
    `AdapterPush` they are ended, and continued after it.

    Args:
        push: Sends new weights. With `None` the engine cannot update weights.
        version: Version of the weights they hold now. Below 0 if they are to be given the first.
    """

    def __init__(
        self,
        options: PoolOptions,
        model: ServedModel,
        push: Push | None = None,
        version: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        alone = isinstance(push, AdapterPush)
        verbs = SGLangAdapterVerbs(model, push) if alone else SGLangVerbs(model)
        workers = Workers(options, push, version, verbs, model.files, ranks)
        super().__init__(SGLangDialect(model), workers, model)


def _started_with(recipe: Recipe) -> dict[str, Argument]:
    # Without it a server frees no memory.
    arguments: dict[str, Argument] = {"enable-memory-saver": True} if recipe.runtime.offload.engine else {}
    return arguments | ({FLAG: True} if recipe.rollout.replay_experts is True else {})


def _open_engine(
    options: PoolOptions, model: ServedModel, push: Push, student: StudentForm, ranks: Ranks
) -> SGLangEngine:
    return SGLangEngine(options, model, push, -1, ranks)


PROGRAM = WorkerProgram(
    _open_engine, lambda model, cuts: SGLangVerbs(model), read_folder, missing_flags, _started_with
)
