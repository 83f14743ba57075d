"""The workers of a served engine: paused, flushed, given new weights, verified, resumed together.

What servers of one kind are told is their `Verbs`.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from opd.errors import RolloutError
from opd.foreign import shown
from opd.loop_thread import LoopThread
from opd.models.causal_lm import weights_digest
from opd.rollout.served_messages import MessageReader
from opd.rollout.weight_proof import Proof, check_config, check_form
from opd.rollout.weight_sync import WeightFolder, Weights
from opd.served.http_client import SERVERS, PoolOptions, RefusedError, Server, UnavailableError, advice
from opd.served.http_pool import HTTPPool

if TYPE_CHECKING:
    from torch import Tensor

Ask = Callable[[Server, str, str, dict[str, Any]], Awaitable[Any]]
"""`ask(server, method, path, body)`: one attempt at one request, as `HTTPClient.ask`."""
Read = Callable[[Ask, Server, str, Path], Awaitable[None]]
"""`read(ask, server, name, folder)`: have a server take the weights in a folder that it sees, and call them
`name`. Raises as `Push.load`."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One version, ready to be given to workers."""

    weights: list[tuple[str, Tensor]]
    """On the CPU, the trainer's no more."""
    folder: Path | None = None
    """Where they are, if on a disk."""
    digest: str = ""
    """Their quick digest; empty where nobody has taken it yet."""


class Push(Protocol):
    """How weights reach a worker, whenever it needs them."""

    def prepare(self, weights: Weights, version: int) -> Prepared:
        """Copy `weights`, which are the newest from now on."""
        ...

    def frozen(self, weights: Weights) -> Prepared:
        """The same of weights that never change: they need not be copied."""
        ...

    async def load(self, ask: Ask, server: Server, name: str, prepared: Prepared) -> None:
        """Have `server` take these weights and call them `name`, with its cache dropped.

        Raises `RolloutError` if it does not take them, `UnavailableError` if it is away or they are.
        """
        ...


class FolderPush:
    """Through a folder on a file system that this process and every worker see.

    Args:
        folder: Where each version is written.
        read: Has a worker take a version.
    """

    def __init__(self, folder: WeightFolder, read: Read) -> None:
        self._folder, self._read = folder, read

    def prepare(self, weights: Weights, version: int) -> Prepared:
        """See `Push`: the older version's folder is gone once no worker reads it."""
        kept = copies(weights)
        return Prepared(kept, self._folder.write(kept, version))

    def frozen(self, weights: Weights) -> Prepared:
        """See `Push`."""
        return Prepared([], self._folder.write(weights, 0))

    async def load(self, ask: Ask, server: Server, name: str, prepared: Prepared) -> None:
        """See `Push`."""
        folder = prepared.folder
        assert folder is not None
        with self._folder.reading(folder) as there:
            if not there:  # newer ones have come meanwhile: those are due
                raise UnavailableError(f"{folder} is not the newest any more", answered=False)
            await self._read(ask, server, name, folder)


def copies(weights: Weights) -> list[tuple[str, Tensor]]:
    return [(name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in weights]


WEIGHTS, REST = ["weights"], ["kv_cache", "cuda_graph"]
"""What a worker gives back in parts, by its own words: it is given weights before it takes the rest."""

LEAVES = 10.0
"""Seconds that a run which ends gives a worker to go on."""
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


class ExpectedAnswers:
    """What servers have to say with the newest weights: computed once, whichever worker asks first."""

    def __init__(self, outputs: Callable[[list[tuple[str, Tensor]]], np.ndarray]) -> None:
        self._outputs = outputs
        self._known: tuple[Newest, np.ndarray] | None = None
        self._lock = threading.Lock()

    def of(self, newest: Newest) -> np.ndarray:
        """What `outputs` gives of them. Takes a forward pass: not for an event loop."""
        with self._lock:
            if self._known is None or self._known[0] is not newest:
                self._known = newest, self._outputs(newest.prepared.weights)
            return self._known[1]


class Verbs(ABC):
    """What servers of one kind are told, and how what they hold is proved.

    Each verb raises `UnavailableError` where a server is away, `RefusedError` where it declines, and
    `RolloutError` where it must not be used.
    """

    pause_ends_streams: ClassVar[bool] = False
    """Whether a pause ends what is being written, which is asked for again after it; else it waits there."""
    adapters: ClassVar[bool] = False
    """Whether they are given adapters alone, on a base that they hold."""
    requirement: str = ""
    """How they have to be started, for people: the end of a sentence."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        """`config`: the student's Hugging Face configuration, to be compared with the servers'."""
        self.config = config or {}
        self.pool: HTTPPool

    def use(self, pool: HTTPPool) -> None:
        """Ask through this pool from now on."""
        self.pool = pool

    async def ask(self, server: Server, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """An answer, asked for a few times where the server is away."""
        return await RETRY.call_async(lambda: self.pool.ask(server, method, path, body), UnavailableError)

    @abstractmethod
    async def pause(self, server: Server) -> None:
        """Stop sampling."""

    @abstractmethod
    async def flush(self, server: Server) -> None:
        """Drop cached keys and values."""

    @abstractmethod
    async def go_on(self, server: Server) -> None:
        """Sample on, if it was paused."""

    @abstractmethod
    async def held(self, server: Server) -> str:
        """What it calls the weights it holds."""

    def name_weights(self, newest: Newest | None, body: dict[str, Any], reader: MessageReader) -> None:
        """Have what is asked be written with `newest`, where it is asked for by name. Raises `RolloutError`
        if there is none yet.
        """
        return

    async def give_base(self, server: Server) -> None:
        """Have it hold what adapters alone are for, where they are given."""
        return

    async def weights_of(self, server: Server) -> str | None:
        """What sampled the tokens of streams that have begun on it; `None` where messages say it. Nothing is
        known of those over which it was paused meanwhile.
        """
        return None

    @abstractmethod
    async def check_settings(self, server: Server) -> None:
        """Whether it was started as it has to be."""

    @abstractmethod
    async def info(self, server: Server) -> Mapping[str, Any]:
        """What it says of its model, with `model_path`, for `check_config`."""

    @abstractmethod
    async def tensor_names(self, server: Server) -> Collection[str] | None:
        """Names of the tensors that it holds; `None` where its ranks may have cut the model's layers."""

    async def check_form(self, server: Server, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Whether its model has the form of `weights`: others would end it."""
        info = await self.info(server)
        check_config(server.url, info, self.config)
        held = await self.tensor_names(server)
        if held is not None:
            check_form(server.url, info, held, weights)

    @abstractmethod
    async def verify(self, server: Server, newest: Newest) -> None:
        """Whether it holds `newest`, which it was given."""

    @abstractmethod
    async def settle(self, server: Server, name: str) -> None:
        """What it holds is proved: have it call that `name`, unless it does."""

    @abstractmethod
    async def release(self, server: Server, parts: list[str]) -> None:
        """Give the memory of these parts back."""

    @abstractmethod
    async def take(self, server: Server, parts: list[str]) -> None:
        """Take it again."""


def new_label() -> str:
    """What the names of one engine's weights begin with."""
    return f"opd-{uuid.uuid4().hex[:8]}"


class Workers:
    """Workers hold version `version`, or are away; one that comes back is given what it lacks.

    A verb for all waits for a worker that is just being admitted, which ends with the newest weights so.
    """

    def __init__(self, options: PoolOptions, push: Push | None, version: int, verbs: Verbs) -> None:
        self._push, self.verbs = push, verbs
        self._first = version
        self.paused = False
        self.pauses = 0
        """How often they were paused so far."""
        self._opened = asyncio.Event()
        # Their names say who has pushed: workers may hold a version 7 of an earlier stage.
        self._label = new_label()
        self.versions: dict[str, int] = {}
        """What workers call the versions they hold."""
        self.pool = HTTPPool("the rollout engine", options, RolloutError, self._admit)
        verbs.use(self.pool)
        self._newest: Newest | None = None
        """Given by the caller's thread, taken by the loop's; `None` before the first push."""
        self._checked: set[str] = set()
        """URLs of workers whose model has the student's form."""
        self._proved: dict[str, str] = {}
        """URL -> the weights that a worker was last found to hold."""
        self._taken = 0
        """Bytes that `take_sent_bytes` has told of."""
        self._asleep: dict[str, list[str]] = {}
        """URLs of workers that sleep, and what each has given back."""

    @property
    def newest(self) -> Newest | None:
        """What workers are to hold; `None` before the first push."""
        return self._newest

    @property
    def version(self) -> int:
        """Of the weights that workers are to hold."""
        return self._first if self._newest is None else self._newest.version

    @cached_property
    def loop(self) -> LoopThread:
        """Where requests run."""
        return LoopThread("served-engine")

    def pause(self) -> None:
        """Stop sampling."""
        self.paused = True  # first: a worker that is admitted meanwhile must not go on
        self.pauses += 1
        self._everywhere(self.verbs.pause)

    def flush(self) -> None:
        """Drop cached keys and values."""
        self._everywhere(self.verbs.flush)

    def resume(self) -> None:
        """Sample on."""
        self.paused = False  # first: one that is admitted meanwhile must not stay paused
        try:
            self._everywhere(self.verbs.go_on)
        finally:
            self.loop.run(self._open())

    async def until_open(self) -> int:
        """How often they were paused so far, once what is asked is not ended by this pause at once."""
        while True:
            pauses = self.pauses  # first: a pause that comes now is one that came later
            if not (self.paused and self.verbs.pause_ends_streams):
                return pauses
            await self._opened.wait()

    async def _open(self) -> None:
        self._opened.set()  # for those that wait now
        self._opened.clear()

    def sleep(self) -> None:
        """Pause, and have every worker give its memory back until it is given weights."""
        self.pause()
        self.flush()
        self._everywhere(self._release)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """See `ServedEngine.update_weights`."""
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
        return prepared.digest or weights_digest(prepared.weights, quick=True)

    def take_sent_bytes(self) -> int | None:
        """Bytes of weights that have travelled since it was asked last; `None` where workers are given all
        tensors as they are.
        """
        sent: int | None = getattr(self._push, "sent_bytes", None)
        if sent is None:
            return None
        before, self._taken = self._taken, sent
        return sent - before

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
                mend = advice(error, "check the worker's log")
                raise RolloutError(f"the rollout engine: {error}; {mend}.")
            elif isinstance(error, BaseException):
                raise error
        if away and (reason := self.pool.options.given_up()) is not None:
            raise reason
        if len(away) == len(servers):
            revive = self.pool.options.revive
            raise RolloutError(f"the rollout engine: no worker answers ({away[0]}); {revive}.")

    async def _leave(self) -> None:
        told = [asyncio.wait_for(self.verbs.go_on(server), LEAVES) for server in self.pool.servers]
        await asyncio.gather(*told, return_exceptions=True)

    async def _load(self, server: Server, newest: Newest) -> None:
        """Have `server` take the `newest` weights, and verify what it holds then."""
        push, name, verbs = self._push, newest.name, self.verbs
        assert push is not None
        self._proved.pop(server.url, None)
        await verbs.pause(server)  # one that was away when the others were paused, too
        await self._wake(server, WEIGHTS)
        if server.url not in self._checked:
            await verbs.check_settings(server)
            await verbs.check_form(server, newest.prepared.weights)
            self._checked.add(server.url)
        await verbs.give_base(server)
        load = partial(push.load, self.pool.ask, server, name, newest.prepared)
        await RETRY.call_async(load, UnavailableError)
        await verbs.verify(server, newest)
        await verbs.settle(server, name)
        held = await verbs.held(server)
        if held != name:
            raise RolloutError(
                f"after the push of version {name} {server.url} says it holds {shown(held)}; let nobody else"
                " give it weights, and --resume."
            )
        self._proved[server.url] = name
        await self._wake(server, REST)

    async def _release(self, server: Server) -> None:
        """Have `server` give its memory back, once: what it has given it cannot give again."""
        if server.url not in self._asleep:
            await self.verbs.release(server, [*WEIGHTS, *REST])
            self._asleep[server.url] = [*WEIGHTS, *REST]

    async def _wake(self, server: Server, parts: list[str]) -> None:
        """Have `server` take memory for `parts` that it has given back. One that was started again since has
        its own, and ends where it is told to take more: it knows no version of this engine.
        """
        given = self._asleep.get(server.url, [])
        missing = [part for part in parts if part in given]
        if not missing:
            return
        if await self.verbs.held(server) not in self.versions:
            del self._asleep[server.url]
            return
        await self.verbs.take(server, missing)
        left = [part for part in given if part not in missing]
        if left:
            self._asleep[server.url] = left
        else:
            del self._asleep[server.url]

    async def _admit(self, server: Server) -> None:
        """A worker that is new or was away: the version it holds, or the newest weights."""
        verbs = self.verbs
        await verbs.check_settings(server)
        held = await verbs.held(server)
        newest = self._newest  # not before: a push may come while a worker is asked
        self._checked.discard(server.url)
        if newest is None:
            self.versions.setdefault(held, self.version)  # what it was started with
            return
        if held != newest.name or self._proved.get(server.url) != held:
            await self._load(server, newest)
        if not self.paused:
            await verbs.go_on(server)  # also one that went away before it was told
