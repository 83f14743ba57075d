"""Whether a run of the tests tries everything (`--full`), and what such a run of whole folders recorded.

bash tests/run.sh storage --full --record     # counts, commit and machine into tests/full.json
python tests/full.py                          # the table of the tests' page from it
python tests/full.py coverage.json            # a table by folder of what --cov-report=json wrote
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

FULL = os.environ.get("OPD_FULL_TESTS") == "1"
"""`conftest.py` sets it with `--full`, before test modules are imported."""


def cases(count: int) -> int:
    """`count` of generated cases, kills or places with `--full`, and a fourth of them without."""
    return count if FULL else max(3, count // 4)


RECORD = Path(__file__).with_name("full.json")
CHOOSING = (
    "keyword",
    "markexpr",
    "deselect",
    "ignore",
    "ignore_glob",
    "maxfail",
    "lf",
    "stepwise",
    "collectonly",
)
OUTCOMES = ("passed", "failed", "skipped")
HEAD = ["folder", *OUTCOMES, "seconds", "commit"]


class Recorder:
    """Counts what becomes of each folder's tests, and writes it at the end of the run."""

    def __init__(self, config: pytest.Config) -> None:
        tests = RECORD.parent
        named = [Path(config.invocation_params.dir, argument).resolve() for argument in config.args]
        whole = all(path == tests or path.parent == tests for path in named)
        chosen = any(config.getoption(option, None) for option in CHOOSING)
        if not whole or not config.getoption("full") or chosen:
            raise ValueError(
                "--record is for whole folders with --full, without options that choose tests or stop early"
                " (-k, -m, -x, --deselect, --ignore, --lf): add --full and take those out, or leave it out"
            )
        if _git("status", "--porcelain", "--", ":/", f":(exclude){RECORD.name}"):
            raise ValueError("--record names a commit: commit what `git status` shows, or leave it out")
        recorded()
        self.counts: dict[str, Counter[str]] = {}
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test that fails in its set-up or after its end has failed, one that is skipped has no call."""
        folder = report.nodeid.split("/")[1]
        self.seconds[folder] += report.duration
        if report.outcome != "passed" or report.when == "call":
            self.counts.setdefault(folder, Counter())[report.outcome] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Add the folders that ran to those of earlier runs, unless something ended the run early."""
        if exitstatus not in (0, 1):  # all passed, some failed
            return
        written = recorded()
        for folder, counts in self.counts.items():
            found = {outcome: counts[outcome] for outcome in OUTCOMES}
            found |= {"seconds": round(self.seconds[folder]), "commit": _git("rev-parse", "--short", "HEAD")}
            written[folder] = {**found, "machine": _machine()}
        new = RECORD.with_suffix(".new")
        new.write_text(json.dumps(dict(sorted(written.items())), indent=1) + "\n", encoding="utf-8")
        new.replace(RECORD)


def recorded() -> dict[str, dict[str, Any]]:
    """What earlier runs recorded, by folder. Raises `ValueError` if the file is damaged."""
    try:
        found = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
        counts = [row[key] for row in found.values() for key in HEAD[1:-1]]
        whole = all(type(count) is int and count >= 0 for count in counts)
        whole = whole and all(re.fullmatch("[0-9a-f]{7,40}", row["commit"]) for row in found.values())
        whole = whole and all(re.fullmatch(r"\w+", folder) for folder in found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(f"{RECORD} is damaged: take it from git again")
    return found


def table() -> str:
    """The rows of `full.json` as Markdown."""
    rows = [HEAD, ["---"] * len(HEAD)]
    for folder, found in recorded().items():
        rows.append([f"`{folder}/`", *(f"{found[key]:,}" for key in HEAD[1:-1]), found["commit"]])
    return _markdown(rows)


def coverage(report: Path) -> str:
    """Lines and branches that tests took, by folder, as Markdown."""
    sums: dict[str, Counter[str]] = {}
    try:
        for name, file in json.loads(report.read_text("utf-8"))["files"].items():
            parts = Path(name).parts[:-1]
            folder = "/".join(parts[: 1 if {"kernels", "storage", "teachers"} & {*parts[:1]} else 2])
            sums.setdefault(folder, Counter()).update(file["summary"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{report} is not what --cov-report=json writes ({error!r})") from None
    rows = [["folder", "lines", "taken", "branches", "taken"], ["---"] * 5]
    for folder, found in sorted(sums.items()):
        pairs = [("num_statements", "covered_lines"), ("num_branches", "covered_branches")]
        shares = [
            (f"{found[of]:,}", f"{found[part] / found[of]:.0%}" if found[of] else "-") for of, part in pairs
        ]
        rows.append([f"`{folder}/`", *(cell for pair in shares for cell in pair)])
    return _markdown(rows)


def _markdown(rows: list[list[str]]) -> str:
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def _git(*words: str) -> str:
    command = ["git", *words]
    try:
        done = subprocess.run(command, cwd=RECORD.parent, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        failed = f"--record names a commit, and `{' '.join(command)}` fails here: leave it out"
        raise ValueError(failed) from None
    return done.stdout.strip()


def _machine() -> str:
    info = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.+)", info.read_text("utf-8")) if info.exists() else None
    return f"{os.cpu_count()} cores, {name[1] if name else platform.processor()}"


if __name__ == "__main__":
    try:
        print(coverage(Path(sys.argv[1])) if sys.argv[1:] else table(), end="")
    except ValueError as wrong:
        sys.exit(str(wrong))
