"""What one flipped bit does to a log of tokens: this project's, and the same rows in SQLite and LMDB.

    python tests/bench/log_damage.py [--flips 1000] [--json FILE]

Every log holds the same steps, each of which was on the disk before the next (`always`); its writer was
killed or has closed it. Each flip is of one random bit of a fresh copy, read by a process of its own:

    same        every step is there and right: the bit says nothing
    noticed     an error, a digest that does not fit, or a step that is missing in between
    silent      fewer steps than were durable, and nothing says so
    died        the reading process was ended by a signal
"""

import argparse
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import lmdb
import numpy as np
from xxhash import xxh3_64_intdigest

from opd.errors import OpdError
from opd.storage.wal import TokenWAL, read_log
from opd.types import Chunk, RolloutRequest, SamplingParams

STEPS, REQUESTS = 200, 64
UIDS = [f"request-{i}" for i in range(REQUESTS)]


def rows() -> list[bytes]:
    """The bytes of each step, as SQLite and LMDB keep them."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 1 << 30, 6 * REQUESTS, dtype=np.int32).tobytes() for _ in range(STEPS)]


def sealed(lsn: int, row: bytes) -> bytes:
    return xxh3_64_intdigest(row, lsn).to_bytes(8, "big") + row


def write_wal(folder: Path, close: bool) -> None:
    log = TokenWAL(folder, fsync="always")
    log.open_many([(RolloutRequest(uid, np.ones(8, np.int32), SamplingParams()), {}) for uid in UIDS])
    for position, row in enumerate(rows()):
        numbers = np.frombuffer(row, np.int32)[:REQUESTS]
        at = np.full(REQUESTS, position, np.int32)
        log.append(Chunk(UIDS, at, numbers, numbers.astype(np.float32), 0, {}))
    if close:
        log.shutdown()


def read_wal(folder: Path) -> int:
    contents = read_log(folder)
    if contents.report.damage is not None:
        raise ValueError(contents.report.damage)
    return contents.report.tokens // REQUESTS


def connected(folder: Path) -> sqlite3.Connection:
    return sqlite3.connect(folder / "log.sqlite", isolation_level=None)


def write_sqlite(folder: Path, close: bool) -> None:
    database = connected(folder)
    database.execute("pragma journal_mode=wal")
    database.execute("pragma synchronous=full")
    database.execute("create table steps(lsn integer primary key, sealed blob)")
    for lsn, row in enumerate(rows()):
        database.execute("insert into steps values (?, ?)", (lsn, sealed(lsn, row)))
    if close:
        database.close()


def read_sqlite(folder: Path) -> int:
    return checked(connected(folder).execute("select lsn, sealed from steps order by lsn").fetchall())


def write_lmdb(folder: Path, close: bool) -> None:
    environment = lmdb.open(str(folder), map_size=1 << 30)
    for lsn, row in enumerate(rows()):
        with environment.begin(write=True) as transaction:
            transaction.put(lsn.to_bytes(8, "big"), sealed(lsn, row), append=True)
    if close:
        environment.close()


def read_lmdb(folder: Path) -> int:
    with lmdb.open(str(folder), map_size=1 << 30).begin() as transaction:
        return checked([(int.from_bytes(key, "big"), value) for key, value in transaction.cursor()])


def checked(found: list[tuple[int, bytes]]) -> int:
    """How many rows there are; each must be the next one, and as it was sealed."""
    for number, (lsn, row) in enumerate(found):
        if lsn != number or row != sealed(lsn, row[8:]):
            raise ValueError(f"row {number} is damaged")
    return len(found)


LOGS = {"log": (write_wal, read_wal), "sqlite": (write_sqlite, read_sqlite), "lmdb": (write_lmdb, read_lmdb)}


def flipped(folder: Path, name: str, rng: random.Random) -> str:
    """What a reader makes of a copy of the log `name` in `folder` with one bit of one file flipped."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, "copy")
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*-shm", "lock.mdb", "LOCK"))
        files = sorted(path for path in copy.iterdir() if path.stat().st_size)
        (chosen,) = rng.choices(files, [path.stat().st_size for path in files])
        with chosen.open("r+b") as file:
            at = rng.randrange(chosen.stat().st_size)
            file.seek(at)
            byte = file.read(1)[0] ^ 1 << rng.randrange(8)
            file.seek(at)
            file.write(bytes([byte]))
        child = os.fork()
        if child == 0:
            try:
                whole = LOGS[name][1](copy) == STEPS
            except (OpdError, ValueError, sqlite3.Error, lmdb.Error, OSError):
                os._exit(2)
            os._exit(0 if whole else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return "died" if code < 0 else ("same", "silent", "noticed")[code]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", nargs=3, metavar=("LOG", "FOLDER", "END"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        name, folder, end = options.write
        LOGS[name][0](Path(folder), end == "closed")
        os._exit(0)  # as a kill would
    found: dict[str, dict[str, int]] = {}
    for name in LOGS:
        for end in ("killed", "closed"):
            with tempfile.TemporaryDirectory() as place:
                subprocess.run([sys.executable, __file__, "--write", name, place, end], check=True)
                rng = random.Random(0)
                counts = Counter(flipped(Path(place), name, rng) for _ in range(options.flips))
            found[f"{name}, {end}"] = dict(counts)
            print(f"{name:7} {end:7} {dict(counts)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
