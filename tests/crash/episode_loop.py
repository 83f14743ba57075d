"""`kill -9` in the middle of episodes: a model, its log, environments with commands, and their log.

    PYTHONPATH=tests/crash:examples/length_bias python tests/crash/episode_loop.py --kills 1000 \\
        [--episodes 5120] [--seed 0] [--json FILE]

A process writes episodes in batches of 64, or of all of them if there are fewer, says each token once it was
given out, and retires a batch when it is whole. It is killed before an operation of either log (an append is
then half written), or at a moment that another process chooses. The next one goes on, *with other noise*:
what it writes anew is another draw, so the distribution has to come out as if nobody had been killed, and a
token that was given out has to stay. Each start of a command is noted outside its sandbox.

Then the episodes are compared with those of undisturbed processes: turns, tokens, success. As a control they
are written undisturbed twice; and as a control that has to fail restarted from scratch: a process that dies
takes the episodes that had not ended with it. Where nobody is killed commands are computed and not run: what
they say is known, and the environment refuses another answer. Prints one line of JSON.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from arms import build_model
from dying_io import DyingIO
from kill_loop import fork, wait_for_death
from two_samples import kolmogorov_smirnov, same_lengths, same_mean

from opd.config.environments import EnvironmentConfig
from opd.environments.episodes import Episodes
from opd.environments.protocol import EPISODE, Action, Step, Task
from opd.environments.tools import Tools
from opd.environments.trajectory import Command, TrajectoryLog
from opd.models.causal_lm import CausalLM
from opd.models.tokenizers import character_tokenizer
from opd.rollout.collect import EncodedPrompt, SamplingEngine
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.streams import More, Streaming
from opd.rollout.torch_engine import TorchEngine
from opd.sandbox.substrates import find_substrate
from opd.storage.framed_log import LogIO
from opd.storage.wal import TokenWAL, read_log
from opd.types import Chunk, RolloutRequest, Sample, SamplingParams, Status

BATCH, TURNS, TURN_TOKENS, LIMIT = 64, 10, 10, 160
ENOUGH = 64
"""Episodes from which distributions are compared."""
STOP, OVER = 3, "e"
"""The token that ends a turn; the character that ends an episode."""
EVIDENCE, REQUIRED = "5678", 6
"""An episode is a success if it has so many of these: who writes more, finds more."""
WORKS = {1: 0, 4: 1}
"""Turn -> number of the command that it runs."""
KINDS: tuple[dict[str, bool], ...] = ({}, {"repeatable": True}, {"repeatable": True, "deterministic": True})
SEED_STEP = 1_000_003
"""Between the noise of two lives."""
SEGMENT_BYTES = 1 << 15
FAR = 1_000_000
"""Between the numbers of batches of two loops of kills."""
LIFETIME = 60
"""Chunks of a life that is restarted from scratch, at most."""
TOKENIZER = character_tokenizer("0123456789abcdefghij", [])
Result = tuple[int, int, bool]
"""Of an episode: turns, tokens that the model wrote, success."""


class Counts(Tools):
    """Two of its turns run a command that adds a line to a file and says how many there are.

    What an interrupted command says differs, so in episodes with commands that may not be repeated the model
    is told the same whatever they say.
    """

    def __init__(self, notes: str = "") -> None:
        """`notes`: a file for a line at each start of a command; without, they are computed."""
        super().__init__(["shell"], {"seconds": 120, "memory_mb": 256, "processes": 16, "disk_mb": 1})
        self._notes = notes

    @classmethod
    def schemas(cls, notes: str = "") -> list[dict[str, Any]]:
        return []

    def reset(self, task: Task) -> None:
        super().reset(task)
        self._found, self._kind = 0, int(task.label) % len(KINDS)
        if self._recorded is not None:
            opened = self._recorded._open

            async def watched(state: str | None) -> Any:
                return _Watched(await opened(state), task.uid, self._notes)

            self._recorded._open = watched

    async def step(self, action: Action) -> Step:
        self._found += sum(sign in EVIDENCE for sign in action.text)
        return await super().step(action)

    async def _run_step(self, action: Action) -> Step:
        said = "i"
        if action.turn in WORKS:
            number = WORKS[action.turn]
            if self._notes:
                line = f"echo {number} >> lines; wc -l < lines # {number}"
                outcome = await self._run_command(
                    Command(("/bin/sh", "-c", line), **KINDS[self._kind]), action.turn
                )
                if self._kind and outcome.stdout.decode().strip() != str(number + 1):
                    raise AssertionError(f"command {number} of {self._task.uid} said {outcome}")
            said = str(number + 1) if self._kind else "j"
        return Step(said, float(self._found >= REQUIRED), True) if OVER in action.text else Step(said)


class _Watched:
    """A sandbox that notes outside which commands start."""

    def __init__(self, box: Any, uid: str, notes: str) -> None:
        self._box, self._uid, self._notes = box, uid, notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)

    async def exec(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Any:
        with open(self._notes, "a") as file:
            file.write(f"{self._uid} {command[-1].rpartition(' ')[2]}\n")
        return await self._box.exec(command, stdin, timeout)


class OwnNoise(Streaming):
    """An engine whose noise is another one in each life; the log is not told."""

    def __init__(self, inner: TorchEngine, life: int) -> None:
        self.inner, self._life = inner, life

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self.inner.submit([replace(one, seed=one.seed + SEED_STEP * self._life) for one in requests])

    def next_chunk(self) -> Chunk | None:
        return self.inner.next_chunk()

    def abort(self, uids: Collection[str]) -> None:
        self.inner.abort(uids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Saying:
    """Says what was given out, once it was."""

    def __init__(self, engine: SamplingEngine, pipe: int) -> None:
        self._engine, self._pipe = engine, pipe

    def generate(self, requests: Any, more: More | None = None) -> Iterator[Chunk]:
        for chunk in self._engine.generate(requests, more):
            rows = zip(chunk.uids, chunk.positions.tolist(), chunk.token_ids.tolist(), strict=True)
            said = [f"t {uid} {position} {token}\n" for uid, position, token in rows]
            said += [f"e {uid}\n" for uid in chunk.finished]
            write(self._pipe, "".join(said).encode())
            yield chunk


def write(pipe: int, data: bytes) -> None:
    """All of it."""
    while data:
        data = data[os.write(pipe, data) :]


def prompts_of(batch: int) -> list[EncodedPrompt]:
    """64 prompts, the same in every batch; the uids name it."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 10, 6).astype(np.int32) for _ in range(BATCH)]
    return [EncodedPrompt(f"{batch}-{i}", "a", ids[i], i, {"prompt": "x"}) for i in range(BATCH)]


def batch_of(uid: str) -> int:
    """Of a prompt, a sample or a turn."""
    return int(uid.partition("-")[0])


def play(
    engine: SamplingEngine, model: CausalLM, prompts: Sequence[EncodedPrompt], seed: int, **where: Any
) -> list[Sample]:
    """The episodes of `prompts`; `where`: `notes`, `log` of commands that are run."""
    params = {"notes": where.get("notes", "")}
    config = EnvironmentConfig(
        type="episode_loop:Counts", params=params, max_turns=TURNS, turn_tokens=TURN_TOKENS, seconds=900.0
    )
    episodes = Episodes(config, "a", TOKENIZER, {}, where.get("log"))
    sampling = SamplingParams(max_new_tokens=LIMIT, stop_ids=(STOP,))
    groups = episodes(engine, prompts, 1, sampling, seed)
    return [sample for group in groups for sample in group.samples]


def result(sample: Sample) -> Result:
    """What is compared of an episode."""
    episode = sample.metadata[EPISODE]
    return episode["turns"], sample.trainable_tokens, episode["reward"] > 0.5


def live(model: CausalLM, folder: Path, batch: int, life: int, ios: Sequence[LogIO], pipe: int) -> None:
    """One life of the process: batch after batch, until it is killed."""
    log = TokenWAL(folder / "wal", fsync="os", segment_bytes=SEGMENT_BYTES, io=ios[0])
    episodes = TrajectoryLog(folder / "episodes", fsync="os", segment_bytes=SEGMENT_BYTES, io=ios[1])
    for io in ios:
        if isinstance(io, DyingIO):
            io.is_open = True
    log.retire([uid for uid in log.requests() if batch_of(uid) < batch])
    episodes.retire([uid for uid in episodes.uids() if batch_of(uid) < batch])
    engine = OwnNoise(TorchEngine(model, max_running=BATCH), life)
    rollout = Saying(FaultTolerantRollout([engine], log), pipe)  # type: ignore[list-item]
    while True:
        prompts = prompts_of(batch)
        samples = play(rollout, model, prompts, 0, notes=str(folder / f"started-{batch}"), log=episodes)
        told: dict[str, Any] = {"samples": [], "commands": []}
        for sample in samples:
            known = episodes.find(sample.uid)
            numbers = [
                sample.response_ids.tolist(),
                sample.loss_mask.tolist(),
                sample.rollout_logprobs.tolist(),
            ]
            told["samples"].append([sample.uid, *result(sample), *numbers])
            for one in known.commands if known is not None else ():
                assert one.outcome is not None
                told["commands"].append([sample.uid, one.number, one.attempts, one.outcome.interrupted])
        write(pipe, f"b {json.dumps(told)}\n".encode())
        log.retire([uid for uid in log.requests() if batch_of(uid) == batch])
        episodes.retire([sample.uid for sample in samples])
        batch += 1


@dataclass
class Seen:
    """What killed processes said, all together."""

    batch: int = 0
    given: dict[str, dict[int, int]] = field(default_factory=dict)
    """Request of the present batch -> position -> token."""
    ended: set[str] = field(default_factory=set)
    results: list[Result] = field(default_factory=list)
    counts: collections.Counter = field(default_factory=collections.Counter)

    def hear(self, line: str, folder: Path) -> None:
        """Take in a line; a token that was given out stays what it was. `folder`: where starts are noted."""
        kind, _, said = line.partition(" ")
        if kind == "t":
            uid, place, token = said.split()
            known = self.given.setdefault(uid, {})
            assert known.setdefault(int(place), int(token)) == int(token), f"{uid}: another token at {place}"
            self.counts["told"] += 1
        elif kind == "e":
            self.ended.add(said)
        elif kind == "b":
            self._whole(json.loads(said), folder / f"started-{self.batch}")

    def _whole(self, said: Mapping[str, list], notes: Path) -> None:
        """A batch: its episodes are learnt from exactly the tokens that were given out, and no command was
        started more often than it may be.
        """
        for uid, turns, tokens, success, ids, mask, logprobs in said["samples"]:
            written = [self.given[name] for n in range(turns + 1) if (name := f"{uid}/{n}") in self.given]
            flat = [token for turn in written for _, token in sorted(turn.items())]
            assert [token for token, own in zip(ids, mask, strict=True) if own] == flat, (
                f"{uid}: other tokens"
            )
            assert all(own or not value for own, value in zip(mask, logprobs, strict=True))
            assert len(flat) == tokens
            self.results.append((turns, tokens, success))
        lines = [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []
        starts = collections.Counter((uid, int(number)) for uid, number in lines)
        for uid, number, attempts, interrupted in said["commands"]:
            marks, started = (
                KINDS[int(uid.partition("-")[2].partition("/")[0]) % len(KINDS)],
                starts[uid, number],
            )
            self.counts.update(commands=1, starts=started, again=max(0, started - 1), interrupted=interrupted)
            if not marks:
                assert started <= 1, f"command {number} of {uid} ran again"
                assert started == 1 or interrupted, f"command {number} of {uid} was never started"
            elif "deterministic" not in marks:
                assert 1 <= started <= attempts, f"command {number} of {uid}: {started} of {attempts}"
                assert not interrupted
        assert starts.keys() <= {(uid, number) for uid, number, *_ in said["commands"]}, (
            "a start not in the log"
        )
        self.batch, self.given, self.ended = self.batch + 1, {}, set()

    def compare(self, folder: Path) -> None:
        """The log holds every token that was given out, and of each request one more at most."""
        contents = read_log(folder)
        assert contents.report.damage is None, contents.report.damage
        found = {uid: one for uid, one in contents.requests().items() if batch_of(uid) == self.batch}
        assert self.given.keys() <= found.keys(), "a request was lost"
        more = 0
        for uid, logged in found.items():
            ids, told = logged.token_ids.tolist(), self.given.get(uid, {})
            assert ids[: len(told)] == [token for _, token in sorted(told.items())], f"{uid}: lost or changed"
            assert len(ids) <= len(told) + 1, f"{uid}: more than the step under way"
            assert uid not in self.ended or logged.status is not Status.PENDING
            more += len(ids) > len(told)
        self.counts["in_flight_kept"] += more > 0
        self.counts["torn"] += contents.report.cut_bytes > 0


def kill_once(model: CausalLM, folder: Path, rng: random.Random, seen: Seen, life: int) -> None:
    """Let a process go on for a while, kill it, and look at what it left."""
    who = rng.choice(("tokens", "commands", "time"))
    place = rng.choice(("any", "any", "any", "opening", "rotation", "compaction"))
    count = rng.randrange(4 if place != "any" else {"tokens": 24, "commands": 80}.get(who, 1))
    lines = rng.randrange(1, 400) if who == "time" else 20_000

    def work(sink: int) -> None:
        ios = [DyingIO(place, count, sink) if who == name else LogIO() for name in ("tokens", "commands")]
        live(model, folder, seen.batch, life, ios, sink)

    process, pipe = fork(work)
    said, fresh = b"", 0
    while True:
        select.select([pipe], [], [], 600.0)
        data = os.read(pipe, 1 << 16)
        if not data:
            break
        said += data
        fresh += sum(line.startswith(b"t") and _is_new(line, seen) for line in data.split(b"\n")[1:-1])
        if fresh >= lines:
            os.kill(process, signal.SIGKILL)
            lines = 1 << 60
    wait_for_death(process)
    os.close(pipe)
    died = "time"
    for line in said.decode().split("\n")[:-1]:
        if line.startswith("d "):
            died = f"{who}, {line[2:]}"
        else:
            seen.hear(line, folder)
    seen.counts.update({"kills": 1, f"killed in {died}": 1})
    seen.compare(folder / "wal")


def _is_new(line: bytes, seen: Seen) -> bool:
    uid, _, place = line[2:].decode().rpartition(" ")[0].rpartition(" ")
    return not (place.isdigit() and int(place) in seen.given.get(uid, {}))


def undisturbed(model: CausalLM, episodes: int, seed: int) -> list[Result]:
    """Nothing happens."""
    engine = TorchEngine(model, max_running=BATCH)
    batches = range(-(-episodes // BATCH))
    return [result(one) for batch in batches for one in play(engine, model, prompts_of(batch), seed)]


class DiedError(Exception):
    """A process would be gone."""


class Mortal:
    """An engine whose process dies after so many chunks."""

    def __init__(self, engine: SamplingEngine, chunks: int) -> None:
        self._engine, self._left = engine, chunks

    def generate(self, requests: Any, more: More | None = None) -> Iterator[Chunk]:
        for chunk in self._engine.generate(requests, more):
            self._left -= 1
            if self._left < 0:
                raise DiedError
            yield chunk


class Kept(EncodedPrompt):
    """A prompt whose samples are found when the process has died."""

    made: ClassVar[list[Sample]] = []

    def empty_sample(self, place: int) -> Sample:
        Kept.made.append(super().empty_sample(place))
        return Kept.made[-1]


def restarted(model: CausalLM, episodes: int, seed: int, lifetime: int) -> list[Result]:
    """A process that dies takes along what had not ended; its next life begins those again, with other noise.
    `lifetime`: chunks that a life has at most.
    """
    rng, found, life = random.Random(seed), [], 0
    for batch in range(-(-episodes // BATCH)):
        left = prompts_of(batch)
        while left:
            life, Kept.made = life + 1, []
            prompts = [Kept(p.uid, p.domain, p.token_ids, p.label, p.metadata) for p in left]
            engine = Mortal(OwnNoise(TorchEngine(model, max_running=BATCH), life), rng.randrange(lifetime))
            with contextlib.suppress(DiedError):
                play(engine, model, prompts, seed)
            ended = {sample.group_uid: sample for sample in Kept.made if sample.status is not Status.PENDING}
            found += [result(sample) for sample in ended.values()]
            left = [prompt for prompt in left if prompt.uid not in ended]
    return found


def compared(x: Sequence[Result], y: Sequence[Result]) -> dict[str, float]:
    """p-values: turns, tokens, success."""
    one, other = (np.array(results, dtype=np.int64) for results in (x, y))
    return {
        "turns": same_lengths(one[:, 0], other[:, 0]),
        "tokens": same_lengths(one[:, 1], other[:, 1]),
        "tokens, Kolmogorov-Smirnov": kolmogorov_smirnov(one[:, 1], other[:, 1])[1],
        "success": same_mean(one[:, 2].astype(float), other[:, 2].astype(float)),
    }


def summed(results: Sequence[Result]) -> dict[str, float]:
    """Means of an arm."""
    turns, tokens, success = np.array(results, dtype=np.float64).mean(0).tolist()
    return {"episodes": len(results), "turns": turns, "tokens": tokens, "success": success}


def killed(folder: Path, kills: int, episodes: int, seed: int, out: Path) -> None:
    """So many kills and episodes at least; what came of it is in `out`, also while it goes on."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)  # homes of those that were killed
    TokenWAL(folder / "wal", fsync="os").shutdown()
    model, rng, life = build_model(), random.Random(seed), 0
    seen = Seen(seed * FAR)
    while seen.counts["kills"] < kills or len(seen.results) < episodes:
        life += 1
        kill_once(model, folder, rng, seen, life)
        spent = sum(os.times()[:4])
        replace_text(out, json.dumps({"results": seen.results, "counts": seen.counts, "spent": spent}))


def replace_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def run(folder: Path, kills: int, episodes: int, seed: int, shards: int = 1) -> Iterator[dict[str, Any]]:
    """What happened how often, every while and in the end. `shards` loops of kills run side by side, each on
    logs of its own.
    """
    torch.set_num_threads(1)
    find_substrate()
    model = build_model()
    plain = {
        "undisturbed": lambda: undisturbed(model, episodes, 1),
        "undisturbed again": lambda: undisturbed(model, episodes, 2),
        "restarted": lambda: restarted(model, episodes, 3, LIFETIME),
    }
    running: dict[int, str] = {}

    def begin(name: str, work: Callable[[], None]) -> None:
        process = os.fork()
        if process == 0:
            try:
                work()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        running[process] = name

    for name, arm in plain.items() if episodes else ():
        begin(name, lambda n=name, a=arm: replace_text(folder / f"{n}.json", json.dumps(a())))
    for shard in range(shards):
        place, out = folder / f"shard-{shard}", folder / f"kills-{shard}.json"
        place.mkdir()
        share = (-(-kills // shards), -(-episodes // shards), seed * shards + shard, out)
        begin(place.name, lambda p=place, s=share: killed(p, *s))
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            name = running.pop(process)
            if status:
                for other in running:
                    os.kill(other, signal.SIGKILL)
                raise SystemExit(f"{name} failed; see above")
        else:
            time.sleep(1.0)
        yield gathered(folder, list(plain))


def gathered(folder: Path, plain: Sequence[str]) -> dict[str, Any]:
    """What the processes of a run have written so far."""
    arms = {name: json.loads(p.read_text()) for name in plain if (p := folder / f"{name}.json").exists()}
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("kills-*.json"))]
    counts: collections.Counter = collections.Counter()
    for one in found:
        counts.update(one["counts"])
    results = [result for one in found for result in one["results"]]
    return report(arms | {"resumed": results}, counts, sum(one["spent"] for one in found))


def report(arms: Mapping[str, list[Result]], counts: Mapping[str, int], spent: float) -> dict[str, Any]:
    """What a run has found so far; `spent`: processor seconds of the killed ones and their commands."""
    arms = {name: results for name, results in arms.items() if results}
    plain = arms.get("undisturbed")
    others = {name: results for name, results in arms.items() if plain and results is not plain}
    return {
        "counts": dict(sorted(counts.items())),
        "arms": {name: summed(results) for name, results in arms.items()},
        "p": {name: compared(plain, results) for name, results in others.items() if len(plain) >= ENOUGH},
        "turns": {name: np.bincount([one[0] for one in results]).tolist() for name, results in arms.items()},
        "processor_seconds": round(spent, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=5120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    global BATCH
    BATCH = min(BATCH, options.episodes)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder, ignore_cleanup_errors=True) as folder:
        for found in run(Path(folder), options.kills, options.episodes, options.seed, options.shards):
            if options.json:
                replace_text(options.json, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
