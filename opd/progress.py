"""Progress of the running stages: bars in a terminal, plain lines anywhere else, and no long silence."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich import progress as rich_progress
from rich.console import Console
from rich.text import Text

from opd.output import LogForwarder
from opd.untrusted import escape_unprintable

AFTER = 10.0
"""Seconds of silence before a heartbeat message."""

_doing: list[Callable[[], str]] = []


@contextmanager
def set_activity(activity: str | Callable[[], str]) -> Iterator[None]:
    """Set the activity shown in heartbeat messages while the block runs."""
    current = activity if callable(activity) else lambda: activity
    _doing.append(current)
    try:
        yield
    finally:
        _doing.remove(current)


def current_activity() -> str:
    """Return the latest activity set by `set_activity`, or an empty string."""
    latest = _doing[-1:]
    return latest[0]() if latest else _elsewhere


_elsewhere = ""


def set_remote_activity(words: str) -> None:
    """Set the activity of another process that this one speaks for. Empty: it has none, or is gone."""
    global _elsewhere
    _elsewhere = words


_open: list[Heartbeat] = []


class Heartbeat:
    """While open, calls `say(seconds since the last beat)` after every `AFTER` seconds of silence, from its
    own thread. If several are open, the latest speaks.
    """

    def __init__(self, say: Callable[[float], None], silence: float | None = None) -> None:
        self._say, self._after = say, AFTER if silence is None else silence
        self._last = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._check_silence, daemon=True)

    def beat(self) -> None:
        """Note that something was printed."""
        self._last = time.monotonic()

    def __enter__(self) -> Heartbeat:
        _open.append(self)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)
        self._over.set()
        self._thread.join()
        note_output()

    def _check_silence(self) -> None:
        spoke = self._last
        while not self._over.wait(max(0.01, spoke + self._after - time.monotonic())):
            spoke = max(spoke, self._last)
            if time.monotonic() - spoke >= self._after:
                if _open[-1:] == [self]:
                    self._say(time.monotonic() - self._last)
                spoke = time.monotonic()


def note_output() -> None:
    """Note that something was printed: no heartbeat message is due for a while."""
    for heartbeat in _open:
        heartbeat.beat()


@contextmanager
def never_silent(subject: str, silence: float | None = None) -> Iterator[None]:
    """Print on standard error that `subject` goes on, if the block takes long."""
    began = time.monotonic()

    def print_progress(_: float) -> None:
        detail = f", {current_activity()}" if current_activity() else ""
        seconds = time.monotonic() - began
        print(
            f"opd: {subject}: {seconds:.0f} s so far{escape_unprintable(detail)}", file=sys.stderr, flush=True
        )

    with Heartbeat(print_progress, silence):
        yield


def suppress_heartbeats() -> Heartbeat:
    """Suppress heartbeats while open: bars, or an awaited process, show that work goes on."""
    return Heartbeat(lambda _: None)


_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """One bar per running stage, with its headline numbers. Finished stages, and records logged under `opd`
    while it is open, become lines above the bars.

    Without a terminal it prints at most one line every few seconds and stage, and a heartbeat line if nothing
    else shows that work goes on. May be called from several threads.
    """

    def __init__(
        self,
        console: Console | None = None,
        seconds_between_lines: float = _SECONDS_BETWEEN_LINES,
        silence: float | None = None,
    ) -> None:
        """Writes to `console`, by default the standard error stream, so that output can be piped."""
        self._console = console or Console(stderr=True)
        self._interval = seconds_between_lines
        self._lock = threading.Lock()
        self._began: dict[str, tuple[float, int]] = {}
        """Start of each stage, and its progress at that time."""
        self._last_line: dict[str, float] = {}
        self._told: set[str] = set()
        self._bars = _make_bars(self._console) if self._console.is_terminal else None
        self._tasks: dict[str, rich_progress.TaskID] = {}
        self._reached: dict[str, str] = {}
        self._heartbeat = Heartbeat(self._print_heartbeat, silence)
        self._opened = ExitStack()

    def __enter__(self) -> Progress:
        self._opened.enter_context(self._heartbeat)
        self._opened.enter_context(LogForwarder(self._show_record))
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        if self._bars is not None:
            self._bars.stop()

    def begin_stage(self, stage: str) -> None:
        """Note that `stage` has begun. It may take a while to its first `update`."""
        with self._lock:
            self._reached[stage] = "begins"

    def _print_heartbeat(self, seconds: float) -> None:
        with self._lock:
            if self._tasks:  # bars show it
                return
            stages = ", ".join(f"{stage} {reached}" for stage, reached in self._reached.items())
            words = "; ".join(part for part in (stages, current_activity()) if part)
            self._print_text(
                f"still at work ({format_clock(seconds)} since the last line){f': {words}' if words else ''}"
            )

    def update_stage(self, stage: str, done: int, total: int, headline: str = "") -> None:
        """Note that `done` of `total` units of `stage` are done. `headline`: its numbers, `reward 0.83`."""
        with self._lock:
            now = time.monotonic()
            began, done_before = self._began.setdefault(stage, (now, done))
            self._reached[stage] = f"{done}/{total}"
            if self._bars is not None:
                if stage not in self._tasks:
                    self._tasks[stage] = self._bars.add_task(stage, total=total, headline="")
                self._bars.update(
                    self._tasks[stage], completed=done, total=total, headline=escape_unprintable(headline)
                )
            elif stage not in self._last_line or now - self._last_line[stage] >= self._interval:
                self._last_line[stage] = now
                elapsed, finished, count = now - began, done - done_before, total - done
                remaining = " " * 11
                if finished > 0 and elapsed > 0 and count > 0:
                    remaining = f"eta {format_clock(elapsed * count / finished):>7}"
                self._print_line(f"{stage:<24} {done:>5}/{total:<5} {remaining} {headline}")

    def finish_stage(self, stage: str, headline: str = "") -> None:
        """Replace the bar of the finished `stage` by one line."""
        with self._lock:
            self._began.pop(stage, None)
            self._last_line.pop(stage, None)
            self._reached.pop(stage, None)
            if self._bars is not None and stage in self._tasks:
                self._bars.remove_task(self._tasks.pop(stage))
            self._print_line(f"{stage:<24} done {headline}")

    def _show_record(self, record: logging.LogRecord) -> None:
        """Print a record as one line, after the `stage` that logged it in another process. A message about a
        domain holds for all stages, and every stage that reads the domain logs it. It is printed once,
        without a stage.
        """
        text, stage = record.getMessage(), getattr(record, "stage", "")
        with self._lock:
            if text.startswith("domain "):
                if text not in self._told:
                    self._told.add(text)
                    self._print_line(text)
            else:
                self._print_line(f"{stage}: {text}" if stage else text)

    def _print_line(self, text: str) -> None:
        self._heartbeat.beat()
        self._print_text(text)

    def _print_text(self, text: str) -> None:
        # Not as markup: a headline may hold brackets. Not wrapped: one event is one line in a log.
        self._console.print(Text(escape_unprintable(text.rstrip())), soft_wrap=True, highlight=False)


def _make_bars(console: Console) -> rich_progress.Progress:
    return rich_progress.Progress(
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(bar_width=24),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.fields[headline]}", markup=False),
        console=console,
        transient=True,
    )


def format_clock(seconds: float) -> str:
    """Return seconds as `1:05` or `2:01:05`."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"
