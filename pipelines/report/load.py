"""Reads a run folder into the few typed records the report is drawn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opd.errors import RunFolderError, reason_of
from opd.metrics import FILE_NAME as METRICS
from opd.pipelines.evaluation.statistics import Count, Interval
from opd.pipelines.records.layout import DONE
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.records.settings import Recorded
from opd.pipelines.records.stage_names import KINDS, kind_of


@dataclass(frozen=True, slots=True)
class DomainAccuracy:
    """Right answers of one model on one domain's held-out prompts."""

    count: Count
    interval: Interval


@dataclass(frozen=True, slots=True)
class ModelResult:
    """One evaluated model."""

    name: str
    kind: str
    """`base`, `specialist` (a teacher trained by the run), `teacher` (one given), `merged` or `baseline`."""
    sampled: dict[str, DomainAccuracy]
    greedy: dict[str, DomainAccuracy]
    mean_length: dict[str, float]
    student_tokens: int = 0
    """Tokens its own training sampled; 0 for a merge of weights."""
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, dict[str, float]] = field(default_factory=dict)
    """Quantiles of the sampled responses' tokens, by domain."""
    elsewhere: str = ""
    """Why its answers were not written by the recipe's engine, if they were not."""
    sets: dict[str, DomainAccuracy] = field(default_factory=dict)
    """Sampled, by evaluation set."""
    several: dict[str, dict[str, Interval]] = field(default_factory=dict)
    """Domain or set -> `pass@4`, `maj@4` and the like, where several answers to each prompt were measured."""
    episodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Domain or set with an environment -> what `evaluation.measure.of_episodes` says."""

    @property
    def teaches(self) -> bool:
        return self.kind in ("specialist", "teacher")

    def counts(self, domains: Sequence[str]) -> list[Count]:
        """Sampled counts of `domains`, in that order."""
        return [self.sampled[domain].count for domain in domains]


@dataclass(frozen=True, slots=True)
class StageResult:
    """One stage of the run."""

    name: str
    seconds: float
    student_tokens: int
    steps: int
    peak_rss_mb: float | None
    phases: dict[str, float]
    """Seconds per phase (`rollout`, `score`, `train`, `sync`)."""
    metrics: list[dict[str, Any]]
    """One object per step; empty for a stage that logs none."""

    def column(self, key: str) -> tuple[list[float], list[float], list[float]]:
        """(steps, student tokens, values) of the steps that logged a finite `key`."""
        rows = [row for row in self.metrics if _finite(row.get(key))]
        steps = [float(row.get("step", index)) for index, row in enumerate(rows)]
        tokens = [float(row.get("tokens/student", 0)) for row in rows]
        return steps, tokens, [float(row[key]) for row in rows]

    def names(self, prefix: str) -> list[str]:
        """What follows `prefix` in the keys of the metrics, in order of appearance."""
        keys = dict.fromkeys(key for row in self.metrics for key in row if key.startswith(prefix))
        return [key.removeprefix(prefix) for key in keys]


@dataclass(frozen=True, slots=True)
class RedFlag:
    """A rule of `watch` that fired."""

    stage: str
    step: int
    rule: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Run:
    """Everything the report shows."""

    name: str
    facts: dict[str, Any]
    """`seed`, `version`, `created` and `machine`, where known."""
    domains: list[str]
    models: list[ModelResult]
    recovery: dict[str, dict[str, Interval]]
    stages: list[StageResult]
    teachers: dict[str, dict[str, float]]
    counters: dict[str, float]
    config: dict[str, Any]
    folders: dict[str, dict[str, str]] = field(default_factory=dict)
    """Model -> its folder, digest, prompt format and loading lines, as far as each is known."""
    answers: dict[str, Any] = field(default_factory=dict)
    """Domain -> a few answers side by side, as `pipelines/evaluation/evaluate.py` gives them."""
    contamination: dict[str, Any] = field(default_factory=dict)
    """Of evaluation prompts in what was trained on, as `pipelines/evaluation/evaluate.py` gives it."""
    difficulty: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Domain -> what its specialist has measured of its prompts (`pipelines/stages/difficulty.py`)."""
    code_changes: list[dict[str, Any]] = field(default_factory=list)
    """What changed in the user's own code during the run, as `RunFolder.code_changes` says it."""
    setting_changes: list[Recorded] = field(default_factory=list)
    """What the recipe has said otherwise since the run was started, oldest first."""
    flags: list[RedFlag] = field(default_factory=list)
    """Stage by stage, in the order in which they fired."""

    @property
    def confidence(self) -> float:
        """Level of every interval, in (0, 1)."""
        return float(self.config.get("evaluation", {}).get("confidence", 0.95))

    def model(self, name: str) -> ModelResult | None:
        return next((model for model in self.models if model.name == name), None)

    def stage(self, name: str) -> StageResult | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    @property
    def trained_here(self) -> bool:
        """Whether every specialist was trained in this run, and so began as its base."""
        return not self.config.get("teachers")

    @property
    def teacher_word(self) -> str:
        """What its teachers are called: "specialist" where the run trained all of them."""
        return "teacher" if any(model.kind == "teacher" for model in self.models) else "specialist"

    @property
    def sets(self) -> list[str]:
        """The evaluation sets that a model was measured on."""
        return list(dict.fromkeys(name for model in self.models for name in model.sets))

    def teachers_of(self, domain: str) -> list[ModelResult]:
        """The evaluated teachers of `domain`."""
        config = self.config.get("domains", {}).get(domain, {})
        if (config.get("distill") or {}).get("kl_coef") == 0:
            return []  # its reward alone counts
        named = config.get("teacher") or domain
        names = [named] if isinstance(named, str) else list(named)
        found = [self.model(f"specialist:{name}") or self.model(f"teacher:{name}") for name in names]
        return [model for model in found if model is not None and domain in model.sampled]

    def teacher(self, domain: str) -> ModelResult | None:
        """The evaluated teacher of `domain`; of several the one that is right most often there."""
        found = self.teachers_of(domain)
        return max(found, key=lambda model: model.sampled[domain].count.accuracy) if found else None

    def best_of_several(self) -> dict[str, str]:
        """Domain -> name of its best teacher, for the domains with several that were evaluated."""
        return {
            domain: best.name.partition(":")[2]
            for domain in self.domains
            if len(self.teachers_of(domain)) > 1 and (best := self.teacher(domain))
        }


def load_run(folder: Path) -> Run:
    """Read `results.json`, `config.json` and every `stages/*/metrics.jsonl` that exists.

    Raises `RunFolderError` if `folder` holds neither results nor metrics, or a file of it cannot be read.
    """
    run = RunFolder.attach(folder)
    results = run.read_results()
    stages = {path.parent.name for path in folder.glob("stages/*/*") if path.name in (METRICS, DONE)}
    metrics = {stage: run.read_metrics(stage) for stage in sorted(stages)}
    if not results and not any(metrics.values()):
        raise RunFolderError(
            f"{folder} holds no results.json and no stages/*/metrics.jsonl: give the folder of a run that "
            "has started"
        )
    try:
        found = _assemble(results, run.read_config(), metrics, fallback=folder.name)
        told = [stage.name for stage in found.stages if stage.name in metrics]
        flags = [flag for stage in told for flag in _red_flags(run, stage)]
        code, settings = run.code_changes, run.setting_changes
        return replace(found, code_changes=code, setting_changes=settings, flags=flags)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RunFolderError(
            f"{folder / 'results.json'} is malformed ({reason_of(error)}): write it again with"
            " `opd evaluate RECIPE --resume`"
        ) from error


def _red_flags(run: RunFolder, stage: str) -> list[RedFlag]:
    rows = run.read_flags(stage)
    try:
        return [RedFlag(stage, int(row["step"]), str(row["rule"]), str(row["sentence"])) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{run.flags(stage)} holds no flags ({reason_of(error)}): restore it") from error


def _assemble(results: dict, config: dict, metrics: dict[str, list[dict]], fallback: str) -> Run:
    models = [_model(entry) for entry in results.get("models", [])]
    known = {entry["name"]: entry for entry in results.get("stages", [])}
    order = [*known, *sorted((name for name in metrics if name not in known), key=stage_order)]
    return Run(
        name=str(results.get("name") or config.get("name") or fallback),
        facts={key: results[key] for key in ("seed", "version", "created", "machine") if key in results},
        domains=list(results.get("domains") or config.get("domains", {})),
        models=models,
        recovery={
            model: {domain: _interval(value) for domain, value in values.items() if value}
            for model, values in results.get("recovery", {}).items()
        },
        stages=[_stage(name, known.get(name, {}), metrics.get(name, [])) for name in order],
        teachers=results.get("teachers", {}),
        counters=results.get("counters", {}),
        config=config,
        folders=results.get("folders", {}),
        answers=results.get("answers", {}),
        contamination=results.get("contamination", {}),
        difficulty=results.get("difficulty", {}),
    )


def _model(entry: dict) -> ModelResult:
    domains, sets = entry.get("domains", {}), entry.get("sets", {})
    several = {name: _several(value) for name, value in (domains | sets).items()}
    return ModelResult(
        name=entry["name"],
        kind=entry["kind"],
        sampled={name: _accuracy(value["sampled"]) for name, value in domains.items()},
        greedy={name: _accuracy(value["greedy"]) for name, value in domains.items() if "greedy" in value},
        mean_length={name: value["mean_length"] for name, value in domains.items() if "mean_length" in value},
        student_tokens=int(entry.get("student_tokens", 0)),
        seconds=float(entry.get("seconds", 0.0)),
        settings=entry.get("settings") or {},
        lengths={name: value["lengths"] for name, value in domains.items() if "lengths" in value},
        elsewhere=str(entry.get("engine_why", "")),
        sets={name: _accuracy(value["sampled"]) for name, value in sets.items()},
        several={name: found for name, found in several.items() if found},
        episodes={n: value["episodes"] for n, value in (domains | sets).items() if "episodes" in value},
    )


def _several(entry: dict) -> dict[str, Interval]:
    return {
        f"{word}@{k}": _interval(value)
        for key, word in (("pass_at", "pass"), ("maj_at", "maj"))
        for k, value in entry.get(key, {}).items()
    }


def _accuracy(entry: dict) -> DomainAccuracy:
    interval = Interval(float(entry["accuracy"]), float(entry["low"]), float(entry["high"]))
    worth = entry.get("worth")
    count = Count(int(entry["correct"]), int(entry["total"]), None if worth is None else float(worth))
    return DomainAccuracy(count, interval)


def _interval(entry: dict) -> Interval:
    return Interval(float(entry["value"]), float(entry["low"]), float(entry["high"]))


def _stage(name: str, entry: dict, metrics: list[dict]) -> StageResult:
    """A stage that is still running has no entry yet: its numbers are then taken from its metrics."""
    last = metrics[-1] if metrics else {}
    phases = entry.get("phases")
    if phases is None:
        keys = dict.fromkeys(key for row in metrics for key in row if key.startswith("time/"))
        phases = {key.removeprefix("time/"): sum(row.get(key, 0.0) for row in metrics) for key in keys}
    return StageResult(
        name=name,
        seconds=float(entry.get("seconds", last.get("time", 0.0))),
        student_tokens=int(entry.get("student_tokens", last.get("tokens/student", 0))),
        steps=int(entry.get("steps", len(metrics))),
        peak_rss_mb=entry.get("peak_rss_mb"),
        phases={phase: float(seconds) for phase, seconds in phases.items()},
        metrics=metrics,
    )


def stage_order(name: str) -> tuple[int, str]:
    """Sorts stages as they run."""
    kind = kind_of(name)
    return (KINDS.index(kind) if kind else len(KINDS)), name


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
