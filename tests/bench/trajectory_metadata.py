"""Metadata of very many tokens and of very many trajectories; run by trajectories.py."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from trajectory_formats import MIB, ROW_BYTES, child

from opd.storage.trajectories import SAMPLE_FIELDS, Field, TrajectoryRecord, TrajectoryStore, TrajectoryWriter
from opd.train.plan import CostModel, DeviceBudget, PlanSettings, Workload, make_plan

BUDGET = DeviceBudget(4e9, 1e5, 65_536)
COST = CostModel.of_model(
    10**9, 2048, [None] * 24, operations_per_second=1e14, bytes_per_second=1e9, overhead_seconds=0.01
)


def metadata(folder: Path, count: int = 1000, tokens: int = 1_000_000) -> dict[str, Any]:
    """Opening, planning and the first mini-batch of sparse million-token trajectories."""
    hidden = Field("hidden", "bfloat16", 64)
    zeros = {f.name: np.zeros(f.shape(tokens), f.numpy) for f in (*SAMPLE_FIELDS, hidden)}
    begin = time.perf_counter()
    with TrajectoryWriter(
        folder, fields=(*SAMPLE_FIELDS, hidden), durable=False, block_bytes=4 * MIB
    ) as writer:
        for i in range(count):
            record = TrajectoryRecord(f"r/{i}", 0, tokens, domain=f"d{i % 4}", teacher=f"t{i % 4}")
            writer.put(record, **zeros)
    row: dict[str, Any] = {"write_s": time.perf_counter() - begin}
    files = list((folder / "segments").iterdir())
    row["heavy_gib"] = sum(path.stat().st_size for path in files) / 2**30
    row["disk_mib"] = sum(path.stat().st_blocks * 512 for path in files) / MIB
    row |= child("plan", folder)
    print(
        f"\n{count:,} trajectories of {tokens:,} tokens: {row['heavy_gib']:.1f} GiB of heavy fields, sparse"
        f" ({row['disk_mib']:.1f} MiB of disk)\nopen {row['open']:.4f} s, plan {row['plan']:.4f} s (heavy"
        f" bytes read: {row['heavy_bytes_planning']}), first trajectory in memory {row['first']:.4f} s"
    )
    return row


def table(folder: Path, count: int = 1_000_000) -> dict[str, float]:
    """Seconds of each step with `count` trajectories, and bytes of metadata for each."""
    seconds: dict[str, float] = {}
    clock = time.perf_counter()

    def done(name: str) -> None:
        nonlocal clock
        seconds[name], clock = time.perf_counter() - clock, time.perf_counter()

    with TrajectoryWriter(folder, durable=False) as writer:
        for start in range(0, count, 1000):
            records = [
                TrajectoryRecord(f"merge/{i}/0", 100, 1000 + i % 5000, f"merge/{i}", f"d{i % 4}", f"t{i % 4}")
                for i in range(start, start + 1000)
            ]
            writer.put_many([(record, {}) for record in records])
    done("write")
    with TrajectoryStore.open(folder) as store:
        done("open")
        whole = store.table
        whole.take(whole.domain.equals("d1") & (whole.tokens > 3000))
        done("filter")
        whole.take(np.random.default_rng(0).permutation(count))
        done("shuffle")
        work = Workload(whole.tokens, whole.teacher.codes, whole.tokens * ROW_BYTES)
        make_plan(work, PlanSettings(512, 8), COST, BUDGET)
        done("plan")
    size = sum(path.stat().st_size for path in (folder / "metadata").iterdir()) / count
    print(f"\n{count:,} trajectories, {size:.0f} bytes of metadata each: "
          + ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items()), flush=True)  # fmt: skip
    return seconds | {"bytes": size}


def plan_child(folder: Path) -> dict[str, float]:
    """Times of a fresh process, and what it read of heavy files by its own count and by the kernel's."""
    begin = time.perf_counter()
    store = TrajectoryStore.open(folder)
    opened = time.perf_counter() - begin
    teachers = store.table.teacher.codes
    work = Workload(store.table.tokens, teachers, store.heavy_bytes())
    plan = make_plan(work, PlanSettings(8, 2), COST, DeviceBudget(1e12))
    planned = time.perf_counter() - begin - opened
    heavy = store.counters.bytes_mapped + store.counters.bytes_read + store.counters.bytes_checked
    with store.lease(plan[0].rows[:1]) as batch:
        batch.load([field.name for field in store.fields])
        first = time.perf_counter() - begin
    return {"open": opened, "plan": planned, "heavy_bytes_planning": heavy, "first": first}
