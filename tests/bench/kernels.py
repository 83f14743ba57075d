"""Time and memory of the chunked KL, forward and backward, against naive full logits and the matmuls alone.

    python tests/bench/kernels.py [--size small] [--chunk 192 1024] [--threads 1] [--json PATH]

Times are taken in one process, the cases in turn, and the best of the rounds counts. Memory is the growth
of the peak resident set over the inputs', each case in a process of its own. "Above gradients" leaves out
the gradient of the student's head and hidden states, which every case must produce.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from opd.kernels.head import Head
from opd.kernels.ops import linear_kl

SIZES = {"default": (2048, 1024, 32768), "small": (256, 256, 8192)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PAGE_STATUS = Path("/proc/self/status")
MIB = 1 << 20


class Inputs:
    """Hidden states and head weights of a student and a teacher of the same size."""

    def __init__(self, tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(rows: int, scale: float) -> Tensor:
            return torch.randn(rows, width, generator=generator).mul_(scale).to(dtype)

        self.student = normal(tokens, 1.0).requires_grad_()
        self.teacher = normal(tokens, 1.0)
        self.student_weight = normal(vocabulary, 2 * width**-0.5).requires_grad_()
        self.teacher_weight = normal(vocabulary, 2 * width**-0.5)
        self.token_weight = torch.full((tokens,), 1 / tokens)
        self.kept: dict[str, Tensor] = {}

    def clear(self) -> None:
        self.student.grad = self.student_weight.grad = None


def naive(inputs: Inputs) -> float:
    """Full logits and autograd, as one would write it down."""
    student = (inputs.student @ inputs.student_weight.t()).float().log_softmax(dim=-1)
    with torch.no_grad():
        teacher = (inputs.teacher @ inputs.teacher_weight.t()).float().log_softmax(dim=-1)
    loss = (student.exp() * (student - teacher)).sum(dim=-1) @ inputs.token_weight
    loss.backward()
    return loss.item()


def chunked(inputs: Inputs, chunk: int) -> float:
    """`opd.kernels.ops.linear_kl`."""
    heads = Head(inputs.student_weight), Head(inputs.teacher_weight)
    values = linear_kl(
        inputs.student, heads[0], inputs.teacher, heads[1], weight=inputs.token_weight, chunk=chunk
    )
    loss = values @ inputs.token_weight
    loss.backward()
    return loss.item()


@torch.no_grad()
def matmuls(inputs: Inputs) -> float:
    """The four matmuls no exact method can do without: both logits, and the student's two gradients.

    The outputs are kept from round to round, so that its best round holds nothing but matmuls.
    """
    if not inputs.kept:
        shape = (len(inputs.student), len(inputs.student_weight))
        inputs.kept["logits"] = torch.empty(shape, dtype=inputs.student.dtype)
        inputs.kept["hidden"] = torch.empty_like(inputs.student)
        inputs.kept["weight"] = torch.empty_like(inputs.student_weight)
    logits = inputs.kept["logits"]
    torch.mm(inputs.teacher, inputs.teacher_weight.t(), out=logits)
    torch.mm(inputs.student, inputs.student_weight.t(), out=logits)
    torch.mm(logits, inputs.student_weight, out=inputs.kept["hidden"])
    torch.mm(logits.t(), inputs.student, out=inputs.kept["weight"])
    return 0.0


def cases(chunks: list[int]) -> dict[str, Callable[[Inputs], float]]:
    """What is compared, by the name it has in the table."""
    found: dict[str, Callable[[Inputs], float]] = {"matmuls alone": matmuls, "naive full logits": naive}
    for size in chunks:
        found[f"chunked, {size} tokens"] = lambda inputs, size=size: chunked(inputs, size)
    return found


def resident_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak since the last reset) of this process, from the Linux kernel."""
    for line in PAGE_STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{PAGE_STATUS} has no {field}; the memory part needs Linux")


def measure_memory(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Run one case in this process and return its loss and the peak growth of the resident set."""
    case = cases(arguments.chunk)[name]
    # Loads the libraries and their work space before the baseline is read.
    case(Inputs(32, 64, 512, DTYPES[arguments.dtype]))
    inputs = Inputs(*SIZES[arguments.size], DTYPES[arguments.dtype])
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident_bytes("VmRSS")
    loss = case(inputs)
    return {"loss": loss, "extra_bytes": resident_bytes("VmHWM") - before}


def memory_in_child(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """`measure_memory` in a fresh process."""
    command = [sys.executable, __file__, "--memory-of", name, "--size", arguments.size]
    command += ["--dtype", arguments.dtype, "--threads", str(arguments.threads)]
    command += ["--chunk", *map(str, arguments.chunk)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def best_times(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Wall and processor seconds of each case: the best of several rounds, each running every case once.

    On a machine that others use too, processor seconds are the steadier of the two.
    """
    inputs = Inputs(*SIZES[arguments.size], DTYPES[arguments.dtype])
    best: dict[str, dict[str, float]] = {}
    for _ in range(arguments.rounds):
        for name, case in cases(arguments.chunk).items():
            inputs.clear()
            wall, processor = time.perf_counter(), time.process_time()
            case(inputs)
            seconds = {
                "seconds": time.perf_counter() - wall,
                "processor_seconds": time.process_time() - processor,
            }
            best[name] = {key: min(value, best.get(name, seconds)[key]) for key, value in seconds.items()}
            print(f"  {name}: {seconds['seconds']:.2f} s", file=sys.stderr, flush=True)
    return best


def compare(arguments: argparse.Namespace) -> dict:
    """Time and memory of every case and their ratios."""
    tokens, width, vocabulary = SIZES[arguments.size]
    itemsize = DTYPES[arguments.dtype].itemsize
    gradient_bytes = (tokens + vocabulary) * width * itemsize
    rows = {}
    for name, seconds in best_times(arguments).items():
        memory = memory_in_child(name, arguments)
        rows[name] = {**seconds, **memory, "above_gradients": memory["extra_bytes"] - gradient_bytes}
    for row in rows.values():
        row["time_over_matmuls"] = row["seconds"] / rows["matmuls alone"]["seconds"]
        row["processor_over_matmuls"] = row["processor_seconds"] / rows["matmuls alone"]["processor_seconds"]
        row["memory_over_naive"] = row["extra_bytes"] / rows["naive full logits"]["extra_bytes"]
        row["above_gradients_over_naive"] = (
            row["above_gradients"] / rows["naive full logits"]["above_gradients"]
        )
    return {
        "tokens": tokens,
        "width": width,
        "vocabulary": vocabulary,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
        "cases": rows,
    }


def print_table(result: dict) -> None:
    """The comparison for people."""
    print(
        f"forward + backward of KL(student || teacher), N={result['tokens']}, d={result['width']}, "
        f"V={result['vocabulary']}, {result['dtype']}, {result['threads']} thread(s)"
    )
    columns = ["wall", "x matmuls", "processor", "x matmuls", "extra memory", "of naive", "above gradients"]
    print(f"{'':22}" + "".join(f"{column:>16}" for column in [*columns, "of naive"]))
    for name, row in result["cases"].items():
        cells = [
            f"{row['seconds']:.2f} s",
            f"{row['time_over_matmuls']:.2f}",
            f"{row['processor_seconds']:.2f} s",
            f"{row['processor_over_matmuls']:.2f}",
            f"{row['extra_bytes'] / MIB:.0f} MiB",
            f"{row['memory_over_naive']:.3f}",
            f"{row['above_gradients'] / MIB:.0f} MiB",
            f"{row['above_gradients_over_naive']:.3f}",
        ]
        print(f"{name:22}" + "".join(f"{cell:>16}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="default")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--chunk", type=int, nargs="+", default=[192, 1024], help="tokens per chunk")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        print(json.dumps(measure_memory(arguments.memory_of, arguments)))
        return
    result = compare(arguments)
    print_table(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
