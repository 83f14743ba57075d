"""A run folder that is being written: what was appended since the last look, in bounded memory.

Nothing here trusts a file: what is no plain file inside the run folder, too long, or not of the form that it
should have is left out and counted. Files may be there later, be cut short in the middle of a line, go away,
or be written anew by a run that resumes: then they are read from their beginning.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from opd.foreign import read_document
from opd.metrics import FILE_NAME as METRICS
from opd.metrics import FLAGS
from opd.pipelines.records.layout import DONE, LAST_SAMPLES
from opd.pipelines.report.load import Run, StageResult, stage_order
from opd.storage.files import open_plain

AT_ONCE = 1 << 25
"""Bytes of a run that are read at a look; the rest comes at the next ones."""
LONGEST_LINE = 1 << 22
POINTS, RECENT = 512, 80
"""Points of a curve that are kept, and how many of its last values are kept as they were."""
KEYS, STAGES, DOMAINS, FLAGS_KEPT = 300, 64, 64, 100
_NAME, _SENTENCE, _TEXT = 200, 1000, 8000
"""Most characters of what is shown."""
_SMALL = 1 << 22
_GUARD = 64
"""Bytes before the place that was reached, by which a file that was written anew is told from one that grew:
a line of metrics ends with a digest of all lines up to it.
"""


class Appended:
    """The lines that are appended to the file at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read, self.unread = 0, 0
        """Bytes that the last look has read, and that it has left: a line without its end among them."""
        self.changed = 0.0
        """When the file was written last, in seconds since the epoch."""
        self._file: tuple[int, int] | None = None
        self._at = 0
        self._guard = b""
        self._long = False

    def look(self, most: int) -> tuple[bool, list[bytes]]:
        """Whether what was read so far no longer counts, and the new whole lines within `most` bytes."""
        try:
            descriptor = open_plain(self.path)
        except OSError:
            anew = self._at > 0
            self._reset(None)
            self.read = self.unread = 0
            return anew, []
        try:
            known = os.fstat(descriptor)
            anew = False
            if (known.st_dev, known.st_ino) != self._file or not self._continues(descriptor, known.st_size):
                anew = self._at > 0
                self._reset((known.st_dev, known.st_ino))
            data = os.pread(descriptor, max(0, min(most, known.st_size - self._at)), self._at)
        except OSError:  # a disk that fails: another look may read it
            return False, []
        finally:
            os.close(descriptor)
        self.changed, self.read = known.st_mtime, len(data)
        lines = self._take(data)
        self.unread = max(0, known.st_size - self._at)
        return anew, lines

    def _reset(self, file: tuple[int, int] | None) -> None:
        self._file, self._at, self._guard, self._long = file, 0, b"", False

    def _continues(self, descriptor: int, size: int) -> bool:
        if size < self._at:
            return False
        return os.pread(descriptor, len(self._guard), self._at - len(self._guard)) == self._guard

    def _take(self, data: bytes) -> list[bytes]:
        end = data.rfind(b"\n") + 1
        if not end:
            if len(data) > LONGEST_LINE:  # a line that nobody wants: go on behind it
                self._pass(data)
                self._long = True
            return []
        self._pass(data[:end])
        lines = data[: end - 1].split(b"\n")
        if self._long:
            self._long, lines[0] = False, b"?"
        return lines

    def _pass(self, data: bytes) -> None:
        self._at += len(data)
        self._guard = (self._guard + data[-_GUARD:])[-_GUARD:]


class Curve:
    """The values of one key: all of them while they are few; then means over stretches of equal length, and
    the last ones as they were, which stand for the end of the curve.
    """

    def __init__(self) -> None:
        self._sums = tuple(array("d") for _ in range(3))
        """Of steps, student tokens and values, by stretch; the last one is open."""
        self._stretch, self._open, self.count = 1, 0, 0
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=RECENT)

    def add(self, step: float, tokens: float, value: float) -> None:
        """One step's value."""
        if self._open == 0:
            if len(self._sums[0]) >= POINTS:
                self._halve()
            for sums in self._sums:
                sums.append(0.0)
        for sums, number in zip(self._sums, (step, tokens, value), strict=True):
            sums[-1] += number
        self._open = (self._open + 1) % self._stretch
        self._recent.append((step, tokens, value))
        self.count += 1

    def column(self) -> tuple[list[float], list[float], list[float]]:
        """(steps, student tokens, values), as `StageResult.column` has them."""
        if self._stretch == 1:
            steps, tokens, values = (list(sums) for sums in self._sums)
            return steps, tokens, values
        closed = len(self._sums[0]) - (self._open > 0)
        recent = list(self._recent)
        points = [
            tuple(sums[place] / self._stretch for sums in self._sums)
            for place in range(closed)
            if (place + 1) * self._stretch <= self.count - len(recent)
        ]
        points += recent
        steps, tokens, values = (list(column) for column in zip(*points, strict=True))
        return steps, tokens, values

    @property
    def last(self) -> float:
        return self._recent[-1][2]

    def _halve(self) -> None:
        self._sums = tuple(
            array("d", (a + b for a, b in zip(sums[::2], sums[1::2], strict=True))) for sums in self._sums
        )
        self._stretch *= 2


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A rule that a step broke."""

    step: int
    rule: str
    metric: str
    value: float | None
    bound: float | None
    action: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Response:
    """One of the responses to a prompt of the last step."""

    text: str
    reward: float | None
    parts: dict[str, float]
    tokens: int
    cut: bool
    teacher: str


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A prompt of the last step, with some of the responses to it."""

    domain: str
    prompt: str
    label: str
    responses: int
    shown: list[Response]


@dataclass(frozen=True, slots=True)
class LiveResult(StageResult):
    """A stage as the report's charts ask for it, from curves."""

    curves: dict[str, Curve] = field(default_factory=dict)

    def column(self, key: str) -> tuple[list[float], list[float], list[float]]:
        curve = self.curves.get(key)
        return ([], [], []) if curve is None else curve.column()

    def names(self, prefix: str) -> list[str]:
        return [key.removeprefix(prefix) for key in self.curves if key.startswith(prefix)]


class LiveStage:
    """One stage, as far as it is written."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self._folder = folder
        self._metrics, self._flags = Appended(folder / METRICS), Appended(folder / FLAGS)
        self._samples = _Small(folder / LAST_SAMPLES)
        self.done = False
        self.flagged: deque[BrokenRule] = deque(maxlen=FLAGS_KEPT)
        self.samples: list[ShownPrompt] = []
        self.samples_step = 0
        self._begin()

    def _begin(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.step, self.steps, self.seconds, self.tokens, self.unreadable = 0, 0, 0.0, 0.0, 0
        self._phases: dict[str, float] = {}

    @property
    def read(self) -> int:
        """Bytes of metrics that the last look has read."""
        return self._metrics.read

    @property
    def unread(self) -> int:
        """Bytes of metrics that later looks will read."""
        return self._metrics.unread

    @property
    def changed(self) -> float:
        """When a step was written last, in seconds since the epoch; 0 before the first."""
        return self._metrics.changed if self.steps else 0.0

    def look(self, most: int) -> bool:
        """Read on, `most` bytes of metrics; whether there is anything new."""
        anew, lines = self._metrics.look(most)
        if anew:
            self._begin()
        for line in lines:
            self._row(line)
        flags_anew, flags = self._flags.look(LONGEST_LINE + 1)
        if flags_anew:
            self.flagged.clear()
        for line in flags:
            flag = _flag(line)
            if flag is not None and flag not in self.flagged:
                self.flagged.append(flag)
        sampled = self._samples.look()
        if sampled:
            self.samples_step, self.samples = _samples(self._samples.document)
        done, self.done = self.done, (self._folder / DONE).is_file()
        return bool(anew or lines or flags_anew or flags or sampled or done != self.done)

    @property
    def flags(self) -> list[BrokenRule]:
        """The rules that were broken, oldest first; without those of steps that a resumed run repeats."""
        return [flag for flag in self.flagged if flag.step <= self.step + 1]

    def result(self) -> LiveResult:
        """For the charts."""
        return LiveResult(
            self.name, self.seconds, int(self.tokens), self.steps, None, self._phases, [], self.curves
        )

    def last(self, key: str) -> float | None:
        """The latest value of a metric."""
        return self.curves[key].last if key in self.curves else None

    def _row(self, line: bytes) -> None:
        try:
            row = read_document(line, LONGEST_LINE)
            step = row["step"]
            if not _number(step) or not isinstance(step, int):
                raise ValueError("it has no step")
        except (ValueError, TypeError, KeyError):
            self.unreadable += 1
            return
        tokens = row.get("tokens/student", 0)
        self.tokens = float(tokens) if _number(tokens) else 0.0
        self.step, self.steps = step, self.steps + 1
        self.seconds = float(row["time"]) if _number(row.get("time")) else self.seconds
        for key, value in row.items():
            if key in ("step", "time", "tokens/student") or not _number(value) or len(key) > _NAME:
                continue
            if key.startswith("time/"):
                phase = key.removeprefix("time/")
                if phase in self._phases or len(self._phases) < 32:
                    self._phases[phase] = self._phases.get(phase, 0.0) + float(value)
            if key not in self.curves:
                if len(self.curves) >= KEYS:
                    continue
                self.curves[key] = Curve()
            self.curves[key].add(float(step), self.tokens, float(value))


class LiveRun:
    """A run folder, whether it is there yet or not."""

    def __init__(self, path: Path, label: str) -> None:
        self.path, self.label = path, label
        self.stages: dict[str, LiveStage] = {}
        self._config = _Small(path / "config.json")
        self._asked: dict[str, Any] = {}
        self.version = 0
        """Grows when a look finds something new."""

    @property
    def there(self) -> bool:
        """Whether there is something of a run."""
        return bool(self.stages or self._asked)

    @property
    def unread(self) -> int:
        """Bytes that later looks will read."""
        return sum(stage.unread for stage in self.stages.values())

    def look(self) -> None:
        """Read on, `AT_ONCE` bytes at most."""
        news = self._config.look()
        if news:
            self._asked = _settings(self._config.document)
        found = _stage_folders(self.path / "stages")
        if list(self.stages) != [folder.name for folder in found]:
            self.stages = {path.name: self.stages.get(path.name) or LiveStage(path) for path in found}
            news = True
        left = AT_ONCE
        for stage in self.stages.values():
            news |= stage.look(left if left > LONGEST_LINE else 0)
            left -= stage.read
        self.version += news

    @property
    def ordered(self) -> list[LiveStage]:
        """The stages in the order in which they run."""
        return sorted(self.stages.values(), key=lambda stage: stage_order(stage.name))

    @property
    def current(self) -> LiveStage | None:
        """The stage that was written to last; of a run that is done the merge."""
        going = [stage for stage in self.ordered if not stage.done and stage.steps]
        if going:
            return max(going, key=lambda stage: stage.changed)
        with_samples = [stage for stage in self.ordered if stage.samples]
        merged = [stage for stage in with_samples if stage.name == "merge"]
        return (merged or with_samples or [stage for stage in self.ordered if stage.steps] or [None])[-1]

    def run(self) -> Run:
        """As the report's charts take it."""
        stages: list[StageResult] = [stage.result() for stage in self.ordered if stage.steps]
        domains, config = self._asked.get("domains", []), {"distill": self._asked.get("distill", {})}
        return Run(self.label, {}, domains, [], {}, stages, {}, {}, config)


class _Small:
    """A small JSON file that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self.document: Any = None
        """What it holds; `None` if that cannot be read."""

    def look(self) -> bool:
        """Whether it is another one than at the last look."""
        seen, data = None, None
        with contextlib.suppress(OSError):
            descriptor = open_plain(self._path)
            with os.fdopen(descriptor, "rb") as file:
                known = os.fstat(descriptor)
                seen = (known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns)
                if seen == self._seen:
                    return False
                data = file.read(_SMALL + 1)
        changed = seen != self._seen
        self._seen, self.document = seen, None
        if data is not None:
            with contextlib.suppress(ValueError):
                self.document = read_document(data, _SMALL)
        return changed


def _stage_folders(folder: Path) -> list[Path]:
    """Folders of stages; a link may lead out of the run folder, and is none."""
    if folder.is_symlink():
        return []
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [folder / name for name in names if len(name) <= _NAME][:STAGES]


def _settings(config: Any) -> dict[str, Any]:
    """What the charts ask of a recipe."""
    if not isinstance(config, dict):
        return {}
    domains = config.get("domains")
    distill = config.get("distill")
    coef = distill.get("rl_coef") if isinstance(distill, dict) else None
    return {
        "domains": [_text(name, _NAME) for name in domains][:DOMAINS] if isinstance(domains, dict) else [],
        "distill": {"rl_coef": float(coef) if _number(coef) else 0.0},
    }


def _flag(line: bytes) -> BrokenRule | None:
    try:
        told = read_document(line, LONGEST_LINE)
        step = told["step"]
    except (ValueError, TypeError, KeyError):
        return None
    if not _number(step) or not isinstance(step, int):
        return None
    value, bound = (_real(told.get(key)) for key in ("value", "bound"))
    rule, metric, action = (_text(told.get(key), _NAME) for key in ("rule", "metric", "action"))
    return BrokenRule(step, rule, metric, value, bound, action, _text(told.get("sentence"), _SENTENCE))


def _samples(document: Any) -> tuple[int, list[ShownPrompt]]:
    if not isinstance(document, dict) or not isinstance(document.get("step"), int):
        return 0, []
    found = []
    for told in _dicts(document.get("prompts"), 16):
        shown = [
            Response(
                _text(one.get("text"), _TEXT),
                _real(one.get("reward")),
                {_text(k, _NAME): float(v) for k, v in _items(one.get("parts")) if _number(v)},
                int(_real(one.get("tokens")) or 0),
                one.get("cut") is True,
                _text(one.get("teacher"), _NAME),
            )
            for one in _dicts(told.get("shown"), 16)
        ]
        domain, prompt, label = (_text(told.get(key), _TEXT) for key in ("domain", "prompt", "label"))
        found.append(
            ShownPrompt(domain, prompt, label, int(_real(told.get("responses")) or len(shown)), shown)
        )
    return document["step"], found


def _dicts(value: Any, most: int) -> Iterable[dict[str, Any]]:
    return [one for one in value[:most] if isinstance(one, dict)] if isinstance(value, list) else []


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items())[:16] if isinstance(value, dict) else []


def _text(value: Any, most: int) -> str:
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return text if len(text) <= most else f"{text[:most]}\u2026"


def _real(value: Any) -> float | None:
    return float(value) if _number(value) else None


def _number(value: Any) -> TypeGuard[int | float]:
    """Whether it can be drawn: a finite number, and so is the sum of many."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < 1e100  # not so: NaN, too
