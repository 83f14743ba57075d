"""The workers of a served engine: paused, flushed, given new weights, verified, resumed together.

New weights reach a worker through a folder that it reads, or broadcast in a process group with it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from opd.errors import RolloutError, reason_of
from opd.foreign import decoding
from opd.models.causal_lm import raw_bytes, torch_device, weights_digest
from opd.ranks import gloo_device, host_store, own_address
from opd.rollout.sglang_proof import Proof, check_config, check_form
from opd.rollout.weight_sync import WeightFolder, Weights, buckets
from opd.served.http_pool import (
    SERVERS,
    HTTPPool,
    LoopThread,
    PoolOptions,
    RefusedError,
    Server,
    UnavailableError,
)
from opd.served.sglang_answers import ranks_of

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


Ask = Callable[[Server, str, str, dict[str, Any]], Awaitable[Any]]
"""`ask(server, method, path, body)`: one attempt at one request, as `HTTPClient.ask`."""
BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """One version, ready to be given to workers."""

    weights: list[tuple[str, Tensor]]
    """On the CPU, the trainer's no more."""
    folder: Path | None = None
    """Where they are, if on a disk."""


class Push(Protocol):
    """How weights reach a worker, whenever it needs them."""

    def prepare(self, weights: Weights, version: int) -> Prepared:
        """Copy `weights`, which are the newest from now on."""
        ...

    async def load(self, ask: Ask, server: Server, name: str, prepared: Prepared) -> None:
        """Have `server` take these weights and call them `name`, with its cache dropped.

        Raises `RolloutError` if it does not take them, `UnavailableError` if it is away or they are.
        """
        ...


class FolderPush:
    """Through a folder on a file system that this process and every worker see."""

    def __init__(self, folder: WeightFolder) -> None:
        self._folder = folder

    def prepare(self, weights: Weights, version: int) -> Prepared:
        """See `Push`: the older version's folder is gone once no worker reads it."""
        kept = _copies(weights)
        return Prepared(kept, self._folder.write(kept, version))

    async def load(self, ask: Ask, server: Server, name: str, prepared: Prepared) -> None:
        """See `Push`."""
        folder = prepared.folder
        assert folder is not None
        with self._folder.reading(folder) as there:
            if not there:  # newer ones have come meanwhile: those are due
                raise UnavailableError(f"{folder} is not the newest any more", answered=False)
            body = {"model_path": str(folder), "weight_version": name, "flush_cache": True}
            done = await ask(server, "POST", "/update_weights_from_disk", body | {"keep_pause": True})
            _check(server, name, done)


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
        self._device = torch_device("auto")
        return Prepared(_copies(weights))

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


def _copies(weights: Weights) -> list[tuple[str, Tensor]]:
    return [(name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in weights]


def _buckets(weights: list[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[str, Tensor]]]:
    """`buckets` of one dtype each: receivers cut a bucket at its dtypes."""
    for _, alike in groupby(weights, key=lambda item: item[1].dtype):
        yield from buckets(alike, size)


def _check(server: Server, name: str, done: Any) -> None:
    if not (done or {}).get("success"):
        raise RolloutError(f"{server.url} did not take the weights {name}: {(done or {}).get('message')}.")


WEIGHTS, REST = ["weights"], ["kv_cache", "cuda_graph"]
"""What a worker gives back in parts, by its own words: it is given weights before it takes the rest."""

RETRY = replace(SERVERS, attempts=4)
"""At a control request, before a worker counts as away."""


@dataclass(frozen=True, slots=True)
class Newest:
    """What workers are to hold: swapped whole, so that nobody gives a worker one version's weights and asks
    it for the proof of another.
    """

    version: int
    name: str
    """What workers call it."""
    prepared: Prepared
    proof: Proof


class Workers:
    """Workers hold version `version`, or are away; one that comes back is given what it lacks.

    A verb for all waits for a worker that is just being admitted, which ends with the newest weights so.
    """

    def __init__(
        self, options: PoolOptions, push: Push | None, version: int, config: Mapping[str, Any] | None
    ) -> None:
        self._push, self._config = push, config or {}
        self._first = version
        self.paused = False
        # Their names say who has pushed: workers may hold a version 7 of an earlier stage.
        self._label = uuid.uuid4().hex[:8]
        self.versions: dict[str, int] = {}
        """What workers call the versions they hold."""
        self.pool = HTTPPool("the rollout engine", options, RolloutError, self._admit)
        self._newest: Newest | None = None
        """Given by the caller's thread, taken by the loop's; `None` before the first push."""
        self._checked: set[str] = set()
        """URLs of workers whose model has the student's form."""
        self._asleep: dict[str, list[str]] = {}
        """URLs of workers that sleep, and what each has given back."""

    @property
    def version(self) -> int:
        """Of the weights that workers are to hold."""
        return self._first if self._newest is None else self._newest.version

    @cached_property
    def loop(self) -> LoopThread:
        """Where requests run."""
        return LoopThread("sglang-engine")

    def pause(self) -> None:
        """Stop sampling; running requests go back to the queue of their worker."""
        self.paused = True  # first: a worker that is admitted meanwhile must not go on
        self._everywhere(lambda server: self._post(server, "/pause_generation", {"mode": "retract"}))

    def flush(self) -> None:
        """Drop cached keys and values."""
        self._everywhere(lambda server: self._post(server, "/flush_cache", {}))

    def resume(self) -> None:
        """Sample on."""
        self.paused = False  # first: one that is admitted meanwhile must not stay paused
        self._everywhere(lambda server: self._post(server, "/continue_generation", {}))

    def sleep(self) -> None:
        """Pause, and have every worker give its memory back until it is given weights."""
        self.pause()
        self.flush()
        self._everywhere(self._release)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """See `SGLangEngine.update_weights`."""
        if not self.paused:
            raise RolloutError(
                "weights can change only between decode steps; call pause() before update_weights()."
            )
        if version <= self.version:
            raise RolloutError(
                f"the policy version must grow, but {version} was given while the engine holds"
                f" {self.version}."
            )
        if self._push is None:
            raise RolloutError("the engine has no way to push new weights; make it with a FolderPush.")
        prepared, name = self._push.prepare(weights, version), f"{self._label}.{version}"
        newest = Newest(version, name, prepared, Proof(prepared.weights))
        self.versions[name] = version
        self._newest = newest
        self._everywhere(lambda server: self._load(server, newest))
        return weights_digest(prepared.weights, quick=True)

    def close(self) -> None:
        """Close the connections. Workers that are paused go on: others may use them."""
        if "loop" in self.__dict__:
            if self.paused:
                self.loop.run(self._leave())
            self.loop.run(self.pool.close())
            self.loop.close()

    def _everywhere(self, verb: Callable[[Server], Awaitable[Any]]) -> None:
        """`verb` on every worker at once. Raises `RolloutError` if none is there."""
        self.loop.run(self._all(verb))

    async def _all(self, verb: Callable[[Server], Awaitable[Any]]) -> None:
        async def alone(server: Server) -> Any:
            async with server.lock:
                return await verb(server)

        servers = self.pool.servers
        done = await asyncio.gather(*map(alone, servers), return_exceptions=True)
        away = [error for error in done if isinstance(error, UnavailableError)]
        for server, error in zip(servers, done, strict=True):
            if isinstance(error, UnavailableError):
                server.admitted = False
            elif isinstance(error, RefusedError):
                raise RolloutError(f"the rollout engine: {error}; check the worker's log.")
            elif isinstance(error, BaseException):
                raise error
        if away and (reason := self.pool.options.given_up()) is not None:
            raise reason
        if len(away) == len(servers):
            raise RolloutError(f"the rollout engine: no worker answers ({away[0]}); start one and --resume.")

    async def _leave(self) -> None:
        done = (self.pool.ask(s, "POST", "/continue_generation", {}) for s in self.pool.servers)
        await asyncio.gather(*done, return_exceptions=True)

    async def _post(self, server: Server, path: str, body: dict[str, Any]) -> Any:
        return await RETRY.call_async(lambda: self.pool.ask(server, "POST", path, body), UnavailableError)

    async def _load(self, server: Server, newest: Newest) -> None:
        """Have `server` take the `newest` weights, and verify what it holds then."""
        push, name = self._push, newest.name
        assert push is not None
        await self._wake(server, WEIGHTS)
        await self._check_form(server, newest)
        load = partial(push.load, self.pool.ask, server, name, newest.prepared)
        await RETRY.call_async(load, UnavailableError)
        held = str((await self.pool.ask(server, "GET", "/model_info")).get("weight_version"))
        if held != name:
            raise RolloutError(f"after the push of version {name} {server.url} says it holds {held}.")
        await self._verify(server, newest)
        await self._wake(server, REST)

    async def _release(self, server: Server) -> None:
        """Have `server` give its memory back, once: what it has given it cannot give again."""
        if server.url not in self._asleep:
            await self.pool.ask(server, "POST", "/release_memory_occupation", {"tags": [*WEIGHTS, *REST]})
            self._asleep[server.url] = [*WEIGHTS, *REST]

    async def _wake(self, server: Server, parts: list[str]) -> None:
        """Have `server` take memory for `parts` that it has given back. One that was started again since has
        its own, and ends where it is told to take more: it knows no version of this engine.
        """
        given = self._asleep.get(server.url, [])
        missing = [part for part in parts if part in given]
        if not missing:
            return
        held = str((await self.pool.ask(server, "GET", "/model_info")).get("weight_version"))
        if held not in self.versions:
            del self._asleep[server.url]
            return
        await self.pool.ask(server, "POST", "/resume_memory_occupation", {"tags": missing})
        left = [part for part in given if part not in missing]
        if left:
            self._asleep[server.url] = left
        else:
            del self._asleep[server.url]

    async def _check_form(self, server: Server, newest: Newest) -> None:
        if server.url in self._checked:
            return
        info = await self.pool.ask(server, "GET", "/model_info") or {}
        check_config(server.url, info, self._config)
        answer = await self._post(server, "/weights_checker", {"action": "checksum"})
        ranks = ranks_of(answer)
        if len(ranks) == 1 and "checksums" in ranks[0]:  # a worker of several ranks may cut its layers
            check_form(server.url, info, ranks[0]["checksums"], newest.prepared.weights)
        self._checked.add(server.url)

    async def _verify(self, server: Server, newest: Newest) -> None:
        """Compare the checksums of every tensor with those of the weights themselves."""
        answer = await self._post(server, "/weights_checker", {"action": "checksum"})
        settings = await self.pool.ask(server, "GET", "/server_info") or {}
        ranks = ranks_of(answer)
        with decoding(lambda cause: RolloutError(f"{server.url}/weights_checker answered {cause}.")):
            await asyncio.to_thread(newest.proof.check, server.url, ranks, settings)

    async def _admit(self, server: Server) -> None:
        """A worker that is new or was away: the version it holds, or the newest weights."""
        held = str((await self.pool.ask(server, "GET", "/model_info")).get("weight_version"))
        self._checked.discard(server.url)
        newest = self._newest
        if newest is None:
            self.versions.setdefault(held, self.version)  # what it was started with
        elif held != newest.name:
            await self._post(server, "/pause_generation", {"mode": "retract"})
            await self._load(server, newest)
            if not self.paused:
                await self._post(server, "/continue_generation", {})
