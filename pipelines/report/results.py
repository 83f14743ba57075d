"""Hold a run's results so far, as the few typed records behind the pages."""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from opd.pipelines.evaluation.statistics import Count, Interval
from opd.pipelines.records.settings import RecordedChange
from opd.pipelines.records.stage_names import KINDS, kind_of, split_round

POINTS, RECENT = 512, 80
"""Maximum points of a live run's curve, and number of its last values stored as they were."""
KEYS, PHASES = 300, 32
"""Maximum curves and phases of a live run's stage."""
LONGEST_NAME = 200
"""Maximum characters of a key. A metric with a longer one is left out."""


@dataclass(frozen=True, slots=True)
class DomainAccuracy:
    """Right answers of one model on one domain's held-out prompts."""

    count: Count
    interval: Interval


@dataclass(frozen=True, slots=True)
class ModelResult:
    name: str
    kind: str
    """`base`, `specialist` (trained by the run), `teacher` (a given one), `merged` or `baseline`."""
    sampled: dict[str, DomainAccuracy]
    greedy: dict[str, DomainAccuracy]
    mean_length: dict[str, float]
    student_tokens: int = 0
    """Tokens its own training sampled, 0 for a merge of weights."""
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, dict[str, float]] = field(default_factory=dict)
    """Quantiles of the sampled responses' tokens, by domain."""
    elsewhere: str = ""
    """The reason if its answers do not come from the recipe's engine."""
    sets: dict[str, DomainAccuracy] = field(default_factory=dict)
    """Sampled, by evaluation set."""
    several: dict[str, dict[str, Interval]] = field(default_factory=dict)
    """Domain or set -> `pass@4`, `maj@4` and the like, if several answers to each prompt were measured."""
    episodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Domain or set with an environment -> result of `evaluation.measure.episode_statistics`."""

    @property
    def is_teacher(self) -> bool:
        return self.kind in ("specialist", "teacher")

    def sampled_counts(self, domains: Sequence[str]) -> list[Count]:
        return [self.sampled[domain].count for domain in domains]


class Curve:
    """The values of one key. All are stored while there are at most `points`. Later it stores means over
    stretches of equal length. The last values, for the end of the curve, are stored as they were.
    """

    def __init__(self, points: int = POINTS) -> None:
        self._points = points
        self._sums = tuple(array("d") for _ in range(3))
        """Sums of steps, student tokens and values, by stretch. The last one is open."""
        self._stretch, self._open, self.count = 1, 0, 0
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=RECENT)

    def add_point(self, step: float, tokens: float, value: float) -> None:
        if self._open == 0:
            if len(self._sums[0]) >= self._points:
                self._halve_points()
            for sums in self._sums:
                sums.append(0.0)
        for sums, number in zip(self._sums, (step, tokens, value), strict=True):
            sums[-1] += number
        self._open = (self._open + 1) % self._stretch
        self._recent.append((step, tokens, value))
        self.count += 1

    def column_values(self) -> tuple[list[float], list[float], list[float]]:
        """Return (steps, student tokens, values), as `StageResult.column_values` does."""
        if self._stretch == 1:
            steps, tokens, values = (list(sums) for sums in self._sums)
            return steps, tokens, values
        closed = len(self._sums[0]) - (self._open > 0)
        recent = list(self._recent)
        points = [
            tuple(sums[index] / self._stretch for sums in self._sums)
            for index in range(closed)
            if (index + 1) * self._stretch <= self.count - len(recent)
        ]
        points += recent
        steps, tokens, values = (list(column) for column in zip(*points, strict=True))
        return steps, tokens, values

    @property
    def last_value(self) -> float:
        return self._recent[-1][2]

    def _halve_points(self) -> None:
        self._sums = tuple(
            array("d", (a + b for a, b in zip(sums[::2], sums[1::2], strict=True))) for sums in self._sums
        )
        self._stretch *= 2


@dataclass(frozen=True, slots=True)
class RedFlag:
    """A rule of `watch` that fired."""

    step: int
    rule: str
    sentence: str
    metric: str = ""
    value: float | None = None
    bound: float | None = None
    action: str = ""


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


class StageResult:
    """One stage so far: the rows of its metrics, and its record once it is done.

    Args:
        bounded: Limit the memory, for a live run of many days.
    """

    def __init__(self, name: str, rows: Iterable[Mapping[str, Any]] = (), *, bounded: bool = False) -> None:
        self.name = name
        self.done = False
        self.record: dict[str, Any] = {}
        """`seconds`, `student_tokens`, `steps`, `peak_rss_mb` and `phases` of a finished stage."""
        self.flags: list[RedFlag] = []
        """In the order in which they fired."""
        self.samples: list[ShownPrompt] = []
        self.samples_step = 0
        self.changed = 0.0
        """Time of the last step's write, in seconds since the epoch, 0 before the first."""
        self._bounded = bounded
        self.clear_rows()
        for row in rows:
            self.add_row(row)

    def clear_rows(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.held: dict[str, dict[str, float]] = {}
        """Bytes of each kind by phase, in the step with the largest sum."""
        self.step = self.rows = self.unreadable = 0
        self._time = self._tokens = 0.0
        self._phases: dict[str, float] = {}

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add the metrics of a step. Values that cannot be drawn are left out."""
        tokens, most = row.get("tokens/student", 0), KEYS if self._bounded else sys.maxsize
        self._tokens = float(tokens) if is_number(tokens) else 0.0
        self.step, self.rows = row["step"], self.rows + 1
        self._time = float(row["time"]) if is_number(row.get("time")) else self._time
        memory: dict[str, dict[str, float]] = {}
        for key, value in row.items():
            if key in ("step", "time", "tokens/student") or not is_number(value) or len(key) > LONGEST_NAME:
                continue
            kind, _, name = key.partition("/")
            if kind == "time" and (name in self._phases or len(self._phases) < PHASES):
                self._phases[name] = self._phases.get(name, 0.0) + value
            if key not in self.curves:
                if len(self.curves) >= most:
                    continue
                self.curves[key] = Curve(POINTS if self._bounded else sys.maxsize)
            self.curves[key].add_point(self.step, self._tokens, value)
            if kind == "memory":
                phase, _, part = name.partition("/")
                memory.setdefault(phase, {})[part] = float(value)
        for phase, parts in memory.items():
            if sum(parts.values()) > sum(self.held.get(phase, {}).values()):
                self.held[phase] = parts

    @property
    def seconds(self) -> float:
        return self.record.get("seconds", self._time)

    @property
    def student_tokens(self) -> int:
        return self.record.get("student_tokens", int(self._tokens))

    @property
    def steps(self) -> int:
        return self.record.get("steps", self.rows)

    @property
    def peak_rss_mb(self) -> float | None:
        return self.record.get("peak_rss_mb")

    @property
    def phases(self) -> dict[str, float]:
        """Seconds per phase (`rollout`, `score`, `train`, `sync`)."""
        return self.record.get("phases", self._phases)

    def column_values(self, key: str) -> tuple[list[float], list[float], list[float]]:
        """Return (steps, student tokens, values) of the steps that logged `key`."""
        curve = self.curves.get(key)
        return ([], [], []) if curve is None else curve.column_values()

    def names_under(self, prefix: str) -> list[str]:
        """Return the rest of the metrics' keys after `prefix`, in order of appearance."""
        return [key.removeprefix(prefix) for key in self.curves if key.startswith(prefix)]

    def last_value(self, key: str) -> float | None:
        """Return the latest value of a metric."""
        return self.curves[key].last_value if key in self.curves else None


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The measured specialists and student of a round, with the tokens of all rounds up to it."""

    number: int
    models: list[ModelResult]
    gain: float | None = None
    """Its measured gain, as `min_round_gain` has it."""

    def model(self, name: str) -> ModelResult | None:
        return next((model for model in self.models if model.name == name), None)


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    facts: dict[str, Any]
    """`seed`, `version`, `created` and `machine`, if known."""
    domains: list[str]
    models: list[ModelResult]
    recovery: dict[str, dict[str, Interval]]
    stages: list[StageResult]
    teachers: dict[str, dict[str, float]]
    counters: dict[str, float]
    config: dict[str, Any]
    folders: dict[str, dict[str, str]] = field(default_factory=dict)
    """Model -> its folder, digest, prompt format and loading lines, as far as known."""
    answers: dict[str, Any] = field(default_factory=dict)
    """Domain -> a few compared answers, from `pipelines/evaluation/evaluate.py`."""
    contamination: dict[str, Any] = field(default_factory=dict)
    """Evaluation prompts in training data, from `pipelines/evaluation/evaluate.py`."""
    difficulty: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Domain -> its specialist's measurements of its prompts (`pipelines/stages/difficulty.py`)."""
    code_changes: list[dict[str, Any]] = field(default_factory=list)
    """Changes of the user's own code during the run, as in `RunFolder.code_changes`."""
    setting_changes: list[RecordedChange] = field(default_factory=list)
    """Changes of the recipe since the run was started, oldest first."""
    rounds: list[RoundResult] = field(default_factory=list)
    """Every round of a run with several. `models` are those of the last one."""

    @property
    def confidence(self) -> float:
        """Level of every interval, in (0, 1)."""
        return float(self.config.get("evaluation", {}).get("confidence", 0.95))

    def model(self, name: str) -> ModelResult | None:
        return next((model for model in self.models if model.name == name), None)

    def stage(self, name: str) -> StageResult | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    @property
    def merges(self) -> list[StageResult]:
        """The merges of all rounds."""
        return [stage for stage in self.stages if kind_of(stage.name) == "merge"]

    @property
    def merge(self) -> StageResult | None:
        """The merge of the last round."""
        return max(self.merges, key=lambda stage: split_round(stage.name)[1], default=None)

    @property
    def flags(self) -> list[tuple[str, RedFlag]]:
        """(stage, flag) of every rule that fired, by stage and in order."""
        return [(stage.name, flag) for stage in self.stages for flag in stage.flags]

    @property
    def current(self) -> StageResult | None:
        """The stage with the latest write, or the merge of a finished run."""
        going = [stage for stage in self.stages if not stage.done and stage.rows]
        if going:
            return max(going, key=lambda stage: stage.changed)
        with_samples = [stage for stage in self.stages if stage.samples]
        merged = [stage for stage in with_samples if stage is self.merge]
        return (merged or with_samples or [stage for stage in self.stages if stage.rows] or [None])[-1]

    @property
    def trained_here(self) -> bool:
        """Every specialist was trained in this run, so it began as the run's base."""
        return not self.config.get("teachers")

    @property
    def teacher_word(self) -> str:
        """The word for its teachers: "specialist" if the run trained all of them."""
        return "teacher" if any(model.kind == "teacher" for model in self.models) else "specialist"

    @property
    def sets(self) -> list[str]:
        """The evaluation sets that a model was measured on."""
        return list(dict.fromkeys(name for model in self.models for name in model.sets))

    def teachers_of(self, domain: str) -> list[ModelResult]:
        config = self.config.get("domains", {}).get(domain, {})
        if (config.get("distill") or {}).get("kl_coef") == 0:
            return []  # only its reward counts
        teachers = config.get("teacher") or domain
        names = [teachers] if isinstance(teachers, str) else list(teachers)
        models = [self.model(f"specialist:{name}") or self.model(f"teacher:{name}") for name in names]
        return [model for model in models if model is not None and domain in model.sampled]

    def best_teacher(self, domain: str) -> ModelResult | None:
        """Return the evaluated teacher of `domain`, of several the one with the highest accuracy there."""
        teachers = self.teachers_of(domain)
        return max(teachers, key=lambda model: model.sampled[domain].count.accuracy) if teachers else None

    def best_of_several(self) -> dict[str, str]:
        """Return domain -> name of its best teacher, for the domains with several evaluated ones."""
        return {
            domain: best.name.partition(":")[2]
            for domain in self.domains
            if len(self.teachers_of(domain)) > 1 and (best := self.best_teacher(domain))
        }


def stage_order(name: str) -> tuple[int, int, int, str]:
    """Return the sort key of a stage in the order of a run."""
    kind, number = kind_of(name), split_round(name)[1]
    order = KINDS.index(kind) if kind else len(KINDS)
    in_rounds = kind in ("specialist", "merge") or (kind == "evaluate" and name != kind)
    return (KINDS.index("specialist") if in_rounds else order), number, order, name


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether it can be drawn: a finite number, small enough for sums of many."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < 1e100  # false for NaN, too
