"""The workers of a served engine: paused, flushed, given new weights, verified and resumed as one.

The requests to servers of one kind are its `Verbs`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from torch import Tensor

from opd.errors import RolloutError
from opd.loop_thread import LoopThread
from opd.models.causal_lm import WeightsDigest, weights_digest
from opd.models.stored_form import StoredForm
from opd.ranks import Ranks
from opd.rollout.served_messages import MessageReader
from opd.rollout.weight_proof import Proof, check_config, check_form
from opd.rollout.weight_sync import WeightFolder, Weights, tensors_of_files
from opd.served.http_client import (
    SERVERS,
    PoolOptions,
    RefusedError,
    Server,
    UnavailableError,
    refusal_advice,
)
from opd.served.http_pool import HTTPPool
from opd.untrusted import safe_excerpt

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Ask = Callable[[Server, str, str, dict[str, Any]], Awaitable[Any]]
"""`ask(server, method, path, body)`: one attempt at one request, as `HTTPClient.request_json`."""
Read = Callable[[Ask, Server, str, Path], Awaitable[None]]
"""`read(ask, server, name, folder)`: have a server load the weights in a folder that it sees, and call them
`name` and `READING`. Raises as `Push.load`."""
READING = ".reading"
"""Suffix of the name of weights that are not verified yet."""


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """One version, ready to be sent to workers."""

    weights: list[tuple[str, Tensor]]
    """Copies on the CPU, no longer the trainer's tensors."""
    folder: Path | None = None
    """Their folder, if they are on a disk."""
    digest: str = ""
    """Their quick digest, or empty if it was not computed yet."""


class Push(Protocol):
    """Sends weights to a worker, whenever it needs them."""

    def prepare(self, weights: Weights, version: int) -> PreparedWeights:
        """Copy `weights`, which are the newest from now on."""
        ...

    def prepare_static(self, weights: Weights) -> PreparedWeights:
        """Prepare weights that never change, so they need not be copied."""
        ...

    async def load(self, send: Ask, server: Server, name: str, prepared: PreparedWeights) -> int:
        """Have `server` load these weights, with its cache dropped. It calls all of a model `name` and
        `READING`, adapters `name`. Return the bytes that it took.

        Raises `RolloutError` if it does not take them, `UnavailableError` if it or the weights are gone.
        """
        ...


class FolderPush:
    """Implements `Push` through a folder on a file system that this process and every worker see."""

    def __init__(self, folder: WeightFolder, read: Read) -> None:
        self._folder, self._read = folder, read

    def prepare(self, weights: Weights, version: int) -> PreparedWeights:
        """See `Push`. The older version's folder is removed once no worker reads it."""
        tensors = copy_to_cpu(weights)
        return PreparedWeights(tensors, self._folder.write_version(tensors, version))

    def prepare_static(self, weights: Weights) -> PreparedWeights:
        return PreparedWeights([], self._folder.write_version(weights, 0))

    async def load(self, send: Ask, server: Server, name: str, prepared: PreparedWeights) -> int:
        folder = prepared.folder
        assert folder is not None
        with self._folder.lease_version(folder) as exists:
            if not exists:  # newer weights have come meanwhile, and are due
                raise UnavailableError(f"{folder} is not the newest any more", answered=False)
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            await self._read(send, server, name, folder)
            return size


def copy_to_cpu(weights: Weights) -> list[tuple[str, Tensor]]:
    return [(name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in weights]


WEIGHTS, REST = ["weights"], ["kv_cache", "cuda_graph"]
"""Parts of its memory that a worker frees, in its own terms. Weights are taken again first."""

GO_ON_SECONDS = 10.0
"""Seconds that a run which ends waits for a worker to resume."""
RETRY = replace(SERVERS, attempts=4)
"""Attempts at a control request, before a worker counts as away."""
KEEP = 1.0
"""Seconds between two looks of the first of several ranks at the weights that workers hold."""


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The target state of workers. It is replaced as one object, so that no worker gets one version's weights
    and is verified against another.
    """

    version: int
    name: str
    """The workers' name for it."""
    prepared: PreparedWeights
    proof: Proof


class ExpectedAnswers:
    """Log-probabilities due with the newest weights, computed once for all workers."""

    def __init__(self, outputs: Callable[[list[tuple[str, Tensor]]], np.ndarray]) -> None:
        self._outputs = outputs
        self._known: tuple[TargetWeights, np.ndarray] | None = None
        self._lock = threading.Lock()

    def logprobs_for(self, newest: TargetWeights) -> np.ndarray:
        """Return `outputs` for these weights. Takes a forward pass, so do not call it in an event loop."""
        with self._lock:
            if self._known is None or self._known[0] is not newest:
                self._known = newest, self._outputs(newest.prepared.weights)
            return self._known[1]


class Verbs(ABC):
    """The requests to servers of one kind, and the verification of their weights.

    Each verb raises `UnavailableError` if a server is away, `RefusedError` if it declines, and `RolloutError`
    if it must not be used.
    """

    pause_ends_streams: ClassVar[bool] = False
    """True if a pause ends requests in progress, which are sent again after it. Otherwise they wait."""
    adapters: ClassVar[bool] = False
    """True if servers are given adapters alone, on a base that they hold."""
    requirement: str = ""
    """How they must be started, for people: the end of a sentence."""

    def __init__(self, config: Mapping[str, object] | None) -> None:
        """`config`: the student's Hugging Face configuration, to be compared with the servers'."""
        self.config = config or {}
        self.label = f"opd-{uuid.uuid4().hex[:8]}"
        """Prefix of the names of weights."""
        self.pool: HTTPPool

    def use_pool(self, pool: HTTPPool) -> None:
        """Send requests through `pool` from now on."""
        self.pool = pool

    async def request_json(
        self, server: Server, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Any:
        """Return the answer to one request, with retries while the server is away."""
        return await RETRY.call_async(
            lambda: self.pool.request_json(server, method, path, body), UnavailableError
        )

    records_experts: bool = False
    """Whether servers must give expert choices."""

    @abstractmethod
    async def pause(self, server: Server) -> None:
        """Stop sampling."""

    @abstractmethod
    async def flush(self, server: Server) -> None:
        """Drop cached keys and values."""

    @abstractmethod
    async def go_on(self, server: Server) -> None:
        """Resume sampling, if it was paused."""

    @abstractmethod
    async def loaded_version(self, server: Server) -> str:
        """Return the server's name for the weights it holds."""

    def name_weights(self, newest: TargetWeights | None, body: dict[str, Any], reader: MessageReader) -> None:
        """Make the request use `newest`, if requests name weights. Raises `RolloutError` without one."""
        return

    async def give_base(self, server: Server) -> int:
        """Load the base of adapters, if servers are given adapters alone. Return the bytes that it took."""
        return 0

    async def weights_of(self, server: Server) -> str | None:
        """Return the name of the weights that sample streams begun on it, or None if messages name them. Not
        valid for streams over which it was paused.
        """
        return None

    @abstractmethod
    async def check_settings(self, server: Server) -> None:
        """Raise unless the server was started with the required settings."""

    @abstractmethod
    async def model_info(self, server: Server) -> Mapping[str, Any]:
        """Return its facts about its model, with `model_path`, for `check_config`."""

    @abstractmethod
    async def tensor_names(self, server: Server) -> Collection[str] | None:
        """Return names of its tensors, or None if its ranks may have cut the model's layers."""

    async def check_form(self, server: Server, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raise unless its model has the form of `weights`. Others would end it."""
        info = await self.model_info(server)
        check_config(server.url, info, self.config)
        names = await self.tensor_names(server)
        if names is not None:
            check_form(server.url, info, names, weights)

    @abstractmethod
    async def verify(self, server: Server, newest: TargetWeights) -> None:
        """Raise unless it holds `newest`, which it was given."""

    @abstractmethod
    async def set_version_name(self, server: Server, name: str) -> None:
        """Have it call its verified weights `name`, which tells all ranks that it may sample with them."""

    @abstractmethod
    async def free_memory(self, server: Server, parts: list[str]) -> None:
        """Free the memory of these parts."""

    @abstractmethod
    async def restore_memory(self, server: Server, parts: list[str]) -> None:
        """Take the memory of these parts again."""


class Workers:
    """Workers that hold version `version`, or are away. A worker that comes back is given the weights it
    lacks, by the names of `files` if they differ from the module's.

    A verb for all workers waits for one that is being admitted, so that one gets the newest weights too.

    All `ranks` sample on the workers, and make one together. The first rank alone controls them: it gives
    weights, once for all, verifies them, and looks after workers that come back. The others use a worker
    while it says that it holds the newest verified weights. With several ranks `pause` and `resume` are of
    this rank's requests, and `update_weights`, which all call, pauses and resumes the workers.
    """

    def __init__(
        self,
        options: PoolOptions,
        push: Push | None,
        version: int,
        verbs: Verbs,
        files: StoredForm | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._push, self.verbs, self._files = push, verbs, files
        self._first, self._ranks = version, Ranks() if ranks is None else ranks
        self.paused = self._stopped = False
        """`_stopped`: the workers themselves are, or are to be."""
        self.pauses = 0
        """Number of pauses so far."""
        self._opened = asyncio.Event()
        # The label names the pusher, because workers may hold a version 7 of an earlier stage.
        verbs.label = self._ranks.gather_json(verbs.label, "the name of the servers' weights")[0]
        self.versions: dict[str, int] = {}
        """Workers' names for versions -> version."""
        self.pool = HTTPPool("the rollout engine", options, RolloutError, self._admit_server)
        verbs.use_pool(self.pool)
        self._newest: TargetWeights | None = None
        """Set by the caller's thread, read by the loop's. `None` before the first push."""
        self._checked: set[str] = set()
        """URLs of workers whose model has the student's form."""
        self._proved: dict[str, str] = {}
        """URL -> the weights that a worker was last verified to hold."""
        self._taken = 0
        """Bytes that `take_sent_bytes` has already reported."""
        self.received_bytes = 0
        """Bytes of weights that workers were given so far, one after another."""
        self._keeping = False
        self._sleeps = False
        """All workers have been put to sleep, and are given no weights yet."""
        self._hung: dict[str, float] = {}
        """URL of a worker that answered nothing -> time at which it is told something again."""
        self._asleep: dict[str, list[str]] = {}
        """URL of a sleeping worker -> the parts it has freed."""

    @property
    def target_weights(self) -> TargetWeights | None:
        """The target state of workers, or None before the first push."""
        return self._newest

    @property
    def version(self) -> int:
        """Version of the weights that workers are to hold."""
        return self._first if self._newest is None else self._newest.version

    @cached_property
    def event_loop(self) -> LoopThread:
        return LoopThread("served-engine")

    def pause(self) -> None:
        """Stop sampling."""
        self.paused = True
        self.pauses += 1
        if self._ranks.is_alone:
            self._stop_workers()

    def flush(self) -> None:
        """Drop cached keys and values."""
        if self._ranks.is_alone:
            self._run_everywhere(self.verbs.flush)

    def resume(self) -> None:
        self.paused = False
        try:
            if self._ranks.is_alone:
                self._resume_workers()
        finally:
            self.event_loop.run(self._signal_open())

    def _stop_workers(self) -> None:
        self._ranks.barrier("the pause of the servers")  # none expects its requests to be ended before it
        self._stopped = True  # first, so that a worker admitted meanwhile does not resume
        self._run_everywhere(self.verbs.pause)
        if not self._ranks.is_alone:
            self._run_everywhere(self.verbs.flush)

    def _resume_workers(self) -> None:
        self._stopped = False  # first, so that a worker admitted meanwhile does not stay paused
        self._run_everywhere(self.verbs.go_on)

    async def until_open(self) -> int:
        """Wait until a pause would not end a new request at once. Returns the number of pauses so far."""
        while True:
            pauses = self.pauses  # first, so that a pause that comes now counts as later
            if not (self.paused and self.verbs.pause_ends_streams):
                return pauses
            await self._opened.wait()

    async def _signal_open(self) -> None:
        self._opened.set()  # for tasks that wait now
        self._opened.clear()

    def sleep(self) -> None:
        """Pause, and have every worker free its memory until it is given weights."""
        self.pause()
        self.flush()
        if not self._ranks.is_alone:
            self._stop_workers()
        self._sleeps = True
        self._run_everywhere(self._release_memory)

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
        self._sleeps = False
        if not self._ranks.is_alone:
            self._stop_workers()
        digests: list[str] = []
        give = lambda: digests.append(self._give_weights(weights, version))  # noqa: E731
        self._ranks.run_on_ranks(give, "the new weights of servers")
        if not self._ranks.is_alone:
            found = self._ranks.gather_json(digests[0], "the digests of new weights")
            if (other := next((rank for rank, one in enumerate(found) if one != found[0]), None)) is not None:
                raise RolloutError(
                    f"rank {other} has gathered other weights of version {version} than rank 0, which has"
                    " given them to the servers; restart with --resume."
                )
            self._resume_workers()
            if self._ranks.is_main and not self._keeping:
                self._keeping = True
                self.event_loop.start(self._keep_each())
        return digests[0]

    def _give_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Give the workers these weights, and return the digest. The other ranks only gather them."""
        assert self._push is not None
        digest, files = WeightsDigest(quick=True), None if self.verbs.adapters else self._files
        sent = weights if files is None else tensors_of_files(weights, files, digest)
        name, prepared = f"{self.verbs.label}.{version}", PreparedWeights([])
        if self._ranks.is_main:
            prepared = self._push.prepare(sent, version)
        else:
            prepared = replace(prepared, digest=weights_digest(sent, quick=True))
            for server in self.pool.servers:
                server.admitted = False  # until it says that it holds them
        newest = TargetWeights(version, name, prepared, Proof(prepared.weights))
        self.versions[name] = version
        self._newest = newest
        if self._ranks.is_main:
            self.event_loop.run(self._call_all(lambda server: self._load_weights(server, newest)))
        if files is not None:
            return digest.hex_digest()
        return prepared.digest or weights_digest(prepared.weights, quick=True)

    async def _keep_each(self) -> None:
        """Look after the workers, for the other ranks."""
        looks: dict[Server, asyncio.Task[None]] = {}
        while True:
            await asyncio.sleep(KEEP)
            self.pool.add_new_servers()
            for server in self.pool.servers if not (self._sleeps or self._stopped) else ():
                if server not in looks or looks[server].done():
                    looks[server] = asyncio.create_task(self.pool.keep_server(server, self._holds_newest))

    async def _holds_newest(self, server: Server) -> bool:
        newest = self._newest
        if newest is None:
            return False
        return await self._limit_wait(server, self.verbs.loaded_version(server)) == newest.name

    def take_sent_bytes(self) -> int | None:
        """Bytes of weights sent since the last call, or None if workers are given all tensors as they are."""
        total: int | None = getattr(self._push, "sent_bytes", None)
        if total is None:
            return None
        previous, self._taken = self._taken, total
        return total - previous

    def close(self) -> None:
        """Close the connections. Paused workers are resumed, because others may use them."""
        if "event_loop" in self.__dict__:
            if self._stopped and self._ranks.is_main:
                self.event_loop.run(self._resume_servers())
            self.event_loop.run(self.pool.close())
            self.event_loop.close()

    def _run_everywhere(self, verb: Callable[[Server], Awaitable[Any]]) -> None:
        """Call `verb` on every worker concurrently. Raises `RolloutError` if no worker answers, on all ranks,
        which call it together.
        """

        def run() -> None:
            if self._ranks.is_main:
                self.event_loop.run(self._call_all(verb))

        self._ranks.run_on_ranks(run, "what servers are told")

    async def _call_all(self, verb: Callable[[Server], Awaitable[Any]]) -> None:
        async def call_locked(server: Server) -> Any:
            if self._hung.get(server.url, 0.0) > time.monotonic():
                raise UnavailableError(f"{server.url} has just answered nothing", answered=False)
            async with server.lock:
                return await self._limit_wait(server, verb(server))

        servers = self.pool.servers
        done = await asyncio.gather(*map(call_locked, servers), return_exceptions=True)
        away = [error for error in done if isinstance(error, UnavailableError)]
        for server, error in zip(servers, done, strict=True):
            if isinstance(error, UnavailableError):
                server.admitted = False
            elif isinstance(error, RefusedError):
                mend = refusal_advice(error, "check the worker's log")
                raise RolloutError(f"the rollout engine: {error}; {mend}.")
            elif isinstance(error, BaseException):
                raise error
        if away and (reason := self.pool.options.given_up()) is not None:
            raise reason
        if len(away) == len(servers):
            revive = self.pool.options.revive
            raise RolloutError(f"the rollout engine: no worker answers ({away[0]}); {revive}.")

    async def _limit_wait(self, server: Server, call: Awaitable[_T]) -> _T:
        """Return the result of `call`. With several ranks `server` has a quarter of their time-out for it, so
        that one that hangs counts as away before the ranks give each other up.
        """
        limit = None if self._ranks.is_alone else self._ranks.timeout / 4
        try:
            async with asyncio.timeout(limit):
                return await call
        except TimeoutError:
            if limit is None:
                raise
            self._hung[server.url] = time.monotonic() + limit
            _log.warning("%s has not done in %.0f s what it was told; the others go on", server.url, limit)
            raise UnavailableError(f"{server.url} was silent for {limit:g} s", answered=False) from None

    async def _resume_servers(self) -> None:
        results = [asyncio.wait_for(self.verbs.go_on(server), GO_ON_SECONDS) for server in self.pool.servers]
        await asyncio.gather(*results, return_exceptions=True)

    async def _load_weights(self, server: Server, newest: TargetWeights) -> None:
        """Have `server` load the `newest` weights, and verify them."""
        push, name, verbs = self._push, newest.name, self.verbs
        assert push is not None
        self._proved.pop(server.url, None)
        await verbs.pause(server)  # also one that was away when the others were paused
        await self._reclaim_memory(server, WEIGHTS)
        if server.url not in self._checked:
            await verbs.check_settings(server)
            await verbs.check_form(server, newest.prepared.weights)
            self._checked.add(server.url)
        size = await verbs.give_base(server)
        load = partial(push.load, self.pool.request_json, server, name, newest.prepared)
        size += await RETRY.call_async(load, UnavailableError)
        self.received_bytes += size
        await verbs.verify(server, newest)
        await verbs.set_version_name(server, name)
        reported = await verbs.loaded_version(server)
        if reported != name:
            raise RolloutError(
                f"after the push of version {name} {server.url} says it holds {safe_excerpt(reported)}; let"
                " nobody else give it weights, and --resume."
            )
        self._proved[server.url] = name
        await self._reclaim_memory(server, REST)

    async def _release_memory(self, server: Server) -> None:
        """Have `server` free its memory, once, because it cannot free it twice."""
        if server.url not in self._asleep:
            await self.verbs.free_memory(server, [*WEIGHTS, *REST])
            self._asleep[server.url] = [*WEIGHTS, *REST]

    async def _reclaim_memory(self, server: Server, parts: list[str]) -> None:
        """Have `server` take memory for `parts` that it has freed. A server restarted since then has its own
        memory, and would end if told to take more. It is recognised because it knows no version of this
        engine.
        """
        resources = self._asleep.get(server.url, [])
        missing = [part for part in parts if part in resources]
        if not missing:
            return
        if await self.verbs.loaded_version(server) not in self.versions:
            del self._asleep[server.url]
            return
        await self.verbs.restore_memory(server, missing)
        remaining = [part for part in resources if part not in missing]
        if remaining:
            self._asleep[server.url] = remaining
        else:
            del self._asleep[server.url]

    async def _wait_for_newest(self, server: Server) -> None:
        """Wait until the first rank has given `server` the newest weights. While other workers hold them, or
        after the time-out of the ranks, raise `UnavailableError`.
        """
        ends, is_logged = time.monotonic() + self._ranks.timeout, False
        while not await self._holds_newest(server):
            others = any(one.admitted for one in self.pool.servers if one is not server)
            if others or time.monotonic() > ends:
                raise UnavailableError(
                    f"{server.url} does not hold version {self.version} yet", answered=False
                )
            if not is_logged:
                is_logged = True
                _log.info("waiting for rank 0 to give %s version %d", server.url, self.version)
            await asyncio.sleep(KEEP)

    async def _admit_server(self, server: Server) -> None:
        """Admit a worker that is new or was away: check its version, or load the newest weights."""
        if self._ranks.is_main:
            await self._limit_wait(server, self._admit_on_main(server))
        else:
            await self._wait_for_newest(server)

    async def _admit_on_main(self, server: Server) -> None:
        verbs = self.verbs
        await verbs.check_settings(server)
        current = await verbs.loaded_version(server)
        newest = self._newest  # read late, because a push may come during the request
        self._checked.discard(server.url)
        if newest is None:
            self.versions.setdefault(current, self.version)  # its version at start
            return
        if current != newest.name or self._proved.get(server.url) != current:
            await self._load_weights(server, newest)
        if not self._stopped:
            await verbs.go_on(server)  # also one that went away before it was resumed
