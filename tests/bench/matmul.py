"""Products of float32 weights by MKL and by oneDNN: forward, both gradients, and decode with few rows;
and bfloat16 ones as they are, and widened to float32.

    python tests/bench/matmul.py [--json FILE]

Processor time of one thread, the best of several, the cases in turn; ratios below 1 are oneDNN's, and of
bfloat16 the widened products'.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from opd.kernels.projection import onednn_linear

WEIGHTS = ((64, 64), (96, 256), (256, 256), (576, 576), (576, 1536), (1536, 576), (1024, 4096), (576, 49152))
"""(K, N)."""
TRAINING, DECODE = (256, 2048), (1, 16, 64)
SECONDS = 0.05
ROUNDS = 5


def seconds(cases: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Of each case: processor seconds of one call."""
    best, repeats = dict.fromkeys(cases, float("inf")), dict.fromkeys(cases, 1)
    for turn in range(ROUNDS + 1):
        for name, case in cases.items():
            start = time.process_time()
            for _ in range(repeats[name]):
                case()
            spent = time.process_time() - start
            if turn:
                best[name] = min(best[name], spent / repeats[name])
            repeats[name] = max(1, int(SECONDS / max(spent / repeats[name], 1e-6)))
    return best


def training(rows: int, inner: int, outer: int) -> dict[str, float]:
    """oneDNN's time over MKL's."""
    x, weight, upstream = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
    found = seconds(
        {
            "forward": lambda: x @ weight.t(),
            "forward onednn": lambda: onednn_linear(x, weight),
            "inputs": lambda: upstream @ weight,
            "inputs onednn": lambda: onednn_linear(upstream, weight.t()),
            "weight": lambda: upstream.t() @ x,
            "weight onednn": lambda: onednn_linear(upstream.t(), x.t()),
        }
    )
    return {name: found[f"{name} onednn"] / found[name] for name in ("forward", "inputs", "weight")}


def widened(rows: int, inner: int, outer: int) -> dict[str, float]:
    """float32's time, with what it takes to widen and to round, over bfloat16's."""
    x, weight, upstream = (
        torch.randn(*shape).bfloat16() for shape in ((rows, inner), (outer, inner), (rows, outer))
    )
    found = seconds(
        {
            "forward": lambda: x @ weight.t(),
            "forward widened": lambda: (x.float() @ weight.float().t()).bfloat16(),
            "inputs": lambda: upstream @ weight,
            "inputs widened": lambda: (upstream.float() @ weight.float()).bfloat16(),
            "weight": lambda: upstream.t() @ x,
            "weight widened": lambda: (upstream.float().t() @ x.float()).bfloat16(),
        }
    )
    return {name: found[f"{name} widened"] / found[name] for name in ("forward", "inputs", "weight")}


def decode(rows: int, inner: int, outer: int) -> dict[str, float]:
    """The packed product's time over MKL's, and over oneDNN's with the weight as it is."""
    x, weight = torch.randn(rows, inner), torch.randn(outer, inner)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    found = seconds(
        {
            "mkl": lambda: torch.mm(x, weight.t()),
            "plain": lambda: onednn_linear(x, weight),
            "packed": lambda: onednn_linear(x, packed),
        }
    )
    return {"mkl": found["packed"] / found["mkl"], "plain": found["packed"] / found["plain"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    with torch.inference_mode():
        for inner, outer in WEIGHTS:
            for count in TRAINING if outer < 2**15 else ():
                found = training(count, inner, outer)
                rows.append({"case": "training", "rows": count, "shape": [outer, inner], **found})
                found = widened(count, inner, outer)
                rows.append({"case": "bfloat16", "rows": count, "shape": [outer, inner], **found})
            for count in DECODE:
                found = decode(count, inner, outer)
                rows.append({"case": "decode", "rows": count, "shape": [outer, inner], **found})
    for row in rows:
        ratios = "  ".join(f"{key} {value:.2f}" for key, value in row.items() if isinstance(value, float))
        print(f"{row['case']:9} {row['rows']:5} rows, weight {row['shape']}: {ratios}")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
