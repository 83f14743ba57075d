"""Run rollout engines as actors: the process of one, and its view in a stage's rollout.

The process computes a chunk of tokens for each call. `FaultTolerantRollout` stands in front of the engines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from opd.errors import RolloutError
from opd.pipelines.launch.ray.actors import ActorLostError, ActorSpec, PackedTensor, RemoteActor
from opd.pipelines.launch.ray.cluster import MIB, import_ray, one_line
from opd.rollout.engine_pool import EnginePool, RetryPolicy
from opd.rollout.weight_sync import bucket_tensors
from opd.storage.transcript import check_masks
from opd.types import Chunk, RolloutRequest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The model that an engine starts from."""

    model: str
    """A Hugging Face folder."""
    adapters: bool
    """The folder's weights are the recipe's adapters, which the engine merges into the model. Otherwise they
    are all of the model's."""


class EngineActor:
    """The actor behind `RayEngine`. One method runs at a time."""

    def __init__(self, spec: ActorSpec) -> None:
        self._recipe = spec.start_process("opd.pipelines.stages.student")
        self._engine: Any = None
        self._loaded_with: EngineModel | None = None
        self._most_kept = 0

    def ping(self) -> int:
        """Return the process id."""
        return os.getpid()

    def load(self, model: EngineModel) -> None:
        """Load the model as version 0."""
        from opd.pipelines.stages.student import embedded_pool

        self._engine = self._loaded_with = None
        self._engine = embedded_pool(self._recipe, Path(model.model), model.adapters).engines[0]
        self.record_masks(self._most_kept)
        self._loaded_with = model

    def record_masks(self, most: int) -> None:
        """See `TorchEngine.record_masks`. Models that are loaded later do so, too."""
        self._most_kept = most
        if self._engine is not None:
            self._engine.record_masks(most)

    def holds(self) -> tuple[EngineModel | None, int]:
        """Return its start model, and the version of its weights, or -1 if it has none or sleeps."""
        engine = self._engine
        if engine is None or engine.asleep:
            return self._loaded_with, -1
        return self._loaded_with, engine.policy_version

    def update(self, model: EngineModel, pieces: Sequence[Any], version: int) -> str:
        """Load the weights in `pieces` into the model `model`, and return their digest. `pieces` are
        references of the results of `bucket_tensors`. The model itself is loaded if it is not there.
        Requests in flight go on with the new weights.
        """
        if self._loaded_with != model:
            self.load(model)
        engine, ray = self._require_engine(), import_ray()
        engine.pause()
        engine.flush()
        try:
            weights = ((n, p.to_tensor()) for piece in pieces for n, p in ray.get(piece))
            return engine.update_weights(weights, version)
        finally:
            engine.resume()

    def flush(self) -> None:
        """Drop every cached key and value."""
        if self._engine is not None:  # a restarted engine holds nothing while others sleep
            self._engine.flush()

    def sleep(self) -> None:
        """Free weights, keys and values until the next `update`."""
        if self._engine is not None and not self._engine.asleep:
            self._engine.sleep()
            _log.info("sleeps, and holds %s", self._engine.resident())

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Begin `requests` in addition to those in flight."""
        self._require_engine().submit(requests)

    def next_chunk(self) -> Chunk | None:
        """Return the next chunk, or `None` if nothing is in flight."""
        return self._require_engine().next_chunk()

    def abort(self, uids: list[str] | None = None) -> None:
        """Abort these requests, or all for `None`."""
        engine = self._require_engine()
        engine.abort(engine.in_flight if uids is None else uids)

    def digest(self) -> str:
        """Return a quick digest of its weights."""
        return self._require_engine().model.quick_digest()

    def _require_engine(self) -> Any:
        if self._engine is None:
            raise RolloutError("the engine holds no model yet; call load() first.")
        return self._engine


class EngineFleet:
    """The engines of one student, with their start model and newest weights.

    The weights lie in the object store once for all readers, and stay there until the next ones. A restarted
    engine loads them before it serves again.
    """

    def __init__(self, remotes: Sequence[RemoteActor], model: Path, adapters: bool = False) -> None:
        """Load `model` into every engine. Raises `RolloutError` if none can. `adapters`: merge the recipe's
        adapters into it.
        """
        self.loaded = EngineModel(str(model.resolve()), adapters)
        self.version = 0
        self.asleep = False
        """No engine holds weights until the next ones, not even a restarted one."""
        self.most_kept = 0
        """Most tokens of a sampling mask, and 0 while nobody asks for masks."""
        self.pieces: list[Any] = []
        self.lock = threading.Lock()
        """Held while version and pieces change."""
        self.limits = remotes[0].limits
        self.engines = [RayEngine(remote, self) for remote in remotes]
        for engine in self.engines:
            engine.come_back()
        for engine in self.engines:
            engine.await_return()
        if not self.serving_count:
            raise RolloutError(f"no rollout engine could be started: {self.engines[0].lost}.")

    def engine_pool(self) -> EnginePool:
        def revive_engine(index: int) -> RayEngine:
            """Return engine `index` after it came back. Raises `ActorLostError` if it did not."""
            engine = self.engines[index]
            if engine.lost is not None:
                raise ActorLostError(engine.lost)
            return engine

        limits = self.limits
        policy = RetryPolicy(
            chunk_timeout=limits.step_timeout,
            silence_limit=limits.start_timeout + 60.0,
            revive=revive_engine,
        )
        return EnginePool(self.engines, policy)

    def publish_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Put `weights` into the object store as `version`, unless they are there already."""
        with self.lock:
            if version == self.version:
                return
            if version < self.version:
                raise RolloutError(
                    f"the policy version must grow, but {version} was given while the engines hold"
                    f" {self.version}."
                )
            store = import_ray().put
            pieces = bucket_tensors(weights, self.limits.bucket_mb * MIB)
            self.pieces = [
                store([(name, PackedTensor.from_tensor(tensor)) for name, tensor in piece])
                for piece in pieces
            ]
            self.version, self.asleep = version, False

    @property
    def serving_count(self) -> int:
        """Number of engines that are not recovering."""
        return sum(not engine.is_recovering and engine.lost is None for engine in self.engines)

    def bring_up(self, remote: RemoteActor) -> str | None:
        """Give an engine the model and the newest weights, whatever it holds or has in flight. Returns its
        digest if it loaded weights. It gets none while the others sleep.
        """
        while True:
            with self.lock:
                version, pieces, asleep = self.version, self.pieces, self.asleep
            remote.call("record_masks", self.most_kept)  # another stage may have asked for masks
            loaded, loaded_version = remote.call("holds")
            digest = None
            if not asleep:
                if loaded != self.loaded or not 0 <= loaded_version <= version:
                    remote.call("load", self.loaded, seconds=self.limits.start_timeout)
                    loaded_version = 0
                remote.call("abort")
                digest = (
                    remote.call("update", self.loaded, pieces, version) if loaded_version < version else None
                )
            if self.asleep:  # it may have woken here after the call to sleep
                remote.call("sleep")
            if version == self.version:
                return digest


@dataclass(slots=True)
class _EngineWork:
    """The work of an actor until it fails. Then a new one begins."""

    open: set[str] = field(default_factory=set)
    next_chunk: Any = None
    """The chunk in computation while the previous one is read."""
    late: set[str] = field(default_factory=set)
    """Requests that were aborted after the call for that chunk."""


class RayEngine:
    """Implements `opd.protocols.RolloutEngine` over an `EngineActor`: one message a chunk.

    An actor that dies or hangs is an error of the current chunk. It is then restarted in the background, and
    gets the fleet's newest weights. Until then `is_recovering` is True.
    """

    def __init__(self, remote: RemoteActor, fleet: EngineFleet) -> None:
        self.remote, self.fleet = remote, fleet
        self.lost: str | None = None
        """The reason why it will not come back."""
        self._work = _EngineWork()
        self._paused = False
        self._returned = threading.Event()
        self._returned.set()
        self._pushed: tuple[int, Any] | None = None

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token. The fleet's, or the engine does not serve."""
        return self.fleet.version

    @property
    def is_recovering(self) -> bool:
        """The engine is on its way back."""
        return not self._returned.is_set()

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Submit as in the protocol. Raises `ActorLostError` if the actor is gone."""
        if self.lost is not None or self.is_recovering:
            raise ActorLostError(self.lost or f"{self.remote.name} is on its way back")
        work = self._work
        self.remote.call("submit", list(requests))
        work.open.update(request.uid for request in requests)

    def next_chunk(self) -> Chunk | None:
        """Return the next chunk, as in the protocol. While a chunk is read, the actor computes the next."""
        work, remote = self._work, self.remote
        if not work.open:
            return None
        reference, work.next_chunk = work.next_chunk or remote.send("next_chunk"), None
        # The waiting thread ends the actor when it hangs. Two would end it twice.
        chunk = remote.get(reference, 2 * remote.limits.step_timeout, kill=False)
        if chunk is None:
            work.open.clear()
            return None
        check_masks(chunk, self.fleet.most_kept)
        if work.late:
            chunk = chunk.without_requests(work.late)
            work.late.clear()
        work.open.difference_update(chunk.finished)
        if work.open:
            work.next_chunk = remote.send("next_chunk")
        return chunk

    def abort(self, uids: Collection[str]) -> None:
        work = self._work
        if gone := work.open.intersection(uids):
            work.open -= gone
            work.late |= gone if work.next_chunk is not None else set()
            self.remote.send("abort", list(gone))

    def record_masks(self, most: int) -> None:
        """See `TorchEngine.record_masks`. All engines of the fleet do so."""
        self.fleet.most_kept = most  # first, because an engine on its way back reads it
        if self.lost is None:
            self.remote.send("record_masks", most)

    def pause(self) -> None:
        """Compute only the chunk that was already requested. The next request follows after `resume`."""
        self._paused = True

    def flush(self) -> None:
        """Drop every cached key and value. A lost actor has none."""
        if not self.is_recovering and self.lost is None:
            self.remote.send("flush")

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Give all engines of the fleet `weights` at once, and return the digest of this one's.

        An engine on its way back raises `ActorLostError` and loads them when it is there. If it is the only
        one, the call waits for it.
        """
        if not self._paused:
            raise RolloutError("weights can change only between decode steps; call pause() first.")
        fleet = self.fleet
        if version != fleet.version:
            fleet.publish_weights(weights, version)
            for engine in fleet.engines:
                engine.send_weights(version)
        if self._pushed is not None and self._pushed[0] == version:
            try:
                return self.remote.get(self._pushed[1], fleet.limits.step_timeout)
            except ActorLostError as error:
                self.report_failure(error)
        if fleet.serving_count or self.lost is not None:
            raise ActorLostError(self.lost or f"{self.remote.name} is on its way back")
        self.await_return()
        return str(self.remote.call("digest"))

    def send_weights(self, version: int) -> None:
        """Begin to send the actor the fleet's weights, if it is there."""
        self._pushed = None
        if self.lost is None and not self.is_recovering:
            self._pushed = (
                version,
                self.remote.send("update", self.fleet.loaded, self.fleet.pieces, version),
            )

    def resume(self) -> None:
        """Continue sampling."""
        self._paused = False

    def sleep(self) -> None:
        """Free the memory of all engines of the fleet until the next weights. An engine on its way back
        sleeps too, after it has loaded the present weights.
        """
        self.fleet.asleep = True
        if self.lost is None:
            self.remote.send("sleep")

    def report_failure(self, error: BaseException) -> None:
        """Bring the engine back after a failed call. End it first if it hangs."""
        if self.lost is None and not self.is_recovering:
            if isinstance(error, TimeoutError):
                self.remote.kill()
            _log.warning("%s failed and is brought back: %s", self.remote.name, one_line(error))
            self.come_back()

    def come_back(self) -> None:
        """Begin to bring the actor up to the fleet's model and weights."""
        self._returned.clear()
        self._work = _EngineWork()
        threading.Thread(target=self._bring_back, daemon=True, name=self.remote.name).start()

    def await_return(self) -> None:
        """Return once the engine serves or is lost."""
        self._returned.wait(2 * self.fleet.limits.start_timeout)

    def _bring_back(self) -> None:
        fleet, name = self.fleet, self.remote.name
        try:
            while True:
                self.remote.await_return()
                with contextlib.suppress(ActorLostError):  # it died again
                    fleet.bring_up(self.remote)
                    return
        except Exception as final:
            self.lost = one_line(final)
            _log.warning("%s is lost: %s", name, self.lost)
        finally:
            self._returned.set()
