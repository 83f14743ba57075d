"""What reading a long trajectory by row range would save against mapping its fields whole.

    python tests/bench/trajectory_rows.py [--tokens 1000000] [--chunk 16384] [--json FILE]

Processor seconds and mapped memory of a `Sample`'s fields, read and checked whole or `--chunk` rows at a
time with those before given back; beside them what the trainer makes of the sample (`MicroBatch`), and what
one set of hidden states takes. The best of three, each on a trajectory not read before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from opd.storage.trajectories import SAMPLE_FIELDS, TrajectoryBatch, TrajectoryRecord, TrajectoryStore
from opd.storage.trajectories.writer import TrajectoryWriter
from opd.train.packing import pack
from opd.types import TokenTerms

ROUNDS, PROMPT, MIB = 3, 1024, 1 << 20
WIDTH = 4096
"""Of a hidden state, for comparison."""


def write(folder: Path, tokens: int) -> None:
    """A trajectory for each round of each way."""
    rng = np.random.default_rng(0)
    response = tokens - PROMPT
    with TrajectoryWriter(folder, durable=False) as writer:
        for number in range(2 * ROUNDS):
            writer.put(
                TrajectoryRecord(str(number), PROMPT, response, trainable_tokens=response),
                token_ids=rng.integers(0, 1000, tokens).astype(np.int32),
                rollout_logprobs=-rng.random(response).astype(np.float32),
                policy_versions=np.zeros(response, np.int32),
                loss_mask=np.ones(response, bool),
            )


def mapped_mib() -> float:
    """File pages this process has resident."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssFile:")[1].split()[0]) / 1024


def whole(batch: TrajectoryBatch, row: int, chunk: int) -> float:
    """Read all rows of every field; mapped MiB then."""
    del chunk
    for field in SAMPLE_FIELDS:
        batch.read(row, field.name).sum()
    return mapped_mib()


def ranges(batch: TrajectoryBatch, row: int, chunk: int) -> float:
    """Read `chunk` rows of every field at a time and give them back; the most MiB mapped."""
    top, count = 0.0, int(batch.table.response_tokens[row])
    for start in range(0, count, chunk):
        stop = min(start + chunk, count)
        for field in SAMPLE_FIELDS:
            batch.read(row, field.name, start, stop).sum()
        top = max(top, mapped_mib())
        for field in SAMPLE_FIELDS:
            batch.forget(row, field.name, start, stop)
    return top


def measure(store: TrajectoryStore, read: Callable[..., float], rows: range, chunk: int) -> dict[str, float]:
    """The best processor seconds, and the most mapped memory beyond what was there."""
    seconds, memory = [], []
    for row in rows:
        before = mapped_mib()
        with store.lease([row]) as batch:
            begin = time.process_time()
            memory.append(read(batch, row, chunk) - before)
            seconds.append(time.process_time() - begin)
    return {"processor_seconds": min(seconds), "mapped_mib": max(memory)}


def packed_mib(store: TrajectoryStore) -> float:
    """What the trainer's tensors of one trajectory take."""
    with store.lease([0]) as batch:
        sample = batch.sample(0)
        micro = pack([(sample, TokenTerms.zeros(len(sample.response_ids)))], torch.device("cpu"))
    tensors = [
        value for value in (getattr(micro, name) for name in micro.__slots__) if torch.is_tensor(value)
    ]
    return sum(tensor.nbytes for tensor in tensors) / MIB


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, default=16_384)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        write(Path(root), options.tokens)
        with TrajectoryStore.open(root) as store:
            found = {
                "whole": measure(store, whole, range(ROUNDS), options.chunk),
                "ranges": measure(store, ranges, range(ROUNDS, 2 * ROUNDS), options.chunk),
            }
            packed = packed_mib(store)
    for name, numbers in found.items():
        print(f"{name:8} {numbers['processor_seconds']:.3f} s {numbers['mapped_mib']:8.1f} MiB mapped")
    hidden = options.tokens * WIDTH * 2 / MIB
    print(f"trainer's tensors of it {packed:.1f} MiB; hidden states of width {WIDTH}, bf16: {hidden:.0f} MiB")
    if options.json:
        machine = f"{os.cpu_count()} cores, {platform.machine()}"
        result = {"machine": machine, "tokens": options.tokens, "chunk": options.chunk, **found}
        options.json.write_text(json.dumps(result | {"trainer_mib": packed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
