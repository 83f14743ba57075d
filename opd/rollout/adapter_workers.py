"""Workers that are given adapters alone: megabytes a step, where all weights are gigabytes.

A worker holds the base, proved once in its life, and has one adapter loaded: that of the newest version,
under a name of its own. Every request names it, so a token's version is that of the adapter that its request
named, and no request is written by the base alone. A pause ends what is being written, which is written on
after it with the adapter that has come; the older one is unloaded then.
"""

from __future__ import annotations

import asyncio
import re
import threading
from abc import abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from opd.errors import RolloutError
from opd.foreign import decoding, shown
from opd.rollout import served_workers
from opd.rollout.adapted_student import AdaptedStudent, AdapterFolder
from opd.rollout.served_messages import MessageReader
from opd.rollout.served_workers import RETRY, Ask, ExpectedAnswers, Newest, Prepared, Push, Verbs, new_label
from opd.rollout.weight_proof import Proof, apart_at_most
from opd.served.http_client import RefusedError, Server, UnavailableError
from opd.served.http_pool import HTTPPool

_OURS = re.compile(r"opd-[0-9a-f]{8}\.\w{1,20}")
"""Names of adapters that a run has loaded, also one that is gone."""
_LACKS = "start it with {flags}, or set rollout.engine.lora to merged"


class AdapterPush(served_workers.FolderPush):
    """Adapters alone, through a folder that this process and every worker see.

    Args:
        root: Below which they are written.
        student: Whose adapters they are.
        base: How the base gets to workers that hold other weights.
        verbs: Begin the paths of the requests to load and unload, such as `/v1`.
    """

    def __init__(self, root: Path, student: AdaptedStudent, base: Push, verbs: str = "") -> None:
        self._adapters = AdapterFolder(root / "adapters", student)
        self._trials = AdapterFolder(root / "trial", student)
        super().__init__(self._adapters, self._load_adapter)
        self.student, self._base, self._verbs = student, base, verbs
        self._written: dict[str, Prepared] = {}
        self._lock = threading.Lock()

    async def _load_adapter(self, ask: Ask, server: Server, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            done = await ask(server, "POST", f"{self._verbs}/load_lora_adapter", body)
        except RefusedError:  # of an attempt that was cut off, or had come to some of its ranks alone
            with suppress(RefusedError):
                await self.unload(ask, server, name)
            done = await ask(server, "POST", f"{self._verbs}/load_lora_adapter", body)
        if isinstance(done, dict) and done.get("success") is False:
            raise RolloutError(
                f"{server.url} did not take the adapter {name}: {shown(done.get('error_message'), 300)}."
            )

    async def unload(self, ask: Ask, server: Server, name: str) -> None:
        """Have `server` forget the adapter `name`, once nothing is written with it. Raises `RefusedError` if
        it knows none.
        """
        await ask(server, "POST", f"{self._verbs}/unload_lora_adapter", {"lora_name": name})

    async def load_base(self, ask: Ask, server: Server, name: str) -> None:
        """Have `server` take the base and call it `name`. See `Push.load`."""
        await self._base.load(ask, server, name, await asyncio.to_thread(self._once, "base"))

    async def load_trial(self, ask: Ask, server: Server, name: str) -> None:
        """Have `server` load the adapter by which it is tried."""
        folder = (await asyncio.to_thread(self._once, "trial")).folder
        assert folder is not None
        await self._load_adapter(ask, server, name, folder)

    def on_trial(self) -> tuple[np.ndarray, float]:
        """What `AdaptedStudent.on_trial` says, computed once."""
        with self._lock:
            return self.student.on_trial

    def _once(self, what: str) -> Prepared:
        with self._lock:
            if what not in self._written:
                student = self.student
                if what == "base":
                    self._written[what] = self._base.frozen(student.base)
                else:
                    self._written[what] = Prepared([], self._trials.write(student.trial, 0))
            return self._written[what]

    def close(self) -> None:
        """Remove what was written of adapters."""
        self._adapters.close()
        self._trials.close()


class AdapterVerbs(Verbs):
    """`Verbs` of workers that are given adapters alone.

    Args:
        plain: Those of their kind, by which their base is pushed and proved.
        push: How adapters get there.
    """

    pause_ends_streams: ClassVar[bool] = True
    adapters: ClassVar[bool] = True

    def __init__(self, plain: Verbs, push: AdapterPush) -> None:
        super().__init__(plain.config)
        self.plain, self._push = plain, push
        weights = push.student.base
        self._base = Newest(-1, f"{new_label()}.base", Prepared(weights), Proof(weights))
        self._proved: set[str] = set()
        """URLs of workers whose base was proved, and which were tried."""
        self._expected = ExpectedAnswers(push.student.outputs)

    def use(self, pool: HTTPPool) -> None:
        """See `Verbs`."""
        super().use(pool)
        self.plain.use(pool)

    @abstractmethod
    async def lacks(self, server: Server) -> str | None:
        """What it was not started with that adapters alone need; `None` if it will do."""

    @abstractmethod
    async def tolerance(self, server: Server) -> float:
        """Nats by which its log-probabilities may differ from the student's."""

    @abstractmethod
    async def score(self, server: Server, name: str) -> np.ndarray:
        """[len(PROBE) - 1] float32: log-probabilities of the probe's tokens with the adapter `name`."""

    @abstractmethod
    def named(self, name: str) -> dict[str, Any]:
        """What a request says to be written with the adapter `name`."""

    def name_weights(self, newest: Newest | None, body: dict[str, Any], reader: MessageReader) -> None:
        """See `Verbs`."""
        if newest is None:
            raise RolloutError("the engine holds no adapter yet; call update_weights() before submit().")
        body |= self.named(newest.name)
        reader.weights, reader.base = newest.name, self._base.name

    async def check_settings(self, server: Server) -> None:
        """See `Verbs`."""
        await self.plain.check_settings(server)
        if (flags := await self.lacks(server)) is not None:
            raise RolloutError(
                f"{server.url} takes no adapters of this recipe; " + _LACKS.format(flags=flags) + "."
            )

    async def check_form(self, server: Server, weights: Any) -> None:
        """See `Verbs`: whether its model has the form of the base."""
        await self.plain.check_form(server, self._base.prepared.weights)

    async def info(self, server: Server) -> Mapping[str, Any]:
        """See `Verbs`."""
        return await self.plain.info(server)

    async def tensor_names(self, server: Server) -> Collection[str] | None:
        """See `Verbs`: those of the base."""
        return await self.plain.tensor_names(server)

    async def give_base(self, server: Server) -> None:
        """See `Verbs`: push it where the worker was started with another or given one since; then try it."""
        if server.url in self._proved and await self.plain.held(server) == self._base.name:
            return
        self._proved.discard(server.url)
        try:
            await self.plain.verify(server, self._base)
        except RolloutError:
            load = partial(self._push.load_base, self.pool.ask, server, self._base.name)
            await RETRY.call_async(load, UnavailableError)
            await self.plain.verify(server, self._base)
        await self.ask(server, "POST", "/update_weight_version", {"new_version": self._base.name})
        trial = self._base.name.replace(".base", ".trial")
        load = partial(self._push.load_trial, self.pool.ask, server, trial)
        await RETRY.call_async(load, UnavailableError)
        due, effect = await asyncio.to_thread(self._push.on_trial)
        await self._compare(server, trial, due, max(1.0, effect))
        self._proved.add(server.url)

    async def verify(self, server: Server, newest: Newest) -> None:
        """See `Verbs`: compare what it says with the adapter."""
        await self._compare(server, newest.name, await asyncio.to_thread(self._expected.of, newest))

    async def settle(self, server: Server, name: str) -> None:
        """See `Verbs`: have it forget the adapters before, also those of a run that is gone."""
        for other in await self._loaded(server):
            if other != name and _OURS.fullmatch(other):
                with suppress(RefusedError):  # somebody else has meanwhile
                    await self._push.unload(self.ask, server, other)

    async def held(self, server: Server) -> str:
        """See `Verbs`: its adapter, on the base that was proved; what it calls another base."""
        base = await self.plain.held(server)
        if base != self._base.name:
            return base
        ours = [name for name in await self._loaded(server) if _OURS.fullmatch(name)]
        return ",".join(ours) or base

    async def flush(self, server: Server) -> None:
        """See `Verbs`."""
        await self.plain.flush(server)

    async def go_on(self, server: Server) -> None:
        """See `Verbs`."""
        await self.plain.go_on(server)

    async def release(self, server: Server, parts: list[str]) -> None:
        """See `Verbs`."""
        raise RolloutError(
            "workers that are given adapters alone do not sleep, which loses their base; set"
            " rollout.engine.lora to merged."
        )

    take = release

    async def _compare(self, server: Server, name: str, due: np.ndarray, effect: float = 1.0) -> None:
        """`RolloutError` unless it says what is `due` with the adapter `name`, within its tolerance `effect`
        times.
        """
        await self.go_on(server)  # paused it scores nothing; nobody asks it for anything else meanwhile
        try:
            said = await self.score(server, name)
        finally:
            await self.pause(server)
        apart = float(np.abs(said - due).max())
        allowed = apart_at_most(await self.tolerance(server), self._push.student.base)
        if not apart <= effect * allowed:
            raise RolloutError(
                f"after the push {server.url} does not apply the adapter {name} as the trainer does: its"
                f" log-probabilities of a few tokens differ by up to {apart:.3g} nats; restart it and"
                " --resume, or set rollout.engine.lora to merged."
            )

    async def _loaded(self, server: Server) -> list[str]:
        """Names of the adapters it has."""
        told = await self.ask(server, "GET", "/v1/models")
        with decoding(lambda cause: UnavailableError(f"{server.url}/v1/models: {cause}", answered=True)):
            return [str(entry["id"]) for entry in told["data"] if entry.get("parent") is not None]


def fits(told: Mapping[str, Any], key: str, rank: int) -> bool:
    """Whether the highest rank that a server tells under `key` is `rank` or more."""
    most = told.get(key)
    return isinstance(most, int) and most >= rank
