"""One report on one GPU: ceilings, tests, kernels, a training step, the engine, a streamed teacher, a run.

    bash tests/gpu/accept.sh [--json FILE] [--only SECTION ...] [--dry]

Each section runs whatever happened to the others; a section that fails is a line of the table and an exit
status of 1. Times are medians by the device's own clock after a warm-up. `--dry` runs the same code at tiny
sizes on a CPU and measures nothing worth reading.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.gpu import engine, kernels, runs, training
from tests.gpu.clock import Place


def ceilings(place: Place) -> dict[str, float]:
    """What the device gives at best: bytes copied and matrix products."""
    numbers, width = (64, 64) if place.dry else (1 << 31, 8192)
    source = torch.empty(numbers, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    copied = place.milliseconds(lambda: target.copy_(source))
    left, right = (torch.randn(width, width, device=place.device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    product = place.milliseconds(lambda: torch.mm(left, right, out=out))
    return {"copy GB/s": 2 * numbers / copied / 1e6, "bf16 TFLOP/s": 2 * width**3 / product / 1e9}


SECTIONS: dict[str, Callable[[Place], Any]] = {
    "ceilings": ceilings,
    "tests": runs.tests,
    "kernels": kernels.table,
    "training": training.steps,
    "engine": engine.decoding,
    "streamed": runs.streamed_teacher,
    "quickstart": runs.quick_start,
}


def machine(place: Place) -> dict[str, Any]:
    """What ran this, in words that name no host."""
    found = {"torch": torch.__version__, "python": platform.python_version(), "dry": place.dry}
    if place.device.type == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        print("this machine has no CUDA device; --dry runs the same code on a CPU", file=sys.stderr)
        return 2
    place = Place(torch.device("cpu") if options.dry else torch.device("cuda", 0), options.dry)
    report: dict[str, Any] = {"machine": machine(place), "seconds": {}, "failed": []}
    for name in options.only:
        print(f"== {name}", flush=True)
        begin = time.perf_counter()
        try:
            report[name] = SECTIONS[name](place)
            print(json.dumps(report[name], indent=1), flush=True)
        except Exception as error:  # the other sections still tell something
            traceback.print_exc()
            report["failed"].append(name)
            report[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        report["seconds"][name] = round(time.perf_counter() - begin, 1)
        place.clear()
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    failed = ", ".join(report["failed"]) or "none"
    print(f"sections failed: {failed}; seconds {report['seconds']}")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
