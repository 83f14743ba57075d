"""A decode step over requests of equal and of mixed lengths, read in bands (`opd.rollout.batch`) and as one.

    PYTHONPATH=tests/bench .venv/bin/python tests/bench/mixed_lengths.py [--rows 128 256] [--json FILE]

Turns of episodes are so mixed where environments take their time (`uniform`: 16 to 255 tokens), and long
answers where they end when they like (`exponential`: mean 1,024 and longest 4,096, an eighth of both here).
A Llama of 25 M parameters; both ways take turns, six steps at a time. Prints medians a step, in milliseconds
of the processor and of the clock, how much faster bands were in the rounds (the least, the median and the
most), and positions read for each that is held. By the clock: alone on the machine, or it measures others,
too.
"""

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
WARM, ROUNDS, STEPS, LONGEST = 5, 7, 6, 512
NEW = WARM + ROUNDS * STEPS + 1


def lengths_of(kind: str, rows: int) -> np.ndarray:
    """[rows]: tokens of each prompt, in an order without meaning."""
    rng = np.random.default_rng(0)
    if kind == "equal":
        return np.full(rows, 128)
    if kind == "uniform":
        return rng.integers(16, 256 - NEW, rows)
    shares = (rng.permutation(rows) + 0.5) / rows
    return (-LONGEST / 4 * np.log(shares)).astype(np.int64).clip(1, LONGEST - NEW)


def filled(model: CausalLM, lengths: np.ndarray) -> TorchEngine:
    """An engine at work on requests of such lengths."""
    rng = np.random.default_rng(0)
    engine = TorchEngine(model, max_running=len(lengths), max_sequence=LONGEST)
    prompts = [rng.integers(0, 20, length).astype(np.int32) for length in lengths]
    sampling = SamplingParams(max_new_tokens=NEW)
    engine.submit([RolloutRequest(f"{i}", ids, sampling, 0) for i, ids in enumerate(prompts)])
    for _ in range(WARM):
        engine.next_chunk()
    return engine


def compared(model: CausalLM, lengths: np.ndarray) -> dict[str, float]:
    """Of both ways, by round."""
    engines, seconds, used = {}, {way: [] for way in WORTH}, {way: [] for way in WORTH}
    for way, worth in WORTH.items():
        batch.WORTH = worth
        engines[way] = filled(model, lengths)
    before = {way: np.array(engine.positions) for way, engine in engines.items()}
    for _ in range(ROUNDS):
        for way, worth in WORTH.items():
            batch.WORTH = worth
            begun, processor = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                engines[way].next_chunk()
            used[way].append((time.process_time() - processor) / STEPS)
            seconds[way].append((time.perf_counter() - begun) / STEPS)
    faster = np.array(used["one"]) / np.array(used["bands"])
    found = {"faster_least": faster.min(), "faster": np.median(faster), "faster_most": faster.max()}
    for way, engine in engines.items():
        read, held = engine.positions - before[way]
        found |= {
            f"{way}_processor_ms": np.median(used[way]) * 1e3,
            f"{way}_ms": np.median(seconds[way]) * 1e3,
            f"{way}_read_over_held": read / held,
        }
    return {name: float(number) for name, number in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode steps over requests of mixed lengths.")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--kinds", nargs="+", default=["equal", "uniform", "exponential"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, found = model_of("25M"), dict[str, Any]()
    for kind in args.kinds:
        for rows in args.rows:
            found[f"{kind} {rows}"] = compared(model, lengths_of(kind, rows))
            print(kind, rows, json.dumps(found[f"{kind} {rows}"]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
