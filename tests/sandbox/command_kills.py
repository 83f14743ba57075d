"""`kill -9` of a process whose agents run commands, again and again on one log, until all have ended.

    python tests/sandbox/command_kills.py --kills 300

Each agent runs the same commands in every life. A line in a file outside says that a command really starts,
written just before it does: no command may be there twice unless it is marked, or in its place a result would
have been lost. In the end every agent's outcomes are those of one that was never disturbed, but for commands
that were reported as interrupted. Prints one line of JSON with what was counted.
"""

import argparse
import asyncio
import collections
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from boxes import SMALL
from kill_loop import DyingIO, fork, wait_for_death

from opd.environments.recorded import RecordedSandbox
from opd.environments.trajectory import Command, TrajectoryLog, read_trajectories
from opd.sandbox.local import LocalSandbox, Sandboxes
from opd.sandbox.protocol import Outcome
from opd.sandbox.substrates import find_substrate
from opd.storage.framed_log import LogIO

AGENTS, COMMANDS = 3, 6


def commands_of(agent: int) -> list[Command]:
    """One after another they tell of all before: a file grows by a line a command."""
    found = []
    for number in range(COMMANDS):
        line = f"echo {agent}-{number} >> lines; sleep 0.0{number}; cat lines; echo x > made-{number}"
        marks = ({}, {"repeatable": True}, {"repeatable": True, "deterministic": True})[(agent + number) % 3]
        found.append(Command(("sh", "-c", line), **marks))
    return found


class Watched:
    """A sandbox that notes outside which commands start."""

    def __init__(self, box: LocalSandbox, agent: int, notes: Path) -> None:
        self._box, self._agent, self._notes = box, agent, notes

    @property
    def spent(self) -> str | None:
        return self._box.spent

    async def exec(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Outcome:
        number = next(n for n, one in enumerate(commands_of(self._agent)) if one.words == tuple(command))
        with open(self._notes, "a") as file:
            file.write(f"{self._agent} {number}\n")
        return await self._box.exec(command, stdin, timeout)

    async def snapshot(self) -> str:
        return await self._box.snapshot()

    async def close(self) -> None:
        await self._box.close()


async def act(folder: Path, log: TrajectoryLog, pipe: int) -> None:
    """All agents, side by side; says when one has been answered."""
    boxes = Sandboxes(folder / f"boxes-{os.getpid()}", log.store, SMALL, substrate=find_substrate())

    async def agent(name: int) -> None:
        async def opened(state: str | None) -> Watched:
            box = boxes.open(str(name))
            if state is not None:
                await box.restore(state)
            return Watched(box, name, folder / "started")

        sandbox = RecordedSandbox(log, str(name), {}, opened)  # type: ignore[arg-type]
        for number, command in enumerate(commands_of(name)):
            outcome = await sandbox.run(command, number)
            told = [name, number, outcome.exit, outcome.stdout.decode(), outcome.interrupted]
            os.write(pipe, (json.dumps(told) + "\n").encode())
        await sandbox.close()

    await asyncio.gather(*(agent(name) for name in range(AGENTS)))
    boxes.close()


def live(folder: Path, io: LogIO, pipe: int) -> None:
    """One life: until all have ended, or it is killed."""
    log = TrajectoryLog(folder / "log", io=io)
    os.write(pipe, b"0\n")
    asyncio.run(act(folder, log, pipe))
    log.shutdown()
    os.write(pipe, b"end\n")
    signal.pause()


def one_life(
    folder: Path, rng: random.Random, seen: dict[tuple[int, int], list], counts: collections.Counter
) -> bool:
    """Start it, kill it, and look; whether all agents had ended."""
    by_itself = rng.random() < 0.5
    io = DyingIO(int(rng.random() ** 2 * 30)) if by_itself else LogIO()
    process, source = fork(lambda sink: live(folder, io, sink))
    said = b""
    if not by_itself:
        said = os.read(source, 1 << 16)
        time.sleep(rng.random() ** 2 * 0.5)
        os.kill(process, signal.SIGKILL)
    while chunk := os.read(source, 1 << 16):
        said += chunk
        if chunk.endswith(b"end\n"):
            os.kill(process, signal.SIGKILL)
    os.close(source)
    wait_for_death(process)
    counts["kills"] += 1
    for line in said.split(b"\n")[1:]:
        if line and line != b"end":
            agent, number, *answer = json.loads(line)
            before = seen.setdefault((agent, number), answer)
            assert before == answer, f"command {number} of {agent} was answered {before}, now {answer}"
    return said.endswith(b"end\n")


def check(folder: Path, seen: dict[tuple[int, int], list], counts: collections.Counter) -> None:
    """Nothing ran twice unmarked, nothing was lost, and every answer is that of an undisturbed agent."""
    episodes, report = read_trajectories(folder / "log")
    assert report.damage is None, report.damage
    lines = (folder / "started").read_text().splitlines()
    started = collections.Counter(tuple(map(int, line.split())) for line in lines)
    for agent in range(AGENTS):
        kept: list[str] = []
        for number, command in enumerate(commands_of(agent)):
            logged = episodes[str(agent)].commands[number]
            exit_status, text, interrupted = seen[agent, number]
            counts["starts"] += started[agent, number]
            counts["again"] += max(0, started[agent, number] - 1)
            assert logged.outcome is not None
            assert (logged.outcome.exit, logged.outcome.interrupted) == (exit_status, interrupted)
            if interrupted:
                assert not command.repeatable
                counts["interrupted"] += 1
            else:
                kept.append(f"{agent}-{number}\n")
                assert (exit_status, text) == (0, "".join(kept))
            if not command.repeatable:
                assert started[agent, number] <= 1, f"command {number} of {agent} ran again"
                assert started[agent, number] == 1 or interrupted
            elif not command.deterministic:
                assert started[agent, number] <= logged.attempts
    counts["agents"] += AGENTS


def run(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """So many kills, over as many sets of agents as that takes; returns what happened how often."""
    find_substrate()
    rng, counts, number = random.Random(seed), collections.Counter(), 0
    while counts["kills"] < kills:
        place, number, seen = folder / str(number), number + 1, {}
        place.mkdir()
        while not one_life(place, rng, seen, counts):
            pass
        check(place, seen, counts)
    return dict(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        json.dump(run(Path(folder), options.kills, options.seed), sys.stdout)


if __name__ == "__main__":
    main()
