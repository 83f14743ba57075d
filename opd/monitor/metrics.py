"""Metrics of a stage: one JSON object a step in `metrics.jsonl`, and TensorBoard event files by choice."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any

from opd.errors import DataError, MissingExtraError, TrainingError

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends to `folder/metrics.jsonl`. A line is there for good once `write` returns, unless the machine
    loses power; a line that a killed writer left unfinished is removed when the file is opened again.
    """

    def __init__(self, folder: str | Path, tensorboard: bool = False) -> None:
        """Raises `MissingExtraError` if TensorBoard is asked for and not installed."""
        self.path = Path(folder) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._board_type = _summary_writer() if tensorboard else None
        self._board: Any = None
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            self._rewrite(read_metrics(self.path))

    def write(self, step: int, metrics: Mapping[str, Any], seconds: float | None = None) -> None:
        """Append one line: `step`, `time` (if `seconds` since the stage began are given), then the metrics in
        alphabetical order. Raises `TrainingError` naming the key of a number that is not finite, or of a
        value that is no number; nothing is written then.
        """
        row: dict[str, int | float] = {"step": int(step)}
        if seconds is not None:
            row["time"] = _finite("time", seconds, step)
        row |= {key: _finite(key, metrics[key], step) for key in sorted(metrics)}
        with self.path.open("ab") as file:
            file.write(_line(row))
        if self._board_type is not None:
            self._write_board(step, row)

    def truncate(self, after_step: int) -> None:
        """Drop, atomically, the lines of steps above `after_step`: a resumed stage writes them again."""
        rows = read_metrics(self.path)
        kept = [row for row in rows if row["step"] <= after_step]
        if len(kept) < len(rows):
            self._rewrite(kept)

    def close(self) -> None:
        """Flush the TensorBoard events; `metrics.jsonl` needs no closing."""
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_board(self, step: int, row: Mapping[str, float]) -> None:
        if self._board is None:
            assert self._board_type is not None
            # Opened at the first step after a resume: events of that step and later ones are hidden.
            self._board = self._board_type(self.path.parent / "tensorboard", purge_step=step)
        for key, value in row.items():
            if key != "step":
                self._board.add_scalar(key, value, step)
        self._board.flush()

    def _rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            file.writelines(_line(row) for row in rows)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)


class NoMetrics(MetricsWriter):
    """Writes nothing: for the ranks of a stage whose metrics another one writes."""

    def __init__(self) -> None:
        self._board = None

    def write(self, step: int, metrics: Mapping[str, Any], seconds: float | None = None) -> None:
        del step, metrics, seconds

    def truncate(self, after_step: int) -> None:
        del after_step


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, in order; none if the file does not exist.

    A last line that a killed writer left unfinished is ignored. Raises `DataError` naming file and line for
    any other line that is not a JSON object with a `step`.
    """
    path = Path(path)
    if not path.exists():
        return []
    *lines, unfinished = path.read_bytes().split(b"\n")
    del unfinished  # empty, unless the last line has no end
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not a line of JSON ({error}); remove the line.") from error
        if not isinstance(row, dict) or "step" not in row:
            raise DataError(f"{path}:{number}: not a row of metrics; remove the line.")
        rows.append(row)
    return rows


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _finite(key: str, value: Any, step: int) -> int | float:
    plain = value.item() if getattr(value, "ndim", None) == 0 else value  # numpy and torch scalars
    if not isinstance(plain, Real):
        raise TrainingError(f"metric {key} at step {step} is a {type(plain).__name__}; give a number.")
    if not math.isfinite(plain):
        raise TrainingError(
            f"metric {key} is {float(plain)} at step {step}; lower the learning rate or look at the batch."
        )
    return int(plain) if isinstance(plain, int) else float(plain)


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("TensorBoard logging", "tensorboard") from error
    return SummaryWriter
