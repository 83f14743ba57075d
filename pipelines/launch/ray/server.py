"""Run servers of a recipe's `servers` as actors, and give stages their groups and weights.

An actor starts its server on its node, monitors it, restarts it and ends it, as a run on one machine does.
The server survives its trainers, and is gone with the actor.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from opd.config import Recipe
from opd.config.servers import ServerGroupConfig
from opd.errors import LaunchError, RolloutError
from opd.output import LogForwarder, record_fields
from opd.pipelines.launch.ray.actors import PING_SECONDS, ActorLostError, ActorSpec, RemoteActor
from opd.pipelines.launch.ray.cluster import import_ray, one_line, server_names
from opd.pipelines.launch.server_key import key_of
from opd.pipelines.launch.servers import ServerPlace, Servers, StartedGroup, same_model, until_free
from opd.pipelines.launch.started_server import end_timeout
from opd.pipelines.records.run_folder import RunFolder
from opd.progress import set_activity
from opd.ranks import Ranks
from opd.rollout.weight_mirror import VARIABLE, WeightMirror, mirror_places, remove_ownerless
from opd.served.http_client import UnavailableError

_log = logging.getLogger(__name__)

LOOK = 2.0
"""Seconds between two checks of a group's actors."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    group: str
    number: int
    config: ServerGroupConfig
    model: str
    any_weights: bool = False
    """The server may continue with other weights of the same form, which it gets later."""
    port: int = 0
    """Its previous port. 0 takes a free one."""


class ServerActor:
    """The actor behind `ActorGroup`. `serve` blocks until its server is ready. `state` answers meanwhile."""

    def __init__(self, spec: ActorSpec) -> None:
        spec.start_process("opd.pipelines.launch.servers")
        self._records: deque[tuple[str, int, str]] = deque(maxlen=100)
        LogForwarder(self._record_log).__enter__()  # for as long as the actor lives
        self._logs = RunFolder.attach(spec.folder).server_logs
        self._group: StartedGroup | None = None
        self._starting = False
        self._places: list[Path] = []
        """Folders for new weights. Its server's guard makes and removes them."""
        self._mirror: WeightMirror | None = None

    def ping(self) -> int:
        """Return the process id."""
        return os.getpid()

    def serve(self, wanted: ServerSpec) -> str:
        """Return the URL of the server, once it is ready. A matching one continues as it is.

        Raises `LaunchError` if it cannot be started.
        """
        model, group = Path(wanted.model), self._group
        if group is not None and group.can_serve(model, wanted.any_weights):
            return group.urls[0]
        self._starting = True
        try:
            self.end()
            ray, config = import_ray(), wanted.config
            host = ray.util.get_node_ip_address()
            if wanted.port:  # a killed actor leaves its server to the guard, which takes a while
                until_free(host, wanted.port, end_timeout())
            if wanted.any_weights:
                remove_ownerless()
                self._places = mirror_places()
                # Ray's object store fills its share of this node's shared memory when it is written to. If
                # none is left, the system ends the writer.
                node_id, store_bytes = ray.get_runtime_context().get_node_id(), 0
                for node in ray.nodes():
                    if node["NodeID"] == node_id:
                        store_bytes = int(node["Resources"].get("object_store_memory", 0))
                self._mirror = WeightMirror(self._places, store_bytes)
                folders = {VARIABLE: os.pathsep.join(map(str, self._places))}
                config = config.model_copy(update={"environment": {**config.environment, **folders}})
            at = ServerPlace(wanted.number, host, wanted.port)
            group = StartedGroup.start_servers(wanted.group, config, model, self._logs, at)
            self._group = group  # `end` may be called meanwhile
            group.wait()
            return group.urls[0]
        except BaseException:
            self.end()
            raise
        finally:
            self._starting = False

    def mirror(self, verb: str, *arguments: Any) -> Any:
        """Call `verb` of its server's `WeightMirror`. Returns `None` if it has none."""
        mirror = self._mirror
        return None if mirror is None else getattr(mirror, verb)(*arguments)

    def state(self) -> tuple[bool, str | None, list[tuple[str, int, str]]]:
        """Return whether it has or starts a server, the final error, and the new log records. A control
        method. Records are in the format of `record_fields`.
        """
        group = self._group
        trouble = None if group is None else group.trouble
        records = [self._records.popleft() for _ in range(len(self._records))]
        return group is not None or self._starting, None if trouble is None else str(trouble), records

    def _record_log(self, record: logging.LogRecord) -> None:
        self._records.append(record_fields(record))
        print(time.strftime("%H:%M:%S"), record.getMessage(), file=sys.stderr, flush=True)

    def end(self) -> None:
        """End its server. Returns once that is gone. A control method."""
        group, self._group, self._mirror = self._group, None, None
        if group is not None:
            group.close()
        for folder in self._places:
            shutil.rmtree(folder, ignore_errors=True)  # its guard has done so, unless it was killed itself
        self._places = []


@dataclass
class ActorGroup:
    """Implements `opd.pipelines.launch.servers.Group`. Its servers live until the run ends, or until it gets
    another model. Closing a group only ends its monitoring.
    """

    name: str
    config: ServerGroupConfig
    model: Path
    any_weights: bool
    remotes: Sequence[RemoteActor]
    trouble: LaunchError | None = None
    urls: list[str] = field(default_factory=list)
    _references: list[Any] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _watcher: threading.Thread | None = None

    @classmethod
    def request_servers(
        cls,
        name: str,
        config: ServerGroupConfig,
        model: Path,
        any_weights: bool,
        remotes: Mapping[str, Sequence[RemoteActor]],
    ) -> ActorGroup:
        """Call the actors of group `name` for their servers. See `wait`. Servers of an earlier stage, or of a
        trainer that died, continue.
        """
        group = cls(name, config, model.resolve(), any_weights, remotes[name])
        group._references = [
            remote.send("serve", group._server_spec(number)) for number, remote in enumerate(group.remotes)
        ]
        return group

    def wait(self) -> None:
        """Return once all servers are ready, and monitor their actors from then on. Raises `LaunchError` if
        one cannot start.
        """
        if self._watcher is not None:
            return
        with set_activity(f"starting servers {self.name} on the cluster"):
            self.urls = [
                self._await_url(remote, reference)
                for remote, reference in zip(self.remotes, self._references, strict=True)
            ]
        self._watcher = threading.Thread(
            target=self._monitor_actors, name=f"servers-{self.name}", daemon=True
        )
        self._watcher.start()

    def can_serve(self, model: Path, any_weights: bool) -> bool:
        """Compare as `StartedGroup.can_serve`."""
        return self.trouble is None and same_model(self.model, model.resolve(), any_weights)

    def close(self) -> None:
        """Stop the monitoring."""
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()

    def _server_spec(self, number: int) -> ServerSpec:
        port = int(self.urls[number].rpartition(":")[2]) if self.urls else 0
        return ServerSpec(self.name, number, self.config, str(self.model), self.any_weights, port)

    def _await_url(self, remote: RemoteActor, reference: Any) -> str:
        seconds = self.config.start_seconds + remote.limits.start_timeout
        try:
            return remote.get(reference, seconds)
        except ActorLostError as error:
            raise LaunchError(
                f"{error} while it started a server of servers.{self.name}; see logs/{remote.name}.log and"
                " logs/servers/ in the run folder, then continue with --resume."
            ) from None

    def _monitor_actors(self) -> None:
        while self.trouble is None and not self._over.wait(LOOK):
            for number, remote in enumerate(self.remotes):
                self._check_actor(number, remote)

    def _check_actor(self, number: int, remote: RemoteActor) -> None:
        try:
            is_serving, trouble, records = remote.get(
                remote.send("state", control=True), PING_SECONDS, kill=False
            )
        except ActorLostError:
            is_serving, trouble, records = False, None, []
        for logger, level, text in records:
            logging.getLogger(logger).log(level, "%s", text)
        if trouble is not None:
            self.trouble = LaunchError(trouble)
        if is_serving or self._over.is_set():
            return
        _log.warning(
            "server %s-%d: its actor is gone; Ray starts it again, and it its server", self.name, number
        )
        try:
            remote.await_return(self._over.is_set)
            url = self._await_url(remote, remote.send("serve", self._server_spec(number)))
        except (ActorLostError, LaunchError) as error:
            if not self._over.is_set():
                self.trouble = LaunchError(f"server {self.name}-{number} is lost: {one_line(error)}")
            return
        if url != self.urls[number]:
            self.trouble = LaunchError(
                f"server {self.name}-{number} was at {self.urls[number]} and is at {url} now; continue with"
                " --resume."
            )


@dataclass(frozen=True, slots=True)
class RemoteMirror:
    """Implements `opd.rollout.delta_push.Receiver` with the mirror in the actor of a server."""

    remote: RemoteActor

    def held(self) -> str | None:
        return self._call_mirror("held")

    def folder(self) -> str | None:
        return self._call_mirror("folder")

    def begin(self, form: Any, files: Mapping[str, bytes]) -> bool:
        return bool(self._call_mirror("begin", form, files))

    def change(self, base: str) -> bool:
        return bool(self._call_mirror("change", base))

    def take(self, part: Any) -> None:
        """Call it as in `WeightMirror`. `part` is the result of `share`."""
        self._call_mirror("take", part)

    def settle(self, digest: str) -> str | None:
        return self._call_mirror("settle", digest)

    def _call_mirror(self, verb: str, *arguments: Any) -> Any:
        """Raise `UnavailableError` if the actor died, or hung and was ended. Ray restarts it."""
        try:
            return self.remote.call("mirror", verb, *arguments)
        except ActorLostError as error:
            raise UnavailableError(str(error), answered=False) from None


def put_weights(part: bytes) -> Any:
    """Put `part` into the object store, from which each node fetches it once. It stays until the result is
    deleted. Raises `RolloutError` if the store is full.
    """
    ray = import_ray()
    try:
        return ray.put(np.frombuffer(part, dtype=np.uint8))
    except ray.exceptions.RayError as error:
        raise RolloutError(
            f"Ray's object store takes no {len(part) / 2**20:.0f} MiB of weights ({one_line(error)}); give it"
            " more memory, or set rollout.engine.folder to one that all nodes see."
        ) from None


def servers_of(
    recipe: Recipe, remotes: Sequence[RemoteActor], ranks: Ranks, logs: Path
) -> AbstractContextManager[Servers]:
    """Open the servers of `recipe` on `remotes`, with logs in `logs`, while a stage runs."""
    by_name = {remote.name: remote for remote in remotes}
    groups = {
        group: [by_name[name] for name in names] for group, names in server_names(recipe.servers).items()
    }
    mirrors = {group: [RemoteMirror(remote) for remote in members] for group, members in groups.items()}
    start = partial(ActorGroup.request_servers, remotes=groups)
    key = key_of(recipe.servers.values(), logs)
    return closing(Servers(recipe.servers, start, ranks, mirrors=mirrors, key=key))


def end_servers(remotes: Sequence[RemoteActor]) -> None:
    """End the servers with all their processes. An actor that is ended first leaves that to its guard."""
    if not remotes:
        return
    ray = import_ray()
    with suppress(ray.exceptions.RayError, ValueError):
        references = [remote.send("end", control=True) for remote in remotes]
        ray.wait(references, num_returns=len(references), timeout=end_timeout())
