"""Rows of the acceptance: numbers, the bounds they are held to, and a verdict for each.

A section writes each row to a file as soon as it has it, so that what was measured before a section fails or
runs out of time is in the report.
"""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OK, FAILS, MISSED, MEASURED, ABSENT, STOPPED, ERROR = (
    "ok",
    "FAILS",
    "missed, dry",
    "measured",
    "not installed",
    "did not run",
    "ERROR",
)
"""A bound of a time that is missed at tiny sizes on a CPU says nothing: `MISSED` accepts."""
REFUSING = (FAILS, ERROR)


@dataclass(frozen=True)
class Bound:
    """What one number of a row may be."""

    number: str
    most: float | None = None
    least: float | None = None
    timed: bool = True
    """Whether the number comes from a clock: on a dry run it is compared, and decides nothing."""

    def met(self, value: Any) -> bool:
        """Whether `value` keeps it; what is no number does not."""
        if not isinstance(value, int | float):
            return False
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)

    def __str__(self) -> str:
        sign, limit = ("<=", self.most) if self.most is not None else (">=", self.least)
        return f"{self.number} {sign} {limit:.4g}"


@dataclass
class Row:
    """One line of the table."""

    name: str
    numbers: dict[str, Any] = field(default_factory=dict)
    bounds: list[str] = field(default_factory=list)
    verdict: str = MEASURED
    why: str = ""


class Sheet:
    """The rows of one section, in a file of one JSON object a line."""

    def __init__(self, path: Path, dry: bool) -> None:
        self.path, self.dry = path, dry

    def row(self, name: str, numbers: dict[str, Any], *bounds: Bound) -> None:
        """Write a row. Every bound's number must be among `numbers`."""
        self._write(Row(name, numbers, [str(bound) for bound in bounds], verdict(numbers, bounds, self.dry)))

    def absent(self, name: str, why: str) -> None:
        """What is compared with, and is not there."""
        self._write(Row(name, verdict=ABSENT, why=why))

    def rival(self, name: str) -> AbstractContextManager[None]:
        """Measures another's code: what goes wrong there is said, and refuses nothing."""
        return self._caught(name, STOPPED)

    def ours(self, name: str) -> AbstractContextManager[None]:
        """Measures our own: what goes wrong is an error of the row, and the next row is measured."""
        return self._caught(name, ERROR)

    @contextmanager
    def _caught(self, name: str, verdict: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._write(Row(name, verdict=verdict, why=f"{type(error).__name__}: {error}"[:200]))

    def _write(self, row: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def rows(self) -> list[Row]:
        """What was written so far."""
        if not self.path.exists():
            return []
        lines = self.path.read_text("utf-8").splitlines()
        return [Row(**json.loads(line)) for line in lines]


def verdict(numbers: dict[str, Any], bounds: tuple[Bound, ...], dry: bool) -> str:
    """Of a row with these numbers and bounds."""
    missed = [bound for bound in bounds if not bound.met(numbers[bound.number])]
    if any(not (dry and bound.timed) for bound in missed):
        return FAILS
    if missed:
        return MISSED
    return OK if bounds else MEASURED


def table(title: str, rows: list[Row]) -> str:
    """The rows of a section as text: verdict, name, numbers, bounds."""
    lines = [title]
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        said = "  ".join(f"{name} {_short(value)}" for name, value in row.numbers.items())
        bounds = f"  [{', '.join(row.bounds)}]" if row.bounds else ""
        why = f"  {row.why}" if row.why else ""
        lines.append(f"  {row.verdict:13} {row.name:{width}}  {said}{bounds}{why}".rstrip())
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
