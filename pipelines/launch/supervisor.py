"""Supervise the processes of a run: ranks, concurrent stages, actors on Ray.

It polls its members, passes their messages on, and sends them this process's signals. After a failure the
others have a moment for their last messages. The error is that of the member that failed by itself, not of
those that lost it. No member outlives the block, or the process that started it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from opd import errors
from opd.child import Channel, Child, listen, parent_channel
from opd.errors import OpdError, PreemptedError
from opd.output import log_again
from opd.pipelines.launch.machine import known_error as by_machine
from opd.progress import Progress, set_remote_activity
from opd.rollout.preemption import EXIT_STATUS, Preemption
from opd.user_code import describe_error

LOOK = 0.1
"""Seconds between two polls of the members."""
LAST_WORDS = 5.0
"""Seconds for the others' last messages after a failure."""
REFUSED = 2
"""Exit status of a process that printed its error."""
_SIGNALS = {"stop": signal.SIGTERM, "suspend": signal.SIGUSR1, "wake": signal.SIGUSR2}


Cause = IntEnum("Cause", "FAULT DIED CRASHED LOST STOPPED")
"""Why a member did not do its work. Of several failures the first kind here explains the others."""


ON_THE_WAY = ("progress", "log", "busy")
"""Kinds of messages that are not a member's last one."""


class Message(NamedTuple):
    """A member's message. On the way: `progress` (done, total, headline), `log` (a record), `busy` (the
    activity of a member whose messages this process prints). As its last message: `done` (the result),
    `error` (class and arguments of an `OpdError`), `crash` (any other error). Without a last message: `left`
    (its exit status), `gone` (the evidence).
    """

    kind: str
    words: tuple[Any, ...]

    @property
    def cause(self) -> Cause:
        first = self.words[0]
        if self.kind == "error":
            causes = {
                "RanksError": Cause.LOST,
                "TeacherRanksError": Cause.LOST,
                "PreemptedError": Cause.STOPPED,
            }
            return causes.get(first, Cause.FAULT)
        if self.kind == "left" and first in (
            EXIT_STATUS,
            -signal.SIGTERM,
        ):  # the one that does not listen yet
            return Cause.STOPPED
        if self.kind == "left" and first >= 0:
            return Cause.FAULT if first == REFUSED else Cause.CRASHED
        return Cause.CRASHED if self.kind == "crash" else Cause.DIED

    def forward_message(self, stage: str, progress: Progress) -> None:
        """Pass on a message of a stage on its way."""
        if self.kind == "progress":
            progress.update_stage(stage, *self.words)
        elif self.kind == "log":
            log_again(*self.words, stage=stage)
        elif self.kind == "busy":
            set_remote_activity(*self.words)


class Member(Protocol):
    """A process as its supervisor sees it. `poll` yields its messages since the last call, and is not called
    after its last one. `request_action` sends `stop`, `suspend` or `wake`. `end` returns once it is gone, by
    force.
    """

    name: str

    def poll(self) -> Iterator[Message]: ...

    def request_action(self, action: str) -> None: ...

    def end(self) -> None: ...


class MemberFailedError(Exception):
    """A member failed. The supervisor's caller formats the error."""

    def __init__(self, member: Any, message: Message) -> None:
        super().__init__(f"{member.name}: {message}")
        self.member, self.message = member, message

    def to_error(self, name: str, log: str) -> Exception:
        """Return its error, with `name` for the member and `log` for more."""
        kind, first, *details = self.message.kind, *self.message.words
        if kind == "error":
            return getattr(errors, first, OpdError)(*details)
        if kind == "crash":
            return RuntimeError(f"{name} crashed with {first}; its traceback is in {log}")
        fate = f"ended with exit status {first} and said nothing; see {log} and continue with --resume."
        return OpdError(f"{name} {fate}")


class Supervisor:
    """Supervises members while its block runs, from `add` until they have ended.

    Args:
        preemption: The signals to this process.
        hear: Called with a member's message, its result too.
        last_words: Seconds the others have after a failure. `None`: they do not need it. They are told to
            stop, and have the grace period for it.
    """

    def __init__(
        self,
        preemption: Preemption,
        hear: Callable[[Any, Message], None] = lambda member, message: None,
        last_words: float | None = LAST_WORDS,
    ) -> None:
        self._preemption, self._hear = preemption, hear
        self._alone = last_words is None
        self._patience = preemption.grace if last_words is None else last_words
        self._members: list[Member] = []
        self.running: list[Member] = []
        self.results: dict[str, Any] = {}
        self._actions: dict[str, str] = {}
        self._failures: list[MemberFailedError] = []
        self._leaving, self._until = False, math.inf

    @property
    def is_ending(self) -> bool:
        """The members are to end: one has failed, or this process is to stop."""
        return bool(self._failures) or self._preemption.is_stopping

    def add_member(self, member: Member) -> None:
        self._members.append(member)
        self.running.append(member)

    def check_members(self) -> None:
        """Poll the members once, and wait for a moment if some are left.

        After the last message it raises `MemberFailedError` for the failure that explains the others, and
        `PreemptedError` if this process is to stop.
        """
        if not self.running:
            self._preemption.check()
        self._poll_members()
        preemption = self._preemption
        if self.is_ending:
            # If all leave on request, they get the grace period, because no last messages are needed.
            leaving = preemption.is_stopping and all(f.message.cause >= Cause.LOST for f in self._failures)
            patience = preemption.grace if leaving else self._patience
            self._until = min(self._until, time.monotonic() + patience)
            is_over = time.monotonic() >= self._until if self.running else bool(self._failures)
            if is_over:
                order = {member.name: number for number, member in enumerate(self._members)}
                self._failures.sort(key=lambda failed: (failed.message.cause, order[failed.member.name]))
                first = self._failures[0] if self._failures else None
                if first is not None and (first.message.cause < Cause.LOST or not preemption.is_stopping):
                    raise first
                if late := ", ".join(member.name for member in self.running):
                    grace = f"runtime.grace_seconds ({preemption.grace:g})"
                    raise PreemptedError(
                        f"{late} did not stop within {grace} and had to be ended; continue with --resume."
                    )
                preemption.check()
        if self.running:
            time.sleep(LOOK)

    def _poll_members(self) -> None:
        stop = self._leaving or self._preemption.is_stopping or (self._alone and self._failures)
        wanted = "stop" if stop else "suspend" if self._preemption.suspended else "wake"
        for member in self._members:
            if self._actions.get(member.name, "wake") != wanted:
                self._actions[member.name] = wanted
                member.request_action(wanted)
        for member in list(self.running):
            for message in member.poll():
                if message.kind not in ON_THE_WAY:
                    self.running.remove(member)
                if message.kind == "done":
                    self.results[member.name] = message.words[0]
                if message.kind in (*ON_THE_WAY, "done"):
                    self._hear(member, message)
                else:
                    self._failures.append(MemberFailedError(member, message))

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the remaining members, give them the rest of their time, and end them."""
        self._leaving = True
        self._until = min(self._until, time.monotonic() + self._preemption.grace)
        try:
            while self.running and time.monotonic() < self._until:
                self._poll_members()
                time.sleep(LOOK)
        finally:
            for member in self.running:
                member.end()


@dataclass
class ProcessMember:
    """A child that sends its messages, and then exits."""

    name: str
    """Its name in errors."""
    child: Child
    log: Path | None = None
    """The file of its output, if that is not this process's terminal."""
    by_status: bool = False
    """Exit status 0 means that its work is done."""
    _last: Message | None = field(default=None, init=False)

    def poll(self) -> Iterator[Message]:
        """Poll as in the protocol. It has ended when it has exited."""
        status = self.child.status()  # first, so that all earlier messages are there
        with suppress(EOFError):
            while (line := self.child.channel.receive_message(0.0)) is not None:
                try:
                    kind, *words = json.loads(line)
                    message = Message(str(kind), tuple(words))
                except (ValueError, TypeError, RecursionError):  # the user's own code wrote to the channel
                    message = Message("crash", ("it said what is no message",))
                if message.kind in ON_THE_WAY:
                    yield message
                else:
                    self._last = message
        if status is not None:
            self.child.channel.close()
            done = status == 0 and self.by_status
            yield self._last or Message("done" if done else "left", (status,))

    def request_action(self, action: str) -> None:
        """Ask as in the protocol."""
        self.child.send_signal(_SIGNALS[action])

    def end(self) -> None:
        """End as in the protocol."""
        self.child.kill_process()


def start_command(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path | None = None,
    *,
    by_status: bool = True,
) -> ProcessMember:
    """Start a member that runs `command`, with more in its environment. It prints into `log`, if given.
    Unless its work is done `by_status`, it sends a message that it is.
    """
    # All of them are on this machine, so gloo needs no other interface.
    gloo = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform.startswith("linux") else {}
    with ExitStack() as stack, defer_signals():
        out = None if log is None else stack.enter_context(log.open("wb"))
        child = Child(command, {**gloo, **os.environ, **environment}, out)
    return ProcessMember(name, child, log, by_status)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer the signals to suspend and to wake for processes started in the block. By default these signals
    end a process that does not handle them yet.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {_SIGNALS["suspend"], _SIGNALS["wake"]})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class ParentSupervisor:
    """The supervisor as a member sees it. It handles Ctrl-C for the member. When it is gone the member ends
    at once, because a killed run must not go on writing into its folder.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        listen(channel)

    def send_message(self, kind: str, *words: Any) -> None:
        """Send a `Message`. It is dropped if the supervisor is gone."""
        with suppress(OSError):
            self._channel.send_message([kind, *words], default=str)


@cache
def parent() -> ParentSupervisor | None:
    """Return the supervisor of a process that `start_command` started, `None` for any other."""
    channel = parent_channel()
    return None if channel is None else ParentSupervisor(channel)


def final_message(
    work: Callable[[], Any], understood: Callable[[Exception], OpdError | None] = by_machine
) -> Message:
    """Return the last message of `work`. Errors not `understood` are bugs, printed with traceback."""
    try:
        return Message("done", (work(),))
    except Exception as error:
        traceback.print_exc()
        opd_error = understood(error)
        if opd_error is None:
            return Message("crash", (describe_error(error),))
        return Message("error", (type(opd_error).__name__, *opd_error.args))
