"""A sandbox with a log of trajectories: commands from before a kill are read from it, and not run again.

After a restart the same commands come in the same order, because the model's tokens are in the token log.
Commands that ended are answered from the log, without a sandbox. The first other command needs the files as
they were. They come from the last snapshot, plus a rerun of the commands after it. Those are marked
deterministic and ended by themselves (a quota or a signal does not end a command at the same point each
time).

A command that was in flight is run again only if it is marked repeatable, from the files as they were before
it. Otherwise it is answered as interrupted, over those files, and that is logged too.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from opd.config.environments import SandboxConfig
from opd.environments.trajectory import Command, LoggedCommand, LoggedEpisode, TrajectoryLog
from opd.errors import StorageError
from opd.sandbox.local import Sandboxes
from opd.sandbox.protocol import Limits, Outcome, Sandbox, SandboxError
from opd.untrusted import bounded_integer, safe_excerpt

_log = logging.getLogger(__name__)
Open = Callable[[str | None], Awaitable[Sandbox]]
"""Opens a sandbox with the files of a snapshot, or of an episode's beginning for `None`."""


def sandbox_opener(boxes: Sandboxes, name: str, files: Mapping[str, str]) -> Open:
    """Open sandboxes of `boxes` in the folder `name`. An episode begins with `files`: text by path."""

    async def opened(state: str | None) -> Sandbox:
        box = boxes.open(name)
        if state is not None:
            await box.restore(state)
        else:
            for path, text in files.items():
                await box.write(path, text.encode())
        return box

    return opened


def settings_of(boxes: Sandboxes, files: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of an episode's sandbox for the log, enough to open an equal one."""
    container = boxes.substrate.container
    return {
        "substrate": boxes.substrate.kind,
        **({} if container is None else {"image": container.image, "image_digest": container.digest}),
        "limits": asdict(boxes.limits),
        "reads": list(boxes.reads),
        "files": dict(files),
    }


def image_in(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the image's name and digest from the log's settings, or None if commands ran in no container.
    Raises `ValueError` or `LookupError` for values that no recipe gives.
    """
    if settings["substrate"] != "container":
        return None
    try:
        config = SandboxConfig(substrate="container", image=settings["image"])
    except ValidationError as error:
        raise ValueError(f"image: {error.errors()[0]['msg']}") from None
    return str(config.image), str(settings["image_digest"])


def limits_in(settings: Mapping[str, Any]) -> Limits:
    """Read the sandbox's limits from a log's settings. Raises `ValueError` or `LookupError`."""
    limits, most = settings["limits"], Limits()
    memory, disk = (
        bounded_integer(limits[name], 1 << 20, 1 << 60, f"limits.{name}") for name in ("memory", "disk")
    )
    values = {name: limits[name] for name in ("seconds", "cpu_seconds", "processes", "output")}
    try:
        values |= {"memory_mb": -(-memory >> 20), "disk_mb": -(-disk >> 20)}
        config = SandboxConfig.model_validate(values, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"limits.{first['loc'][0]}: {first['msg']}") from None
    files = bounded_integer(limits["files"], 1, most.files, "limits.files")
    opened = bounded_integer(limits["open_files"], 1, most.open_files, "limits.open_files")
    return Limits(
        config.seconds, config.cpu_seconds, memory, config.processes, disk, files, config.output, opened
    )


class RecordedSandbox:
    """The commands of one episode, one at a time."""

    def __init__(self, log: TrajectoryLog, uid: str, settings: Mapping[str, Any], open_sandbox: Open) -> None:
        """`settings`: of the environment and its sandbox, JSON-able. Raises `StorageError` if the log has the
        episode with other settings.
        """
        self._log, self._uid, self._open = log, uid, open_sandbox
        self.logged_episode: LoggedEpisode = log.begin_episode(uid, settings)
        """The log's state of the episode."""
        self._answered = 0
        """Commands answered since this process opened the episode."""
        self._sandbox: Sandbox | None = None
        self.spent: str | None = None
        """Reason why no more commands can run in it."""
        self._behind = False
        """True if a command was started and did not return, so the files are unknown."""

    def skip_commands(self, turn: int) -> None:
        """Skip the commands of this turn, whose result the log has."""
        commands = self.logged_episode.commands
        while self._answered < len(commands) and commands[self._answered].turn == turn:
            self._check_quota(commands[self._answered])
            self._answered += 1

    async def run(self, command: Command, turn: int) -> Outcome:
        """Return the outcome of the next command, from the log or from running it. Raises `StorageError` if
        the log has another command in its place or a snapshot is damaged. Raises `SandboxError` once the disk
        quota is used up.
        """
        if self.spent is not None:
            raise SandboxError(f"nothing more can be done in this sandbox: {self.spent}")
        if self._answered == len(self.logged_episode.commands):
            outcome = await self._run_command(command, turn)
        else:
            logged = self.logged_episode.commands[self._answered]
            outcome = await self._replay_command(logged, command, turn)
        self._check_quota(self.logged_episode.commands[self._answered])
        self._answered += 1
        return outcome

    async def _replay_command(self, logged: LoggedCommand, command: Command, turn: int) -> Outcome:
        if logged.command.digest != command.digest or logged.turn != turn:
            raise StorageError(
                f"episode {safe_excerpt(self._uid)} asks for {safe_excerpt(' '.join(command.words))} as"
                f" command {logged.number}, where it had run {safe_excerpt(' '.join(logged.command.words))};"
                " its environment answers otherwise than before: take its randomness from task.seed, and"
                f" remove {self._log.folder} to begin episodes again"
            )
        if logged.outcome is not None:
            return logged.outcome
        if command.repeatable:
            _log.info("episode %s: command %d was in flight and runs again", self._uid, logged.number)
            return await self._run_command(command, turn)
        _log.warning("episode %s: command %d was interrupted, and is not run again", self._uid, logged.number)
        outcome = Outcome(None, interrupted=True)
        state = await (await self._sandbox_at(logged.number)).snapshot()
        self._log.log_result(self._uid, logged.number, outcome, state)
        return outcome

    async def _run_command(self, command: Command, turn: int) -> Outcome:
        sandbox = await self._sandbox_at(self._answered)
        logged = self._log.log_intent(self._uid, turn, command)
        outcome = await self._exec(sandbox, command)
        state, cut_short = None, outcome.exit is None or outcome.exit < 0
        if sandbox.spent is None and (cut_short or not command.deterministic):
            state = await sandbox.snapshot()
        self._log.log_result(self._uid, logged.number, outcome, state)
        return outcome

    async def _exec(self, sandbox: Sandbox, command: Command) -> Outcome:
        self._behind = True
        outcome = await sandbox.exec(command.words, command.stdin, command.timeout)
        self._behind = False
        return outcome

    def _check_quota(self, logged: LoggedCommand) -> None:
        if logged.outcome is not None and logged.outcome.killed_by == "disk":
            self.spent = "its home holds more than its quota"

    async def _sandbox_at(self, number: int) -> Sandbox:
        """Return the sandbox with the files as they were before command `number`."""
        if self._sandbox is not None and not self._behind:
            return self._sandbox
        await self.close()
        commands = self.logged_episode.commands[:number]
        first = next((i for i in range(number, 0, -1) if commands[i - 1].state is not None), 0)
        self._sandbox = await self._open(commands[first - 1].state if first else None)
        for one in commands[first:]:
            if not one.command.deterministic:
                raise StorageError(
                    f"episode {safe_excerpt(self._uid)}: no state was kept after command {one.number},"
                    f" which may not be run again; remove {self._log.folder} to begin episodes again"
                )
            outcome = await self._exec(self._sandbox, one.command)
            if outcome != one.outcome:
                raise StorageError(
                    f"episode {safe_excerpt(self._uid)}: command {one.number}, marked deterministic, ended"
                    " otherwise when it was run again; leave the mark out"
                )
        return self._sandbox

    async def close(self) -> None:
        """Close the sandbox. The log stays."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()
