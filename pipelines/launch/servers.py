"""Start, monitor, restart and end the servers of a run, when they are first needed.

One of them is a `StartedServer`. A server that ends, or answers nothing for long, is restarted at its port.
To its clients it was away, and must verify its weights before it is used again. A server's output is in
`logs/servers/`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from opd.config import Recipe
from opd.config.servers import Argument, ServerGroupConfig
from opd.config.teachers import ServerConfig
from opd.errors import LaunchError, OpdError, reason_of
from opd.pipelines.launch import started_server
from opd.pipelines.launch.server_key import key_of
from opd.pipelines.launch.started_server import HOST, LOOK, SLEEPS, StartedServer
from opd.progress import set_activity
from opd.ranks import Ranks
from opd.retry import Retry

if TYPE_CHECKING:
    from opd.rollout.delta_push import Receiver

_log = logging.getLogger(__name__)

AGAIN = Retry(pause=1.0, longest=30.0)
"""Pause between the end of a server and its next start."""
Served = TypeVar("Served", bound=ServerConfig)


def _check_nothing() -> None: ...


def same_model(served: Path, model: Path, any_weights: bool) -> bool:
    """Return whether a server of folder `served` serves `model`, or with `any_weights` one of its form."""
    if served == model or not any_weights:
        return served == model
    configs: list[bytes | None] = []
    for folder in (served, model):
        try:
            configs.append((folder / "config.json").read_bytes())
        except OSError:  # it is not there any more
            configs.append(None)
    return configs[0] == configs[1]


def until_free(host: str, port: int, seconds: float) -> None:
    """Wait until nobody listens on `port` any more, at most `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return
        time.sleep(LOOK)


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """The place of one server of a group, alone on its machine."""

    number: int
    """Its number in the group."""
    host: str
    """The address of that machine, on which it listens."""
    port: int = 0
    """0 takes a free one."""


@dataclass
class StartedGroup:
    """Servers of one model, and a thread that restarts them when they end."""

    name: str
    config: ServerGroupConfig
    servers: list[StartedServer]
    model: Path
    trouble: LaunchError | None = None
    """The error with which the group was given up."""
    restarts: int = 0
    _over: threading.Event = field(default_factory=threading.Event)
    _watcher: threading.Thread | None = None
    _asleep: bool = False
    _turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while servers are checked, put to sleep or woken."""
    _failures: dict[str, int] = field(default_factory=dict)
    """Number of failures of each server, by name."""
    _due: dict[str, float] = field(default_factory=dict)
    """Time of the next start of each ended server."""

    @classmethod
    def start_servers(
        cls, name: str, config: ServerGroupConfig, model: Path, logs: Path, place: ServerPlace | None = None
    ) -> StartedGroup:
        """Begin to start the group's servers, or the one of `place`. See `wait`. Raises `LaunchError`."""
        logs.mkdir(parents=True, exist_ok=True)
        key = key_of([config], logs)
        places = [ServerPlace(number, HOST) for number in range(config.count)] if place is None else [place]
        servers = []
        for at in places:
            log = logs / f"{name}-{at.number}.log"
            servers.append(StartedServer(log.stem, config, at.number, model, log, at.host, at.port, key))
        group = cls(name, config, servers, model)
        try:
            for server in servers:
                server.start()
        except BaseException as error:
            group.close()
            if not isinstance(error, OSError) or isinstance(error, OpdError):
                raise
            raise LaunchError(f"servers.{name} cannot be started ({reason_of(error)}).") from error
        return group

    def wait(self) -> None:
        """Return once all servers are ready. They are monitored from then on.

        Raises `LaunchError` with the end of its log if one cannot start, or takes too long.
        """
        if self._watcher is None:
            with set_activity(self._start_progress):
                self._wait_until_ready(self.config.start_seconds)
            self._watcher = threading.Thread(
                target=self._monitor_servers, name=f"servers-{self.name}", daemon=True
            )
            self._watcher.start()

    def sleep(self, check: Callable[[], None] = _check_nothing) -> None:
        """Free the servers' memory. A starting server does so once it is ready. A server that ends is not
        restarted until they wake. `check` is called meanwhile, and may raise.
        """
        with self._turn:
            if self._asleep:
                return
            self._asleep = True
            with set_activity(self._start_progress):
                until = time.monotonic() + self.config.start_seconds
                while time.monotonic() < until:
                    running = [server for server in self.servers if server.status() is None]
                    if all(server.served or server.check_ready() for server in running):
                        break
                    check()
                    if self._over.wait(0.1):
                        return
            _call_each(self.servers, StartedServer.sleep, check)

    def wake(self, check: Callable[[], None] = _check_nothing) -> None:
        """Let the servers allocate it again, and restart ended ones. Returns once all are ready.

        Raises `LaunchError` if one cannot be started. `check` is called meanwhile, and may raise.
        """
        with self._turn:
            if not self._asleep:
                return
            _call_each(self.servers, StartedServer.wake, check)
            self._due.clear()
            for server in self.servers:
                if server.status() is not None:
                    self._count_restart(server, "ended before its turn")
                    if self.trouble is not None:
                        raise self.trouble
                    self._start_again(server)
            self._wait_until_ready(self.config.start_seconds, check)
            self._asleep = False

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def can_serve(self, model: Path, any_weights: bool) -> bool:
        """Return whether it can serve `model` without a restart. See `Servers.serve_models`."""
        return self.trouble is None and same_model(self.model, model, any_weights)

    def ask_to_end(self) -> None:
        """Begin to end all servers. None is restarted."""
        self._over.set()
        for server in self.servers:
            server.ask_to_end()

    def close(self) -> None:
        """End all servers. Returns once they are gone."""
        self.ask_to_end()
        if self._watcher is not None:
            self._watcher.join()
        self.ask_to_end()  # a server in the middle of a restart, too
        until = time.monotonic() + started_server.end_timeout()
        with set_activity(f"ending the servers {self.name}"):
            for server in self.servers:
                server.wait(max(0.1, until - time.monotonic()))

    def _start_progress(self) -> str:
        ready = sum(server.served for server in self.servers)
        return f"starting servers {self.name}: {ready} of {len(self.servers)} are ready"

    def _wait_until_ready(self, seconds: float, check: Callable[[], None] = _check_nothing) -> None:
        until = time.monotonic() + seconds
        waiting = list(self.servers)
        while waiting:
            for server in waiting:
                if server.status() is not None:
                    if server.has_lost_port():
                        server.start()
                        continue
                    raise LaunchError(
                        f"server {server.name} ended with exit status {server.status()} before it was ready;"
                        f" the last it said was: {server.last_message()}; see {server.log}, mend"
                        f" servers.{self.name}, then continue with --resume."
                    )
            if time.monotonic() > until:
                raise LaunchError(
                    f"server {waiting[0].name} was not ready after {seconds:g} s; see {waiting[0].log}, or"
                    f" raise servers.{self.name}.start_seconds, then continue with --resume."
                )
            check()
            waiting = [server for server in waiting if not server.check_ready()]
            self._over.wait(0.1 if waiting else 0)

    def _monitor_servers(self) -> None:
        try:
            while not self._over.wait(LOOK) and self.trouble is None:
                with self._turn:
                    if not self._asleep and not self._over.is_set():
                        self._restart_failed()
        except Exception as error:  # any error: a run must not wait for servers without a monitor
            self.trouble = LaunchError(
                f"servers {self.name} cannot be watched any more ({reason_of(error)}); continue with"
                " --resume."
            )
            _log.exception("%s", self.trouble)

    def _restart_failed(self) -> None:
        due, failures = self._due, self._failures
        for server in self.servers:
            if server.name in due:
                if time.monotonic() >= due[server.name]:
                    del due[server.name]
                    self._start_again(server)
                continue
            reason = self._fault_of(server)
            if reason is None:
                continue
            failures[server.name] = failures.get(server.name, 0) + 1
            pause = AGAIN.pause_seconds(failures[server.name])
            due[server.name] = time.monotonic() + pause
            server.ask_to_end()
            server.wait(started_server.end_timeout())
            self._count_restart(server, reason)
            if self.trouble is None:
                _log.warning("server %s %s; it is started again in %.0f s", server.name, reason, pause)

    def _fault_of(self, server: StartedServer) -> str | None:
        """Return the reason for a restart, or `None`."""
        server.check_ready()
        status, config = server.status(), server.group
        if status is not None:
            return f"ended with exit status {status}"
        if server.served:
            silent, limit = server.silent_seconds(), config.silence_seconds
        else:
            silent, limit = time.monotonic() - server.answered, config.start_seconds
        return f"has answered nothing for {limit:g} s" if silent > limit else None

    def _count_restart(self, server: StartedServer, reason: str) -> None:
        """Count an end. After too many the group is given up."""
        server.served = False
        self.restarts += 1
        most = server.group.restarts
        if self.restarts > most:
            self.trouble = LaunchError(
                f"server {server.name} {reason}, and servers.{self.name}.restarts {most} are used up; see"
                f" {server.log}, then continue with --resume."
            )
            _log.error("%s", self.trouble)

    def _start_again(self, server: StartedServer) -> None:
        try:
            server.start()
        except OSError as error:
            _log.warning("server %s cannot be started again (%s)", server.name, reason_of(error))


def _call_each(
    servers: Sequence[StartedServer], verb: Callable[[StartedServer], None], check: Callable[[], None]
) -> None:
    """Call `verb` on all servers concurrently, because each may move gigabytes. `check` is called meanwhile.
    If it raises, the calls go on alone.
    """
    threads = [threading.Thread(target=verb, args=(server,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        check()
        for thread in threads:
            thread.join(0.1)


class Group(Protocol):
    """Servers of one model: on this machine (`StartedGroup`), or on a cluster's nodes."""

    name: str
    model: Path
    trouble: LaunchError | None

    @property
    def urls(self) -> list[str]: ...

    def wait(self) -> None: ...

    def can_serve(self, model: Path, any_weights: bool) -> bool: ...

    def close(self) -> None: ...


StartGroup = Callable[[str, ServerGroupConfig, Path, bool], Group]
"""Starts a group of this name for a model. The flag allows any weights of its form."""


class Servers:
    """The started groups of a recipe's `servers`, until closed.

    Args:
        ranks: The processes of the run. The first one starts the groups for all.
        turns: Names of the groups of which one at a time is awake. See `turn`.
        mirrors: The receivers of weights of each group's servers. See `mirrors`.
        key: The key of the groups from `start` that need one.
    """

    def __init__(
        self,
        groups: Mapping[str, ServerGroupConfig],
        start: StartGroup,
        ranks: Ranks | None = None,
        turns: Collection[str] = (),
        mirrors: Mapping[str, Sequence[Receiver]] | None = None,
        key: str = "",
    ) -> None:
        self._key = key
        self._groups, self._start, self._ranks = groups, start, ranks or Ranks()
        self._turns, self._mirrors = turns, mirrors or {}
        self._started: dict[str, Group] = {}

    def serve_models(
        self,
        wanted: Mapping[str, tuple[Served, Path]],
        *,
        any_weights: bool = False,
        arguments: Mapping[str, Argument] | None = None,
    ) -> dict[str, Served]:
        """Start servers, and return each of the settings with their URLs.

        They serve the model of the settings, or with `any_weights` one of its configuration, which gets other
        weights before use. All ranks call it together. `arguments` go to started servers, unless their group
        has its own. Raises `LaunchError` if they cannot be started.
        """
        urls: dict[str, list[str]] = {}

        def start() -> None:
            if self._ranks.is_main:
                for config, model in wanted.values():
                    self._start_group(config, model, any_weights, arguments or {})
                    self._put_to_sleep(config.servers or "")
                for name, (config, _) in wanted.items():
                    group = self._started[config.servers or ""]
                    group.wait()
                    urls[name] = group.urls
                    _log.info("servers %s serve %s at %s", group.name, group.model, ", ".join(group.urls))

        self._ranks.main_first(start, "the start of servers")
        if not self._ranks.is_alone:
            urls = self._ranks.gather_json(urls, "the URLs of servers")[0]
        served = {}
        for name, (config, _) in wanted.items():
            requires_key = self._groups[config.servers or ""].requires_key
            served[name] = config.with_servers(urls[name], self._key if requires_key else "")
        return served

    def mirrors_by_url(self, config: ServerConfig) -> dict[str, Receiver]:
        """Return the receivers of new weights of the servers of `config` (from `at`), by URL."""
        return dict(zip(config.urls, self._mirrors.get(config.started_group or "", ()), strict=True))

    @contextlib.contextmanager
    def awake_group(self, group: str, check: Callable[[], None] = _check_nothing) -> Iterator[None]:
        """Keep the servers of `group`, which takes turns, awake in the block. All ranks enter and leave it
        together. `check` is called while servers are waited for, and may raise.
        """

        def wake() -> None:
            if self._ranks.is_main:
                self._sleeping_group(group).wake(check)

        self._ranks.main_first(wake, f"the servers {group} that wake")
        yield
        self._ranks.barrier(f"the last answer of servers {group}")
        self._put_to_sleep(group, check)

    def _put_to_sleep(self, group: str, check: Callable[[], None] = _check_nothing) -> None:
        """Put the group to sleep, once it is ready, if it takes turns."""
        if self._ranks.is_main and group in self._turns:
            self._started[group].wait()
            self._sleeping_group(group).sleep(check)

    def _sleeping_group(self, name: str) -> StartedGroup:
        group = self._started[name]
        assert isinstance(group, StartedGroup)  # no others share devices, so no others take turns
        return group

    def group_trouble(self, urls: Sequence[str]) -> LaunchError | None:
        """Return the final error of a group with one of these URLs, or `None`. Only its first rank knows."""
        groups = [group for group in self._started.values() if not set(group.urls).isdisjoint(urls)]
        return next((group.trouble for group in groups if group.trouble is not None), None)

    def _start_group(
        self, config: ServerConfig, model: Path, any_weights: bool, arguments: Mapping[str, Argument]
    ) -> None:
        name = config.servers or ""
        group = self._started.get(name)
        if group is not None and group.can_serve(model, any_weights):
            return
        if group is not None:
            self._started.pop(name).close()
        settings = self._groups[name]
        saver = SLEEPS if name in self._turns else {}
        arguments = {**config.server_arguments, **arguments, **saver, **settings.arguments}
        variables = {**config.server_environment(arguments), **settings.environment}
        settings = settings.model_copy(update={"arguments": arguments, "environment": variables})
        self._started[name] = self._start(name, settings, model, any_weights)

    def close(self) -> None:
        """End all groups. Those on this machine end concurrently."""
        for group in self._started.values():
            if isinstance(group, StartedGroup):
                group.ask_to_end()
        while self._started:
            self._started.popitem()[1].close()


def open_servers(
    recipe: Recipe, logs: Path, ranks: Ranks | None = None
) -> contextlib.AbstractContextManager[Servers]:
    """Open the servers of `recipe` on this machine. None outlives the block."""

    def start_group(name: str, group: ServerGroupConfig, model: Path, _: bool) -> StartedGroup:
        return StartedGroup.start_servers(name, group, model, logs)

    key = key_of(recipe.servers.values(), logs)
    return contextlib.closing(Servers(recipe.servers, start_group, ranks, recipe.servers_in_turn, key=key))
