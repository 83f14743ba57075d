"""A decode step over requests that hold 16 to 255 tokens, read in bands (`opd.rollout.batch`) and as one.

    PYTHONPATH=tests/bench .venv/bin/python tests/bench/mixed_lengths.py [--rows 128 256 384] [--json FILE]

Turns of episodes are so mixed where environments take their time. A Llama of 25 M parameters; both ways take
turns, six steps at a time. Prints the median of milliseconds a step, and what share of the positions that are
read the requests hold. Alone on the machine, or it measures others, too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from episodes import model_of

from opd.models.causal_lm import CausalLM
from opd.rollout import batch
from opd.rollout.torch_engine import TorchEngine
from opd.types import RolloutRequest, SamplingParams

WORTH = {"one": 1 << 60, "bands": batch.WORTH}
WARM, ROUNDS, STEPS = 5, 5, 6


def filled(model: CausalLM, rows: int) -> TorchEngine:
    """An engine at work on `rows` requests."""
    rng = np.random.default_rng(0)
    engine = TorchEngine(model, max_running=rows, max_sequence=512)
    sampling = SamplingParams(max_new_tokens=WARM + ROUNDS * STEPS + 1)
    lengths = rng.integers(16, 256 - sampling.max_new_tokens, rows)
    prompts = [rng.integers(0, 20, length).astype(np.int32) for length in lengths]
    engine.submit([RolloutRequest(f"{i}", ids, sampling, 0) for i, ids in enumerate(prompts)])
    for _ in range(WARM):
        engine.step()
    return engine


def compared(model: CausalLM, rows: int) -> dict[str, float]:
    """Milliseconds a step in both ways."""
    engines, seconds = {}, {way: [] for way in WORTH}
    for way, worth in WORTH.items():
        batch.WORTH = worth
        engines[way] = filled(model, rows)
    for _ in range(ROUNDS):
        for way, worth in WORTH.items():
            batch.WORTH = worth
            for _ in range(STEPS):
                begun = time.perf_counter()
                engines[way].step()
                seconds[way].append(time.perf_counter() - begun)
    found: dict[str, float] = {way: float(np.median(taken)) * 1e3 for way, taken in seconds.items()}
    held = engines["bands"]._batch.length[:rows] - 1
    read = sum(band.positions for band in engines["bands"]._runner.cache.bands(held))
    return found | {"held": int(held.sum()) / read, "held_of_one": int(held.sum()) / (rows * int(held.max()))}


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode steps over requests of mixed lengths.")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256, 384])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, found = model_of("25M"), dict[str, Any]()
    for rows in args.rows:
        found[str(rows)] = compared(model, rows)
        print(rows, json.dumps(found[str(rows)]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
