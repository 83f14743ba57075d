"""Metrics of a stage: one JSON object a step in `metrics.jsonl`, also sent to chosen trackers
(`opd/sinks.py`), and one object in `flags.jsonl` for every rule that fired on them.

The files only grow. Each line ends with `chain`, a digest of itself and of all lines before it. So a changed,
lost or added line in the middle is found, and the last `chain` stands for the whole file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from opd.errors import DataError, TrainingError, add_path_note
from opd.storage.files import read_plain, write_atomic
from opd.untrusted import read_document

FILE_NAME = "metrics.jsonl"
FLAGS = "flags.jsonl"
"""In a stage's folder: the rules that fired, one object a line."""
_LONGEST_ROW = 1 << 24
"""Bytes. A row of a stage has some thousands."""
CHAIN = "chain"
_MARK = f', "{CHAIN}": "'.encode()


MemorySource = Callable[[], Mapping[str, int]]
"""Returns the bytes that each part of something large takes now: weights, moments, keys and values."""


class MemoryMeter:
    """Counts the bytes of memory of each large owner: models, optimiser, engine and teachers. Each counts its
    own. Transient tensors (activations, logits) are not counted.
    """

    def __init__(self) -> None:
        self._sources: list[MemorySource] = []
        self._most: dict[str, int] = {}

    def add_source(self, source: MemorySource) -> None:
        """Call `source` with every sample, too. Parts of one name are added up."""
        self._sources.append(source)

    def sample(self) -> dict[str, int]:
        """Return the bytes of each part now."""
        now: dict[str, int] = {}
        for source in self._sources:
            for part, size in source().items():
                now[part] = now.get(part, 0) + size
        self._most = max(now, self._most, key=_total_bytes)
        return now

    def drain_peak(self) -> dict[str, int]:
        """Return the largest sample since the last call, a sample taken now included."""
        self.sample()
        most, self._most = self._most, {}
        return most

    def reset_peak(self) -> None:
        """Forget the largest sample, without taking one."""
        self._most = {}


class PhaseTimer:
    """Attributes a step's wall time to its phases, with the most memory of each."""

    def __init__(self, memory: MemoryMeter | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._memory = MemoryMeter() if memory is None else memory
        self._most: dict[str, dict[str, int]] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._memory.reset_peak()  # the memory before is not this phase's
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
            self._most[phase] = max(self._memory.drain_peak(), self._most.get(phase, {}), key=_total_bytes)

    @property
    def peak_bytes(self) -> int:
        """Bytes of weights, moments, caches and other known parts in the phase that held the most."""
        return max(map(_total_bytes, self._most.values()), default=0)

    def add_to(self, phases: dict[str, float]) -> dict[str, float]:
        """Add the seconds to the totals in `phases`. Return them, and this step's memory, as metrics."""
        for phase, seconds in self.seconds.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
        times = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        most = ((phase, *item) for phase, parts in self._most.items() for item in parts.items())
        return times | {f"memory/{phase}/{part}": size for phase, part, size in most}


def _total_bytes(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


_OUTERMOST = {"policy/ratio_min": min, "policy/ratio_max": max}


def combine_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of a step's updates: the mean over the updates that have a metric, the smallest or
    largest ratio of all. An update without tokens of a teacher has no share in that teacher's metrics.
    """
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for one in updates for name in one):
        values = [one[name] for one in updates if name in one]
        if name in _OUTERMOST:
            metrics[name] = _OUTERMOST[name](values)
        else:
            of = len(updates) if name.startswith(("token_share/", "grad_share/")) else len(values)
            metrics[name] = math.fsum(values) / of
    return metrics


def row_of(step: int, metrics: Mapping[str, object], seconds: float | None = None) -> dict[str, int | float]:
    """Return the row of a line: `step`, `time` (if `seconds` since the stage began are given), then the
    metrics in alphabetical order. Raises `TrainingError` naming the key of a number that is not finite, or of
    a value that is no number.
    """
    row: dict[str, int | float] = {"step": int(step)}
    if seconds is not None:
        row["time"] = _finite_number("time", seconds, step)
    return row | {key: _finite_number(key, metrics[key], step) for key in sorted(metrics)}


class JSONLinesWriter:
    """Appends to a file of JSON lines. An appended line stays, unless the machine loses power. If a killed
    writer left a line unfinished, opening the file again removes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._tail: str | None = None
        if self.path.exists():
            data = read_plain(self.path, follow=True)
            complete = data[: data.rfind(b"\n") + 1]
            if len(complete) < len(data):
                self._replace_file(complete)

    def append(self, row: Mapping[str, object]) -> None:
        """Append `row`, which has a `step`."""
        body = json.dumps(row, allow_nan=False).encode()
        chain = _chain_digest(self.last_chain, body)
        with add_path_note(self.path), self.path.open("ab") as file:
            file.write(body[:-1] + _MARK + chain.encode() + b'"}\n')
        self._tail = chain

    @property
    def last_chain(self) -> str:
        """`chain` of the last line, "" before the first. It changes with every byte written so far."""
        if self._tail is None:
            last = read_plain(self.path, follow=True).splitlines()[-1:] if self.path.exists() else []
            self._tail = _split_chain(last[0])[1] if last else ""
        return self._tail

    def truncate(self, after_step: int, tail: str | None = None) -> None:
        """Drop, atomically, the lines of steps above `after_step`: a resumed stage writes them again.

        With `tail`, drop the lines after the one that ends with it, whatever they hold. Raises `DataError` if
        there is no such line, or if a line before it has changed.
        """
        verified = []
        if after_step > 0:
            verified = list(_verified_lines(self.path, tail))
            if tail is not None and (not verified or verified[-1].chain != tail):
                raise DataError(
                    f"{self.path} has lost what was written up to step {after_step}; restore it, or delete"
                    f" the folder {self.path.parent} to run the stage again."
                )
        lines = [line.data for line in verified if line.row["step"] <= after_step]
        data = b"".join(line + b"\n" for line in lines)
        if self.path.exists() and read_plain(self.path, follow=True) != data:
            self._replace_file(data)

    def sync(self) -> None:
        """Make everything written so far durable, because a checkpoint or a record refers to it."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def _replace_file(self, data: bytes) -> None:
        write_atomic(self.path, data)
        self._tail = None


class FlagsWriter(JSONLinesWriter):
    """Appends to `folder/flags.jsonl`, which exists once a rule has fired."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(Path(folder) / FLAGS)

    def append(self, row: Mapping[str, object]) -> None:
        """Append durably: flags are rare."""
        super().append(row)
        self.sync()

    def truncate(self, after_step: int, tail: str | None = None) -> None:
        """Like `JSONLinesWriter.truncate`. An empty `tail` means that no rule had fired."""
        super().truncate(0 if tail == "" else after_step, tail)


class MetricsWriter(JSONLinesWriter):
    """Appends to `folder/metrics.jsonl`."""

    def __init__(
        self, folder: str | Path, tensorboard: bool = False, sinks: Sequence[str] = (), run: str = ""
    ) -> None:
        """Open the file and the trackers `sinks`, which get every row of the run called `run` as well. Raises
        `MissingExtraError` if one is not installed.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        first = ["tensorboard"] if tensorboard and "tensorboard" not in sinks else []
        names = [*first, *dict.fromkeys(sinks)]
        self._sinks: Any = None
        if names:
            from opd.sinks import Sinks

            self._sinks = Sinks(names, path, run)
        super().__init__(path / FILE_NAME)

    def write(self, step: int, metrics: Mapping[str, object], seconds: float | None = None) -> None:
        """Append `row_of` its arguments. Raises as `row_of` does and then writes nothing."""
        row = row_of(step, metrics, seconds)
        self.append(row)
        if self._sinks is not None:
            self._sinks.write(step, {key: value for key, value in row.items() if key != "step"})

    def close(self) -> None:
        """Close the sinks. `metrics.jsonl` needs no closing."""
        if self._sinks is not None:
            self._sinks.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NoMetrics(MetricsWriter):
    """Writes nothing: for the ranks of a stage that do not write metrics."""

    def __init__(self) -> None:
        self._sinks = None

    @property
    def last_chain(self) -> str:
        return ""

    def write(self, step: int, metrics: Mapping[str, object], seconds: float | None = None) -> None:
        del step, metrics, seconds

    def truncate(self, after_step: int, tail: str | None = None) -> None:
        del after_step, tail

    def sync(self) -> None:
        pass


def read_metrics(path: str | Path, *, chained: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl` or `flags.jsonl`, in order, or none if the file does not exist.

    An unfinished last line of a killed writer is ignored. Raises `DataError` naming file and line for any
    other line that is not a JSON object with a `step`, or that has changed. Files of older releases, without
    `chain`, are read as they are, unless `chained`.
    """
    return [line.row for line in _verified_lines(Path(path), chained=chained)]


class _Line(NamedTuple):
    data: bytes
    """Without its end."""
    row: dict[str, Any]
    chain: str


def _verified_lines(path: Path, tail: str | None = None, *, chained: bool = False) -> Iterator[_Line]:
    """Yield the lines of `path`, each compared with its `chain`, up to the one that ends with `tail`."""
    if not path.exists():
        return
    try:
        *lines, _ = read_plain(path, follow=True).split(b"\n")  # the last is empty, or a line without its end
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); restore it.") from None
    previous = ""
    for number, data in enumerate(lines, start=1):
        body, chain = _split_chain(data)
        try:
            row = read_document(body, _LONGEST_ROW)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not a line of JSON ({error}); restore the file.") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise DataError(f"{path}:{number}: not a row of metrics; restore the file.")
        chained = chained or bool(chain or previous)
        if chained and chain != _chain_digest(previous, body):
            raise DataError(
                f"{path}:{number}: this line or one before it is not what was written; restore the file, or"
                f" delete the folder {path.parent} to run the stage again."
            )
        yield _Line(data, row, chain)
        previous = chain
        if tail is not None and chain == tail:
            return


def _chain_digest(previous: str, body: bytes) -> str:
    return hashlib.sha256(previous.encode() + body).hexdigest()[:16]


def _split_chain(line: bytes) -> tuple[bytes, str]:
    """Split a line into its row and its `chain`, "" if it has none."""
    head, mark, chain = line.rpartition(_MARK)
    if not mark or not chain.endswith(b'"}'):
        return line, ""
    return head + b"}", chain[:-2].decode("ascii", "replace")


def _finite_number(key: str, value: Any, step: int) -> int | float:
    plain = value.item() if getattr(value, "ndim", None) == 0 else value  # numpy and torch scalars
    if not isinstance(plain, Real):
        raise TrainingError(f"metric {key} at step {step} is a {type(plain).__name__}; give a number.")
    if not math.isfinite(plain):
        raise TrainingError(
            f"metric {key} is {float(plain)} at step {step}; lower the learning rate or look at the batch."
        )
    return int(plain) if isinstance(plain, int) else float(plain)
