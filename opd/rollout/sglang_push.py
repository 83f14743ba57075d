"""New weights for one SGLang worker: through a folder that it reads, or broadcast in a group with it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import torch

from opd.errors import RolloutError
from opd.models.causal_lm import raw_bytes
from opd.rendezvous import host_store
from opd.rollout.sync.disk import WeightFolder
from opd.rollout.sync.group import TIMEOUT, Seat, weight_group
from opd.rollout.sync.parcel import Weights, buckets
from opd.served.http_client import RefusedError, Server, UnavailableError

if TYPE_CHECKING:
    from torch import Tensor

Ask = Callable[[Server, str, str, dict[str, Any]], Awaitable[Any]]
"""`ask(server, method, path, body)`: one attempt at one request, as `HTTPClient.ask`."""
BUCKET_BYTES = 256 << 20


class Push(Protocol):
    """How the newest weights reach a worker, whenever it needs them."""

    def prepare(self, weights: Weights, version: int) -> list[tuple[str, Tensor]]:
        """Make `weights` the newest; returns copies of them on the CPU."""
        ...

    async def load(self, ask: Ask, server: Server, name: str) -> None:
        """Have `server` take the newest weights and call them `name`, with its cache dropped.

        Raises `RolloutError` if it does not take them, `UnavailableError` if it is away.
        """
        ...


class FolderPush:
    """Through a folder on a file system that this process and every worker see."""

    def __init__(self, folder: WeightFolder) -> None:
        self._folder = folder

    def prepare(self, weights: Weights, version: int) -> list[tuple[str, Tensor]]:
        """See `Push`: the older version's folder is gone afterwards."""
        kept = _copies(weights)
        self._folder.write(kept, version)
        return kept

    async def load(self, ask: Ask, server: Server, name: str) -> None:
        """See `Push`."""
        body = {"model_path": str(self._folder.newest), "weight_version": name, "flush_cache": True}
        done = await ask(server, "POST", "/update_weights_from_disk", body | {"keep_pause": True})
        _check(server, name, done)


class TensorPush:
    """Broadcast, in buckets, in a process group with each worker: one worker's end is not the others'.

    Args:
        host: This machine's address, as workers reach it.
        bucket_bytes: Weights go in pieces of about this size, at least one tensor each.
    """

    def __init__(self, host: str = "127.0.0.1", bucket_bytes: int = BUCKET_BYTES) -> None:
        self._host, self._size = host, bucket_bytes
        self._newest: list[tuple[str, Tensor]] = []
        self._groups: dict[str, tuple[str, Any, torch.device]] = {}
        """URL -> name of the group, its back end, where it sends from."""

    def prepare(self, weights: Weights, version: int) -> list[tuple[str, Tensor]]:
        """See `Push`."""
        self._newest = _copies(weights)
        return self._newest

    async def load(self, ask: Ask, server: Server, name: str) -> None:
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
            pieces = list(_buckets(self._newest, self._size))
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
            raise UnavailableError(f"{server.url} left the weight group ({error})", answered=False)
        sent.cancel()
        _check(server, version or "", await answer)

    async def _join(self, ask: Ask, server: Server) -> tuple[str, Any, torch.device]:
        """A new group of this process and all ranks of `server`."""
        settings = await ask(server, "GET", "/server_info", {}) or {}
        cuda = settings.get("device") == "cuda" and torch.cuda.is_available()
        ranks = int(settings.get("tp_size") or 1)
        seat = Seat(f"opd-{uuid.uuid4().hex[:8]}", 0, 1 + ranks, "nccl" if cuda else "gloo")
        store, port = host_store(self._host, TIMEOUT)
        body = {
            "master_address": self._host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": seat.world,
            "group_name": seat.name,
            "backend": seat.backend,
        }
        answer = asyncio.ensure_future(ask(server, "POST", "/init_weights_update_group", body))
        met = asyncio.ensure_future(asyncio.to_thread(weight_group, store, seat, TIMEOUT, self._host))
        await asyncio.wait([answer, met], return_when=asyncio.FIRST_EXCEPTION)
        if answer.done() and answer.exception() is not None:
            met.cancel()
        _check(server, seat.name, await answer)
        return seat.name, await met, torch.device("cuda" if cuda else "cpu")


def _copies(weights: Weights) -> list[tuple[str, Tensor]]:
    return [(name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in weights]


def _buckets(weights: list[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[str, Tensor]]]:
    """`buckets` of one dtype each: receivers cut a bucket at its dtypes."""
    for _, alike in groupby(weights, key=lambda item: item[1].dtype):
        yield from buckets(alike, size)


def _check(server: Server, name: str, done: Any) -> None:
    if not (done or {}).get("success"):
        raise RolloutError(f"{server.url} did not take the weights {name}: {(done or {}).get('message')}.")
