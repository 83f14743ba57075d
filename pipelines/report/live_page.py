"""Draw pages of runs while they train: each run by itself, and several in the same charts.

A page is like the report: its style, its charts, its times, nothing from elsewhere. It has one script, which
the browser knows by its digest. The script requests the page's inside again and inserts the changes. Without
it the page reloads itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from markupsafe import Markup

from opd.pipelines.evaluation.statistics import at_the_end
from opd.pipelines.report import figures, page
from opd.pipelines.report.display_text import amount, format_duration, stage_label
from opd.pipelines.report.figures import ChartCues, ChartGroup
from opd.pipelines.report.load import LiveRun
from opd.pipelines.report.results import RedFlag, Response, Run, StageResult
from opd.pipelines.report.tables import Table, plain_table

SECONDS = 2
"""Seconds between two updates of an open page."""
SHARE = 0.05
"""Maximum share of a core's time for drawing, because the run needs it."""
FLAGS_SHOWN = 20
SCRIPT = (page.TEMPLATES / "live.js").read_text("utf-8").replace("SECONDS", str(1000 * SECONDS))
_DIGEST = b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none';"
    f" script-src 'sha256-{_DIGEST}'; connect-src 'self'"
)
"""The browser's permissions of a page: to be drawn, run that script, and send requests to its origin."""
_KEYS = (
    ("reward/mean", "Reward"),
    ("kl/mean", "KL"),
    ("loss/ce", "Loss"),
    ("entropy", "Entropy"),
    ("length/mean", "Length"),
    ("truncated", "Cut"),
    ("grad_norm", "Gradient norm"),
)
"""Columns of a stage's table."""


@dataclass(slots=True)
class _DrawnCharts:
    """The charts of the last drawing."""

    version: int
    curves: Markup
    charts: Markup
    """The charts at the end of the page."""
    at: float
    seconds: float


class PageBoard:
    """The pages of some runs. Not for several threads at once.

    Args:
        runs: In the order of their pages.
        clock: A monotonic clock, in seconds.
        spent: Seconds of processor time.
    """

    def __init__(
        self,
        runs: Sequence[LiveRun],
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self.runs = list(runs)
        self._clock, self._spent = clock, spent
        self._looked = -1.0
        self._drawn: dict[int | None, _DrawnCharts] = {}
        self._told: dict[int | None, tuple[int, Markup, Markup]] = {}
        """The text above the curves and below them, with its version of the runs."""

    def refresh_runs(self) -> None:
        """Read on, once a second at most, or while there is more to read."""
        if (
            self._looked < 0
            or self._clock() - self._looked >= 1
            or any(run.unread_bytes for run in self.runs)
        ):
            for run in self.runs:
                run.read_changes()
            self._looked = self._clock()

    def render_page(self, number: int | None) -> str:
        """Return the complete page of run `number`, or of all of them."""
        label = "several runs" if number is None else self.runs[number].label
        told = {
            "title": page.clean_text(f"{label}, live"),
            "policy": POLICY,
            "script": SCRIPT,
            "seconds": SECONDS,
        }
        return page.fill_template("live.html", part=self.render_content(number), **told)

    def render_content(self, number: int | None) -> Markup:
        """Draw the inside of that page: curves first."""
        self.refresh_runs()
        shown = self.runs if number is None else [self.runs[number]]
        version, runs = sum(run.version for run in shown), [run.current_run() for run in shown]
        if number not in self._told or self._told[number][0] != version:
            self._told[number] = version, *self._draw_numbers(number, shown, runs)
        (_, head, told), drawn = self._told[number], self._current_charts(number, version, runs)
        return head + drawn.curves + told + drawn.charts

    def _draw_numbers(
        self, number: int | None, shown: Sequence[LiveRun], runs: Sequence[Run]
    ) -> tuple[Markup, Markup]:
        """Draw the text above the curves and below them."""
        pages = [("/", "All runs"), *((f"/{place}", run.label) for place, run in enumerate(self.runs))]
        here, flags = "/" if number is None else f"/{number}", flags_of(shown)
        links, lines = pages if len(self.runs) > 1 else [], [status_line(run) for run in shown]
        head = page.draw_template("live_head.html", links=links, here=here, headlines=lines, flags=flags)
        tools = {"measured": flag_bound, "last_steps": last_steps, "every_number": every_number}
        told = {"flags": flags, "shown": FLAGS_SHOWN, "runs": runs, "told_reward": format_reward}
        return head, page.draw_template("live_numbers.html", **told, **tools)

    def _current_charts(self, number: int | None, version: int, runs: Sequence[Run]) -> _DrawnCharts:
        known, now, spent = self._drawn.get(number), self._clock(), self._spent()
        if known is None or (version != known.version and now - known.at >= known.seconds / SHARE):
            curves, charts = draw_charts(runs, several=number is None)
            known = _DrawnCharts(version, curves, charts, self._clock(), self._spent() - spent)
            self._drawn[number] = known
        return known


def draw_charts(runs: Sequence[Run], *, several: bool) -> tuple[Markup, Markup]:
    """Draw the curves, and the charts at the end of the page: of one run, or of several compared."""
    if several:
        panels = figures.overlay_panels([(run.name, run) for run in runs])
        first = [
            ChartGroup("The runs beside each other", panels, figures.run_cues([run.name for run in runs]))
        ]
        rest, timed = [], [(f"{run.name}: time and memory", run) for run in runs]
    else:
        learning, *rest = figures.chart_groups(runs[0], ChartCues(runs[0]))
        first, timed = [learning], [("Time and memory", runs[0])]
    return (
        page.draw_template("live_charts.html", groups=first, timed=[]),
        page.draw_template("live_charts.html", groups=rest, timed=timed),
    )


def open_runs(paths: Sequence[Path]) -> list[LiveRun]:
    """Return the runs in the folders `paths`, with the shortest distinct labels."""
    names = [path.resolve().name for path in paths]
    labels = names if len({*names}) == len(names) else [str(path) for path in paths]
    return [LiveRun(path, label) for path, label in zip(paths, labels, strict=True)]


def status_line(live: LiveRun) -> str:
    """Return the state of a run in a sentence."""
    stage = live.current_run().current
    if not live.is_present:
        return f"{live.label}: there is no run in {live.path} yet"
    if stage is None:
        return f"{live.label}: no step is written yet"
    doing = "done" if stage.done else f"at step {stage.step}"
    rest = live.unread_bytes
    reading = f" (reading, {amount(rest)}B are left)" if rest > 1 << 20 else ""
    return f"{live.label}: {stage_label(stage.name)}, {doing}{reading}"


def stage_numbers(stage: StageResult) -> list[tuple[str, str]]:
    """Return (label, number) of the last step for the table of stages."""
    return [(told, f"{value:.3g}") for key, told in _KEYS if (value := stage.last_value(key)) is not None]


def format_time(stage: StageResult) -> str:
    """Format its duration so far, "" if it is not known."""
    return format_duration(stage.seconds) if stage.rows or "seconds" in stage.record else ""


def flags_of(runs: Sequence[LiveRun]) -> list[tuple[str, RedFlag]]:
    """Return (where, flag) of all runs, the current stage's first, and the newest first."""
    found = []
    for live in runs:
        run = live.current_run()
        order = sorted(run.stages, key=lambda stage: stage is not run.current)
        where = f"{live.label}, " if len(runs) > 1 else ""
        found += [(f"{where}{stage_label(s.name)}", flag) for s in order for flag in reversed(s.flags)]
    return found


def flag_bound(flag: RedFlag) -> str:
    """Format the number that broke the rule."""
    value, bound = ("-" if number is None else f"{number:.4g}" for number in (flag.value, flag.bound))
    return f"{flag.metric} {value}, bound {bound}"


def format_reward(response: Response) -> str:
    """Format the reward of a response, its parts, and whether it was cut."""
    reward = "no reward" if response.reward is None else f"reward {response.reward:.4g}"
    parts = ", ".join(f"{name} {value:.3g}" for name, value in response.parts.items())
    cut = ", cut at the length limit" if response.cut else ""
    teacher = f", for {response.teacher}" if response.teacher else ""
    return f"{reward}{f' ({parts})' if parts else ''}{cut}, {response.tokens} tokens{teacher}"


def last_steps(run: Run) -> Table | None:
    """Tabulate the progress of each stage, and the numbers of its last step."""
    rows = []
    for stage in run.stages:
        when = _clock_time(stage.changed) if stage.changed else ""
        told = [str(stage.step or ""), amount(stage.student_tokens) if stage.student_tokens else ""]
        told += [format_time(stage), f"done {when}".strip() if stage.done else when]
        values = dict(stage_numbers(stage))
        rows.append([stage_label(stage.name), *told, *(values.get(what, "") for _, what in _KEYS)])
    return plain_table(["Stage", "Step", "Tokens", "Time", "Last step", *(what for _, what in _KEYS)], rows)


def every_number(run: Run) -> Table | None:
    """Tabulate every number of the current stage, for metrics without a chart."""
    curves = {} if run.current is None else run.current.curves
    found = [(key, curves[key].column_values()[2]) for key in sorted(curves)]
    rows = [[key, f"{values[-1]:.6g}", f"{at_the_end(values)[0]:.6g}"] for key, values in found]
    return plain_table(["Metric", "Last step", "Mean of the last steps"], rows)


def _clock_time(seconds: float) -> str:
    """Format a time of the day. A file may have an impossible time, which is empty."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(seconds).strftime("%H:%M:%S")
    return ""
