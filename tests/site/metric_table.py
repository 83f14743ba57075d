"""The metrics that the documentation has, from its one table."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"
NAMES = {"DOMAIN": r".+", "TEACHER": r".+", "PHASE": r"[a-z_]+", "KIND": r"[a-z_]+", "P": r"\d+"}


def documented() -> list[str]:
    """Every metric of the first column, with the words that stand for names."""
    rows = [line.split("|")[1] for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def pattern(name: str) -> re.Pattern[str]:
    """What the metrics called `name` in the table look like."""
    return re.compile("".join(NAMES.get(part, re.escape(part)) for part in re.split(r"\b([A-Z]+)\b", name)))


def undocumented(keys: list[str]) -> list[str]:
    """Those of `keys` that the table does not have."""
    known = [pattern(name) for name in documented()]
    return [key for key in keys if not any(one.fullmatch(key) for one in known)]
