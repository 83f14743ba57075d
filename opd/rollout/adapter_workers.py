"""Workers that are given adapters alone: megabytes a step, where all weights are gigabytes.

A worker holds the base, which is verified once. It has one adapter loaded: the newest version, under a name
of its own. Every request names its adapter, so a token's version is known. The base alone never generates. A
pause ends the requests in progress. They go on after it with the new adapter, and the old one is unloaded
then.
"""

from __future__ import annotations

import asyncio
import re
import threading
from abc import abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from opd.errors import RolloutError
from opd.rollout import served_workers
from opd.rollout.adapted_student import AdaptedStudent, AdapterFolder
from opd.rollout.served_messages import MessageReader
from opd.rollout.served_workers import (
    READING,
    RETRY,
    Ask,
    ExpectedAnswers,
    PreparedWeights,
    Push,
    TargetWeights,
    Verbs,
)
from opd.rollout.weight_proof import Proof, apart_at_most
from opd.served.http_client import RefusedError, Server, UnavailableError
from opd.served.http_pool import HTTPPool
from opd.untrusted import convert_decode_errors, safe_excerpt

_OURS = re.compile(r"opd-[0-9a-f]{8}\.\w{1,20}")
"""Names of adapters that a run has loaded, also an earlier run."""
_LACKS = "start it with {flags}, or set rollout.engine.lora to merged"


class AdapterPush(served_workers.FolderPush):
    """Adapters alone, through a folder that this process and every worker see.

    Args:
        base: Sends the base to workers that hold other weights.
        verbs: Begin the paths of the requests to load and unload, such as `/v1`.
    """

    def __init__(self, root: Path, student: AdaptedStudent, base: Push, verbs: str = "") -> None:
        self._adapters = AdapterFolder(root / "adapters", student)
        self._trials = AdapterFolder(root / "trial", student)
        super().__init__(self._adapters, self._load_adapter)
        self.student, self._base, self._verbs = student, base, verbs
        self._written: dict[str, PreparedWeights] = {}
        self._lock = threading.Lock()

    async def _load_adapter(self, send: Ask, server: Server, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            done = await send(server, "POST", f"{self._verbs}/load_lora_adapter", body)
        except RefusedError:  # an attempt was cut off, or reached only some ranks
            with suppress(RefusedError):
                await self.unload_adapter(send, server, name)
            done = await send(server, "POST", f"{self._verbs}/load_lora_adapter", body)
        if isinstance(done, dict) and done.get("success") is False:
            raise RolloutError(
                f"{server.url} did not take the adapter {name}:"
                f" {safe_excerpt(done.get('error_message'), 300)}."
            )

    async def unload_adapter(self, send: Ask, server: Server, name: str) -> None:
        """Have `server` forget adapter `name`, once unused. Raises `RefusedError` if it does not know it."""
        await send(server, "POST", f"{self._verbs}/unload_lora_adapter", {"lora_name": name})

    async def load_base(self, send: Ask, server: Server, name: str) -> int:
        """Have `server` load the base. See `Push.load`."""
        return await self._base.load(send, server, name, await asyncio.to_thread(self._prepare_once, "base"))

    async def load_trial(self, send: Ask, server: Server, name: str) -> None:
        folder = (await asyncio.to_thread(self._prepare_once, "trial")).folder
        assert folder is not None
        await self._load_adapter(send, server, name, folder)

    def on_trial(self) -> tuple[np.ndarray, float]:
        """`AdaptedStudent.on_trial`, computed once."""
        with self._lock:
            return self.student.on_trial

    def _prepare_once(self, key: str) -> PreparedWeights:
        with self._lock:
            if key not in self._written:
                student = self.student
                if key == "base":
                    self._written[key] = self._base.prepare_static(student.base_tensors)
                else:
                    self._written[key] = PreparedWeights(
                        [], self._trials.write_version(student.trial_adapters, 0)
                    )
            return self._written[key]

    def close(self) -> None:
        """Remove the adapters' folders."""
        self._adapters.close()
        self._trials.close()


class AdapterVerbs(Verbs):
    """`Verbs` of workers that are given adapters alone.

    Args:
        plain: Verbs of the same server kind. They push and verify the base.
        push: Sends the adapters.
    """

    pause_ends_streams: ClassVar[bool] = True
    adapters: ClassVar[bool] = True

    def __init__(self, plain: Verbs, push: AdapterPush) -> None:
        super().__init__(plain.config)
        self.plain, self._push = plain, push
        self._proved: set[str] = set()
        """URLs of workers whose base was verified and which passed the trial."""
        self._expected = ExpectedAnswers(push.student.compute_logprobs)

    @property
    def _base_name(self) -> str:
        return f"{self.label}.base"

    @cached_property
    def _base(self) -> TargetWeights:
        weights = self._push.student.base_tensors
        return TargetWeights(-1, self._base_name, PreparedWeights(weights), Proof(weights))

    def use_pool(self, pool: HTTPPool) -> None:
        super().use_pool(pool)
        self.plain.use_pool(pool)

    @abstractmethod
    async def missing_flags(self, server: Server) -> str | None:
        """Flags that adapters need and the server was not started with; `None` if there are none."""

    @abstractmethod
    async def logprob_tolerance(self, server: Server) -> float:
        """Nats by which its log-probabilities may differ from the student's."""

    @abstractmethod
    async def score(self, server: Server, name: str) -> np.ndarray:
        """[len(PROBE) - 1] float32: log-probabilities of the probe's tokens with the adapter `name`."""

    @abstractmethod
    def adapter_fields(self, name: str) -> dict[str, Any]:
        """Fields of a request that is to use the adapter `name`."""

    def name_weights(self, newest: TargetWeights | None, body: dict[str, Any], reader: MessageReader) -> None:
        if newest is None:
            raise RolloutError("the engine holds no adapter yet; call update_weights() before submit().")
        body |= self.adapter_fields(newest.name)
        reader.weights, reader.base = newest.name, self._base_name

    async def check_settings(self, server: Server) -> None:
        self.plain.records_experts = self.records_experts
        await self.plain.check_settings(server)
        if (flags := await self.missing_flags(server)) is not None:
            raise RolloutError(
                f"{server.url} takes no adapters of this recipe; " + _LACKS.format(flags=flags) + "."
            )

    async def check_form(self, server: Server, weights: Any) -> None:
        """See `Verbs`: check that its model has the form of the base."""
        await self.plain.check_form(server, self._base.prepared.weights)

    async def model_info(self, server: Server) -> Mapping[str, Any]:
        return await self.plain.model_info(server)

    async def tensor_names(self, server: Server) -> Collection[str] | None:
        """See `Verbs`: names of the base's tensors."""
        return await self.plain.tensor_names(server)

    async def give_base(self, server: Server) -> int:
        """See `Verbs`: push the base unless the worker holds it, then try the worker. Until the adapter that
        follows is verified the base has a name under which no rank uses the worker.
        """
        names = (self._base_name, self._base_name + READING)
        if server.url in self._proved and await self.plain.loaded_version(server) in names:
            await self.plain.set_version_name(server, names[1])
            return 0
        self._proved.discard(server.url)
        size = 0
        try:
            await self.plain.verify(server, self._base)
        except RolloutError:
            load = partial(self._push.load_base, self.pool.request_json, server, self._base_name)
            size = await RETRY.call_async(load, UnavailableError)
            await self.plain.verify(server, self._base)
        await self.plain.set_version_name(server, names[1])
        trial = f"{self.label}.trial"
        load = partial(self._push.load_trial, self.pool.request_json, server, trial)
        await RETRY.call_async(load, UnavailableError)
        due, effect = await asyncio.to_thread(self._push.on_trial)
        await self._check_logprobs(server, trial, due, max(1.0, effect))
        self._proved.add(server.url)
        return size

    async def verify(self, server: Server, newest: TargetWeights) -> None:
        """See `Verbs`: compare its log-probabilities with the adapter's."""
        await self._check_logprobs(
            server, newest.name, await asyncio.to_thread(self._expected.logprobs_for, newest)
        )

    async def set_version_name(self, server: Server, name: str) -> None:
        """See `Verbs`: have it unload all other adapters, also those of an earlier run."""
        for other in await self._loaded_adapters(server):
            if other != name and _OURS.fullmatch(other):
                with suppress(RefusedError):  # another run has unloaded it meanwhile
                    await self._push.unload_adapter(self.request_json, server, other)
        await self.plain.set_version_name(server, self._base_name)

    async def loaded_version(self, server: Server) -> str:
        """See `Verbs`: its adapter if that and its base are verified, else the name of the base it holds."""
        base = await self.plain.loaded_version(server)
        if base != self._base_name:
            return base
        ours = [name for name in await self._loaded_adapters(server) if _OURS.fullmatch(name)]
        return ",".join(ours) or base

    async def flush(self, server: Server) -> None:
        await self.plain.flush(server)

    async def go_on(self, server: Server) -> None:
        await self.plain.go_on(server)

    async def free_memory(self, server: Server, parts: list[str]) -> None:
        raise RolloutError(
            "workers that are given adapters alone do not sleep, which loses their base; set"
            " rollout.engine.lora to merged."
        )

    restore_memory = free_memory

    async def _check_logprobs(self, server: Server, name: str, due: np.ndarray, effect: float = 1.0) -> None:
        """Raise `RolloutError` if its log-probabilities with the adapter `name` differ from `due` by more
        than `effect` times its tolerance.
        """
        await self.go_on(server)  # a paused server scores nothing, and no other request comes meanwhile
        try:
            logprobs = await self.score(server, name)
        finally:
            await self.pause(server)
        apart = float(np.abs(logprobs - due).max())
        allowed = apart_at_most(await self.logprob_tolerance(server), self._push.student.base_tensors)
        if not apart <= effect * allowed:
            raise RolloutError(
                f"after the push {server.url} does not apply the adapter {name} as the trainer does: its"
                f" log-probabilities of a few tokens differ by up to {apart:.3g} nats; restart it and"
                " --resume, or set rollout.engine.lora to merged."
            )

    async def _loaded_adapters(self, server: Server) -> list[str]:
        answer = await self.request_json(server, "GET", "/v1/models")
        with convert_decode_errors(
            lambda cause: UnavailableError(f"{server.url}/v1/models: {cause}", answered=True)
        ):
            return [str(entry["id"]) for entry in answer["data"] if entry.get("parent") is not None]


def rank_fits(settings: Mapping[str, object], key: str, rank: int) -> bool:
    """Return True if the server's highest rank, under `key`, is at least `rank`."""
    most = settings.get(key)
    return isinstance(most, int) and most >= rank
