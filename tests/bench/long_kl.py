"""How the time of the exact KL with its gradients grows with the length of one sequence.

    python tests/bench/long_kl.py [--json FILE]

For each number of tokens `n`: seconds of forward and backward, the best of the rounds, the lengths taking
turns so that other work on the machine disturbs all alike. The exponent is the slope of a straight line
through (log n, log seconds): 1 is linear. Width and vocabulary are small, so that a run takes about a minute.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path

import numpy as np
import torch

from opd.kernels.head import Head
from opd.kernels.ops import linear_kl

LENGTHS = (62_500, 125_000, 250_000, 500_000, 1_000_000)
WIDTH, VOCABULARY = 16, 512


def problem(length: int) -> tuple[torch.Tensor, torch.Tensor, tuple[Head, Head]]:
    """Hidden states [length, D] of student and teacher, and their heads."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(length, WIDTH, generator=generator) for _ in range(2))
    weights = [torch.randn(VOCABULARY, WIDTH, generator=generator) for _ in range(2)]
    return student, teacher, (Head(weights[0].requires_grad_()), Head(weights[1]))


def seconds_of(student: torch.Tensor, teacher: torch.Tensor, heads: tuple[Head, Head], chunk: int) -> dict:
    """Wall and processor seconds of one forward and backward over hidden states `[n, D]`."""
    student.grad = heads[0].weight.grad = None
    weight = torch.full((len(student),), 1 / len(student))
    wall, processor = time.perf_counter(), time.process_time()
    values = linear_kl(student, heads[0], teacher, heads[1], weight=weight, chunk=chunk)
    (values @ weight).backward()
    return {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - processor}


def measure(rounds: int, chunk: int) -> dict[int, dict[str, float]]:
    """The best times of each length."""
    student, teacher, heads = problem(max(LENGTHS))
    best: dict[int, dict[str, float]] = {}
    for turn in range(rounds + 1):  # the first one warms up
        for length in LENGTHS if turn else LENGTHS[:1]:
            found = seconds_of(student[:length].clone().requires_grad_(), teacher[:length], heads, chunk)
            if turn:
                best[length] = {key: min(value, best.get(length, found)[key]) for key, value in found.items()}
    return best


def exponent(times: dict[int, dict[str, float]], field: str) -> float:
    """Slope of log seconds over log tokens."""
    lengths = np.log(np.array(list(times), dtype=np.float64))
    return float(np.polyfit(lengths, np.log([row[field] for row in times.values()]), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    times = measure(arguments.rounds, arguments.chunk)
    print(f"D={WIDTH}, V={VOCABULARY}, chunk {arguments.chunk}, {arguments.threads} thread(s)")
    print(f"{'tokens':>10}{'wall, s':>12}{'processor, s':>14}{'ns a token':>12}")
    for length, row in times.items():
        each = row["processor_seconds"] / length * 1e9
        print(f"{length:>10}{row['seconds']:>12.3f}{row['processor_seconds']:>14.3f}{each:>12.0f}")
    fitted = {field: exponent(times, field) for field in ("seconds", "processor_seconds")}
    print(f"exponent {fitted['seconds']:.3f} (wall), {fitted['processor_seconds']:.3f} (processor)")
    if arguments.json:
        result = {
            "width": WIDTH,
            "vocabulary": VOCABULARY,
            "chunk": arguments.chunk,
            "threads": arguments.threads,
            "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
            "times": {str(length): row for length, row in times.items()},
            "exponent": fitted,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
