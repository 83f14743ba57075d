"""`kill -9` of a process that generates: a model, an engine, the fault-tolerant rollout and its log.

    PYTHONPATH=tests python tests/crash/generate_loop.py --kills 1000 [--seed 0] [--folder DIR] [--json FILE]
        [--mixture]

The process writes batch after batch, says each token once it was given out, and retires a batch when it is
whole. It is killed at a random moment, or before an operation of the system, of each kind in turn: an append
(then half of it is written), a step of beginning a new file, of compaction, or of opening the log. After the
kill the log must hold every token that was given out, and at most the step under way besides; each must be
the token an undisturbed process writes at that position, since the noise is a function of (seed, uid,
position). With `--mixture` every position must have the expert choices of an undisturbed process, too. The
next process continues. A reader reads all the while and is killed as well. Prints one line of JSON.
"""

import argparse
import collections
import json
import math
import os
import random
import select
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tiny
import tiny_types
import torch
from dying_io import DyingIO
from kill_loop import fork, read_until_killed, wait_for_death

from opd.models.attention import ATTENTION_NAME
from opd.models.causal_lm import CausalLM
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.torch_engine import TorchEngine
from opd.storage.transcript import Tokens, Transcript, choices_of
from opd.storage.wal import TokenWAL, read_log
from opd.types import RolloutRequest, SamplingParams, Status

REQUESTS, RUNNING = 8, 6
SEGMENT_BYTES = 1500
PLACES = ("any", "write", "tear", "rotation", "compaction", "opening", "time")
OPERATIONS = {"any": 200, "write": 60, "tear": 40, "rotation": 30, "compaction": 20, "opening": 4, "time": 1}
"""A process dies before one of so many operations of a place."""
ENOUGH = 20
"""Batches after which a process that did not come to its place is killed where it is."""


def requests_of(batch: int) -> list[RolloutRequest]:
    """Different prompts, limits and stop ids; the uids name the batch."""
    rng = np.random.default_rng(batch)
    return [
        RolloutRequest(
            f"{batch}/{i}",
            rng.integers(0, 10, 4).astype(np.int32),
            SamplingParams(max_new_tokens=int(rng.integers(4, 40)), stop_ids=(int(rng.integers(0, 10)),)),
            seed=batch,
        )
        for i in range(REQUESTS)
    ]


class CheckedEngine(TorchEngine):
    """Refuses to be asked for a token that the log holds already."""

    log: TokenWAL

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            logged = self.log.find(request.uid)
            assert logged is not None
            assert logged.token_ids.tolist() == request.prefix_ids.tolist()
        super().submit(requests)


def generate_until_killed(
    model: CausalLM, folder: Path, batch: int, policy: str, place: str, count: int, pipe: int
) -> None:
    """Write one batch after another."""
    io = DyingIO(place, count, pipe)
    log = TokenWAL(folder, fsync=policy, segment_bytes=SEGMENT_BYTES, interval_seconds=0.001, io=io)  # type: ignore[arg-type]
    io.is_open = True
    engine = CheckedEngine(model, max_running=RUNNING, record_experts=model.routing is not None)
    engine.log = log
    rollout = FaultTolerantRollout([engine], log)
    while True:
        requests = requests_of(batch)
        for step in rollout.generate(requests):
            pairs = zip(step.uids, step.positions.tolist(), step.token_ids.tolist(), strict=True)
            said = [f"t {uid} {position} {token}\n" for uid, position, token in pairs]
            said += [f"e {uid} {status}\n" for uid, status in step.finished.items()]
            os.write(pipe, "".join(said).encode())
        os.write(pipe, f"r {batch}\n".encode())
        log.retire([request.uid for request in requests])
        batch += 1
        os.write(pipe, f"b {batch}\n".encode())


@dataclass
class Expected:
    """What undisturbed processes write; each batch is computed once."""

    model: CausalLM
    known: dict[str, tuple[list[int], list[float], Status]] = field(default_factory=dict)
    choices: dict[str, np.ndarray | None] = field(default_factory=dict)
    """Expert choices of every position, of a mixture."""

    def of(self, uid: str) -> tuple[list[int], list[float], Status]:
        """(token ids, log-probabilities, end) of a request."""
        if uid not in self.known:
            for request in requests_of(int(uid.partition("/")[0])):
                self.known[request.uid] = ([], [], Status.PENDING)
            requests = requests_of(int(uid.partition("/")[0]))
            transcript = Transcript({request.uid: Tokens.empty() for request in requests})
            engine = TorchEngine(self.model, record_experts=self.model.routing is not None)
            for step in engine.generate(requests):
                transcript.add_chunk(step)
                for name, token, logprob in zip(step.uids, step.token_ids, step.logprobs, strict=True):
                    self.known[name][0].append(int(token))
                    self.known[name][1].append(float(logprob))
                for name, status in step.finished.items():
                    self.known[name] = (*self.known[name][:2], status)
            for request in requests:
                tokens = transcript.request_tokens(request.uid)
                self.choices[request.uid] = choices_of([(len(request.prompt_ids), tokens)])
        return self.known[uid]


@dataclass
class Told:
    """What killed processes said, all together."""

    batch: int = 0
    retiring: int = -1
    given: dict[str, int] = field(default_factory=dict)
    """Tokens given out, of the requests of the present batch."""
    ended: dict[str, str] = field(default_factory=dict)
    tokens: int = 0

    def hear(self, line: str, expected: Expected) -> None:
        """Take in one line; whatever is said must be what an undisturbed process says."""
        kind, *words = line.split()
        if kind == "t":
            uid, position, token = words[0], int(words[1]), int(words[2])
            assert expected.of(uid)[0][position] == token, f"{uid}: another token at {position}"
            self.tokens += position >= self.given.get(uid, 0)
            self.given[uid] = max(position + 1, self.given.get(uid, 0))
        elif kind == "e":
            self.ended[words[0]] = words[1]
        elif kind == "r":
            self.retiring = int(words[0])
        elif kind == "b":
            self.batch = int(words[0])
            self.given, self.ended = {}, {}


def compare(folder: Path, told: Told, expected: Expected, counts: collections.Counter) -> None:
    """Nothing given out is missing, nothing is invented, nothing is there twice."""
    contents = read_log(folder)
    assert contents.report.damage is None, contents.report.damage
    found = contents.requests()
    if told.retiring == told.batch and not found:  # it had been retired when the process died
        told.batch += 1
        told.given, told.ended = {}, {}
        return
    assert set(told.given) <= set(found), "a request was lost"
    in_flight = 0
    for uid, logged in found.items():
        assert int(uid.partition("/")[0]) == told.batch, f"{uid} was retired"
        ids, logprobs, end = expected.of(uid)
        length = len(logged.token_ids)
        assert logged.token_ids.tolist() == ids[:length], f"{uid}: invented or doubled"
        np.testing.assert_allclose(logged.logprobs, logprobs[:length], atol=1e-5)
        positions = len(logged.request.prompt_ids) + length - 1
        choices, due = (
            choices_of([(positions + 1 - length, Tokens.from_logged(logged))]),
            expected.choices[uid],
        )
        if length and due is not None:
            assert choices is not None
            assert np.array_equal(choices, due[:positions]), f"{uid}: other experts"
        assert length >= told.given.get(uid, 0), f"{uid}: a token that was given out is lost"
        assert length <= told.given.get(uid, 0) + 1, f"{uid}: more than the step under way"
        in_flight += length > told.given.get(uid, 0)
        assert (logged.status is Status.PENDING) == (length < len(ids))
        assert logged.status in (Status.PENDING, end)
        assert told.ended.get(uid, logged.status) == logged.status
    counts["in_flight_kept"] += in_flight > 0
    counts["torn"] += contents.report.cut_bytes > 0


def listen(process: int, pipe: int, patience: float) -> bytes:
    """Everything a process says until it dies; it is killed after `patience` seconds, or `ENOUGH` batches."""
    said, until = b"", time.monotonic() + patience
    while True:
        remaining = until - time.monotonic()
        over = remaining <= 0 or said.count(b"\nb ") >= ENOUGH
        if over:
            os.kill(process, signal.SIGKILL)
        if over or select.select([pipe], [], [], min(remaining, 60.0))[0]:
            data = os.read(pipe, 1 << 20)
            if not data:
                break
            said += data
    wait_for_death(process)
    os.close(pipe)
    return said


def kill_once(
    folder: Path, rng: random.Random, told: Told, expected: Expected, counts: collections.Counter
) -> None:
    """Let a process generate for a while, kill it, and look at what it left."""
    place, policy = PLACES[counts["kills"] % len(PLACES)], rng.choice(("os", "interval", "always"))
    count = rng.randrange(OPERATIONS[place])
    patience = rng.random() * 0.1 if place == "time" else math.inf
    work = (expected.model, folder, told.batch, policy, place, count)
    process, pipe = fork(lambda sink: generate_until_killed(*work, sink))
    lines = listen(process, pipe, patience).decode().split("\n")
    assert lines.pop() == "", "half a line"
    died = "time"
    for line in lines:
        if line.startswith("d "):
            died = line[2:]
        else:
            told.hear(line, expected)
    counts.update({"kills": 1, f"killed in {died}": 1})
    compare(folder, told, expected, counts)


def mixture() -> CausalLM:
    """A model with experts."""
    torch.manual_seed(0)
    module = tiny_types.tiny_model("qwen3_moe", num_experts=6, num_experts_per_tok=3)
    module.set_attn_implementation(ATTENTION_NAME)
    return CausalLM(module)


def run(folder: Path, kills: int, seed: int, model: CausalLM) -> dict[str, int]:
    """Kill so many generating processes on one log; returns what happened how often."""
    torch.set_num_threads(1)
    TokenWAL(folder, fsync="os").shutdown()
    rng, counts = random.Random(seed), collections.Counter()
    told, expected = Told(), Expected(model)
    for number in range(kills):
        reading = number % 3 == 0
        reader, pipe = fork(lambda sink: read_until_killed(folder, sink)) if reading else (0, -1)
        try:
            kill_once(folder, rng, told, expected, counts)
        finally:
            if reading:
                os.kill(reader, signal.SIGKILL)
                wait_for_death(reader)
                with os.fdopen(pipe, "rb") as file:
                    counts.update({"reads": len(file.read()), "killed readers": 1})
    counts.update(batches=told.batch, tokens=told.tokens)
    return dict(sorted(counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where to put the log")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mixture", action="store_true", help="a model with experts")
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = mixture() if options.mixture else tiny.model()
        counts = run(Path(folder) / "log", options.kills, options.seed, model)
    print(json.dumps(counts))
    if options.json:
        seconds = round(time.perf_counter() - begin, 1)
        options.json.write_text(json.dumps(counts | {"seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
