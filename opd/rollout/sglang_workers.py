"""SGLang workers: their verbs, and how new weights reach them.

They read a folder, or weights are broadcast in a process group with each of them.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from opd.config.teachers import SGLangEngineConfig
from opd.errors import RolloutError, reason_of
from opd.foreign import decoding
from opd.models.causal_lm import raw_bytes, torch_device
from opd.ranks import gloo_device, host_store, own_address
from opd.rollout import served_workers
from opd.rollout.served_engine import ServedModel
from opd.rollout.served_workers import Ask, Newest, Prepared, Verbs, copies
from opd.rollout.weight_proof import check_config, check_form
from opd.rollout.weight_sync import Weights, buckets
from opd.served.http_client import RefusedError, Server, UnavailableError
from opd.served.sglang_answers import most_tokens, ranks_of

if TYPE_CHECKING:
    from torch import Tensor

TIMEOUT = 120.0
"""Seconds a member waits for another."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One member's place in a weight group."""

    name: str
    """Of the group; the same for all members."""
    rank: int
    """0 is the trainer."""
    world: int
    backend: str = "gloo"
    """`gloo`, or `nccl` where every member has CUDA (which has not been run yet)."""


def weight_group(store: Store, member: GroupMember, timeout: float = TIMEOUT, host: str = "127.0.0.1") -> Any:
    """The back end of the group at `member`; returns once every member has come.

    This member listens on its own address `host`, and with gloo on no other.

    The members meet under the keys that `torch.distributed` uses for a group of that name, so that an engine
    which makes its group with it, as SGLang does, meets this one. Raises `RolloutError` if one stays away.
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


async def read_folder(ask: Ask, server: Server, name: str, folder: Path) -> None:
    """Have `server` take the weights in a folder that it sees. See `Push.load`."""
    body = {"model_path": str(folder), "weight_version": name, "flush_cache": True}
    done = await ask(server, "POST", "/update_weights_from_disk", body | {"keep_pause": True})
    _check(server, name, done)


class SGLangFolderPush(served_workers.FolderPush):
    """See `served_workers.FolderPush`."""

    async def _read(self, ask: Ask, server: Server, name: str, folder: Path) -> None:
        await read_folder(ask, server, name, folder)


BUCKET_BYTES = 256 << 20


class TensorPush:
    """Broadcast, in buckets, in a process group with each worker: one worker's end is not the others'.

    Args:
        host: This machine's address, as workers reach it; `None` is the one by which it reaches each of them.
        bucket_bytes: Weights go in pieces of about this size, at least one tensor each.
    """

    def __init__(self, host: str | None = None, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._host, self._size = host, bucket_bytes
        self._device = torch.device("cpu")
        """The trainer's, by its number: the threads that send work on the first one."""
        self._groups: dict[str, tuple[str, Any, torch.device]] = {}
        """URL -> name of the group, its back end, where it sends from."""

    def prepare(self, weights: Weights, version: int) -> Prepared:
        """See `Push`."""
        return self.frozen(copies(weights))

    def frozen(self, weights: Weights) -> Prepared:
        """See `Push`."""
        self._device = torch_device("auto")
        return Prepared(list(weights))

    async def load(self, ask: Ask, server: Server, name: str, prepared: Prepared) -> None:
        """See `Push`. A worker that fails in the middle holds parts of two versions: it is not used again
        before it has taken one whole.
        """
        if server.url not in self._groups:
            self._groups[server.url] = await self._join(ask, server)
        try:
            try:
                _check(server, name, await ask(server, "POST", "/begin_weight_update", {}))
            except RefusedError:  # a trainer that died has left its update open
                await ask(server, "POST", "/end_weight_update", {})
                _check(server, name, await ask(server, "POST", "/begin_weight_update", {}))
            pieces = list(_buckets(prepared.weights, self._size))
            for place, bucket in enumerate(pieces):
                last = place == len(pieces) - 1
                await self._send(ask, server, bucket, name if last else None)
            _check(server, name, await ask(server, "POST", "/end_weight_update", {}))
        except (UnavailableError, RefusedError) as error:
            # It may have been started again, with no memory of the group.
            del self._groups[server.url]
            raise UnavailableError(str(error), answered=True) from None

    async def _send(
        self, ask: Ask, server: Server, bucket: list[tuple[str, Tensor]], version: str | None
    ) -> None:
        from torch.distributed import BroadcastOptions

        group, backend, device = self._groups[server.url]
        content = torch.cat([raw_bytes(tensor) for _, tensor in bucket]).to(device)
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
            body["weight_version"] = version
        answer = asyncio.ensure_future(ask(server, "POST", "/update_weights_from_distributed", body))
        sent = asyncio.ensure_future(asyncio.to_thread(lambda: backend.broadcast([content], options).wait()))
        # A worker that refuses does not receive: the broadcast would wait for it until its time-out.
        await asyncio.wait([answer, sent], return_when=asyncio.FIRST_EXCEPTION)
        if sent.done() and (error := sent.exception()) is not None:
            answer.cancel()
            raise UnavailableError(f"{server.url} left the weight group ({reason_of(error)})", answered=False)
        sent.cancel()
        _check(server, version or "", await answer)

    async def _join(self, ask: Ask, server: Server) -> tuple[str, Any, torch.device]:
        """A new group of this process and all ranks of `server`."""
        settings = await ask(server, "GET", "/server_info", {}) or {}
        cuda = settings.get("device") == "cuda" and torch.cuda.is_available()
        ranks = int(settings.get("tp_size") or 1)
        member = GroupMember(f"opd-{uuid.uuid4().hex[:8]}", 0, 1 + ranks, "nccl" if cuda else "gloo")
        host = self._host or await asyncio.to_thread(own_address, urlsplit(server.url).hostname or "")
        store, port = host_store(host, TIMEOUT)
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": member.world,
            "group_name": member.name,
            "backend": member.backend,
        }
        answer = asyncio.ensure_future(ask(server, "POST", "/init_weights_update_group", body))
        met = asyncio.ensure_future(asyncio.to_thread(weight_group, store, member, TIMEOUT, host))
        await asyncio.wait([answer, met], return_when=asyncio.FIRST_EXCEPTION)
        if answer.done() and answer.exception() is not None:
            met.cancel()
        _check(server, member.name, await answer)
        return member.name, await met, self._device if cuda else torch.device("cpu")


def _buckets(weights: list[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[str, Tensor]]]:
    """`buckets` of one dtype each: receivers cut a bucket at its dtypes."""
    for _, alike in groupby(weights, key=lambda item: item[1].dtype):
        yield from buckets(alike, size)


def _check(server: Server, name: str, done: Any) -> None:
    if not (done or {}).get("success"):
        raise RolloutError(f"{server.url} did not take the weights {name}: {(done or {}).get('message')}.")


class SGLangVerbs(Verbs):
    """See `Verbs`. A pause gives running requests back to the queue of their worker."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model.config)
        self._longest = model.max_sequence

    async def pause(self, server: Server) -> None:
        """See `Verbs`."""
        await self.ask(server, "POST", "/pause_generation", {"mode": "retract"})

    async def flush(self, server: Server) -> None:
        """See `Verbs`."""
        await self.ask(server, "POST", "/flush_cache", {})

    async def go_on(self, server: Server) -> None:
        """See `Verbs`."""
        await self.ask(server, "POST", "/continue_generation", {})

    async def held(self, server: Server) -> str:
        """See `Verbs`."""
        return str((await self.pool.ask(server, "GET", "/model_info")).get("weight_version"))

    async def release(self, server: Server, parts: list[str]) -> None:
        """See `Verbs`."""
        await self.pool.ask(server, "POST", "/release_memory_occupation", {"tags": parts})

    async def take(self, server: Server, parts: list[str]) -> None:
        """See `Verbs`."""
        await self.pool.ask(server, "POST", "/resume_memory_occupation", {"tags": parts})

    async def check_settings(self, server: Server) -> None:
        """Whether it takes as many tokens as a request may have."""
        told = await self.pool.ask(server, "GET", "/server_info") or {}
        with decoding(lambda cause: RolloutError(f"{server.url}/server_info answered {cause}.")):
            most = most_tokens(told)
        wanted = self._longest + SGLangEngineConfig.kept
        if most is not None and most < wanted:
            raise RolloutError(
                f"{server.url} takes {most} tokens a request, and responses may need {self._longest} beside"
                f" {SGLangEngineConfig.kept} that it keeps; give it a context-length of {wanted} or more, or"
                " lower rollout.max_sequence."
            )

    async def settle(self, server: Server, name: str) -> None:
        """They call weights so from when they take them."""

    async def check_form(self, server: Server, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Verbs`."""
        info = await self.pool.ask(server, "GET", "/model_info") or {}
        check_config(server.url, info, self.config)
        answer = await self.ask(server, "POST", "/weights_checker", {"action": "checksum"})
        ranks = ranks_of(answer)
        if len(ranks) == 1 and "checksums" in ranks[0]:  # a worker of several ranks may cut its layers
            check_form(server.url, info, ranks[0]["checksums"], weights)

    async def verify(self, server: Server, newest: Newest) -> None:
        """Compare the checksums of every tensor with those of the weights themselves."""
        answer = await self.ask(server, "POST", "/weights_checker", {"action": "checksum"})
        settings = await self.pool.ask(server, "GET", "/server_info") or {}
        ranks = ranks_of(answer)
        with decoding(lambda cause: RolloutError(f"{server.url}/weights_checker answered {cause}.")):
            await asyncio.to_thread(newest.proof.check, server.url, ranks, settings)
