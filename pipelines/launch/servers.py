"""The servers that a run starts itself: started when they are first needed, watched, started again, ended.

Each is behind a guard (`server_guard.py`), so that none outlives the run, however that ends. A server that
ends, or answers nothing at all for long, is started again at its port: to whoever asks it, it was away, and
has to prove its weights before it is used again. What a server prints is in `logs/servers/`.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from opd.config import Recipe
from opd.config.servers import ServerGroupConfig
from opd.config.teachers import ServerConfig
from opd.errors import ConfigError, LaunchError, OpdError, reason_of
from opd.foreign import printable
from opd.progress import doing
from opd.ranks import Ranks
from opd.retry import Retry
from opd.served.plugin import opd_hidden_states
from opd.served.plugin.opd_hidden_states import SHARED, VARIABLE

_log = logging.getLogger(__name__)

HOST = "127.0.0.1"
"""Where servers listen that are asked from their own machine alone."""
PLUGIN = Path(opd_hidden_states.__file__).parent
GUARD = Path(__file__).with_name("server_guard.py")
_OF_RANKS = re.compile(r"(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
_FLAGS = {"sglang": ("--model-path", "--tp-size"), "vllm": ("--model", "--tensor-parallel-size")}
"""What a kind of server calls its model, and its GPUs."""
_LAST_BYTES = 20_000
_RAISED = re.compile(r"[\w.]+(Error|Exception): ")
AGAIN = Retry(pause=1.0, longest=30.0)
"""Between the end of a server and its next start."""
LOOK = 0.5
"""Seconds between two looks at a server; each asks it whether it is there."""
ANSWER = 5.0
"""Seconds it has to answer a look: one that is at work may be slow to."""
ASKED = 10
"""How often in `silence_seconds` what computes in a server is asked for a word."""
Served = TypeVar("Served", bound=ServerConfig)
_NO_SUCH = 127
GRACE = 10.0
"""Seconds a server has to end once it is asked to."""
ENDING = 15.0
"""Seconds beyond these until its guard is ended by force."""


def command_of(group: ServerGroupConfig, model: Path, port: int, host: str = HOST) -> list[str]:
    """The command line of one server of `group`."""
    path, ranks = _FLAGS[group.type]
    own = [*(group.command or [sys.executable, "-m", group.module])]
    own += [path, str(model), "--host", host, "--port", str(port)]
    if group.tensor_parallel > 1:
        own += [ranks, str(group.tensor_parallel)]
    return own + group.words


def _environment(group: ServerGroupConfig, number: int) -> dict[str, str]:
    # What says which rank this process is says nothing of a server, which may have ranks of its own.
    ours = {name: value for name, value in os.environ.items() if not _OF_RANKS.fullmatch(name)}
    # A health check that generates a token answers with an error while the engine is paused.
    own = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "VLLM_NO_USAGE_STATS": "1"}
    if group.devices is not None:
        first = number * group.tensor_parallel
        shown = group.devices[first : first + group.tensor_parallel]
        own["CUDA_VISIBLE_DEVICES"] = ",".join(_seen(device) for device in shown)
    own[VARIABLE] = f"{SHARED}/opd-hidden-{uuid.uuid4().hex}"
    found = {**ours, **own, **group.environment}
    if group.arguments.get("enable-return-hidden-states"):
        # SGLang looks there for plug-ins by itself, whichever command starts it.
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PLUGIN), found.get("PYTHONPATH")]))
    return found


def _seen(device: int) -> str:
    """What CUDA calls the `device` of that number among those this process sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        return str(device)
    names = [name.strip() for name in seen.split(",") if name.strip()]
    if device >= len(names):
        raise ConfigError(
            f"a group under `servers` names device {device}, but CUDA_VISIBLE_DEVICES shows {len(names)};"
            " number them from 0, as this process sees them."
        )
    return names[device]


def same_model(held: Path, model: Path, any_weights: bool) -> bool:
    """Whether a server of the folder `held` serves `model`, or with `any_weights` one of its form."""
    return held == model or (any_weights and _described(held) == _described(model))


def _described(model: Path) -> bytes | None:
    """The configuration of the model in a folder; `None` if it is not there any more."""
    with contextlib.suppress(OSError):
        return (model / "config.json").read_bytes()
    return None


def _readable(connection: http.client.HTTPConnection) -> bool:
    """Whether an answer has come, or the connection has ended."""
    return connection.sock is None or _speaks(connection.sock.fileno(), 0.0)


def _speaks(descriptor: int, seconds: float) -> bool:
    """Whether something can be read of it, or it ends, within `seconds`."""
    poll = select.poll()  # `select.select` refuses descriptors from 1024 on
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def until_free(host: str, port: int, seconds: float) -> None:
    """Wait until nobody listens on `port` any more, but no longer than `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return
        time.sleep(LOOK)


def free_port(host: str) -> int:
    """One that is free there now."""
    with socket.create_server((host, 0)) as taken:
        return taken.getsockname()[1]


@dataclass
class StartedServer:
    """One server of a group, and the process that guards it."""

    name: str
    group: ServerGroupConfig
    number: int
    model: Path
    log: Path
    host: str = HOST
    port: int = 0
    answered: float = 0.0
    """When it last answered anything, or was started."""
    served: bool = False
    """Whether it was ready since it was started last."""
    worked: float = 0.0
    """When what computes in it answered last, or it became ready."""
    _question: http.client.HTTPConnection | None = None
    """On which that is asked: one at a time, however long it takes, since it may be at work."""
    _guard: subprocess.Popen[bytes] | None = None
    _pipe: int | None = None
    _gone: int | None = None
    """What can be read of it once the server is gone, and all it had."""
    _hidden: str = ""
    """Where it leaves hidden states."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Start it, at the port that it has if it was started before. Raises `OSError` if that cannot be."""
        self.port = self.port or free_port(self.host)
        self.served, self.answered = False, time.monotonic()
        self._close()
        self._forget_the_end()
        environment = _environment(self.group, self.number)
        self._hidden = environment[VARIABLE]
        read, self._pipe = os.pipe()
        self._gone, gone = os.pipe()
        command = command_of(self.group, self.model, self.port, self.host)
        try:
            with self.log.open("ab") as log:
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", str(GUARD), str(read), str(gone), str(GRACE), *command],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[read, gone],
                    start_new_session=True,
                )
        except BaseException:
            self._close()
            self._forget_the_end()
            raise
        finally:
            os.close(read)
            os.close(gone)

    def status(self) -> int | None:
        """Its exit status; `None` while it runs. One that could not even be started has a shell's."""
        return _NO_SUCH if self._guard is None else self._guard.poll()

    def look(self) -> bool:
        """Ask whether it is ready, which it says within `ANSWER` seconds, or not at all."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(self.host, self.port, timeout=ANSWER)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                status = connection.getresponse().status
                self.answered = time.monotonic()
                if status == http.HTTPStatus.OK and not self.served:
                    self.served, self.worked = True, self.answered
        return self.served

    def silent(self) -> float:
        """For how many seconds it has answered nothing, or what computes in it has not, which is not the
        process that answers whether it is ready. Asks that now and then; whatever it answers will do.
        """
        now, question = time.monotonic(), self._question
        with contextlib.suppress(OSError, http.client.HTTPException):
            if question is None and now - self.worked >= self.group.silence_seconds / ASKED:
                question = http.client.HTTPConnection(self.host, self.port, timeout=ANSWER)
                self._question = question
                question.request("GET", "/server_info")
            elif question is not None and _readable(question):
                self._question = None
                with contextlib.closing(question):
                    question.getresponse().read(1)
                    self.worked = now
        return now - min(self.answered, self.worked)

    def ask_to_end(self) -> None:
        """Its guard ends it, and all it has started."""
        if self._guard is not None and self._guard.poll() is None:
            self._guard.send_signal(signal.SIGTERM)
        self._close()

    def wait(self, seconds: float) -> None:
        """Until it is gone; by force after `seconds`."""
        if self._guard is None:
            return
        until = time.monotonic() + seconds
        try:
            self._guard.wait(seconds)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        self._guard = None
        if self._gone is not None:  # a guard that was killed itself has left the rest to another process
            _speaks(self._gone, max(0.0, until - time.monotonic()))
        self._forget_the_end()
        if Path(self._hidden).name.startswith("opd-hidden-"):
            shutil.rmtree(self._hidden, ignore_errors=True)  # its guard has, unless it was killed itself

    def lost_its_port(self) -> bool:
        """Whether another process was faster to take the port that was free when it was started."""
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), timeout=LOOK):
            self.port = 0
        return not self.port

    def last_words(self) -> str:
        """The last exception in its log, or else the last line, for an error."""
        with contextlib.suppress(OSError):
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))  # the rest may be gigabytes
                lines = file.read(_LAST_BYTES).decode("utf-8", "replace").split("\n")
            said = [line for line in lines if line.strip()]
            raised = [line for line in said if _RAISED.match(line)]
            return printable((raised or said or ["nothing"])[-1])[:300]
        return "nothing"

    def _forget_the_end(self) -> None:
        gone, self._gone = self._gone, None
        if gone is not None:
            os.close(gone)

    def _forget_question(self) -> None:
        question, self._question = self._question, None
        if question is not None:
            question.close()

    def _close(self) -> None:
        self._forget_question()
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe)


@dataclass(frozen=True, slots=True)
class Place:
    """Of one server of a group that is alone on its machine."""

    number: int
    """Which of the group it is."""
    host: str
    """Address of that machine, on which it listens."""
    port: int = 0
    """0 takes a free one."""


@dataclass
class StartedGroup:
    """Servers of one model, and a thread that starts again what has ended."""

    name: str
    config: ServerGroupConfig
    servers: list[StartedServer]
    model: Path
    trouble: LaunchError | None = None
    """Why the group is given up."""
    restarts: int = 0
    _over: threading.Event = field(default_factory=threading.Event)
    _watcher: threading.Thread | None = None

    @classmethod
    def begin(
        cls, name: str, config: ServerGroupConfig, model: Path, logs: Path, place: Place | None = None
    ) -> StartedGroup:
        """Begin to start all servers of the group, or the one of `place`; see `wait`. Raises `LaunchError` if
        that cannot be.
        """
        logs.mkdir(parents=True, exist_ok=True)
        places = [Place(number, HOST) for number in range(config.count)] if place is None else [place]
        servers = [
            StartedServer(own, config, at.number, model, logs / f"{own}.log", at.host, at.port)
            for own, at in ((f"{name}-{at.number}", at) for at in places)
        ]
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
        """Return once all servers are ready, which are watched from then on.

        Raises `LaunchError` with the end of its log if one cannot start, or takes too long.
        """
        if self._watcher is None:
            with doing(self._starting):
                self._wait_until_ready(self.config.start_seconds)
            self._watcher = threading.Thread(target=self._watch, name=f"servers-{self.name}", daemon=True)
            self._watcher.start()

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def serves(self, model: Path, any_weights: bool) -> bool:
        """Whether it need not be started anew for `model`; see `Servers.at`."""
        return self.trouble is None and same_model(self.model, model, any_weights)

    def close(self) -> None:
        """End all servers. Returns once they are gone."""
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()
        for server in self.servers:
            server.ask_to_end()
        until = time.monotonic() + GRACE + ENDING
        with doing(f"ending the servers {self.name}"):
            for server in self.servers:
                server.wait(max(0.1, until - time.monotonic()))

    def _starting(self) -> str:
        ready = sum(server.served for server in self.servers)
        return f"starting servers {self.name}: {ready} of {len(self.servers)} are ready"

    def _wait_until_ready(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        waiting = list(self.servers)
        while waiting:
            for server in waiting:
                if server.status() is not None:
                    if server.lost_its_port():
                        server.start()
                        continue
                    raise LaunchError(
                        f"server {server.name} ended with exit status {server.status()} before it was ready;"
                        f" the last it said was: {server.last_words()}; see {server.log}, mend"
                        f" servers.{self.name}, then continue with --resume."
                    )
            if time.monotonic() > until:
                raise LaunchError(
                    f"server {waiting[0].name} was not ready after {seconds:g} s; see {waiting[0].log}, or"
                    f" raise servers.{self.name}.start_seconds, then continue with --resume."
                )
            waiting = [server for server in waiting if not server.look()]
            self._over.wait(0.1 if waiting else 0)

    def _watch(self) -> None:
        failures = dict.fromkeys((server.name for server in self.servers), 0)
        due: dict[str, float] = {}
        while not self._over.wait(LOOK) and self.trouble is None:
            for server in self.servers:
                if server.name in due:
                    if time.monotonic() >= due[server.name]:
                        del due[server.name]
                        self._start_again(server)
                    continue
                reason = self._fault_of(server)
                if reason is None:
                    continue
                failures[server.name] += 1
                pause = AGAIN.seconds(failures[server.name])
                due[server.name] = time.monotonic() + pause
                self._left(server, reason, pause)

    def _fault_of(self, server: StartedServer) -> str | None:
        """Why it has to be started again; `None` if it has not."""
        server.look()
        status, config = server.status(), server.group
        if status is not None:
            return f"ended with exit status {status}"
        if server.served:
            silent, limit = server.silent(), config.silence_seconds
        else:
            silent, limit = time.monotonic() - server.answered, config.start_seconds
        return f"has answered nothing for {limit:g} s" if silent > limit else None

    def _left(self, server: StartedServer, reason: str, pause: float) -> None:
        server.ask_to_end()
        server.wait(GRACE + ENDING)
        server.served = False
        self.restarts += 1
        most = server.group.restarts
        if self.restarts > most:
            self.trouble = LaunchError(
                f"server {server.name} {reason}, and servers.{self.name}.restarts {most} are used up; see"
                f" {server.log}, then continue with --resume."
            )
            _log.error("%s", self.trouble)
        else:
            _log.warning("server %s %s; it is started again in %.0f s", server.name, reason, pause)

    def _start_again(self, server: StartedServer) -> None:
        try:
            server.start()
        except OSError as error:
            _log.warning("server %s cannot be started again (%s)", server.name, reason_of(error))


class Group(Protocol):
    """Servers of one model: on this machine (`StartedGroup`), or on a cluster's nodes."""

    name: str
    model: Path
    trouble: LaunchError | None

    @property
    def urls(self) -> list[str]: ...

    def wait(self) -> None: ...

    def serves(self, model: Path, any_weights: bool) -> bool: ...

    def close(self) -> None: ...


Begin = Callable[[str, ServerGroupConfig, Path, bool], Group]
"""Begins to start a group of this name for a model, of which any weights will do where it is told so."""


class Servers:
    """The groups of a recipe's `servers` that have been started, until it is closed.

    Args:
        groups: The recipe's.
        begin: Starts one.
        ranks: The processes of the run, of which the first starts them for all.
    """

    def __init__(
        self, groups: Mapping[str, ServerGroupConfig], begin: Begin, ranks: Ranks | None = None
    ) -> None:
        self._groups, self._start, self._ranks = groups, begin, ranks or Ranks()
        self._started: dict[str, Group] = {}

    def at(
        self,
        wanted: Mapping[str, tuple[Served, Path]],
        *,
        any_weights: bool = False,
        arguments: Mapping[str, bool] | None = None,
    ) -> dict[str, Served]:
        """Each of the settings with the URLs of its servers, which serve the model beside it, or with
        `any_weights` one of its configuration: it is given others before it is used. All ranks call it
        together. `arguments` are told to servers that are started, unless their group says otherwise.

        Raises `LaunchError` if they cannot be started.
        """
        urls: dict[str, list[str]] = {}

        def start() -> None:
            if self._ranks.main:
                for config, model in wanted.values():
                    self._begin(config, model, any_weights, arguments or {})
                for name, (config, _) in wanted.items():
                    group = self._started[config.servers or ""]
                    group.wait()
                    urls[name] = group.urls
                    _log.info("servers %s serve %s at %s", group.name, group.model, ", ".join(group.urls))

        self._ranks.main_first(start)
        if not self._ranks.alone:
            urls = self._ranks.gather_json(urls, "the URLs of servers")[0]
        return {name: config.at(urls[name]) for name, (config, _) in wanted.items()}

    def given_up(self, urls: Sequence[str]) -> LaunchError | None:
        """Why a group that has one of these URLs is given up; only the rank that started it knows."""
        groups = [group for group in self._started.values() if not set(group.urls).isdisjoint(urls)]
        return next((group.trouble for group in groups if group.trouble is not None), None)

    def _begin(
        self, config: ServerConfig, model: Path, any_weights: bool, arguments: Mapping[str, bool]
    ) -> None:
        name = config.servers or ""
        group = self._started.get(name)
        if group is not None and group.serves(model, any_weights):
            return
        if group is not None:
            self._started.pop(name).close()
        asked = self._groups[name]
        told = {**config.server_arguments, **arguments, **asked.arguments}
        asked = asked.model_copy(update={"arguments": told})
        self._started[name] = self._start(name, asked, model, any_weights)

    def close(self) -> None:
        """End them all."""
        while self._started:
            self._started.popitem()[1].close()


def started_by(
    recipe: Recipe, logs: Path, ranks: Ranks | None = None
) -> contextlib.AbstractContextManager[Servers]:
    """The servers of `recipe` on this machine, none of which lives longer than the block."""

    def begin(name: str, group: ServerGroupConfig, model: Path, _: bool) -> StartedGroup:
        return StartedGroup.begin(name, group, model, logs)

    return contextlib.closing(Servers(recipe.servers, begin, ranks))
