"""How time grows with the length of one trajectory: log, store, planner, KL and the engine's own work.

    python tests/bench/long_growth.py [--rounds 1] [--only "log recover" ...] [--folder DIR] [--json FILE]
                                      [--plot FILE]

Processor seconds at n = 62,500 ... 1,000,000 tokens of

log append     one request of n tokens, one decode step a token
log recover    a reader reads that log, and gives the request
log resume     a writer opens it, and a rollout tells the n tokens again as chunks
plan           an epoch of n trajectories
kl             exact KL of n tokens with its gradients, in chunks (`long_kl.py`: width 16, 512 logits)
rollout        supervision and log of one response of n tokens from an engine without a model

The exponent is the slope of log seconds against log n; 1 is linear. What grows faster in a model by its
nature (attention) is not in here. Seconds are the best of the rounds; beside the exponent of these the file
has the one of each round.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from long_kl import problem, seconds_of

from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.streams import Streaming
from opd.storage.sample_lot import TOKEN_BYTES
from opd.storage.wal import TokenWAL, read_log
from opd.train.plan import CostModel, Workload, make_plan
from opd.types import Chunk, RolloutRequest, SamplingParams, Status

TOKENS = [62_500, 125_000, 250_000, 500_000, 1_000_000]
COST = CostModel.of_model(
    10**9, 2048, [None] * 24, operations_per_second=1e14, bytes_per_second=1e9, overhead_seconds=0.01
)
GOAL = 1.05
CHUNK = 1024
WARM_UP = 2_000


class PlainEngine(Streaming):
    """Gives the token 1 until a response is as long as wanted, then the stop id 0."""

    policy_version = 0

    def __init__(self, length: int) -> None:
        self.length = length
        self._chunks: Iterator[Chunk] = iter(())

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """One request."""
        (request,) = requests
        self._chunks = self._write(request)

    def next_chunk(self) -> Chunk | None:
        """One token."""
        return next(self._chunks, None)

    def abort(self, uids: Collection[str]) -> None:
        """Write no more."""
        self._chunks = iter(())

    def _write(self, request: RolloutRequest) -> Iterator[Chunk]:
        uids, logprob, limit = [request.uid], -np.ones(1, np.float32), request.sampling.max_new_tokens
        going, last = np.ones(1, np.int32), min(self.length, limit) - 1
        for position in range(len(request.prefix_ids), last):
            yield Chunk(uids, np.array([position], np.int32), going, logprob, 0, {})
        at = np.array([last], np.int32)
        yield Chunk(uids, at, np.zeros(1, np.int32), logprob, 0, {request.uid: Status.COMPLETED})

    def pause(self) -> None:
        """It never samples by itself."""

    resume = flush = pause


def request(tokens: int) -> RolloutRequest:
    """One response of at most `tokens` tokens."""
    return RolloutRequest("a", np.ones(1, np.int32), SamplingParams(max_new_tokens=tokens + 1, stop_ids=(0,)))


def rollout(folder: Path, tokens: int) -> None:
    """One response, supervised and logged."""
    with TokenWAL(folder, fsync="os") as wal:
        chunks = FaultTolerantRollout([PlainEngine(tokens)], wal).generate([request(tokens)])  # type: ignore[list-item]
        assert sum(len(chunk.uids) for chunk in chunks) == tokens


def append(folder: Path, data: dict[str, np.ndarray]) -> None:
    """Log one request, a decode step a token."""
    uids, ids, logprobs = ["a"], data["token_ids"], data["rollout_logprobs"]
    with TokenWAL(folder, fsync="os") as wal:
        wal.open(request(len(ids)), {})
        for place in range(len(ids)):
            position, row = np.array([place], np.int32), slice(place, place + 1)
            wal.append(Chunk(uids, position, ids[row], logprobs[row], 0, {}))


def recover(folder: Path, tokens: int) -> None:
    """Read a log of one request."""
    found = read_log(folder).find("a")
    assert found is not None
    assert len(found.token_ids) == tokens


def resume(folder: Path, tokens: int) -> None:
    """Open the log, tell what it holds, and end the response with one more token."""
    with TokenWAL(folder, fsync="os") as wal:
        opened = wal.find("a")
        assert opened is not None
        chunks = FaultTolerantRollout([PlainEngine(tokens + 1)], wal).generate([opened.request])  # type: ignore[list-item]
        assert sum(len(chunk.uids) for chunk in chunks) == tokens + 1


def kl(tokens: int) -> Callable[[Path], object]:
    """One forward and backward pass of the loss."""
    student, teacher, heads = problem(tokens)
    return lambda place: seconds_of(student.clone().requires_grad_(), teacher, heads, CHUNK)


def tasks(folder: Path, tokens: int, wanted: Callable[[str], bool]) -> dict[str, Callable[[Path], object]]:
    """What is measured, by name; each is given a folder of its own."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, tokens).astype(np.int32)
    data = {"token_ids": ids, "rollout_logprobs": rng.standard_normal(tokens).astype(np.float32)}
    lengths = rng.integers(100, 8000, tokens)
    work = Workload(lengths, rng.integers(0, 8, tokens), lengths * TOKEN_BYTES)
    logged = folder / f"log-{tokens}"
    if wanted("log recover") or wanted("log resume"):
        append(logged, data)
    found: dict[str, Callable[[Path], object]] = {
        "log append": lambda place: append(place, data),
        "log recover": lambda place: recover(logged, tokens),
        "plan": lambda place: make_plan(work, 512, 8, COST, 65_536),
        "kl": kl(tokens),
        "rollout": lambda place: rollout(place, tokens),
        "log resume": lambda place: resume(logged, tokens),
    }
    return {name: task for name, task in found.items() if wanted(name)}


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """The slope of a straight line through log seconds against log n."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def growth(folder: Path, wanted: Callable[[str], bool]) -> dict[str, list[float]]:
    """One round: processor seconds of every task that is wanted, by n."""
    seconds: dict[str, list[float]] = {}
    for name, task in tasks(folder, WARM_UP, wanted).items():  # what the first time costs is not growth
        task(folder / name)
    for tokens in TOKENS:
        for name, task in tasks(folder, tokens, wanted).items():
            begin = time.process_time()
            task(folder / f"{name}-{tokens}")
            seconds.setdefault(name, []).append(time.process_time() - begin)
        if tokens == TOKENS[0]:
            print(f"{'n':>12}" + "".join(f"{name:>13}" for name in seconds))
        print(f"{tokens:>12,}" + "".join(f"{times[-1]:13.4f}" for times in seconds.values()), flush=True)
    return seconds


def summary(rounds: list[dict[str, list[float]]], before: dict[str, Any]) -> dict[str, Any]:
    """The best seconds of the `rounds` and their exponents; other tasks as they were `before`."""
    best = {name: np.min([own[name] for own in rounds], axis=0).tolist() for name in rounds[0]}
    each = {name: [round(exponent(TOKENS, own[name]), 4) for own in rounds] for name in best}
    slopes = {name: exponent(TOKENS, times) for name, times in best.items()}
    for name in best:
        print(f"{name:12} exponent {slopes[name]:.3f}, by round {each[name]}")
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    return {
        "machine": machine,
        "n": TOKENS,
        "seconds": before.get("seconds", {}) | best,
        "exponents": before.get("exponents", {}) | slopes,
        "exponents_of_rounds": before.get("exponents_of_rounds", {}) | each,
        "goal": GOAL,
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Seconds against tokens on logarithmic axes, with a straight line of slope 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4.8), layout="constrained")
    for (name, seconds), mark in zip(result["seconds"].items(), "os^vD<>p*", strict=False):
        label = f"{name} ({result['exponents'][name]:.2f})"
        axes.loglog(result["n"], seconds, marker=mark, markersize=4, linewidth=1.2, label=label)
    sizes = np.array(result["n"], dtype=float)
    highest = max(times[0] for times in result["seconds"].values())
    axes.loglog(sizes, 2 * highest * sizes / sizes[0], ":", color="0.4", label="slope 1")
    axes.set_xlabel("tokens of one trajectory (plan: trajectories)")
    axes.set_ylabel("processor seconds")
    axes.set_xticks(result["n"], [f"{n / 1000:g}k" for n in result["n"]])
    axes.minorticks_off()
    figure.legend(
        loc="outside lower center", fontsize=7, ncols=3, title="exponent in brackets", title_fontsize=7
    )
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print and plot."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="tasks; the others stay as the file has them")
    parser.add_argument("--folder", type=Path, help="where logs go")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep = options.only and options.json and options.json.exists()
    before = json.loads(options.json.read_text()) if keep else {}
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder) as root:
            rounds.append(growth(Path(root), lambda name: name in (options.only or [name])))
        result = summary(rounds, before)
        if options.json:  # after each round: one that is cut short costs no other
            options.json.write_text(json.dumps(result, indent=1) + "\n")
        if options.plot:
            plot(result, options.plot)


if __name__ == "__main__":
    main()
