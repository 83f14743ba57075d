"""Time, memory and error of the reverse KL with its gradients, against what else there is, in one run.

    python tests/bench/kernels.py [--size default] [--dtype float32] [--chunk 1024] [--json PATH]

Compared: the four matmuls alone, as `torch.mm` does them (for bfloat16 on a CPU also with float32 logits;
where `opd.kernels` takes another library, also by that one), full logits (plain and under torch.compile),
Liger-Kernel's chunked loss where it is installed, and `opd.kernels` (PyTorch, and TileLang where it can run).
Times are taken in one process, the cases in turn, and the best of the rounds
counts; "vs liger" is against Liger's default, compiled. Memory is the growth of the peak over the inputs',
each case in a process of its own; "above gradients" leaves out the gradients of the student's head and hidden
states, which every case must produce, and "buffers" is 2 C V numbers of 4 bytes, what the method says it
needs. The error is that of the loss, relative to float64 on the same inputs. Compare processor seconds where
other work keeps the cores busy. THP_MEM_ALLOC_ENABLE=1 makes PyTorch ask Linux for huge pages.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
from kernel_cases import Inputs, cases

SIZES = {
    "small": (256, 256, 8192),
    "short": (512, 1024, 32768),
    "default": (2048, 1024, 32768),
    "half": (1024, 1024, 32768),
    "wide": (512, 2048, 151936),
    "large": (8192, 4096, 128256),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PAGE_STATUS = Path("/proc/self/status")
MIB = 1 << 20


def chosen(arguments: argparse.Namespace) -> dict:
    """The cases this run compares."""
    return cases(arguments.chunk, arguments.dtype, arguments.device, arguments.only)


def build_inputs(arguments: argparse.Namespace, size: tuple[int, int, int] | None = None) -> Inputs:
    """The inputs of the chosen size, dtype and device."""
    return Inputs(*(size or SIZES[arguments.size]), DTYPES[arguments.dtype], arguments.device)


def resident_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak since the last reset) of this process, from the Linux kernel."""
    for line in PAGE_STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{PAGE_STATUS} has no {field}; the memory part needs Linux")


def measure_memory(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Run one case in this process and return its loss and the growth of its peak memory."""
    case = chosen(arguments)[name]
    # Loads the libraries, compiles, and makes their work space before the baseline is read. Compiled cases
    # are compiled for the shape, so they warm up on the whole problem.
    warm_up = None if "compiled" in name else (64, SIZES[arguments.size][1], 512)
    case(build_inputs(arguments, warm_up))
    inputs = build_inputs(arguments)
    if arguments.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = case(inputs)
        return {"loss": loss, "extra_bytes": torch.cuda.max_memory_allocated() - before}
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident_bytes("VmRSS")
    loss = case(inputs)
    return {"loss": loss, "extra_bytes": resident_bytes("VmHWM") - before}


def memory_in_child(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """`measure_memory` in a fresh process."""
    command = [sys.executable, __file__, "--memory-of", name, "--size", arguments.size]
    command += ["--dtype", arguments.dtype, "--threads", str(arguments.threads), "--device", arguments.device]
    command += ["--chunk", *map(str, arguments.chunk)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"the memory of {name!r} could not be measured:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def best_times(arguments: argparse.Namespace, inputs: Inputs) -> dict[str, dict[str, float]]:
    """Wall and processor seconds of each case: the best of several rounds, each running every case once.

    The round before the first warms up and is not counted.
    """
    best: dict[str, dict[str, float]] = {}
    for turn in range(arguments.rounds + 1):
        for name, case in chosen(arguments).items() if turn == 0 else arguments.compiled.items():
            inputs.clear()
            synchronize(arguments.device)
            wall, processor = time.perf_counter(), time.process_time()
            case(inputs)
            synchronize(arguments.device)
            seconds = {
                "seconds": time.perf_counter() - wall,
                "processor_seconds": time.process_time() - processor,
            }
            print(f"  {turn} {name}: {seconds['seconds']:.2f} s", file=sys.stderr, flush=True)
            if turn == 0:  # warms up, and keeps what torch.compile made
                arguments.compiled[name] = case
            else:
                best[name] = {key: min(value, best.get(name, seconds)[key]) for key, value in seconds.items()}
    return best


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def compare(arguments: argparse.Namespace) -> dict:
    """Time, memory and error of every case, and their ratios."""
    tokens, width, vocabulary = SIZES[arguments.size]
    gradient_bytes = (tokens + vocabulary) * width * DTYPES[arguments.dtype].itemsize
    inputs = build_inputs(arguments)
    exact = inputs.exact_loss()
    rows: dict[str, dict[str, float]] = {}
    for name, seconds in best_times(arguments, inputs).items():
        memory = memory_in_child(name, arguments)
        rows[name] = {**seconds, **memory, "above_gradients": memory["extra_bytes"] - gradient_bytes}
    base, rival = rows["matmuls alone"], rows.get("liger, compiled")
    for name, row in rows.items():
        row["time_over_matmuls"] = row["seconds"] / base["seconds"]
        row["processor_over_matmuls"] = row["processor_seconds"] / base["processor_seconds"]
        if "matmuls" not in name:  # which have no loss
            row["relative_error"] = abs(row["loss"] - exact) / exact
        else:
            del row["loss"]
        if rival is not None:
            row["times_faster_than_liger"] = rival["seconds"] / row["seconds"]
            row["liger_memory_over_this"] = rival["above_gradients"] / max(1, row["above_gradients"])
        if name.startswith("opd"):
            size = min(tokens, int(name.split(",")[1].split()[0]))
            row["above_gradients_over_buffers"] = row["above_gradients"] / (2 * size * vocabulary * 4)
    return {
        "tokens": tokens,
        "width": width,
        "vocabulary": vocabulary,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "exact_loss": exact,
        "machine": machine(arguments.device),
        "cases": rows,
    }


def machine(device: str) -> dict[str, str | int]:
    """What ran this, in words that name no host."""
    found: dict[str, str | int] = {
        "processor": platform.machine(),
        "cores": os.cpu_count() or 1,
        "vector_units": torch.backends.cpu.get_cpu_capability(),
    }
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    huge_pages = os.environ.get("THP_MEM_ALLOC_ENABLE", "0")
    return {**found, "torch": torch.__version__, "THP_MEM_ALLOC_ENABLE": huge_pages}


def print_table(result: dict) -> None:
    """The comparison for people."""
    print(
        f"forward + backward of KL(student || teacher), N={result['tokens']}, d={result['width']}, "
        f"V={result['vocabulary']}, {result['dtype']}, {result['threads']} thread(s)"
    )
    columns = ["wall", "x matmuls", "processor", "x matmuls", "vs liger", "above gradients", "x buffers"]
    columns.append("loss error")
    print(f"{'':38}" + "".join(f"{column:>16}" for column in columns))
    for name, row in result["cases"].items():
        cells = [
            f"{row['seconds']:.3f} s",
            f"{row['time_over_matmuls']:.2f}",
            f"{row['processor_seconds']:.3f} s",
            f"{row['processor_over_matmuls']:.2f}",
            f"{row['times_faster_than_liger']:.2f}x faster" if "times_faster_than_liger" in row else "",
            f"{row['above_gradients'] / MIB:.0f} MiB",
            f"{row['above_gradients_over_buffers']:.2f}" if name.startswith("opd") else "",
            f"{row['relative_error']:.1e}" if "relative_error" in row else "",
        ]
        print(f"{name:38}" + "".join(f"{cell:>16}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="default")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--chunk", type=int, nargs="+", default=[1024], help="tokens per chunk")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains one of these words")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.compiled = {}
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        print(json.dumps(measure_memory(arguments.memory_of, arguments)))
        return
    result = compare(arguments)
    print_table(result)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
