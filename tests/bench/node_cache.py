"""The hidden-state cache against memcpy, plain files and two LMDB designs, in turn in one process.

    python tests/bench/node_cache.py [--rows 64 1024 4096] [--width 2048] [--blobs 48] [--rounds 5]
                                       [--folder DIR] [--json FILE]

Reading: every byte of every blob is copied out once, so the rates compare with memcpy; the time is of the
call alone. The designs check the same checksum on every read. Writing: all blobs, once a round, into a fresh
folder; `plain files` flushes and names one after another. `LMDB index` keeps blobs as files and names them in
one durable transaction each, without an order of use, quota or leases; `LMDB values` keeps the arrays in the
database. Best round of each. A folder in memory shows the work without the disk.
"""

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import xxhash

from opd.storage.files import MappedFile, fsync_folder
from opd.storage.node_cache import CacheRecord, NodeCache, cache_key

Arrays = dict[bytes, np.ndarray]
Folder = Callable[[], Path]


def arrays(rows: int, width: int, count: int) -> Arrays:
    """`count` arrays `[rows, width]` of bfloat16 bits."""
    chooser = np.random.default_rng(0)
    tokens = np.arange(rows, dtype=np.int32)
    return {
        cache_key("bench", tokens + i, 0): chooser.integers(0, 1 << 16, (rows, width), dtype=np.uint16)
        for i in range(count)
    }


def opened(folder: Path, **options: Any) -> NodeCache:
    return NodeCache(folder, quota_bytes=1 << 40, **options)


def items(data: Arrays) -> list[tuple[bytes, np.ndarray, CacheRecord]]:
    return [(key, rows, CacheRecord("sample", "teacher", 0)) for key, rows in data.items()]


class PlainFiles:
    """The least a durable write can be: data, flush, rename, flush of the name."""

    def __init__(self, folder: Path, flush: bool = True) -> None:
        folder.mkdir(parents=True)
        self.folder, self.flush = folder, flush

    def put(self, key: bytes, rows: np.ndarray) -> None:
        temporary = self.folder / "partial"
        with open(temporary, "wb", buffering=0) as file:
            file.write(rows.data)
            if self.flush:
                os.fdatasync(file.fileno())
        os.rename(temporary, self.folder / key.hex())
        if self.flush:
            fsync_folder(self.folder)

    def get(self, key: bytes) -> np.ndarray:
        with open(self.folder / key.hex(), "rb", buffering=0) as file:
            mapped = MappedFile(file.fileno(), os.fstat(file.fileno()).st_size)
        mapped.load()
        return np.asarray(mapped)


class LmdbIndex:
    """Blobs as plain files; an LMDB entry with the checksum, committed durably, names each."""

    def __init__(self, folder: Path) -> None:
        self.files = PlainFiles(folder / "blobs")
        self.index = lmdb.open(str(folder / "index"), map_size=1 << 28)

    def put(self, key: bytes, rows: np.ndarray) -> None:
        self.files.put(key, rows)
        with self.index.begin(write=True) as change:
            change.put(key, xxhash.xxh3_128_digest(rows.data))

    def get(self, key: bytes) -> np.ndarray:
        with self.index.begin() as look:
            checksum = look.get(key)
        data = self.files.get(key)
        assert xxhash.xxh3_128_digest(data.data) == checksum
        return data


class LmdbValues:
    """Checksum and array as the LMDB value."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.values = lmdb.open(str(folder), map_size=1 << 34)

    def put(self, key: bytes, rows: np.ndarray) -> None:
        with self.values.begin(write=True) as change:
            change.put(key, xxhash.xxh3_128_digest(rows.data) + rows.tobytes())

    def get(self, key: bytes) -> np.ndarray:
        with self.values.begin(buffers=True) as look:
            value = look.get(key)
            assert value is not None
            assert xxhash.xxh3_128_digest(value[16:]) == bytes(value[:16])
            return np.frombuffer(value, np.uint8)[16:]


def put_all(store: PlainFiles | LmdbIndex | LmdbValues, data: Arrays) -> None:
    for key, rows in data.items():
        store.put(key, rows)


def writers(data: Arrays, fresh: Folder) -> dict[str, Callable[[], object]]:
    """Ways to write all of `data` once."""

    def one_by_one() -> None:
        with opened(fresh()) as cache:
            for item in items(data):
                cache.put(*item)

    def grouped() -> None:
        with opened(fresh()) as cache:
            cache.put_many(items(data))

    return {
        "plain files, no flush": lambda: put_all(PlainFiles(fresh(), flush=False), data),
        "put": one_by_one,
        "put_many": grouped,
        "plain files": lambda: put_all(PlainFiles(fresh()), data),
        "LMDB index": lambda: put_all(LmdbIndex(fresh()), data),
        "LMDB values": lambda: put_all(LmdbValues(fresh()), data),
    }


def readers(data: Arrays, fresh: Folder) -> dict[str, Callable[[bytes], np.ndarray]]:
    """Ways to get the bytes of one key; each store has been filled."""
    filled = fresh()
    with opened(filled) as cache:
        cache.put_many(items(data))
    index, values, plain = LmdbIndex(fresh()), LmdbValues(fresh()), PlainFiles(fresh())
    for store in (index, values, plain):
        put_all(store, data)

    def hit(cache: NodeCache) -> Callable[[bytes], np.ndarray]:
        def get(key: bytes) -> np.ndarray:
            lease = cache.get(key)
            assert lease is not None
            return lease.rows

        return get

    return {
        "memcpy": lambda key: data[key],
        "map, unchecked": plain.get,
        "hit": hit(opened(filled)),
        "hit, verify=first": hit(opened(filled, verify="first")),
        "LMDB index": index.get,
        "LMDB values": values.get,
    }


def best(
    cases: dict[str, Callable[[], object]], rounds: int, afterwards: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Seconds of the best round of each case; the rounds alternate. `afterwards` runs after each, untimed."""
    times = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - start)
            afterwards()
    return times


def measure(data: Arrays, root: Path, rounds: int) -> list[dict[str, Any]]:
    """One row a way to read or write `data` below `root`."""
    total = sum(rows.nbytes for rows in data.values())
    if shutil.disk_usage(root).free < 8 * total:
        raise SystemExit(f"{root} has less than {8 * total} bytes free; use another --folder")
    written = root / "written"

    def fresh() -> Path:
        return Path(tempfile.mkdtemp(dir=root)) / "store"

    def fresh_written() -> Path:
        written.mkdir()
        return written / "store"

    target = np.empty(next(iter(data.values())).nbytes, np.uint8)

    def reading(get: Callable[[bytes], np.ndarray], copy: bool) -> Callable[[], None]:
        def run() -> None:
            for key in data:
                found = get(key)
                if copy:
                    np.copyto(target, found.reshape(-1).view(np.uint8))

        return run

    gets = readers(data, fresh)
    read = best({name: reading(get, True) for name, get in gets.items()}, rounds)
    lookup = best({name: reading(get, False) for name, get in gets.items()}, rounds)
    write = best(writers(data, fresh_written), rounds, lambda: shutil.rmtree(written))
    table = [
        {"way": f"read: {name}", "us": 1e6 * lookup[name] / len(data), "GB/s": total / read[name] / 1e9,
         "ratio": read["memcpy"] / read[name]}
        for name in gets
    ]  # fmt: skip
    table += [
        {"way": f"write: {name}", "us": 1e6 * seconds / len(data), "GB/s": total / seconds / 1e9,
         "ratio": write["plain files"] / seconds}
        for name, seconds in write.items()
    ]  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blobs", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for rows in options.rows:
        data = arrays(rows, options.width, options.blobs)
        with tempfile.TemporaryDirectory(prefix="opd-bench-", dir=options.folder) as root:
            table = measure(data, Path(root), options.rounds)
        print(f"\n{options.blobs} blobs of [{rows}, {options.width}] bfloat16")
        print(f"{'':34}{'us a blob':>12}{'GB/s':>8}{'ratio':>8}   (read: to memcpy; write: to plain files)")
        for line in table:
            print(f"{line['way']:34}{line['us']:12.1f}{line['GB/s']:8.2f}{line['ratio']:8.2f}", flush=True)
        results.append({"rows": rows, "width": options.width, "blobs": options.blobs, "table": table})
    if options.json:
        machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
