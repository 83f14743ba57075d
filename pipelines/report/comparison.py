"""Compare several runs, or one recipe under several seeds, in a terminal table and a page: `opd compare`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from opd.errors import ConfigError, RunFolderError
from opd.pipelines.evaluation.statistics import at_the_end, mean_accuracy
from opd.pipelines.records.settings import iterate_changes
from opd.pipelines.records.stage_names import stage_model
from opd.pipelines.report.display_text import model_label, point_bounds, points, teachers_label
from opd.pipelines.report.load import drawing_errors, load_run
from opd.pipelines.report.results import Run
from opd.pipelines.report.verdict import align_columns, compare_models, retained_shares
from opd.storage.files import write_atomic
from opd.untrusted import escape_controls

FREE = ("run_dir", "name")
"""Settings that do not affect the results."""
Rows = list[list[str]]


@dataclass(frozen=True)
class Runs:
    names: list[str]
    runs: list[Run]

    @classmethod
    def read(cls, folders: Sequence[Path]) -> Runs:
        """Load the runs. Raises `ConfigError` below two, `RunFolderError` without an evaluated merge."""
        if len({folder.resolve() for folder in folders}) < len(folders) or len(folders) < 2:
            raise ConfigError("opd compare takes two or more different run folders; give them")
        for folder in folders:
            if not folder.is_dir():
                raise RunFolderError(f"there is no run folder {folder}; check the path")
        runs = [load_run(folder) for folder in folders]
        for folder, run in zip(folders, runs, strict=True):
            merged = run.model("merged")
            if merged is None or not merged.sampled:
                raise RunFolderError(
                    f"{folder} has no evaluated merge to compare; run `opd evaluate RECIPE --resume` first"
                )
        short = [folder.name for folder in folders]
        return cls(short if len({*short}) == len(short) else [str(folder) for folder in folders], runs)

    def settings(self) -> Rows:
        """Return a row for every setting in which the runs differ, with each run's value."""
        keys: dict[str, None] = {}
        for run in self.runs[1:]:
            pair = (_flatten_settings(self.runs[0].config), _flatten_settings(run.config))
            keys |= dict.fromkeys(change.name for change in iterate_changes(*pair))
        models = [stage_model(stage.name) for run in self.runs for stage in run.stages]
        unused = [*FREE, "runtime", "launch"]
        if not any(model.startswith(("specialist:", "mixed_grpo")) for model in models):
            unused.append("specialist")  # no run trained a model with these settings
        settings = [_flatten_settings(run.config) for run in self.runs]
        return [
            [key, *(_format_setting(values[key]) if key in values else "-" for values in settings)]
            for key in keys
            if key.split(".")[0] not in unused
        ]

    @cached_property
    def seed_groups(self) -> list[list[int]]:
        """Indices of runs that differ in the seed alone, in order, of two or more: a mean makes sense."""
        groups: dict[tuple[str, ...], list[int]] = {}
        settings = [row[1:] for row in self.settings() if row[0] != "seed"]
        for index in range(len(self.runs)):
            groups.setdefault(tuple(row[index] for row in settings), []).append(index)
        return [group for group in groups.values() if len(group) > 1]

    def accuracy(self) -> Rows:
        """Return a row a model: its mean sampled accuracy in every run. Mean and deviation over the runs of
        each group follow. The last rows are the retained share and the KL at the end.
        """
        labels = dict.fromkeys(m.name for run in self.runs for m in run.models if not m.is_teacher)
        ranks = {"base": 0, "merged": 1}
        word = "teacher" if any(run.teacher_word == "teacher" for run in self.runs) else "specialist"
        rows = []
        for name in sorted(labels, key=lambda name: ranks.get(name, 2)):
            means: list[float | None] = []
            for run in self.runs:
                model = run.model(name)
                measured = [domain for domain in run.domains if model and domain in model.sampled]
                counts = model.sampled_counts(measured) if model else []
                means.append(mean_accuracy(counts).value if counts else None)
            rows.append(self._table_row(model_label(name), means))
        taught: list[float | None] = []
        shares: list[float | None] = []
        ends: list[float | None] = []
        for run in self.runs:
            counts = [best.sampled[d].count for d in run.domains if (best := run.best_teacher(d))]
            taught.append(mean_accuracy(counts).value if counts else None)
            merged, merge = run.model("merged"), run.merge
            retained = retained_shares(run, merged) if merged else {}
            shares.append(mean(retained.values()) if retained else None)
            values = merge.column_values("kl/mean")[2] if merge else []
            ends.append(at_the_end(values)[0] if values else None)
        rows.insert(1, self._table_row(teachers_label(word), taught))
        rows.append(self._table_row("Share kept, %", shares))
        rows.append(self._table_row("KL at the end", ends, digits=4, scale=1))
        return [row for row in rows if {*row[1:]} != {"-"}]

    def domains(self) -> Rows:
        """Return a row a domain: the merged student's accuracy in every run."""
        names = dict.fromkeys(domain for run in self.runs for domain in run.domains)
        rows = []
        for domain in names:
            merged = [run.model("merged") for run in self.runs]
            accuracies = [model.sampled.get(domain) if model else None for model in merged]
            values = [accuracy.interval.value if accuracy else None for accuracy in accuracies]
            rows.append(self._table_row(domain, values))
        return rows

    def head(self, first: str) -> list[str]:
        """Return the names of the columns."""
        means = []
        for group in self.seed_groups:
            names = ", ".join(self.names[index] for index in group)
            means.append("mean (sd)" if len(group) == len(self.runs) else f"mean (sd) of {names}")
        return [first, *self.names, *means]

    def verdict(self) -> str:
        """Describe the differences between the merged students against the evaluation's own noise."""
        first, sentences = self.runs[0], []
        merged = first.model("merged")
        for name, run in zip(self.names[1:], self.runs[1:], strict=True):
            other = run.model("merged")
            comparison = compare_models(first, merged, other) if merged and other else None
            if comparison is None:
                sentences.append(f"{self.names[0]} and {name} share no domain.")
                continue
            words = {"ahead": "is ahead of", "behind": "is behind", "level": "cannot be told from"}
            sentences.append(
                f"{self.names[0]} {words[comparison.outcome]} {name}: {points(comparison.gap.value)} points"
                f" ({point_bounds(comparison.gap)})."
            )
        kinds = {row[0] for row in self.settings()}
        subject = "one recipe under several seeds" if kinds else "runs of one recipe and seed"
        if kinds - {"seed"}:
            subject = "runs of different settings, which no mean is taken over"
            subject += " unless they differ in the seed alone" if self.seed_groups else ""
        return f"These are {subject}. {' '.join(sentences)}"

    def _table_row(
        self, label: str, values: Sequence[float | None], digits: int = 1, scale: float = 100
    ) -> list[str]:
        cells = ["-" if value is None else f"{scale * value:.{digits}f}" for value in values]
        for group in self.seed_groups:
            scaled = [scale * value for index in group if (value := values[index]) is not None]
            spread = f" ({stdev(scaled):.{digits}f})" if len(scaled) > 1 else ""
            cells.append(f"{mean(scaled):.{digits}f}{spread}" if scaled else "-")
        return [label, *cells]


def compare_runs(folders: Sequence[Path], page: Path) -> str:
    """Write `page`, and return the text for the terminal. Raises the errors of `Runs.read`, and
    `RunFolderError` if the page cannot be written, before anything is drawn.
    """
    runs = Runs.read(folders)
    if page.is_dir() or not page.parent.is_dir():
        raise RunFolderError(f"{page} cannot be written: give a file in a folder that is there with --out")
    if page.exists() and not _is_page(page):
        raise RunFolderError(f"{page} is there already and is no page; give another file with --out")
    with drawing_errors(", ".join(map(str, folders))):
        from opd.pipelines.report.figures import (  # matplotlib, which draws
            ChartGroup,
            overlay_panels,
            run_cues,
        )
        from opd.pipelines.report.page import draw_template

        panels = overlay_panels(list(zip(runs.names, runs.runs, strict=True)), ("reward/mean",), "merge")
        merges = ChartGroup("The merges", panels, run_cues(runs.names))
        title = f"{len(runs.runs)} runs"
        html = draw_template("comparison.html", title=title, runs=runs, merges=merges)
        write_atomic(page, html.encode())
        tables = [
            [runs.head("mean sampled accuracy, %"), *runs.accuracy()],
            [runs.head("merged student, %"), *runs.domains()],
        ]
        if differing := runs.settings():
            tables.append([["setting", *runs.names], *differing])
        parts = [runs.verdict(), *("\n".join(align_columns(table)) for table in tables)]
    return escape_controls("\n\n".join([*parts, f"page  {page}"]))


def _is_page(path: Path) -> bool:
    begins = b"<!doctype html>"
    try:
        with path.open("rb") as file:
            return file.read(len(begins)) in (begins, b"")
    except OSError:  # the later write reports it
        return True


def _flatten_settings(settings: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """Return every setting by its dotted field."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flatten_settings(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _format_setting(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
