"""Run one inference server behind a guard.

The guard (`server_guard.py`) ends it with the run, however that ends. Servers of SGLang can free their
device's memory and allocate it again. With a weights backup in the host's memory they have the same weights
again, and their clients verify that. A server ends if it is told to release while it computes, or to allocate
twice, so this class remembers its state.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opd.child import Child, wait_readable
from opd.config.servers import ServerGroupConfig
from opd.errors import ConfigError, reason_of
from opd.pipelines.launch.server_key import KeyArguments, key_arguments
from opd.served.plugin import opd_hidden_states
from opd.served.plugin.opd_hidden_states import SHARED, VARIABLE
from opd.untrusted import safe_excerpt

_log = logging.getLogger(__name__)

HOST = "127.0.0.1"
"""Address of servers with clients on their own machine alone."""
PLUGIN = Path(opd_hidden_states.__file__).parent
GUARD = Path(__file__).with_name("server_guard.py")
_OF_RANKS = re.compile(r"(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
_LAST_BYTES = 20_000
_RAISED = re.compile(r"[\w.]+(Error|Exception): ")
LOOK = 0.5
"""Seconds between two checks of a server. Each is a request."""
ANSWER = 5.0
"""Seconds it has to answer a check. A busy one may be slow."""
ASKED = 10
"""Number of requests to a server's computing process in `silence_seconds`."""
_NO_SUCH = 127
_NO_KEY = KeyArguments()
GRACE = 10.0
"""Seconds a server has to end after the request."""
ENDING = 15.0
"""Seconds beyond these until its guard is ended by force."""
PARTS = ("weights", "kv_cache", "cuda_graph")
"""Names of the memory that SGLang releases."""
SLEEPS = {"enable-memory-saver": True, "enable-weights-cpu-backup": True}
"""Start arguments of a server that is to sleep."""
_IDLE = 30.0
"""Seconds that abandoned requests have to leave."""


def end_timeout() -> float:
    """Return the seconds until a server is gone after the request to end, in the end by force."""
    return GRACE + ENDING


def command_of(group: ServerGroupConfig, model: Path, port: int, host: str = HOST) -> list[str]:
    """Return the command line of one server of `group`."""
    program = group.server_program
    words = [*(group.command or [sys.executable, "-m", program.module])]
    words += [f"--{program.model}", str(model), "--host", host, "--port", str(port)]
    if group.tensor_parallel > 1:
        words += [f"--{program.ranks}", str(group.tensor_parallel)]
    return words + group.command_line


def _server_environment(group: ServerGroupConfig, number: int, key: KeyArguments = _NO_KEY) -> dict[str, str]:
    # Variables of this process's rank do not fit a server, which may have ranks of its own.
    variables = {name: value for name, value in os.environ.items() if not _OF_RANKS.fullmatch(name)}
    # A health check that generates a token would fail while the engine is paused.
    variables |= {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "VLLM_NO_USAGE_STATS": "1"}
    if group.devices is not None:
        first = number * group.tensor_parallel
        shown = [str(device) for device in group.devices[first : first + group.tensor_parallel]]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:  # devices are numbered among those this process sees
            names = [name.strip() for name in visible.split(",") if name.strip()]
            if lost := [device for device in shown if int(device) >= len(names)]:
                raise ConfigError(
                    f"a group under `servers` names device {lost[0]}, but CUDA_VISIBLE_DEVICES shows"
                    f" {len(names)}; number them from 0, as this process sees them."
                )
            shown = [names[int(device)] for device in shown]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(shown)
    variables[VARIABLE] = f"{SHARED}/opd-hidden-{uuid.uuid4().hex}"
    variables |= {**group.environment, **key.variables}
    if key.plugin or group.arguments.get("enable-return-hidden-states"):
        # SGLang looks there for plug-ins by itself, however it is started.
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PLUGIN), variables.get("PYTHONPATH")]))
    return variables


def free_port(host: str) -> int:
    """Return a port that is free there now."""
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]


@dataclass
class StartedServer:
    """One server of a group, with its guard process."""

    name: str
    group: ServerGroupConfig
    number: int
    model: Path
    log: Path
    host: str = HOST
    port: int = 0
    key: str = field(default="", repr=False)
    """The key that it requires from clients."""
    answered: float = 0.0
    """Time of its last answer, or of its start."""
    served: bool = False
    """It was ready since its last start."""
    asleep: bool = False
    """Its memory is freed."""
    worked: float = 0.0
    """Time of its computing process's last answer, or when it became ready."""
    _question_index: int = 0
    """Index of the first question of its program that it may know."""
    _question: http.client.HTTPConnection | None = None
    """The connection of that question: one at a time, however long a busy server takes."""
    _guard: Child | None = None
    _hidden: str = ""
    """Its folder of hidden states."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Start it, at its previous port if it has one. Raises `OSError` if it cannot."""
        self.port = self.port or free_port(self.host)
        self.served = self.asleep = False
        self.answered = time.monotonic()
        self._forget_question()
        if self._guard is not None:  # of the one that has lost its port
            self._guard.channel.close()
        group, key = self.group, key_arguments(self.group, self.key, self.log)
        environment = _server_environment(group, self.number, key)
        self._hidden = environment[VARIABLE]
        command = command_of(group, self.model, self.port, self.host)
        # By default the noise of vLLM is always the same: two servers of a group, or a restarted one, would
        # repeat each other's.
        words = [word.partition("=")[0] for word in group.command or []]
        if group.server_program.repeats and "seed" not in group.arguments and "--seed" not in words:
            command += ["--seed", str(secrets.randbelow(2**31))]
        command += key.words
        guarded = [sys.executable, "-I", str(GUARD), str(GRACE), *command]
        with open(self.log, "ab", opener=_open_private) as log:
            self._guard = Child(guarded, environment, log, apart=True)

    def status(self) -> int | None:
        """Return its exit status, or `None` while it runs. One that could not be started has a shell's."""
        return _NO_SUCH if self._guard is None else self._guard.status()

    def check_ready(self) -> bool:
        """Check whether it is ready. It must answer within `ANSWER` seconds."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(self.host, self.port, timeout=ANSWER)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                status = connection.getresponse().status
                self.answered = time.monotonic()
                if status == http.HTTPStatus.OK and not self.served:
                    self.served, self.worked = True, self.answered
        return self.served

    def silent_seconds(self) -> float:
        """Return the seconds without any answer of it, or of its computing process. Another process answers
        whether it is ready. So the computing one gets a question now and then. Any answer counts.
        """
        now, question, questions = time.monotonic(), self._question, self.group.server_program.questions
        with contextlib.suppress(OSError, http.client.HTTPException):
            if question is None and now - self.worked >= self.group.silence_seconds / ASKED:
                method, path, body = questions[self._question_index]
                question = http.client.HTTPConnection(self.host, self.port, timeout=ANSWER)
                try:
                    text = None if body is None else json.dumps(body)
                    question.request(method, path, text, self._request_headers)
                except BaseException:
                    question.close()
                    raise
                self._question = question  # nothing waits for an answer if the request failed
            elif question is not None and wait_readable(question.sock, 0.0):  # or it has ended
                self._question = None
                with contextlib.closing(question):
                    answer = question.getresponse()
                    answer.read(1)
                    # Another process sends not found, and there may be another question.
                    is_missing = answer.status == http.HTTPStatus.NOT_FOUND
                    if is_missing and self._question_index + 1 < len(questions):
                        self._question_index += 1
                    else:
                        self.worked = now
        return now - min(self.answered, self.worked)

    @property
    def _request_headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}

    def sleep(self) -> None:
        """Free its memory. It ends if it cannot, or is not ready. An ended one has none."""
        if self.asleep or self.status() is not None:
            return
        with self._or_end("give its memory back"):
            if not self.served:
                raise OSError("it is not ready yet")
            self._post_json("/abort_request", {"rid": "", "abort_all": True})  # abandoned ones
            until = time.monotonic() + _IDLE
            while self._post_json("/flush_cache", {}) != http.client.OK:  # it refuses while it computes
                if time.monotonic() > until:
                    raise http.client.HTTPException(f"it was not idle {_IDLE:g} s after all was given up")
                time.sleep(0.1)
            _require_ok(self._post_json("/release_memory_occupation", {"tags": PARTS}))
            self.asleep = True

    def wake(self) -> None:
        """Allocate its memory again. It ends if it cannot."""
        if self.asleep:
            with self._or_end("take its memory again"):
                _require_ok(self._post_json("/resume_memory_occupation", {"tags": PARTS}))
            self.asleep = False
        self._forget_question()
        self.answered = self.worked = time.monotonic()

    def _post_json(self, path: str, body: dict[str, Any]) -> int:
        seconds = self.group.silence_seconds
        with contextlib.closing(
            http.client.HTTPConnection(self.host, self.port, timeout=seconds)
        ) as connection:
            connection.request("POST", path, json.dumps(body), self._request_headers)
            return connection.getresponse().status

    @contextlib.contextmanager
    def _or_end(self, action: str) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            _log.warning("server %s could not %s (%s) and is ended", self.name, action, reason_of(error))
            self.ask_to_end()
            self.wait(end_timeout())

    def ask_to_end(self) -> None:
        """Let its guard end it, with all its processes."""
        if self._guard is not None:
            self._guard.channel.hang_up()
        self._forget_question()

    def wait(self, seconds: float) -> None:
        """Wait until it is gone, by force after `seconds`."""
        guard, until = self._guard, time.monotonic() + seconds  # two threads may wait
        if guard is None:
            return
        if guard.wait(seconds) is None:
            guard.send_signal(signal.SIGKILL)
            guard.wait()
        self._guard = None
        # A killed guard has left the rest to another process.
        guard.channel.wait_closed(max(0.0, until - time.monotonic()))
        guard.channel.close()
        if Path(self._hidden).name.startswith("opd-hidden-"):
            shutil.rmtree(self._hidden, ignore_errors=True)  # its guard has done so, unless it was killed

    def has_lost_port(self) -> bool:
        """Return whether another process took the free port before its start."""
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), timeout=LOOK):
            self.port = 0
        return not self.port

    def last_message(self) -> str:
        """Return the last exception in its log, or else the last line, for an error."""
        with contextlib.suppress(OSError):
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))  # the rest may be gigabytes
                lines = file.read(_LAST_BYTES).decode("utf-8", "replace").split("\n")
            printed = [line for line in lines if line.strip()]
            raised = [line for line in printed if _RAISED.match(line)]
            return safe_excerpt((raised or printed or ["nothing"])[-1], 300)
        return "nothing"

    def _forget_question(self) -> None:
        question, self._question = self._question, None
        if question is not None:
            question.close()


def _open_private(path: str, flags: int) -> int:
    """Open the log for this user alone, because SGLang logs all its settings, with its key."""
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # an existing one, too
    return descriptor


def _require_ok(status: int) -> None:
    if status != http.client.OK:
        raise http.client.HTTPException(f"it answered {status}")
