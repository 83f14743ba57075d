"""Pages of runs while they train: each run by itself, and several in the same charts.

A page is the report's: its style, its charts, nothing from elsewhere. Its one script, known to the browser by
its digest, asks for the page's inside again and puts in what has changed; without it the page reloads itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path

from opd.foreign import visible
from opd.pipelines.evaluation.statistics import at_the_end
from opd.pipelines.report import figures
from opd.pipelines.report.figures import Cue, Cues
from opd.pipelines.report.live import BrokenRule, LiveRun, LiveStage, Response, ShownPrompt
from opd.pipelines.report.page import beside, captioned, document, figure, grid, legend, section
from opd.pipelines.report.tables import cell
from opd.pipelines.report.words import amount, duration, stage_label
from opd.redact import redact

SECONDS = 2
"""Between two looks of a page that is open."""
SHARE = 0.05
"""Of a core's time that goes into drawing, at most: the run needs it."""
FLAGS_SHOWN = 20
SCRIPT = """
const main = document.querySelector("main"), said = document.querySelector("#said");
let seen = "";
function put(fresh) {
  if (fresh.length !== main.children.length) { main.replaceChildren(...fresh); return; }
  fresh.forEach((part, place) => {
    const old = main.children[place];
    if (old.outerHTML === part.outerHTML) return;
    const open = [...old.querySelectorAll("details")].map((one) => one.open);
    part.querySelectorAll("details").forEach((one, index) => { one.open = open[index] === true; });
    if (old.outerHTML !== part.outerHTML) old.replaceWith(part);
  });
}
async function look() {
  if (!document.hidden) {
    try {
      const headers = {"If-None-Match": seen};
      const answer = await fetch(location.pathname + "?part", {cache: "no-store", headers});
      if (answer.status === 200) {
        const inside = new DOMParser().parseFromString(await answer.text(), "text/html");
        put([...inside.body.children]);
        seen = answer.headers.get("ETag");
      }
      said.textContent = answer.ok || answer.status === 304 ? "" : "The page could not be drawn anew.";
    } catch (error) {
      said.textContent = "opd watch does not answer: this is how it was. Start it again to go on.";
    }
  }
  setTimeout(look, SECONDS);
}
setTimeout(look, SECONDS);
""".replace("SECONDS", str(1000 * SECONDS))
_DIGEST = b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none';"
    f" script-src 'sha256-{_DIGEST}'; connect-src 'self'"
)
"""What a browser lets a page do: be drawn, run that script, and ask where it came from."""
_AFTER = (
    f'<p id="said" role="status"></p>\n<script>{SCRIPT}</script>\n'
    f'<noscript><meta http-equiv="refresh" content="{5 * SECONDS}"></noscript>\n'
)
_KEYS = (
    ("reward/mean", "Reward"),
    ("kl/mean", "KL"),
    ("loss/ce", "Loss"),
    ("entropy", "Entropy"),
    ("length/mean", "Length"),
    ("truncated", "Cut"),
    ("grad_norm", "Gradient norm"),
)
"""Of a stage's table."""


@dataclass(slots=True)
class _Drawn:
    """Charts as they were drawn last."""

    version: int
    html: str
    at: float
    seconds: float


class Board:
    """What is shown of some runs. Not for several threads at once.

    Args:
        runs: In the order of their pages.
        clock: Seconds that only grow.
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
        self._drawn: dict[int | None, _Drawn] = {}
        self._above: dict[int | None, tuple[int, str]] = {}
        """What stands above the charts, and of which version of the runs."""

    def look(self) -> None:
        """Read on, once a second at most, or while there is more to read."""
        if self._looked < 0 or self._clock() - self._looked >= 1 or any(run.unread for run in self.runs):
            for run in self.runs:
                run.look()
            self._looked = self._clock()

    def page(self, number: int | None) -> str:
        """The whole page of run `number`, or of all of them."""
        label = "several runs" if number is None else self.runs[number].label
        return document(visible(redact(f"{label}, live")), self.part(number), POLICY, _AFTER)

    def part(self, number: int | None) -> str:
        """The inside of that page."""
        self.look()
        shown = self.runs if number is None else [self.runs[number]]
        version = sum(run.version for run in shown)
        if self._above.get(number, (-1, ""))[0] != version:
            parts = [self._header(number), _flags(shown), *map(_stages, shown)]
            parts += [_samples(run) for run in shown if number is not None]
            self._above[number] = version, _clean("".join(parts))
        return self._above[number][1] + self._charts(number, version)

    def _header(self, number: int | None) -> str:
        shown = self.runs if number is None else [self.runs[number]]
        lines = "".join(f"<h1>{escape(headline(run))}</h1>" for run in shown)
        links = ""
        if len(self.runs) > 1:
            pages = [("/", "All runs"), *((f"/{n}", run.label) for n, run in enumerate(self.runs))]
            here = "/" if number is None else f"/{number}"
            links = " \u00b7 ".join(
                f"<strong>{escape(told)}</strong>" if to == here else f'<a href="{to}">{escape(told)}</a>'
                for to, told in pages
            )
            links = f'<nav class="kicker">{links}</nav>'
        return f"<header><div>{links}{lines}</div></header>\n"

    def _charts(self, number: int | None, version: int) -> str:
        known, now, spent = self._drawn.get(number), self._clock(), self._spent()
        if known is not None and (version == known.version or now - known.at < known.seconds / SHARE):
            return known.html
        html = _clean(_several(self.runs) if number is None else _one(self.runs[number]))
        self._drawn[number] = _Drawn(version, html, self._clock(), self._spent() - spent)
        return html


def opened(paths: Sequence[Path]) -> list[LiveRun]:
    """The runs in the folders `paths`, called as short as tells them apart."""
    names = [path.resolve().name for path in paths]
    labels = names if len({*names}) == len(names) else [str(path) for path in paths]
    return [LiveRun(path, label) for path, label in zip(paths, labels, strict=True)]


def headline(run: LiveRun) -> str:
    """Where a run is, in a sentence."""
    stage = run.current
    if not run.there:
        return f"{run.label}: there is no run in {run.path} yet"
    if stage is None:
        return f"{run.label}: no step is written yet"
    doing = "done" if stage.done else f"at step {stage.step}"
    rest = run.unread
    reading = f" (reading, {amount(rest)}B are left)" if rest > 1 << 20 else ""
    return f"{run.label}: {stage_label(stage.name)}, {doing}{reading}"


def numbers(stage: LiveStage) -> list[tuple[str, str]]:
    """(what, number) of the last step that the table of stages shows."""
    return [(told, f"{value:.3g}") for key, told in _KEYS if (value := stage.last(key)) is not None]


def flags_of(runs: Sequence[LiveRun]) -> list[tuple[str, BrokenRule]]:
    """(where, flag) of all runs, those of the stage that runs first, and the newest first."""
    found = []
    for run in runs:
        current = run.current
        order = sorted(run.ordered, key=lambda stage: stage is not current)
        where = f"{run.label}, " if len(runs) > 1 else ""
        found += [(f"{where}{stage_label(s.name)}", flag) for s in order for flag in reversed(s.flags)]
    return found


def told_reward(response: Response) -> str:
    """The reward of a response, its parts, and whether it was cut."""
    reward = "no reward" if response.reward is None else f"reward {response.reward:.4g}"
    parts = ", ".join(f"{name} {value:.3g}" for name, value in response.parts.items())
    cut = ", cut at the length limit" if response.cut else ""
    teacher = f", for {response.teacher}" if response.teacher else ""
    return f"{reward}{f' ({parts})' if parts else ''}{cut}, {response.tokens} tokens{teacher}"


def _clean(page: str) -> str:
    return visible(redact(page))


def _flags(runs: Sequence[LiveRun]) -> str:
    found = flags_of(runs)
    if not found:
        return section("Red flags", '<p class="note">None.</p>')
    items = "".join(
        f"<li><strong>{escape(where)}, step {flag.step}: {escape(flag.rule)}</strong> "
        f'<span class="wrong">{escape(flag.action)}</span><br>{escape(flag.sentence)} '
        f'<span class="unit">{escape(_measured(flag))}</span></li>'
        for where, flag in found[:FLAGS_SHOWN]
    )
    more = len(found) - FLAGS_SHOWN
    rest = f'<p class="note">And {more} more in flags.jsonl of the stages.</p>' if more > 0 else ""
    return section("Red flags", f'<ul class="flags">{items}</ul>{rest}')


def _measured(flag: BrokenRule) -> str:
    value, bound = ("-" if number is None else f"{number:.4g}" for number in (flag.value, flag.bound))
    return f"{flag.metric} {value}, bound {bound}"


def _stages(run: LiveRun) -> str:
    known = [stage for stage in run.ordered if stage.steps or stage.done]
    if not known:
        return section(run.label, '<p class="note">The page shows steps as soon as there are some.</p>')
    heads = ("Stage", "Step", "Tokens", "Time", "Last step", *(told for _, told in _KEYS))
    heads = "".join(f'<th scope="col">{told}</th>' for told in heads)
    rows = "".join(_row(stage) for stage in known)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    table = f'<div class="scroll" tabindex="0">{table}</div>'
    lost = sum(stage.unreadable for stage in known)
    note = "Each number is that of the last step."
    note += f" {lost} lines of metrics cannot be read and are left out." if lost else ""
    return section(run.label, captioned(table, note) + _every(run))


def _row(stage: LiveStage) -> str:
    when = _clock(stage.changed) if stage.changed else ""
    cells = [str(stage.step or ""), amount(stage.tokens) if stage.tokens else "", duration(stage.seconds)]
    cells += [f"done {when}".strip() if stage.done else when]
    values = dict(numbers(stage))
    cells += [values.get(told, "") for _, told in _KEYS]
    told = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(stage_label(stage.name))}</th>{told}</tr>'


def _clock(seconds: float) -> str:
    """A time of the day; empty for one that no calendar has, as a file may be given any."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(seconds).strftime("%H:%M:%S")
    return ""


def _every(run: LiveRun) -> str:
    """Every number of the stage that was written to last, for what no chart shows."""
    stage = run.current
    if stage is None:
        return ""
    rows = ""
    for key in sorted(stage.curves):
        values = stage.curves[key].column()[2]
        rows += (
            f'<tr><th scope="row">{escape(key)}</th><td>{values[-1]:.6g}</td>'
            f"<td>{at_the_end(values)[0]:.6g}</td></tr>"
        )
    heads = "".join(
        f'<th scope="col">{told}</th>' for told in ("Metric", "Last step", "Mean of the last steps")
    )
    head = f"<thead><tr>{heads}</tr></thead>"
    table = f'<div class="scroll" tabindex="0"><table>{head}<tbody>{rows}</tbody></table></div>'
    label = escape(stage_label(stage.name))
    return f'<details class="every"><summary>Every number: {label}</summary>{table}</details>'


def _samples(run: LiveRun) -> str:
    stage = run.current
    if stage is None or not stage.samples:
        return ""
    asked = "".join(_asked(one) for one in stage.samples)
    note = (
        f"{stage_label(stage.name)}, step {stage.samples_step}: some of its prompts, with the responses that"
        " were rewarded best and worst. Long ones are cut."
    )
    return section(
        "Samples of the last step", f'<p class="note">{escape(note)}</p><div class="answers">{asked}</div>'
    )


def _asked(asked: ShownPrompt) -> str:
    cells = [cell("Prompt", asked.prompt), cell("Label", asked.label)]
    cells += [cell(told_reward(one), one.text) for one in asked.shown]
    of = f", {len(asked.shown)} of {asked.responses} responses" if asked.responses > len(asked.shown) else ""
    return f'<h4>{escape(asked.domain)}{of}</h4><dl class="answer">{"".join(cells)}</dl>\n'


def _one(live: LiveRun) -> str:
    run = live.run()
    if not run.stages:
        return ""
    cues = Cues(run)
    extra = [Cue("merge", "ink", "o")] if run.stage("merge") else []
    trained = [Cue(x.label, x.role, x.marker) for x in figures.merge_and_baselines(run, cues)[1:]]
    html = ""
    for title, panels, known in (
        ("Learning curves", figures.learning(run, cues), [*cues.all(), *extra, *trained]),
        ("Teachers", figures.teachers(run, cues), cues.all()),
        ("Lengths and training health", figures.health(run, cues), [*cues.all(), *extra]),
    ):
        html += section(title, grid(panels, known)) if panels else ""
    timed = figures.time_per_phase(run)
    return html + (section("Time by phase", figure(timed, legend(figures.phase_cues(run)))) if timed else "")


def _several(runs: Sequence[LiveRun]) -> str:
    shown = [(run.label, run.run()) for run in runs]
    panels = figures.overlaid(shown)
    cues = figures.run_cues([run.label for run in runs])
    html = section("The runs beside each other", grid(panels, cues)) if panels else ""
    for label, run in shown:
        timed = figures.time_per_phase(run)
        if timed:
            html += section(f"{label}: time by phase", beside(timed, "", figures.phase_cues(run)))
    return html
