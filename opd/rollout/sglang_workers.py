"""The workers of a served engine: paused, flushed, given new weights, verified, resumed together."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from opd.errors import RolloutError
from opd.foreign import decoding
from opd.models.causal_lm import weights_digest
from opd.rollout.sglang_push import Push
from opd.rollout.sglang_sync import Proof, check_config, check_form
from opd.served.http_client import PoolOptions, RefusedError, Server, UnavailableError, pause
from opd.served.http_pool import HTTPPool, LoopThread
from opd.served.sglang_answers import ranks_of

if TYPE_CHECKING:
    from torch import Tensor

ATTEMPTS = 4
"""At a control request, before a worker counts as away."""


class Workers:
    """Workers hold version `version`, or are away; one that comes back is given what it lacks."""

    def __init__(
        self, options: PoolOptions, push: Push | None, version: int, config: Mapping[str, Any] | None
    ) -> None:
        self.version, self._push, self._config = version, push, config or {}
        self.paused = False
        # Their names say who has pushed: workers may hold a version 7 of an earlier stage.
        self._label = uuid.uuid4().hex[:8]
        self.versions: dict[str, int] = {}
        """What workers call the versions they hold."""
        self.pool = HTTPPool("the rollout engine", options, RolloutError, self._admit)
        self._weights: list[tuple[str, Tensor]] = []
        self._checked: set[str] = set()
        """URLs of workers whose model has the student's form."""
        self._proof: Proof | None = None
        """Of the newest weights."""
        self._rng = random.Random()

    @cached_property
    def loop(self) -> LoopThread:
        """Where requests run."""
        return LoopThread("sglang-engine")

    def pause(self) -> None:
        """Stop sampling; running requests go back to the queue of their worker."""
        self._everywhere(lambda server: self._post(server, "/pause_generation", {"mode": "retract"}))
        self.paused = True

    def flush(self) -> None:
        """Drop cached keys and values."""
        self._everywhere(lambda server: self._post(server, "/flush_cache", {}))

    def resume(self) -> None:
        """Sample on."""
        self._everywhere(lambda server: self._post(server, "/continue_generation", {}))
        self.paused = False

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
        self._weights = self._push.prepare(weights, version)
        self._proof = Proof(self._weights)
        self.version = version
        self.versions[self._name] = version
        self._everywhere(self._load)
        return weights_digest(self._weights)

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
        servers = self.pool.servers
        done = await asyncio.gather(*map(verb, servers), return_exceptions=True)
        away = [error for error in done if isinstance(error, UnavailableError)]
        for server, error in zip(servers, done, strict=True):
            if isinstance(error, UnavailableError):
                server.admitted = False
            elif isinstance(error, RefusedError):
                raise RolloutError(f"the rollout engine: {error}; check the worker's log.")
            elif isinstance(error, BaseException):
                raise error
        if len(away) == len(servers):
            raise RolloutError(f"the rollout engine: no worker answers ({away[0]}); start one and --resume.")

    async def _leave(self) -> None:
        done = (self.pool.ask(s, "POST", "/continue_generation", {}) for s in self.pool.servers)
        await asyncio.gather(*done, return_exceptions=True)

    async def _post(self, server: Server, path: str, body: dict[str, Any]) -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self.pool.ask(server, "POST", path, body)
            except UnavailableError:
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(pause(attempt, self._rng))

    @property
    def _name(self) -> str:
        """What workers are to call the newest version."""
        return f"{self._label}.{self.version}"

    async def _load(self, server: Server) -> None:
        """Have `server` take the newest weights, and verify what it holds then."""
        assert self._push is not None
        await self._check_form(server)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self._push.load(self.pool.ask, server, self._name)
                break
            except UnavailableError:
                if attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(pause(attempt, self._rng))
        held = str((await self.pool.ask(server, "GET", "/model_info")).get("weight_version"))
        if held != self._name:
            raise RolloutError(f"after the push of version {self._name} {server.url} says it holds {held}.")
        await self._verify(server)

    async def _check_form(self, server: Server) -> None:
        if server.url in self._checked:
            return
        info = await self.pool.ask(server, "GET", "/model_info") or {}
        check_config(server.url, info, self._config)
        answer = await self._post(server, "/weights_checker", {"action": "checksum"})
        ranks = ranks_of(answer)
        if len(ranks) == 1 and "checksums" in ranks[0]:  # a worker of several ranks may cut its layers
            check_form(server.url, info, ranks[0]["checksums"], self._weights)
        self._checked.add(server.url)

    async def _verify(self, server: Server) -> None:
        """Compare the checksums of every tensor with those of the weights themselves."""
        assert self._proof is not None
        answer = await self._post(server, "/weights_checker", {"action": "checksum"})
        settings = await self.pool.ask(server, "GET", "/server_info") or {}
        ranks = ranks_of(answer)
        with decoding(lambda cause: RolloutError(f"{server.url}/weights_checker answered {cause}.")):
            await asyncio.to_thread(self._proof.check, server.url, ranks, settings)

    async def _admit(self, server: Server) -> None:
        """A worker that is new or was away: the version it holds, or the newest weights."""
        held = str((await self.pool.ask(server, "GET", "/model_info")).get("weight_version"))
        self._checked.discard(server.url)
        if not self._weights:
            self.versions.setdefault(held, self.version)  # what it was started with
        elif held != self._name:
            await self._post(server, "/pause_generation", {"mode": "retract"})
            await self._load(server)
            if not self.paused:
                await self._post(server, "/continue_generation", {})
