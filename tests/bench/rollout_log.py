"""What durability costs the embedded engine: rollouts supervised without a log, and logged.

    python tests/bench/rollout_log.py [--batch 64 192 512] [--new 64] [--rounds 9] [--hidden 96]
                                      [--clock wall|cpu] [--json FILE]

One run is divided into the time inside the engine's decode steps and all the rest: supervision, the log, and
for `always` its waits for the disk. The overhead is the rest over the engine's time, so that a busy machine
slows both sides of the quotient; the median of the rounds counts. The rest includes opening and retiring the
requests. A small model is the hard case: the log's work per token is the same for a large one. `--clock cpu`
counts the processor time of this thread, which leaves out waits and what other processes take.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from opd.models.causal_lm import CausalLM
from opd.models.tokenizers import character_tokenizer
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.torch_engine import TorchEngine
from opd.storage.wal import TokenWAL
from opd.types import Chunk, RolloutRequest, SamplingParams

POLICIES = ("os", "interval", "always")
PROMPT = 12


class ClockedEngine(TorchEngine):
    """Adds up the seconds spent in its own work."""

    clock: Callable[[], float] = time.perf_counter
    inside = 0.0

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """As `TorchEngine`."""
        begin = self.clock()
        super().submit(requests)
        self.inside += self.clock() - begin

    def next_chunk(self) -> Chunk | None:
        """As `TorchEngine`."""
        begin = self.clock()
        chunk = super().next_chunk()
        self.inside += self.clock() - begin
        return chunk


def model(hidden: int) -> CausalLM:
    """A three-layer Llama."""
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
    }
    return CausalLM.from_config(config, tokenizer=character_tokenizer("0123456789abcdefghij", []))


def requests(batch: int, new: int, name: str) -> list[RolloutRequest]:
    """`batch` requests, eight to a prompt."""
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_new_tokens=new)
    prompts = [rng.integers(0, 20, PROMPT).astype(np.int32) for _ in range(-(-batch // 8))]
    return [RolloutRequest(f"{name}/{i}", prompts[i // 8], sampling) for i in range(batch)]


def one_round(
    engine: ClockedEngine, rollout: FaultTolerantRollout, log: TokenWAL | None, asked: list[RolloutRequest]
) -> tuple[float, float]:
    """Seconds inside the engine, and all seconds."""
    engine.inside = 0.0
    begin = engine.clock()
    for _ in rollout.generate(asked):
        pass
    if log is not None:
        log.retire([request.uid for request in asked])
    return engine.inside, engine.clock() - begin


def measure(engine: ClockedEngine, batch: int, new: int, rounds: int) -> dict[str, dict[str, float]]:
    """Tokens per second of the best round and the median overhead, of each way."""
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        logs = {f"log, fsync={policy}": TokenWAL(Path(folder, policy), fsync=policy) for policy in POLICIES}
        ways = {"no log": None, **logs}
        rollouts = {name: FaultTolerantRollout([engine], log) for name, log in ways.items()}
        for number in range(rounds + 1):
            for name, log in ways.items():
                seconds = one_round(engine, rollouts[name], log, requests(batch, new, f"{number}"))
                if number:
                    found.setdefault(name, []).append(seconds)
        for log in logs.values():
            log.shutdown()
    return {
        name: {
            "tokens_per_second": batch * new / min(total for _, total in pairs),
            "engine_tokens_per_second": batch * new / min(inside for inside, _ in pairs),
            "overhead": statistics.median(total / inside - 1 for inside, total in pairs),
        }
        for name, pairs in found.items()
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 192, 512])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = ClockedEngine(model(options.hidden))
    engine.clock = time.perf_counter if options.clock == "wall" else time.thread_time
    rows: list[dict[str, Any]] = []
    print("| requests | way | tokens/s | inside the engine | overhead |\n|---|---|---|---|---|")
    for batch in options.batch:
        for name, row in measure(engine, batch, options.new, options.rounds).items():
            rows.append({"requests": batch, "way": name, **row})
            speeds = f"{row['tokens_per_second']:,.0f} | {row['engine_tokens_per_second']:,.0f}"
            print(f"| {batch} | {name} | {speeds} | {100 * row['overhead']:.1f} % |", flush=True)
    if options.json:
        machine = f"{os.cpu_count()} cores, {platform.machine()}"
        header = {"machine": machine, "hidden": options.hidden, "new": options.new, "clock": options.clock}
        options.json.write_text(json.dumps(header | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
