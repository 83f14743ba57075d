"""The trajectory store against torch.save files, numpy .npz and Arrow; run by trajectories.py."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from opd.storage.trajectories import SAMPLE_FIELDS, TrajectoryRecord, TrajectoryStore, TrajectoryWriter

MIB = 1 << 20
ROW_BYTES = sum(field.row_bytes for field in SAMPLE_FIELDS)


def resident(kind: str) -> int:
    """Bytes of this process in memory: RSS now, or its peak `HWM`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"Vm{kind}:")[1].split()[0])


def arrays(tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    """The fields of a trajectory of response tokens alone."""
    rng = np.random.default_rng(seed)
    return {
        "token_ids": rng.integers(0, 150_000, tokens).astype(np.int32),
        "rollout_logprobs": rng.standard_normal(tokens).astype(np.float32),
        "policy_versions": np.full(tokens, seed, np.int32),
        "loss_mask": rng.random(tokens) < 0.9,
    }


def write_format(name: str, folder: Path, count: int, tokens: int) -> None:
    """The same `count` trajectories in one of the formats."""
    if name == "store":
        with TrajectoryWriter(folder, durable=False) as writer:
            for i in range(count):
                writer.put(TrajectoryRecord(str(i), 0, tokens), **arrays(tokens, i))
        return
    folder.mkdir()
    for i in range(count):
        data = arrays(tokens, i)
        if name == "torch.save":
            import torch

            torch.save({key: torch.from_numpy(array) for key, array in data.items()}, folder / f"{i}.pt")
        elif name == "npz":
            np.savez(folder / f"{i}.npz", **data)
        else:
            import pyarrow as pa

            table = pa.table(data)
            with (
                pa.OSFile(str(folder / f"{i}.arrow"), "wb") as file,
                pa.ipc.new_file(file, table.schema) as out,
            ):
                out.write_table(table)


def load_format(name: str, path: Path) -> dict[str, Any]:
    """One trajectory of a file format, as its users would load it."""
    if name == "torch.save":
        import torch

        return torch.load(path, weights_only=True)  # noqa: TID251
    if name == "npz":
        with np.load(path) as file:
            return {key: file[key] for key in file.files}
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
        return {key: table.column(key).to_numpy() for key in table.column_names}


def iterate(name: str, folder: Path, batch: int) -> dict[str, float]:
    """One pass in mini-batches, every byte looked at; first mini-batch in seconds, growth of memory in bytes.

    `eager` formats load everything first, as a list of samples in memory; lazy ones keep what they opened.
    """
    if name == "torch.save":
        import torch  # noqa: F401  not part of what is measured
    if name == "arrow":
        import pyarrow  # noqa: F401
    kept: list[dict[str, Any]] = []
    before = resident("RSS")
    Path("/proc/self/clear_refs").write_text("5")
    begin, first = time.perf_counter(), math.inf
    if name == "store":
        with TrajectoryStore.open(folder) as store:
            rows = np.arange(len(store.table)).reshape(-1, batch)
            for held in store.batches(rows, [field.name for field in SAMPLE_FIELDS]):
                for row in held.rows:
                    for field in SAMPLE_FIELDS:
                        held.read(row, field.name).max()
                first = min(first, time.perf_counter() - begin)
    else:
        paths = sorted(folder.iterdir())
        kept = [load_format(name, path) for path in paths]
        for start in range(0, len(paths), batch):
            for data in kept[start : start + batch]:
                for array in data.values():
                    array.max()
            first = min(first, time.perf_counter() - begin)
    total = time.perf_counter() - begin
    return {"first": first, "total": total, "growth": resident("HWM") - before}


def child(*arguments: object) -> dict[str, Any]:
    """What `iterate` measures in a process of its own."""
    script = Path(__file__).with_name("trajectories.py")
    command = [sys.executable, str(script), "child", *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def formats(folder: Path, rounds: int, count: int = 256, tokens: int = 1_000_000) -> dict[str, Any]:
    """First mini-batch (2 trajectories) and peak memory of every format, on the same data."""
    found: dict[str, Any] = {"trajectories": count, "tokens": tokens, "mini_batch": 2}
    size = count * tokens * ROW_BYTES / MIB
    print(f"\n{count} trajectories of {tokens:,} tokens, {size:,.0f} MiB; 2 a mini-batch")
    print(f"{'':12}{'first s':>10}{'pass s':>10}{'peak MiB':>10}")
    for name in ("torch.save", "npz", "arrow", "store"):
        write_format(name, folder / name, count, tokens)
        results = [child("iterate", name, folder / name, 2) for _ in range(rounds)]
        row = min(results, key=lambda r: r["first"]) | {"growth": max(r["growth"] for r in results)}
        found[name] = row
        print(f"{name:12}{row['first']:10.4f}{row['total']:10.3f}{row['growth'] / MIB:10.1f}", flush=True)
        subprocess.run(["rm", "-r", str(folder / name)], check=True)
    return found
