"""Read a run folder into the records of the pages.

`load_run` reads a complete one. It compares each byte with its digest, and damage is an error. `LiveRun`
reads on at each call, in bounded memory. It trusts no file, and skips files that are not plain files of the
run, too long, or of another form. Files may appear later, be cut in the middle of a line, go away, or be
rewritten by a resumed run. Then they are read from their beginning. Both fill the same records.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from opd.errors import RunFolderError, reason_of
from opd.metrics import FILE_NAME as METRICS
from opd.metrics import FLAGS
from opd.pipelines.evaluation.statistics import Count, Interval
from opd.pipelines.records.layout import CONFIG, DONE, LAST_SAMPLES
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.report.results import (
    LONGEST_NAME,
    DomainAccuracy,
    ModelResult,
    RedFlag,
    Response,
    RoundResult,
    Run,
    ShownPrompt,
    StageResult,
    is_number,
    stage_order,
)
from opd.storage.files import open_plain
from opd.untrusted import read_document

LONGEST_LINE = 1 << 22
_SMALL = 1 << 22
"""Maximum bytes of a file that is replaced as a whole."""
_GUARD = 64
"""Bytes before the read position, to tell a rewritten file from a grown one. A line of metrics ends with a
digest of all lines up to it."""


class AppendedFile:
    """The lines that are appended to the file at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read, self.unread = 0, 0
        """Bytes that the last look read, and bytes it left, with a line without its end."""
        self.changed = 0.0
        """Time of the last write, in seconds since the epoch."""
        self._file: tuple[int, int] | None = None
        self._at = 0
        self._guard = b""
        self._long = False

    def read_appended(self, most: int) -> tuple[bool, list[bytes]]:
        """Return whether the lines read so far are void, and the new complete lines within `most` bytes."""
        try:
            descriptor = open_plain(self.path)
        except OSError:
            anew = self._at > 0
            self._reset_position(None)
            self.read = self.unread = 0
            return anew, []
        try:
            stat = os.fstat(descriptor)
            file, anew = (stat.st_dev, stat.st_ino), False
            is_continued = file == self._file and stat.st_size >= self._at
            if is_continued:
                guard = os.pread(descriptor, len(self._guard), self._at - len(self._guard))
                is_continued = guard == self._guard
            if not is_continued:
                anew = self._at > 0
                self._reset_position(file)
            data = os.pread(descriptor, max(0, min(most, stat.st_size - self._at)), self._at)
        except OSError:  # a failing disk: a later look may read it
            return False, []
        finally:
            os.close(descriptor)
        self.changed, self.read = stat.st_mtime, len(data)
        lines = self._split_lines(data)
        self.unread = max(0, stat.st_size - self._at)
        return anew, lines

    def _reset_position(self, file: tuple[int, int] | None) -> None:
        self._file, self._at, self._guard, self._long = file, 0, b"", False

    def _split_lines(self, data: bytes) -> list[bytes]:
        end = data.rfind(b"\n") + 1
        if not end:
            if len(data) > LONGEST_LINE:  # a line that is too long: skip it
                self._advance_position(data)
                self._long = True
            return []
        self._advance_position(data[:end])
        lines = data[: end - 1].split(b"\n")
        if self._long:
            self._long, lines[0] = False, b"?"
        return lines

    def _advance_position(self, data: bytes) -> None:
        self._at += len(data)
        self._guard = (self._guard + data[-_GUARD:])[-_GUARD:]


class ReplacedFile:
    """The small JSON file at `path`, which is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, ...] | None = None
        self._document: Any = None

    @property
    def is_present(self) -> bool:
        """The last look found it."""
        return self._identity is not None

    def pop_document(self) -> Any:
        """Return its document at the last look, once. `None` if it cannot be read."""
        document, self._document = self._document, None
        return document

    def read_changed(self) -> bool:
        """Read it again, and return whether it changed since the last look."""
        identity, data = None, None
        with contextlib.suppress(OSError):
            descriptor = open_plain(self._path)
            with os.fdopen(descriptor, "rb") as file:
                stat = os.fstat(descriptor)
                identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
                if identity == self._identity:
                    return False
                data = file.read(_SMALL + 1)
        changed = identity != self._identity
        self._identity, self._document = identity, None
        if data is not None:
            with contextlib.suppress(ValueError):
                self._document = read_document(data, _SMALL)
        return changed


AT_ONCE = 1 << 25
"""Bytes of a run that one look reads. The rest comes with the next ones."""
STAGES, DOMAINS, FLAGS_KEPT = 64, 64, 100
"""Limits of a live run."""
_SENTENCE, _TEXT = 1000, 8000
"""Maximum characters of shown text."""
_UNUSABLE = (KeyError, TypeError, AttributeError, ValueError, OverflowError)


def load_run(folder: Path) -> Run:
    """Read `results.json`, `config.json` and every `stages/*/metrics.jsonl` that exists.

    Raises `RunFolderError` if `folder` has neither results nor metrics, or a file of it cannot be read.
    """
    run = RunFolder.attach(folder)
    results = run.read_results()
    names = {path.parent.name for path in folder.glob("stages/*/*") if path.name in (METRICS, DONE)}
    stages = {name: StageResult(name, run.read_metrics(name)) for name in sorted(names)}
    if not results and not any(stage.rows for stage in stages.values()):
        raise RunFolderError(
            f"{folder} holds no results.json and no stages/*/metrics.jsonl: give the folder of a run that "
            "has started"
        )
    for name, stage in stages.items():
        rows = run.read_flags(name)
        try:
            stage.flags = [_parse_flag(row) for row in rows]
        except _UNUSABLE as error:
            raise RunFolderError(
                f"{run.flags_path(name)} holds no flags ({reason_of(error)}): restore it"
            ) from error
        done = ReplacedFile(run.stage_path(name) / DONE)  # the metrics' reader has compared its digest
        done.read_changed()
        stage.done, stage.record = done.is_present, _done_record(done.pop_document())
    try:
        built = _build_run(results, run.read_config(), stages, folder.name)
    except _UNUSABLE as error:
        raise RunFolderError(
            f"{folder / 'results.json'} is malformed ({reason_of(error)}): write it again with"
            " `opd evaluate RECIPE --resume`"
        ) from error
    return replace(built, code_changes=run.code_changes, setting_changes=run.setting_changes)


@contextmanager
def drawing_errors(folders: object) -> Iterator[None]:
    """Raise `RunFolderError` if the settings or results in `folders` are malformed."""
    from jinja2 import TemplateError

    try:
        yield
    except (*_UNUSABLE, TemplateError) as error:
        raise RunFolderError(
            f"the report of {folders} cannot be drawn ({type(error).__name__}: {reason_of(error)}): its"
            " config.json or results.json is not as a run writes it; restore them"
        ) from error


class LiveRun:
    """A run folder, there or not yet, and the results of the looks into it."""

    def __init__(self, path: Path, label: str) -> None:
        self.path, self.label = path, label
        self._stages: dict[str, _LiveStage] = {}
        self._config = ReplacedFile(path / CONFIG)
        self._settings: dict[str, Any] = {}
        self.version = 0
        """Grows when a look finds something new."""

    @property
    def is_present(self) -> bool:
        """It has files of a run."""
        return bool(self._stages or self._settings)

    @property
    def unread_bytes(self) -> int:
        """Bytes that later looks will read."""
        return sum(stage.metrics.unread for stage in self._stages.values())

    def read_changes(self) -> None:
        """Read on, at most `AT_ONCE` bytes."""
        news = self._config.read_changed()
        if news:
            config, self._settings = self._config.pop_document(), {}
            if isinstance(config, dict):  # only the settings that the charts use
                domains, distill = config.get("domains"), config.get("distill")
                coef = distill.get("rl_coef") if isinstance(distill, dict) else None
                names = list(domains)[:DOMAINS] if isinstance(domains, dict) else []
                self._settings = {
                    "domains": {_bounded_text(name, LONGEST_NAME): {} for name in names},
                    "distill": {"rl_coef": float(coef) if is_number(coef) else 0.0},
                }
        folders = _stage_folders(self.path / "stages")
        if list(self._stages) != [folder.name for folder in folders]:
            self._stages = {path.name: self._stages.get(path.name) or _LiveStage(path) for path in folders}
            news = True
        budget = AT_ONCE
        for stage in self._stages.values():
            news |= stage.read_changes(budget if budget > LONGEST_LINE else 0)
            budget -= stage.metrics.read
        self.version += news

    def current_run(self) -> Run:
        """Return the results so far, with the begun stages in the order in which they run."""
        begun = [live.stage for live in self._stages.values() if live.stage.rows or live.stage.done]
        begun.sort(key=lambda stage: stage_order(stage.name))
        domains = list(self._settings.get("domains", ()))
        return Run(self.label, {}, domains, [], {}, begun, {}, {}, self._settings)


class _LiveStage:
    """The files of a stage, and their content so far."""

    def __init__(self, folder: Path) -> None:
        self.stage = StageResult(folder.name, bounded=True)
        self.metrics, self._flags = AppendedFile(folder / METRICS), AppendedFile(folder / FLAGS)
        self._samples, self._done = ReplacedFile(folder / LAST_SAMPLES), ReplacedFile(folder / DONE)
        self._flagged: deque[RedFlag] = deque(maxlen=FLAGS_KEPT)

    def read_changes(self, most: int) -> bool:
        """Read on, at most `most` bytes of metrics. Returns whether there is anything new."""
        stage = self.stage
        anew, lines = self.metrics.read_appended(most)
        if anew:
            stage.clear_rows()
        for line in lines:
            try:
                stage.add_row(_parse_row(line))
            except _UNUSABLE:
                stage.unreadable += 1
        stage.changed = self.metrics.changed if stage.rows else 0.0
        flags_anew, flags = self._flags.read_appended(LONGEST_LINE + 1)
        if flags_anew:
            self._flagged.clear()
        for line in flags:
            with suppress(*_UNUSABLE):
                flag = _parse_flag(_parse_row(line))
                if flag not in self._flagged:
                    self._flagged.append(flag)
        # Without flags of steps that a resumed run repeats.
        stage.flags = [flag for flag in self._flagged if flag.step <= stage.step + 1]
        sampled, ended = self._samples.read_changed(), self._done.read_changed()
        if sampled:
            stage.samples_step, stage.samples = _shown_samples(self._samples.pop_document())
        if ended:
            stage.done, stage.record = self._done.is_present, _done_record(self._done.pop_document())
        return bool(anew or lines or flags_anew or flags or sampled or ended)


def _parse_row(line: bytes) -> dict[str, Any]:
    """Return a line's object. Raises one of `_UNUSABLE` if it is none or has no step."""
    row = read_document(line, LONGEST_LINE)
    if type(row["step"]) is not int or not is_number(row["step"]):
        raise ValueError("it has no step")
    return row


def _parse_flag(row: Mapping[str, Any]) -> RedFlag:
    value, bound = (_number_or_none(row.get(key)) for key in ("value", "bound"))
    rule, metric, action = (_bounded_text(row.get(key), LONGEST_NAME) for key in ("rule", "metric", "action"))
    return RedFlag(
        int(row["step"]), rule, _bounded_text(row["sentence"], _SENTENCE), metric, value, bound, action
    )


def _build_run(results: dict, config: dict, stages: dict[str, StageResult], fallback: str) -> Run:
    listed = {entry["name"]: entry for entry in results.get("stages", [])}
    for name, entry in listed.items():
        stages.setdefault(name, StageResult(name)).record = _parse_record(entry)
    order = [*listed, *sorted((name for name in stages if name not in listed), key=stage_order)]
    return Run(
        name=str(results.get("name") or config.get("name") or fallback),
        facts={key: results[key] for key in ("seed", "version", "created", "machine") if key in results},
        domains=list(results.get("domains") or config.get("domains", {})),
        models=[_model_result(entry) for entry in results.get("models", [])],
        recovery={
            model: {domain: _parse_interval(value) for domain, value in values.items() if value}
            for model, values in results.get("recovery", {}).items()
        },
        stages=[stages[name] for name in order],
        teachers=results.get("teachers", {}),
        counters=results.get("counters", {}),
        config=config,
        folders=results.get("folders", {}),
        answers=results.get("answers", {}),
        contamination=results.get("contamination", {}),
        difficulty=results.get("difficulty", {}),
        rounds=[_round_result(entry) for entry in results.get("rounds", [])],
    )


def _round_result(entry: Mapping[str, Any]) -> RoundResult:
    gain = entry.get("gain")
    models = [_model_result(one) for one in entry["models"]]
    return RoundResult(int(entry["round"]), models, None if gain is None else float(gain))


def _parse_record(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a finished stage's record of time, tokens and memory. Raises one of `_UNUSABLE`."""
    kinds = {"seconds": float, "student_tokens": int, "steps": int, "peak_rss_mb": float}
    record: dict[str, Any] = {
        key: kind(entry[key]) for key, kind in kinds.items() if entry.get(key) is not None
    }
    if entry.get("phases") is not None:
        phases = entry["phases"].items()
        record["phases"] = {_bounded_text(phase, LONGEST_NAME): float(seconds) for phase, seconds in phases}
    return record


def _done_record(document: Any) -> dict[str, Any]:
    """Return `_parse_record` of a `done.json`, or nothing if it cannot be drawn."""
    try:
        record = _parse_record(document)
    except _UNUSABLE:
        return {}
    numbers = [value for key, value in record.items() if key != "phases"] + [
        *record.get("phases", {}).values()
    ]
    return record if len(numbers) < 99 and all(map(is_number, numbers)) else {}


def _model_result(entry: dict) -> ModelResult:
    domains, sets = entry.get("domains", {}), entry.get("sets", {})
    several: dict[str, dict[str, Interval]] = {}
    for name, value in (domains | sets).items():
        for key, word in (("pass_at", "pass"), ("maj_at", "maj")):
            for k, interval in value.get(key, {}).items():
                several.setdefault(name, {})[f"{word}@{k}"] = _parse_interval(interval)
    return ModelResult(
        name=entry["name"],
        kind=entry["kind"],
        sampled={name: _domain_accuracy(value["sampled"]) for name, value in domains.items()},
        greedy={
            name: _domain_accuracy(value["greedy"]) for name, value in domains.items() if "greedy" in value
        },
        mean_length={name: value["mean_length"] for name, value in domains.items() if "mean_length" in value},
        student_tokens=int(entry.get("student_tokens", 0)),
        seconds=float(entry.get("seconds", 0.0)),
        settings=entry.get("settings") or {},
        lengths={name: value["lengths"] for name, value in domains.items() if "lengths" in value},
        elsewhere=str(entry.get("engine_why", "")),
        sets={name: _domain_accuracy(value["sampled"]) for name, value in sets.items()},
        several=several,
        episodes={n: value["episodes"] for n, value in (domains | sets).items() if "episodes" in value},
    )


def _domain_accuracy(entry: dict) -> DomainAccuracy:
    interval = Interval(float(entry["accuracy"]), float(entry["low"]), float(entry["high"]))
    worth = entry.get("worth")
    count = Count(int(entry["correct"]), int(entry["total"]), None if worth is None else float(worth))
    return DomainAccuracy(count, interval)


def _parse_interval(entry: dict) -> Interval:
    return Interval(float(entry["value"]), float(entry["low"]), float(entry["high"]))


def _stage_folders(folder: Path) -> list[Path]:
    """Return the folders of stages. Links are left out because they may lead out of the run folder."""
    if folder.is_symlink():
        return []
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [folder / name for name in names if len(name) <= LONGEST_NAME][:STAGES]


def _shown_samples(document: Any) -> tuple[int, list[ShownPrompt]]:
    """Return the step and the prompts of a `last_samples` document, as far as they can be shown."""
    if not isinstance(document, dict) or not isinstance(document.get("step"), int):
        return 0, []
    prompts = []
    for entry in _first_dicts(document.get("prompts"), 16):
        responses = []
        for one in _first_dicts(entry.get("shown"), 16):
            parts = one.get("parts")
            items = list(parts.items())[:16] if isinstance(parts, dict) else []
            responses.append(
                Response(
                    _bounded_text(one.get("text"), _TEXT),
                    _number_or_none(one.get("reward")),
                    {_bounded_text(k, LONGEST_NAME): float(v) for k, v in items if is_number(v)},
                    int(_number_or_none(one.get("tokens")) or 0),
                    one.get("cut") is True,
                    _bounded_text(one.get("teacher"), LONGEST_NAME),
                )
            )
        domain, prompt, label = (
            _bounded_text(entry.get(key), _TEXT) for key in ("domain", "prompt", "label")
        )
        count = int(_number_or_none(entry.get("responses")) or len(responses))
        prompts.append(ShownPrompt(domain, prompt, label, count, responses))
    return document["step"], prompts


def _first_dicts(value: Any, most: int) -> Iterable[dict[str, Any]]:
    return [one for one in value[:most] if isinstance(one, dict)] if isinstance(value, list) else []


def _bounded_text(value: Any, most: int) -> str:
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return text if len(text) <= most else f"{text[:most]}\u2026"


def _number_or_none(value: Any) -> float | None:
    return float(value) if is_number(value) else None
