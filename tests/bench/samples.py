"""Samples on disk at a million tokens, and a million samples: time to the first mini-batch, memory, tables.

    python tests/bench/samples.py [--samples 256] [--rows 1000000] [--json FILE]

memory  samples of 1,000,000 tokens, two a mini-batch, as torch.save files that are all loaded and as lots of
        one each: seconds to the first mini-batch from a cold start of the reader, and the growth of its peak
        memory over one pass. One process each; files are in the page cache, so no disk is measured.
table   samples without tokens, a thousand a lot: seconds to write, open, filter, shuffle, plan.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from opd.storage.sample_lot import FIELDS, TOKEN_BYTES, SampleRecord
from opd.storage.sample_store import SampleStore, SampleWriter
from opd.train.plan import CostModel, Workload, make_plan

TOKENS = 1_000_000
_READ = """
import json, sys, time
from pathlib import Path
import numpy as np
import torch
from opd.storage.sample_lot import FIELDS
from opd.storage.sample_store import SampleStore
folder, form = Path(sys.argv[1]), sys.argv[2]
Path("/proc/self/clear_refs").write_text("5")
def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
before, begin, first, total = peak(), time.perf_counter(), None, 0
if form == "torch":
    every = [torch.load(path, weights_only=True) for path in sorted(folder.iterdir())]
    plan = [every[i : i + 2] for i in range(0, len(every), 2)]
    read = ([{n: v.numpy() for n, v in one.items()} for one in pair] for pair in plan)
else:
    store = SampleStore.open([folder])
    plan = np.arange(len(store.records)).reshape(-1, 2)
    batches = store.lease_batches(plan, tuple(FIELDS))
    read = ([{n: b.read(r, n) for n in FIELDS} for r in b.rows] for b in batches)
for pair in read:
    total += sum(int(values.view(np.uint8).sum()) for one in pair for values in one.values())
    first = first or time.perf_counter() - begin
print(json.dumps({"first_s": first, "peak_mib": peak() - before, "sum": total}))
"""


def memory(samples: int) -> dict[str, dict[str, float]]:
    """Read the same samples in both forms."""
    import torch

    rng = np.random.default_rng(0)
    found = {}
    with tempfile.TemporaryDirectory() as root:
        for form in ("torch", "lots"):
            Path(root, form).mkdir()
        with SampleWriter(Path(root, "lots"), durable=False) as writer:
            for i in range(samples):
                values = {name: rng.integers(0, 2, TOKENS).astype(dtype) for name, dtype in FIELDS.items()}
                writer.put([(SampleRecord(f"{i}", 0, TOKENS), values)])
                own = {name: torch.from_numpy(array) for name, array in values.items()}
                torch.save(own, Path(root, "torch", f"{i:04d}.pt"))
        for form in ("torch", "lots"):
            command = [sys.executable, "-c", _READ, str(Path(root, form)), form]
            found[form] = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout
            )
    assert found["torch"].pop("sum") == found["lots"].pop("sum")
    return found


def table(rows: int) -> dict[str, float]:
    """Write, open and plan a table."""
    found: dict[str, float] = {}

    def timed(name: str, act: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        made = act()
        found[name] = time.perf_counter() - begin
        return made

    def write() -> None:
        with SampleWriter(root, durable=False) as writer:
            for first in range(0, rows, 1000):
                lot = [
                    SampleRecord(f"run/{i}", 100, i % 2000, teacher=f"t{i % 8}")
                    for i in range(first, first + 1000)
                ]
                writer.put([(record, {}) for record in lot])

    with tempfile.TemporaryDirectory() as root:
        timed("write_s", write)
        known = timed("open_s", lambda: SampleStore.open([Path(root)])).records
    tokens = np.array([record.token_count for record in known])
    teachers = np.array([int(record.teacher[1:]) for record in known])
    work = Workload(tokens, teachers, tokens * TOKEN_BYTES)
    timed("plan_s", lambda: make_plan(work, 512, 8, CostModel(quadratic=1e-3), 65_536))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {"cores": os.cpu_count(), "samples": options.samples, "rows": options.rows}
    result = found | {"memory": memory(options.samples), "table": table(options.rows)}
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
