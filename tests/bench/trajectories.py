"""The trajectory store and the planner at a million tokens: growth, first mini-batch, memory, against others.

    python tests/bench/trajectories.py [growth | formats | memory | metadata | table ...] [--gib 1 4 8]
                                       [--folder DIR] [--json FILE] [--plot FILE]

growth    processor seconds for one trajectory of n = 62,500 ... 1,000,000 tokens: logged token by token,
          written in pieces of 512 as a rollout does, read in chunks; and for a plan of n trajectories. The
          exponent is the slope of log seconds against log n.
formats   the same 1,000,000-token trajectories as torch.save files, numpy .npz, Arrow and a store: time to
          the first mini-batch from a cold start of the reader, peak memory over one pass. One process each;
          files are in the page cache, so the disk is not measured. The first two are loaded whole, Arrow is
          mapped and kept.
memory    growth of the resident set while a store of so many GiB is read in mini-batches of 32 MiB, and the
          proportional share of two such readers against one.
metadata  1,000 trajectories of 1,000,000 tokens whose heavy fields are zeros, so sparse files: opening,
          planning and the first mini-batch, with heavy bytes counted.
table     a million trajectories without heavy fields: written, opened, filtered, shuffled, planned.

Best of the rounds. Data is real random numbers, except for `metadata`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from trajectory_formats import MIB, ROW_BYTES, arrays, child, formats, iterate
from trajectory_metadata import BUDGET, COST, metadata, plan_child, table

from opd.storage.trajectories import SAMPLE_FIELDS, TrajectoryRecord, TrajectoryStore, TrajectoryWriter
from opd.storage.wal import TokenWAL
from opd.train.plan import PlanSettings, Workload, make_plan
from opd.types import Chunk, RolloutRequest, SamplingParams

TOKENS = [62_500, 125_000, 250_000, 500_000, 1_000_000]


def best(run: Callable[[], object], rounds: int) -> float:
    """Processor seconds of the best round: nothing here waits for a disk."""
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return min(times)


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """The slope of a straight line through log seconds against log n."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def log(folder: Path, data: dict[str, np.ndarray]) -> None:
    """One request, a decode step a token."""
    uids, version = ["a"], 0
    with TokenWAL(folder, fsync="os") as wal:
        wal.open(RolloutRequest("a", np.zeros(1, np.int32), SamplingParams()), {})
        for place in range(len(data["token_ids"])):
            position = np.array([place], np.int32)
            ids, logprobs = data["token_ids"][place : place + 1], data["rollout_logprobs"][place : place + 1]
            wal.append(Chunk(uids, position, ids, logprobs, version, {}))


def write(folder: Path, data: dict[str, np.ndarray]) -> None:
    """One trajectory, piece by piece."""
    tokens = len(data["token_ids"])
    with TrajectoryWriter(folder, durable=False) as writer:
        writer.begin("a", 0, tokens)
        for start in range(0, tokens, 512):
            writer.append("a", **{name: array[start : start + 512] for name, array in data.items()})
        writer.seal(TrajectoryRecord("a", 0, tokens))


def read(folder: Path, data: dict[str, np.ndarray]) -> None:
    """All fields of the trajectory, chunk by chunk, given back as they are used."""
    tokens = len(data["token_ids"])
    with TrajectoryStore.open(folder) as store, store.lease([0]) as batch:
        for start in range(0, tokens, 4096):
            for name in data:
                batch.read(0, name, start, min(tokens, start + 4096)).sum()


def growth(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds by n of every step that sees a trajectory, and their exponents."""
    seconds: dict[str, list[float]] = {"log": [], "append": [], "read": [], "plan": []}
    for tokens in TOKENS:
        data = arrays(tokens)
        stores = [folder / f"{tokens}-{i}" for i in range(rounds)]
        unused = iter(stores)
        rng = np.random.default_rng(0)
        lengths = rng.integers(100, 8000, tokens)
        work = Workload(lengths, rng.integers(0, 8, tokens), lengths * ROW_BYTES)
        logs = iter([folder / f"log-{tokens}-{i}" for i in range(rounds)])
        seconds["log"].append(best(lambda d=data, logs=logs: log(next(logs), d), rounds))
        seconds["append"].append(best(lambda d=data, unused=unused: write(next(unused), d), rounds))
        seconds["read"].append(best(partial(read, stores[0], data), rounds))
        seconds["plan"].append(best(partial(make_plan, work, PlanSettings(512, 8), COST, BUDGET), rounds))
        print(f"{tokens:>12,}" + "".join(f"{times[-1]:12.4f}" for times in seconds.values()), flush=True)
    slopes = {name: exponent(TOKENS, times) for name, times in seconds.items()}
    print(f"{'exponent':>12}" + "".join(f"{slope:12.3f}" for slope in slopes.values()))
    return {"n": TOKENS, "seconds": seconds, "exponents": slopes}


def memory(folder: Path, sizes: list[float]) -> list[dict[str, Any]]:
    """Growth of memory over one pass at several sizes of data, and the share of two readers."""
    found = []
    tokens = 8 * MIB // ROW_BYTES
    for size in sizes:
        path = folder / f"{size}"
        count = int(size * 1024 // 8) // 4 * 4
        data = arrays(tokens)
        with TrajectoryWriter(path, durable=False) as writer:
            for i in range(count):
                writer.put(TrajectoryRecord(str(i), 0, tokens), **data)
        row = {"gib": size, "mini_batch_mib": 4 * tokens * ROW_BYTES / MIB}
        row |= child("iterate", "store", path, 4)
        row["allowed_mib"] = 2 * row["mini_batch_mib"] + 64
        row |= shares(path)
        found.append(row)
        print(
            f"{size:6} GiB: peak growth {row['growth'] / MIB:6.1f} MiB (allowed {row['allowed_mib']:.0f}),"
            f" first mini-batch {row['first']:.4f} s, pass {row['total']:.2f} s; two readers' pages:"
            f" {row['pss_ratio']:.3f} of one's",
            flush=True,
        )
        subprocess.run(["rm", "-r", str(path)], check=True)
    return found


def shares(path: Path) -> dict[str, float]:
    """Proportional share (PSS) of the data's pages of two processes that hold the same, over that of one."""
    command = [sys.executable, __file__, "child", "hold", str(path), "16"]

    def started() -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    one = started()
    alone = pss(one.pid, path)
    two = started()
    both = pss(one.pid, path) + pss(two.pid, path)
    for process in (one, two):
        process.kill()
        process.communicate()
    return {"pss_one": alone, "pss_two": both, "pss_ratio": both / alone}


def pss(pid: int, path: Path) -> int:
    """Proportional share of a process in the maps of files below `path`."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if not line.split(maxsplit=1)[0].endswith(":"):
            inside = str(path) in line
        elif inside and line.startswith("Pss:"):
            total += 1024 * int(line.split()[1])
    return total


def hold(path: Path, count: int) -> None:
    """Hold a mini-batch until the end of the process."""
    store = TrajectoryStore.open(path)
    batch = store.lease(range(count)).load([field.name for field in SAMPLE_FIELDS])
    print(len(batch.rows), flush=True)
    sys.stdin.read()


def plot(result: dict[str, Any], path: Path) -> None:
    """Seconds against n on two logarithmic axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for name, seconds in result["seconds"].items():
        label = f"{name}: exponent {result['exponents'][name]:.2f}"
        axes.loglog(result["n"], seconds, marker="o", label=label)
    axes.set_xlabel("n: tokens (log, append, read), trajectories (plan)")
    axes.set_ylabel("processor seconds")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def run_child(arguments: list[str]) -> None:
    what, rest = arguments[0], arguments[1:]
    if what == "hold":
        hold(Path(rest[0]), int(rest[1]))
    elif what == "plan":
        print(json.dumps(plan_child(Path(rest[0]))))
    else:
        print(json.dumps(iterate(rest[0], Path(rest[1]), int(rest[2]))))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", default=[], help="growth, formats, memory, metadata, table; default: all"
    )
    parser.add_argument("--gib", type=float, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    parts = options.parts or ["growth", "formats", "memory", "metadata", "table"]
    results: dict[str, Any] = {}
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="opd-bench-", dir=options.folder) as root:
            if part == "growth":
                print(f"{'n':>12}{'log s':>12}{'append s':>12}{'read s':>12}{'plan s':>12}")
                results[part] = growth(Path(root), options.rounds)
            elif part == "memory":
                results[part] = memory(Path(root), options.gib)
            elif part == "formats":
                results[part] = formats(Path(root), options.rounds)
            elif part == "metadata":
                results[part] = metadata(Path(root) / "store")
            else:
                results[part] = table(Path(root) / "store")
    if options.plot and "growth" in results:
        plot(results["growth"], options.plot)
    if options.json:
        machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        run_child(sys.argv[2:])
    else:
        main()
