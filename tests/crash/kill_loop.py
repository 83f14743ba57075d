"""`kill -9` at any moment of a writing process, again and again on one log.

    python tests/crash/kill_loop.py --kills 10000

The writer says after each call that it returned. After the kill the log must hold exactly what a model holds
after that many calls, or after one more: the call that was under way. The next writer goes on from there. A
reader reads all the while, and is killed as well. Prints one line of JSON with what was counted.
"""

import argparse
import collections
import json
import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from log_model import LogModel, ModelRequest, random_call, state_of

from opd.storage.framed_log import LogIO
from opd.storage.wal import TokenWAL, read_log
from opd.types import LoggedRequest

POLICIES = ("os", "interval", "always")
SEGMENT_BYTES = 2000


def model_of(requests: dict[str, LoggedRequest]) -> LogModel:
    """A model that holds what a log holds."""
    model = LogModel()
    for uid, logged in requests.items():
        model.requests[uid] = ModelRequest(
            logged.request,
            logged.metadata,
            logged.token_ids.tolist(),
            logged.logprobs.tolist(),
            logged.policy_versions.tolist(),
            logged.status,
            logged.failure,
            None if logged.expert_choices is None else list(logged.expert_choices),
            list(logged.expert_spans),
        )
    return model


def calls(model: LogModel, seed: int) -> Iterator[tuple[str, tuple]]:
    """(method, arguments) for ever; `model` has taken each one in when it is given out."""
    rng, serial = random.Random(seed), 0
    while True:
        serial += 1
        choice = rng.random()
        if choice < 0.06:
            yield ("compact" if choice < 0.03 else "sync"), ()
        else:
            name, arguments = random_call(model, rng, seed * 1_000_000 + serial)
            getattr(model, name)(*arguments)
            yield name, arguments


class DyingIO(LogIO):
    """Kills its own process before the operation with a given number; an append is then half written."""

    def __init__(self, last: int) -> None:
        self._left = last

    def _step(self) -> None:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def create(self, path: Path) -> int:
        self._step()
        return super().create(path)

    def append(self, file: int, buffers: list) -> None:
        if self._left == 0:
            data = b"".join(buffers)
            super().append(file, [data[: 1 + hash(data) % len(data)]])
        self._step()
        super().append(file, buffers)

    def reserve(self, file: int, start: int, count: int) -> None:
        self._step()
        super().reserve(file, start, count)

    def truncate_file(self, file: int, size: int) -> None:
        self._step()
        super().truncate_file(file, size)

    def sync(self, file: int) -> None:
        self._step()
        super().sync(file)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)

    def sync_folder(self, folder: Path) -> None:
        self._step()
        super().sync_folder(folder)


def write_until_killed(folder: Path, seed: int, policy: str, io: LogIO, pipe: int) -> None:
    log = TokenWAL(folder, fsync=policy, segment_bytes=SEGMENT_BYTES, interval_seconds=0.001, io=io)  # type: ignore[arg-type]
    os.write(pipe, b"0\n")
    for count, (name, arguments) in enumerate(calls(model_of(log.requests()), seed), start=1):
        getattr(log, name)(*arguments)
        os.write(pipe, b"%d\n" % count)


def read_until_killed(folder: Path, pipe: int) -> None:
    """Requests only ever grow, until they are gone; nothing that is read is damaged."""
    lengths: dict[str, int] = {}
    while True:
        contents = read_log(folder)
        assert contents.report.damage is None, contents.report.damage
        seen = {uid: len(logged.token_ids) for uid, logged in contents.requests().items()}
        shrunk = {uid for uid in seen if seen[uid] < lengths.get(uid, 0)}
        assert not shrunk, f"{shrunk} lost tokens between two reads"
        lengths = seen
        os.write(pipe, b"r")


def fork(work: Callable[[int], None]) -> tuple[int, int]:
    """(process id, pipe to read from) of a child that runs `work`; it never returns."""
    source, sink = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(source)
            work(sink)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(sink)
    return process, source


def wait_for_death(process: int) -> None:
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status), "the child ended by itself"
    assert os.WTERMSIG(status) == signal.SIGKILL, f"the child died of signal {os.WTERMSIG(status)}"


def kill_once(
    folder: Path, seed: int, rng: random.Random, model: LogModel, counts: collections.Counter
) -> LogModel:
    """Let a writer write for a moment, kill it, and compare; returns the model of what the log holds now."""
    policy = rng.choice(POLICIES)
    by_itself = rng.random() < 0.5
    io = DyingIO(int(rng.random() ** 2 * 200)) if by_itself else LogIO()
    process, pipe = fork(lambda sink: write_until_killed(folder, seed, policy, io, sink))
    said = b""
    if not by_itself:
        said = os.read(pipe, 2) if rng.random() < 0.9 else b""  # most go into writing, some into opening
        time.sleep(rng.random() ** 2 * 0.01)
        os.kill(process, signal.SIGKILL)
    wait_for_death(process)
    with os.fdopen(pipe, "rb") as file:
        lines = (said + file.read()).split(b"\n")[:-1]
    assert [int(line) for line in lines] == list(range(len(lines)))
    done = max(len(lines) - 1, 0)
    before = state_of(model_requests(model))
    stream = calls(model, seed)
    for _ in range(done):
        next(stream)
    allowed = [model.state() if done else before]
    next(stream)
    allowed.append(model.state() if lines else before)
    contents = read_log(folder)
    assert contents.report.damage is None, contents.report.damage
    found = state_of(contents.requests())
    assert found in allowed, f"seed {seed}, {policy}: {done} calls were acknowledged, and the log differs"
    counts.update(kills=1, acknowledged_calls=done, opening=not lines, torn=contents.report.cut_bytes > 0)
    counts["in_flight_kept"] += found != allowed[0]
    counts["tokens"] += contents.report.tokens
    return model_of(contents.requests())


def model_requests(model: LogModel) -> dict[str, LoggedRequest]:
    return {uid: request.logged() for uid, request in model.requests.items()}


def run(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill so many writers on one log, with a reader beside each; returns what happened how often."""
    TokenWAL(folder).shutdown()
    rng, model, counts = random.Random(seed), LogModel(), collections.Counter()
    for number in range(kills):
        reading = number % 4 == 0
        reader, pipe = fork(lambda sink: read_until_killed(folder, sink)) if reading else (0, -1)
        counts["reads"] += len(os.read(pipe, 1)) if reading else 0  # it is at work when the writer begins
        try:
            model = kill_once(folder, seed * 1_000_003 + number, rng, model, counts)
        finally:
            if reading:
                os.kill(reader, signal.SIGKILL)
                wait_for_death(reader)
                with os.fdopen(pipe, "rb") as file:
                    counts["reads"] += len(file.read())
    log = TokenWAL(folder)
    assert state_of(log.requests()) == state_of(model_requests(model))
    log.shutdown()
    return dict(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where to put the log; on a file system in memory it is fast")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(json.dumps(run(Path(folder) / "log", options.kills, options.seed)))


if __name__ == "__main__":
    main()
