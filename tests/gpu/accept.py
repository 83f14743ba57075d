"""Accepts a GPU: checks and measures everything that needs one, each part within its own time.

    bash tests/gpu/accept.sh [--json FILE] [--only SECTION ...] [--ranks N] [--dry]

Every section is a process of its own: one that fails, is killed or runs over its time is a line of the table,
and the others run. The status is 0 if all of them ended and every bound is met. `--ranks` runs what needs
several GPUs in place of what needs one. `--dry` runs the same code at tiny sizes on a CPU: what a clock says
is compared with its bound then and decides nothing.
"""

import argparse
import contextlib
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.gpu.clock import Place
from tests.gpu.rows import REFUSING, Row, Sheet, table

ROOT = Path(__file__).resolve().parents[2]
TOTAL = 585.0
"""Seconds that all sections may take together; less than the ten minutes of a lent machine's command."""
DRY_SECONDS = 1800.0
"""What a section on a CPU may take: it ends a hang and measures nothing."""


@dataclass(frozen=True)
class Section:
    """A function `module.function(sheet, place)` and the seconds it may take on a GPU, beside those that the
    sections before it have left.
    """

    module: str
    function: str
    seconds: float


ONE = {
    "ceilings": Section("clock", "ceilings", 10),
    "kernels": Section("kernels", "divergences", 100),
    "training": Section("training", "steps", 85),
    "engine": Section("engine", "decoding", 80),
    "streamed": Section("runs", "streamed_teacher", 85),
    "tests": Section("runs", "tests", 115),
    "quickstart": Section("runs", "quick_start", 110),
}
APART = {
    "merge": Section("merge", "merge_step", 290),
    "micro_batches": Section("training", "micro_batches", 120),
    "mixed_lengths": Section("engine", "mixed_lengths", 150),
    "sizes": Section("training", "sizes", 240),
    "compiled": Section("training", "compiled", 240),
    "policy": Section("kernels", "policy_rows", 60),
    "long": Section("long", "long_attention", 150),
}
"""Studies that decide nothing: they run when `--only` names them."""
SEVERAL = {
    "distill": Section("ranks", "distill", 150),
    "teachers": Section("ranks", "teachers", 120),
    "vocabulary": Section("ranks", "vocabulary", 90),
    "sync": Section("ranks", "sync", 120),
}
SECTIONS = ONE | APART | SEVERAL


def machine(place: Place) -> dict[str, Any]:
    """What ran this, in words that name no host."""
    found = {"torch": torch.__version__, "python": platform.python_version(), "dry": place.dry}
    if place.device.type == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["devices"] = torch.cuda.device_count()
        found["cuda"] = torch.version.cuda
    return found


def run_section(name: str, rows: Path, place: Place) -> None:
    """In the section's own process: write its rows."""
    section = SECTIONS[name]
    call = getattr(importlib.import_module(f"tests.gpu.{section.module}"), section.function)
    call(Sheet(rows, place.dry), place)


def ended(command: list[str], log: Path, seconds: float) -> str:
    """Run `command` for at most `seconds`: "done", "failed" or "over time". What it started ends with it."""
    with log.open("wb") as said:
        child = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said, start_new_session=True)
        try:
            return "failed" if child.wait(timeout=seconds) else "done"
        except subprocess.TimeoutExpired:
            return "over time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # its own session: all that is left of the section
            child.wait()


def limit_of(name: str, options: argparse.Namespace) -> float:
    """The seconds of a section by itself."""
    return options.limit.get(name, DRY_SECONDS if options.dry else SECTIONS[name].seconds)


def section_report(name: str, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Start one section, wait `limit` seconds at most, and say how it ended, with its rows."""
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows.jsonl", Path(folder) / "log"
        command = [sys.executable, "-m", "tests.gpu.accept", "--section", name, "--rows", str(rows)]
        command += ["--dry"] if options.dry else []
        command += ["--ranks", str(options.ranks)] if options.ranks else []
        begin = time.perf_counter()
        state = ended(command, log, limit) if limit > 0 else "not reached"
        found: dict[str, Any] = {"state": state, "seconds": round(time.perf_counter() - begin, 1)}
        found |= {"limit": round(limit, 1), "rows": [asdict(row) for row in Sheet(rows, options.dry).rows()]}
        if state != "done":
            found["said"] = log.read_text("utf-8", "replace")[-3000:] if log.exists() else ""
    return found


def refused(found: dict[str, Any]) -> bool:
    """Whether a section's report refuses the GPU."""
    empty = not found["rows"]
    return found["state"] != "done" or empty or any(row["verdict"] in REFUSING for row in found["rows"])


def printed(name: str, found: dict[str, Any]) -> str:
    """A section as text."""
    title = f"== {name}: {found['state']} in {found['seconds']} s of {found['limit']:.0f}"
    text = table(title, [Row(**row) for row in found["rows"]])
    return text + ("\n" + found["said"] if found.get("said") else "")


def accept(options: argparse.Namespace, place: Place) -> bool:
    """Run the sections, print their tables, write the report; whether all is accepted."""
    report: dict[str, Any] = {"machine": machine(place), "sections": {}}
    begin, due = time.perf_counter(), 0.0
    for name in options.only or list(SEVERAL if options.ranks else ONE):
        now, due = time.perf_counter() - begin, due + limit_of(name, options)
        limit = options.limit.get(name, due - now)  # what others have left is added to no limit that is given
        found = section_report(name, options, limit if options.dry else min(limit, TOTAL - now))
        report["sections"][name] = found
        print(printed(name, found), flush=True)
        report["refused"] = [n for n, one in report["sections"].items() if refused(one)]
        report["accepted"] = not report["refused"]
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    words = f"refused: {', '.join(report['refused'])}" if report["refused"] else "accepted"
    print(f"{words}; {time.perf_counter() - begin:.0f} s on {report['machine']}")
    return report["accepted"]


def seconds_of(text: str) -> tuple[str, float]:
    """`SECTION=SECONDS`."""
    name, _, seconds = text.partition("=")
    if name not in SECTIONS:
        raise argparse.ArgumentTypeError(f"there is no section {name}")
    return name, float(seconds)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the report here")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="these sections")
    parser.add_argument("--ranks", type=int, default=0, help="what needs several GPUs, on so many")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument(
        "--limit", nargs="+", type=seconds_of, default=[], help="SECTION=SECONDS: other limits"
    )
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.limit = dict(options.limit)
    asked = set(options.only or [])
    if not options.section and asked & SEVERAL.keys() and (asked & ONE.keys() or not options.ranks):
        parser.error(f"{', '.join(SEVERAL)} need --ranks N, and run without the others")
    return options


def main() -> int:
    options = parsed()
    if not options.dry and not torch.cuda.is_available():
        print("this machine has no CUDA device; --dry runs the same code on a CPU", file=sys.stderr)
        return 2
    if not options.dry and options.ranks > torch.cuda.device_count():
        print(
            f"this machine has {torch.cuda.device_count()} CUDA devices; --ranks asks for more",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu") if options.dry else torch.device("cuda", 0)
    place = Place(device, options.dry, options.ranks)
    if options.section:
        run_section(options.section, options.rows, place)
        return 0
    return 0 if accept(options, place) else 1


if __name__ == "__main__":
    sys.exit(main())
