"""Draw small charts as inline SVG: matplotlib draws them, CSS colours them.

Every chart is about as wide as a phone's column, so that its text has its full size there. Wider pages show
several in a row. Its colours are roles, each with a value for a light and for a dark page. It is drawn with
the light values, and their hex codes are then replaced by CSS variables. So one SVG follows the reader's
colour scheme. Therefore the roles of a chart must differ in their light values.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from opd.pipelines.evaluation.statistics import Interval, at_the_end
from opd.pipelines.report.display_text import NARROW, amount, format_power
from opd.untrusted import escape_controls


@dataclass(frozen=True, slots=True)
class Colour:
    """The two colours of a role."""

    light: str
    dark: str


ROLES: dict[str, Colour] = {
    "page": Colour("#ffffff", "#15181c"),
    "ink": Colour("#1b1f24", "#e3e6ea"),
    "muted": Colour("#5c6570", "#9ea7b1"),
    "line": Colour("#dfe3e8", "#31373f"),
    "panel": Colour("#f5f6f8", "#1d2126"),
    "heat": Colour("#8fc1ea", "#1f5c90"),
    "rest": Colour("#c3c9d0", "#4b545e"),
    # Okabe and Ito's order, lightened or darkened to retain 3:1 against the page in both schemes.
    "c0": Colour("#0072b2", "#56aee8"),
    "c1": Colour("#d55e00", "#f28e4b"),
    "c2": Colour("#00885f", "#35c598"),
    "c3": Colour("#b4548f", "#e39ac4"),
    "c4": Colour("#a07400", "#e2bb4a"),
    "c5": Colour("#3f8fc4", "#a6d6f7"),
    "c6": Colour("#6b4c9a", "#b79be0"),
    "c7": Colour("#7a4a2a", "#cda58a"),
}
SERIES = 8
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
"""Second cue beside the colour, drawn at a line's end."""


def series_role(index: int) -> str:
    """Return the role of the `index`-th domain, phase or other series. Roles repeat after `SERIES`."""
    return f"c{index % SERIES}"


def light_colour(role: str) -> str:
    """Return the hex code a chart is drawn with."""
    return ROLES[role].light


def css_variables(scheme: str) -> str:
    """Return the CSS declarations of every role for `light` or `dark`."""
    return "".join(f"--{role}:{getattr(colour, scheme)};" for role, colour in ROLES.items())


WIDTH = 360
"""Width of every chart in CSS pixels (one SVG unit each)."""
MAX_POINTS = 160
"""Maximum points. A longer series is averaged in bins of equal step count."""
STEPS = [1, 2, 2.5, 5, 10]
"""Tick distances, times a power of ten."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 11,
    "font.family": "DejaVu Sans",
    "axes.unicode_minus": True,
    "axes.linewidth": 0.8,
    "path.simplify_threshold": 0.2,
}


@dataclass(frozen=True, slots=True)
class Series:
    """One line."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    role: str
    """Colour role of `ROLES`."""
    marker: str = MARKERS[0]
    all_values: Sequence[float] = ()
    """All values if some of them cannot be drawn, else `y`."""

    @property
    def end_mean(self) -> tuple[float, int]:
        """The number for the end of the line, and the number of steps in its mean."""
        return at_the_end(self.all_values or self.y)


@dataclass(frozen=True, slots=True)
class Axis:
    """The style of the axes, mainly of the vertical one."""

    percent: bool = False
    """Values are shares, in percent."""
    log: bool = False
    low: float | None = None
    high: float | None = None
    names: Sequence[str] = ()
    """Names of the positions 0, 1, ... of the horizontal axis, if they are not numbers."""

    def format_value(self, value: float) -> str:
        """Format `value` with at most three significant digits."""
        if self.percent:
            return f"{100 * value:.3g}{NARROW}%"
        return format_power(value) if 0 < abs(value) < 1e-3 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar with its label above it."""

    label: str
    note: str
    parts: Sequence[tuple[str, float]]
    """(colour role, length)."""


@dataclass(frozen=True, slots=True)
class Dot:
    """One row of a dot plot: a mean with its interval, and the values it averages."""

    label: str
    note: str
    mean: Interval
    parts: Sequence[tuple[str, str, float]]
    """(colour role, marker, value)."""
    role: str = "ink"


def line_chart(name: str, lines: Sequence[Series], axis: Axis, x_label: str, description: str = "") -> str:
    """Draw `lines` against one horizontal axis. Over 40 points a line is its moving mean. A marker at the
    right is the number for the line's end. `description` describes the chart in words.
    """
    figure, axes = _new_canvas(height=216, left=46, right=14, top=8, bottom=38)
    for line in lines:
        colour = light_colour(line.role)
        x, y = _bin_means(line.x), _bin_means(line.y)
        smooth = _moving_mean(y) if len(line.y) > 40 else y
        if smooth is not y:
            axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.3)
        axes.plot(x, smooth, color=colour, linewidth=1.7, solid_capstyle="round")
        axes.plot(
            line.x[-1], line.end_mean[0], color=colour, marker=line.marker, markersize=5.5, clip_on=False
        )
    if axis.log:
        axes.set_yscale("log")
        positive = [value for line in lines for value in line.y if value > 0]
        decades = math.log10(max(positive) / min(positive)) if positive else 0.0
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2.5 else (1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
    axes.set_ylim(axis.low, axis.high)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: axis.format_value(value)))
    if axis.names:
        axes.set_xticks(range(len(axis.names)), axis.names)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value)))
        axes.set_xlim(left=0)
    axes.set_xlabel(x_label, color=light_colour("muted"))
    axes.grid(axis="y", color=light_colour("line"), linewidth=0.8)
    return _figure_svg(figure, name, description)


def bar_chart(name: str, bars: Sequence[Bar], x_label: str, description: str = "") -> str:
    """Draw horizontal stacked bars, top to bottom, each under its own label."""
    figure, axes = _row_canvas(len(bars), x_label)
    for row, bar in enumerate(bars):
        start = 0.0
        for role, length in bar.parts:
            axes.barh(row, length, left=start, height=0.36, color=light_colour(role), linewidth=0)
            start += length
    axes.set_xlim(0, 1.02 * max(sum(length for _, length in bar.parts) for bar in bars) or 1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _row_labels(axes, [(bar.label, bar.note) for bar in bars])
    return _figure_svg(figure, name, description)


def dot_chart(
    name: str, dots: Sequence[Dot], x_label: str, write: Callable[[float], str], description: str = ""
) -> str:
    """Draw means with their intervals, and their single values as smaller marks, beside a line at 0. `write`
    formats a value on the axis.
    """
    figure, axes = _row_canvas(len(dots), x_label)
    values = [v for dot in dots for v in (dot.mean.low, dot.mean.high, *(part[2] for part in dot.parts))]
    low, high = min(0.0, *values), max(0.0, *values)
    margin = 0.03 * (high - low) or 1.0
    # The numbers at the right stand beside a line at 0, not across it.
    axes.set_xlim(low - margin * (low < 0), high + (5 if low < 0 else 1) * margin)
    axes.axvline(0, color=light_colour("rest"), linewidth=1.2, zorder=1)
    for row, dot in enumerate(dots):
        for role, marker, value in dot.parts:
            small: dict[str, Any] = {
                "color": light_colour(role),
                "marker": marker,
                "markersize": 4.5,
                "alpha": 0.85,
            }
            axes.plot(value, row, **small, clip_on=False, zorder=3)
        line: dict[str, Any] = {"color": light_colour(dot.role), "clip_on": False}
        axes.plot([dot.mean.low, dot.mean.high], [row, row], linewidth=2.2, solid_capstyle="butt", **line)
        axes.plot(dot.mean.value, row, marker="|", markersize=12, markeredgewidth=2.2, zorder=4, **line)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    _row_labels(axes, [(dot.label, dot.note) for dot in dots])
    return _figure_svg(figure, name, description)


def _new_canvas(height: float, left: float, right: float, top: float, bottom: float) -> tuple[Figure, Axes]:
    """Return a figure of `WIDTH` x `height` pixels, with margins in pixels. An SVG unit is 1/72 inch."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / 72, height / 72))
        FigureCanvasSVG(figure)
        box = (
            left / WIDTH,
            bottom / height,
            (WIDTH - left - right) / WIDTH,
            (height - top - bottom) / height,
        )
        axes = figure.add_axes(box)
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(light_colour("rest"))
    axes.tick_params(length=0, pad=5, labelcolor=light_colour("muted"))
    axes.set_axisbelow(True)
    return figure, axes


def _row_canvas(count: int, x_label: str) -> tuple[Figure, Axes]:
    """Return a canvas with one row of 40 pixels per entry, the first on top."""
    figure, axes = _new_canvas(height=40 * count + 48, left=8, right=12, top=6, bottom=42)
    axes.set_ylim(count - 0.5, -0.75)
    axes.yaxis.set_major_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="x", color=light_colour("line"), linewidth=0.8)
    axes.set_xlabel(x_label, color=light_colour("muted"))
    return figure, axes


def _row_labels(axes: Axes, labels: Sequence[tuple[str, str]]) -> None:
    """Draw a label at the left and a number at the right above every row."""
    # The names are the user's: a pair of dollar signs begins no formula.
    shared: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "bottom", "parse_math": False}
    for row, (label, note) in enumerate(labels):
        label = escape_controls(label, "")
        label = label if len(label) <= 34 else f"{label[:33]}\u2026"
        axes.text(0, row - 0.24, label, color=light_colour("ink"), **shared)
        axes.text(1, row - 0.24, note, color=light_colour("muted"), ha="right", **shared)


def _bin_means(values: Sequence[float]) -> list[float]:
    size = math.ceil(len(values) / MAX_POINTS)
    chunks = [values[start : start + size] for start in range(0, len(values), size)]
    return [sum(chunk) / len(chunk) for chunk in chunks]


def _moving_mean(values: Sequence[float]) -> list[float]:
    """Return the centred mean over 9 points, fewer near the ends."""
    reach = 4
    windows = [
        values[max(0, i - min(reach, i, len(values) - 1 - i)) : i + min(reach, i, len(values) - 1 - i) + 1]
        for i in range(len(values))
    ]
    return [sum(window) / len(window) for window in windows]


def _figure_svg(figure: Figure, name: str, description: str) -> str:
    """Serialise for inlining: no prologue, size or style sheet, its own ids, colours as variables."""
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": escape_controls(name)}), warnings.catch_warnings():
        # Names may be of any script. The reader's font draws the page's text.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    opening = (
        f'<svg viewBox="0 0 {WIDTH} {figure.get_figheight() * 72:g}" role="img" aria-label="{escape(name)}">'
        f"<desc>{escape(description)}</desc>"
    )
    text = opening + text[text.index(">") + 1 :]
    used = set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda match: match.group(0) if match.group(1) in used else "", text)
    variables = {colour.light: f"var(--{role})" for role, colour in ROLES.items()}
    text = re.sub(r"#[0-9a-f]{6}\b", lambda match: variables.get(match.group(0), match.group(0)), text)
    # Remove styles that the page's own sheet sets, and elements without effect.
    text = re.sub(r"font-size: [^;\"]*;?|font-family: [^;\"]*;?|font: [^;\"]*;?", "", text)
    text = re.sub(r' transform="rotate\(-0 [^"]*"|<g/>|<defs>\s*</defs>', "", text)
    return re.sub(r"\s*\n\s*", "\n", text).strip()
