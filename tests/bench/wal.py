"""The token log against a bare append, LMDB and SQLite: tokens a second, latency, bytes, recovery.

    python tests/bench/wal.py [--steps 200] [--requests 64,256,1024] [--folder DIR] [--json FILE]

Every method makes the same chunks durable, one commit a chunk. Those that wait for the disk take
turns, chunk by chunk, because a disk's speed changes from second to second; each method keeps its best round.
On a busy machine compare the commits in the middle (p50) or the fastest tenth (p10). `bare` fills the same
records and does nothing but `write` and `fdatasync`, on a file that grows; `bare reserved` does so over zeros
that it puts a MiB ahead, as the log does: then a sync has no new size of the file to write.
"""

import argparse
import json
import os
import platform
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from xxhash import xxh3_64_intdigest

from opd.storage.framed_log_writer import RESERVE
from opd.storage.wal import TokenWAL, read_log
from opd.storage.wal_table import TOKEN
from opd.types import Chunk, RolloutRequest, SamplingParams

Commit = Callable[[Chunk], None]


def requests(count: int) -> list[RolloutRequest]:
    prompt = np.arange(8, dtype=np.int32)
    return [
        RolloutRequest(f"step-1/prompt-{i}/sample-{i % 8}", prompt, SamplingParams()) for i in range(count)
    ]


def steps(uids: list[str], count: int) -> Iterator[Chunk]:
    rng = np.random.default_rng(0)
    for position in range(count):
        ids = rng.integers(0, 150_000, len(uids), dtype=np.int32)
        logprobs = -rng.random(len(uids), dtype=np.float32)
        yield Chunk(list(uids), np.full(len(uids), position, np.int32), ids, logprobs, 3, {})


def records_of(chunk: Chunk) -> np.ndarray:
    records = np.empty(len(chunk.uids), TOKEN)
    records["request"] = np.arange(len(chunk.uids))
    records["position"], records["token"] = chunk.positions, chunk.token_ids
    records["logprob"], records["version"], records["kept"] = chunk.logprobs, chunk.policy_version, 0
    return records


@contextmanager
def wal(folder: Path, policy: str, count: int) -> Iterator[Commit]:
    log = TokenWAL(folder, fsync=policy)  # type: ignore[arg-type]
    log.open_many([(request, {}) for request in requests(count)])
    yield log.append
    log.shutdown()


@contextmanager
def bare(folder: Path, sync: bool) -> Iterator[Commit]:
    file = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def commit(chunk: Chunk) -> None:
        os.write(file, records_of(chunk).view(np.uint8))
        if sync:
            os.fdatasync(file)

    yield commit
    os.close(file)


@contextmanager
def bare_reserved(folder: Path) -> Iterator[Commit]:
    file = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT)
    written = reserved = 0

    def commit(chunk: Chunk) -> None:
        nonlocal written, reserved
        data = records_of(chunk).view(np.uint8)
        if written + len(data) > reserved:
            os.pwrite(file, bytes(RESERVE), reserved)
            reserved += RESERVE
        written += os.write(file, data)
        os.fdatasync(file)

    yield commit
    os.ftruncate(file, written)
    os.close(file)


@contextmanager
def lmdb_blob(folder: Path) -> Iterator[Commit]:
    with lmdb.open(str(folder), map_size=1 << 32) as environment:
        serial = 0

        def commit(chunk: Chunk) -> None:
            nonlocal serial
            serial += 1
            with environment.begin(write=True) as transaction:
                transaction.put(serial.to_bytes(8, "big"), records_of(chunk).tobytes(), append=True)

        yield commit


@contextmanager
def connected(folder: Path, synchronous: str) -> Iterator[sqlite3.Connection]:
    database = sqlite3.connect(folder / "tokens.sqlite", isolation_level=None)
    database.execute("pragma journal_mode=wal")
    database.execute(f"pragma synchronous={synchronous}")
    yield database
    database.close()


@contextmanager
def sqlite(folder: Path, synchronous: str) -> Iterator[Commit]:
    """A row a token."""
    with connected(folder, synchronous) as database:
        database.execute("create table tokens(request, position, token, logprob, version)")

        def commit(chunk: Chunk) -> None:
            rows = records_of(chunk)[["request", "position", "token", "logprob", "version"]].tolist()
            database.execute("begin")
            database.executemany("insert into tokens values (?, ?, ?, ?, ?)", rows)
            database.execute("commit")

        yield commit


@contextmanager
def sqlite_row(folder: Path, synchronous: str) -> Iterator[Commit]:
    """A row a chunk, with a digest of it, as a log on SQLite would be."""
    with connected(folder, synchronous) as database:
        database.execute("create table steps(lsn integer primary key, count, tokens blob, digest integer)")

        def commit(chunk: Chunk) -> None:
            data = records_of(chunk).tobytes()
            row = (len(chunk.uids), data, xxh3_64_intdigest(data) >> 1)
            database.execute("insert into steps(count, tokens, digest) values (?, ?, ?)", row)

        yield commit


METHODS = {
    "wal always": lambda folder, count: wal(folder, "always", count),
    "bare + fdatasync": lambda folder, count: bare(folder, True),
    "bare reserved + fdatasync": lambda folder, count: bare_reserved(folder),
    "lmdb sync": lambda folder, count: lmdb_blob(folder),
    "sqlite wal full": lambda folder, count: sqlite(folder, "full"),
    "sqlite row full": lambda folder, count: sqlite_row(folder, "full"),
    "wal interval": lambda folder, count: wal(folder, "interval", count),
    "wal os": lambda folder, count: wal(folder, "os", count),
    "bare": lambda folder, count: bare(folder, False),
    "sqlite wal normal": lambda folder, count: sqlite(folder, "normal"),
    "sqlite row normal": lambda folder, count: sqlite_row(folder, "normal"),
}
DURABLE = list(METHODS)[:6]
"""Those that wait for the disk. They are measured side by side, the others one at a time."""


def measure(methods: list[str], place: Path, count: int, length: int) -> dict[str, dict[str, float]]:
    """Make the same chunks durable by each of `methods`, one chunk by all of them before the next."""
    uids = [request.uid for request in requests(count)]
    folders = {method: Path(tempfile.mkdtemp(dir=place)) for method in methods}
    latencies: dict[str, list[float]] = {method: [] for method in methods}
    with ExitStack() as stack:
        commits = [(m, stack.enter_context(METHODS[m](folders[m], count))) for m in methods]
        for chunk in steps(uids, length):
            commits.append(commits.pop(0))  # nobody always comes after the same neighbour
            if int(chunk.positions[0]) % 2:
                commits.reverse()
            for method, commit in commits:
                start = time.perf_counter()
                commit(chunk)
                latencies[method].append(time.perf_counter() - start)
    return {m: summary(latencies[m], folders[m], count, sparse=m.startswith("lmdb")) for m in methods}


def summary(latencies: list[float], folder: Path, count: int, *, sparse: bool) -> dict[str, float]:
    stats = [path.stat() for path in folder.iterdir()]
    stored = sum(stat.st_blocks * 512 if sparse else stat.st_size for stat in stats)
    shutil.rmtree(folder)
    ordered, length = sorted(latencies), len(latencies)
    return {
        "tokens_per_second": count * length / sum(latencies),
        "p10_ms": 1e3 * ordered[length // 10],
        "p50_ms": 1e3 * ordered[length // 2],
        "p99_ms": 1e3 * ordered[length * 99 // 100],
        "bytes_per_token": stored / (count * length),
    }


def recovery(place: Path, tokens: int, count: int) -> dict[str, float]:
    """Seconds to read a log of so many tokens, by a reader and by the next writer."""
    folder = Path(tempfile.mkdtemp(dir=place))
    uids = [request.uid for request in requests(count)]
    log = TokenWAL(folder, fsync="os")
    log.open_many([(request, {}) for request in requests(count)])
    for chunk in steps(uids, tokens // count):
        log.append(chunk)
    log.shutdown()
    del log
    times = {}
    start, processor = time.perf_counter(), time.process_time()
    contents = read_log(folder)
    times["read_seconds"] = time.perf_counter() - start
    times["read_processor_seconds"] = time.process_time() - processor
    assert contents.report.tokens == tokens // count * count
    del contents
    start = time.perf_counter()
    with TokenWAL(folder) as log:
        times["open_seconds"] = time.perf_counter() - start
        found = log.requests()
        times["open_and_every_request_seconds"] = time.perf_counter() - start
        assert sum(len(logged.token_ids) for logged in found.values()) == tokens // count * count
    shutil.rmtree(folder)
    return times


def ratios(rounds: dict[str, list[dict[str, float]]], key: str) -> dict[str, float]:
    """How many times as fast `wal always` is as every other method that waits for the disk, by throughput or
    by the time of a commit: the median over the rounds, in each of which they took turns step by chunk.
    """
    ours, sign = rounds.get(DURABLE[0], []), 1 if key == "tokens_per_second" else -1
    return {
        method: statistics.median(
            (a[key] / b[key]) ** sign for a, b in zip(ours, rounds[method], strict=True)
        )
        for method in DURABLE[1:]
        if ours and method in rounds
    }


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    return max(rounds, key=lambda result: result["tokens_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", default="64,256,1024")
    parser.add_argument("--methods", default=",".join(METHODS), help="some of: " + ", ".join(METHODS))
    parser.add_argument("--recover", type=int, default=10_000_000, metavar="TOKENS")
    parser.add_argument("--folder", type=Path, help="where the logs go: the disk that is measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "times faster": {}}
    titles = ("p10 ms", "p50 ms", "p99 ms")
    print(f"{'method':25} {'requests':>8} {'tokens/s':>12} {' '.join(f'{t:>8}' for t in titles)} bytes/token")
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        for count in map(int, options.requests.split(",")):
            chosen = options.methods.split(",")
            groups = [[m for m in chosen if m in DURABLE], *([m] for m in chosen if m not in DURABLE)]
            rounds = {method: [] for method in chosen}
            for _ in range(options.rounds):
                for group in groups:
                    for method, row in measure(group, Path(place), count, options.steps).items():
                        rounds[method].append(row)
            for method in rounds:
                row = results.setdefault(method, {})[count] = best(rounds[method])
                print(
                    f"{method:25} {count:8} {row['tokens_per_second']:12,.0f} {row['p10_ms']:8.3f}"
                    f" {row['p50_ms']:8.3f} {row['p99_ms']:8.3f} {row['bytes_per_token']:11.2f}"
                )
            found = {key: ratios(rounds, key) for key in ("tokens_per_second", "p50_ms", "p10_ms")}
            results["times faster"][count] = found
            for key, row in found.items():
                listed = ", ".join(f"{method} {value:.2f}" for method, value in row.items())
                print(f"wal always at {count} requests, times as fast by {key}: {listed}", flush=True)
        for count in (64, 1024) if options.recover else ():
            times = results.setdefault("recovery", {})[count] = recovery(Path(place), options.recover, count)
            print(f"recovery of {options.recover:,} tokens, {count} requests: {times}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
