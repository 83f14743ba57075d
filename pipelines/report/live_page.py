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
        self._texts: dict[int | None, tuple[int, Markup, Markup]] = {}
        """(version of the runs, text above the curves, text below them)."""

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
        return page.fill_template(
            "live.html",
            part=self.render_content(number),
            title=page.clean_text(f"{label}, live"),
            policy=POLICY,
            script=SCRIPT,
            seconds=SECONDS,
        )

    def render_content(self, number: int | None) -> Markup:
        """Draw the inside of that page: curves first."""
        self.refresh_runs()
        shown = self.runs if number is None else [self.runs[number]]
        version, runs = sum(run.version for run in shown), [run.current_run() for run in shown]
        if number not in self._texts or self._texts[number][0] != version:
            pages = [("/", "All runs"), *((f"/{index}", run.label) for index, run in enumerate(self.runs))]
            flags = flags_of(shown)
            above = page.draw_template(
                "live_head.html",
                links=pages if len(self.runs) > 1 else [],
                here="/" if number is None else f"/{number}",
                headlines=[status_line(run) for run in shown],
                flags=flags,
            )
            below = page.draw_template(
                "live_numbers.html",
                flags=flags,
                shown=FLAGS_SHOWN,
                runs=runs,
                told_reward=format_reward,
                measured=flag_bound,
                last_steps=last_steps,
                every_number=every_number,
            )
            self._texts[number] = version, above, below
        _, above, below = self._texts[number]
        drawn, now, spent = self._drawn.get(number), self._clock(), self._spent()
        if drawn is None or (version != drawn.version and now - drawn.at >= drawn.seconds / SHARE):
            curves, charts = draw_charts(runs, several=number is None)
            drawn = _DrawnCharts(version, curves, charts, self._clock(), self._spent() - spent)
            self._drawn[number] = drawn
        return above + drawn.curves + below + drawn.charts


def draw_charts(runs: Sequence[Run], *, several: bool) -> tuple[Markup, Markup]:
    """Draw the curves, and the charts at the end of the page: of one run, or of several compared."""
    if several:
        panels = figures.overlay_panels([(run.name, run) for run in runs])
        first = [
            ChartGroup("The runs beside each other", panels, figures.run_cues([run.name for run in runs]))
        ]
        others, timed = [], [(f"{run.name}: time and memory", run) for run in runs]
    else:
        learning, *others = figures.chart_groups(runs[0], ChartCues(runs[0]))
        first, timed = [learning], [("Time and memory", runs[0])]
    return (
        page.draw_template("live_charts.html", groups=first, timed=[]),
        page.draw_template("live_charts.html", groups=others, timed=timed),
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
    unread = live.unread_bytes
    reading = f" (reading, {amount(unread)}B are left)" if unread > 1 << 20 else ""
    return f"{live.label}: {stage_label(stage.name)}, {doing}{reading}"


def stage_numbers(stage: StageResult) -> list[tuple[str, str]]:
    """Return (label, number) of the last step for the table of stages."""
    return [(label, f"{value:.3g}") for key, label in _KEYS if (value := stage.last_value(key)) is not None]


def format_time(stage: StageResult) -> str:
    """Format its duration so far, "" if it is not known."""
    return format_duration(stage.seconds) if stage.rows or "seconds" in stage.record else ""


def flags_of(runs: Sequence[LiveRun]) -> list[tuple[str, RedFlag]]:
    """Return (where, flag) of all runs, the current stage's first, and the newest first."""
    flags = []
    for live in runs:
        run = live.current_run()
        order = sorted(run.stages, key=lambda stage: stage is not run.current)
        where = f"{live.label}, " if len(runs) > 1 else ""
        flags += [(f"{where}{stage_label(s.name)}", flag) for s in order for flag in reversed(s.flags)]
    return flags


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
        when = ""
        if stage.changed:
            with contextlib.suppress(
                ValueError, OverflowError, OSError
            ):  # a file may have an impossible time
                when = datetime.fromtimestamp(stage.changed).strftime("%H:%M:%S")
        cells = [str(stage.step or ""), amount(stage.student_tokens) if stage.student_tokens else ""]
        cells += [format_time(stage), f"done {when}".strip() if stage.done else when]
        values = dict(stage_numbers(stage))
        rows.append([stage_label(stage.name), *cells, *(values.get(label, "") for _, label in _KEYS)])
    return plain_table(["Stage", "Step", "Tokens", "Time", "Last step", *(label for _, label in _KEYS)], rows)


def every_number(run: Run) -> Table | None:
    """Tabulate every number of the current stage, for metrics without a chart."""
    curves = {} if run.current is None else run.current.curves
    columns = [(key, curves[key].column_values()[2]) for key in sorted(curves)]
    rows = [[key, f"{values[-1]:.6g}", f"{at_the_end(values)[0]:.6g}"] for key, values in columns]
    return plain_table(["Metric", "Last step", "Mean of the last steps"], rows)
