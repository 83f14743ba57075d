"""Show runs while they train, `opd watch`: as a page on this machine's loopback or in the terminal.

The server gives away its pages and nothing else. A path names a page by its number and never a file. A
request's body is not read. A request is refused if its `Host` is not this machine, so a foreign page whose
name resolves to here reads nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import ConfigError, RunFolderError
from opd.progress import suppress_heartbeats
from opd.redact import redact
from opd.untrusted import escape_controls, safe_excerpt

if TYPE_CHECKING:
    from rich.console import Console, Group

    from opd.pipelines.report.live_page import PageBoard
    from opd.pipelines.report.load import LiveRun

LOOPBACK = "127.0.0.1"
MOST_RUNS = 16
_MOST_REQUESTS = 16
"""Maximum concurrent requests. More are sent away."""
_PATIENCE = 10.0
"""Seconds for a request to arrive and for its answer to be read."""
_PATH = re.compile(r"/([0-9]{1,3})?(\?part)?")
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
"""This machine by any port, because a tunnel has another one."""
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_SAMPLES, _FLAGS = 3, 5
"""Limits in the terminal."""


def show_runs(paths: Sequence[Path], port: int | None = None, *, terminal: bool = False) -> int:
    """Show the runs in the folders `paths` until Ctrl-C. Returns the exit status.

    Raises `ConfigError` for excluding options and for a used port, `RunFolderError` for a file. A missing run
    is waited for.
    """
    if terminal and port is not None:
        raise ConfigError("--port is of the page and --terminal is without one; keep one of the two")
    if port is not None and port > 65535:
        raise ConfigError(f"--port {port} is no port; give one from 1 to 65535, or leave it out")
    if len({path.resolve() for path in paths}) < len(paths) or len(paths) > MOST_RUNS:
        raise ConfigError(f"opd watch takes at most {MOST_RUNS} run folders, each of them once")
    for path in paths:
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"{path} is no folder; give the folder of a run")
    with suppress_heartbeats(), contextlib.suppress(KeyboardInterrupt):
        from opd.pipelines.report.live_page import PageBoard, open_runs

        runs = open_runs(paths)
        for run in runs:
            if not run.path.exists():
                print(
                    f"opd: there is no run in {safe_excerpt(run.path)} yet; waiting for it", file=sys.stderr
                )
        if terminal:
            _show_terminal(runs)
            return 0
        with WatchServer(PageBoard(runs), port or 0) as server:
            print(f"http://{LOOPBACK}:{server.server_port}/", flush=True)
            server.serve_forever()
    return 0


class WatchServer(ThreadingHTTPServer):
    """Serve the pages of `board`, on loopback alone.

    Raises `ConfigError` if `port` is not available. With 0 the system chooses one.
    """

    daemon_threads = True
    block_on_close = False  # a late request does not block closing

    def __init__(self, board: PageBoard, port: int = 0) -> None:
        self.board = board
        self.lock = threading.Lock()
        """Serializes the drawing of pages."""
        self._free = threading.BoundedSemaphore(_MOST_REQUESTS)
        try:
            super().__init__((LOOPBACK, port), _PageHandler)
        except OSError as error:
            raise ConfigError(
                f"port {port} of this machine cannot be had ({error.strerror}); give another --port, or none"
            ) from None

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a request in its own thread, if there are not too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: Any) -> None:
        """Ignore a client that went away. Print other errors as one line."""
        error = sys.exception()
        if not isinstance(error, OSError):
            print(
                f"opd: watch: a request was not answered: {safe_excerpt(repr(error))}",
                file=sys.stderr,
                flush=True,
            )


class _PageHandler(BaseHTTPRequestHandler):
    server: WatchServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = _PATIENCE
    server_version, sys_version = "opd", ""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0].strip()):
            self._send_refusal(HTTPStatus.MISDIRECTED_REQUEST, "Ask for 127.0.0.1 or localhost.")
            return
        match = _PATH.fullmatch(self.path)
        runs = self.server.board.runs
        number = None if match is None or match[1] is None else int(match[1])
        if match is None or (number is not None and number >= len(runs)):
            self._send_refusal(HTTPStatus.NOT_FOUND, "There is no such page.")
            return
        if number is None and len(runs) == 1:
            number = 0
        part = match[2] is not None
        with self.server.lock:
            board = self.server.board
            text = board.render_content(number) if part else board.render_page(number)
        data = text.encode("utf-8", "backslashreplace")
        tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        if part and self.headers.get("If-None-Match") == tag:
            self._send_page(HTTPStatus.NOT_MODIFIED, b"", tag)
        else:
            self._send_page(HTTPStatus.OK, data, tag)

    def _send_refusal(self, status: HTTPStatus, sentence: str) -> None:
        self._send_page(status, f"{sentence}\n".encode(), "", "text/plain")

    def _send_page(self, status: HTTPStatus, data: bytes, tag: str, kind: str = "text/html") -> None:
        from opd.pipelines.report.live_page import POLICY

        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", f"{POLICY}; frame-ancestors 'none'")
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send the library's own refusals without any of the request's text."""
        del message, explain
        self.close_connection = True
        self._send_refusal(HTTPStatus(code), HTTPStatus(code).phrase)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: page views are private."""
        del format, args


def _show_terminal(runs: Sequence[LiveRun]) -> None:
    """Draw repeatedly in a terminal, elsewhere once."""
    from rich.console import Console
    from rich.live import Live

    from opd.pipelines.report.live_page import SECONDS

    console = Console(highlight=False)
    _read_runs(runs)
    if not sys.stdout.isatty():
        console.print(render_view(runs, console))
        return
    with Live(render_view(runs, console), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(SECONDS)
            _read_runs(runs)
            live.update(render_view(runs, console), refresh=True)


def _read_runs(runs: Sequence[LiveRun]) -> None:
    for run in runs:
        run.read_changes()
        previous, unread = float("inf"), run.unread_bytes
        while 1 << 22 < unread < previous:  # as long as it shrinks: a line without an end stays
            run.read_changes()
            previous, unread = unread, run.unread_bytes


def render_view(runs: Sequence[LiveRun], console: Console) -> Group:
    """Render the terminal's view: each run's stages, red flags, and samples of the last step."""
    from rich.console import Group
    from rich.text import Text

    from opd.pipelines.report.display_text import amount, stage_label
    from opd.pipelines.report.live_page import (
        flags_of,
        format_reward,
        format_time,
        stage_numbers,
        status_line,
    )

    parts: list[Any] = []
    for run in runs:
        parts.append(Text(_plain_line(status_line(run)), style="bold"))
        for stage in run.current_run().stages:
            state = "done" if stage.done else f"step {stage.step}"
            words = [f"{stage_label(stage.name):<24} {state:<10}", format_time(stage)]
            words += [f"{amount(stage.student_tokens)} tokens"] if stage.student_tokens else []
            words += [f"{label.lower()} {number}" for label, number in stage_numbers(stage)]
            parts.append(Text(_plain_line("  ".join(words)), no_wrap=True, overflow="ellipsis"))
            for key in ("reward/mean", "kl/mean", "loss/ce"):
                if not stage.done and key in stage.curves:
                    line = f"  {key:<12} {spark_line(stage.curves[key].column_values()[2])}"
                    parts.append(Text(_plain_line(line), no_wrap=True))
        parts.append(Text(""))
    flags = flags_of(runs)
    for where, flag in flags[:_FLAGS]:
        line = f"! {where}, step {flag.step}: {flag.rule} ({flag.action}): {flag.sentence}"
        parts.append(Text(_plain_line(line), style="red"))
    if len(flags) > _FLAGS:
        parts.append(Text(f"! and {len(flags) - _FLAGS} more", style="red"))
    parts += [] if flags else [Text("No red flags.")]
    width = max(20, console.width - 4)
    for run in runs:
        stage = run.current_run().current
        for sample in [] if stage is None else stage.samples[:_SAMPLES]:
            parts.append(Text(""))
            parts.append(Text(_plain_line(f"> {sample.domain}: {sample.prompt}")[:width], style="bold"))
            for one in sample.shown[:2]:
                parts.append(Text(_plain_line(f"  [{format_reward(one)}] {one.text}")[:width]))
    return Group(*parts)


def spark_line(values: Sequence[float], width: int = 48) -> str:
    """Draw a curve in one line: means of `width` intervals, from its lowest to its highest."""
    signs = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
    count = min(width, len(values))
    bounds = [len(values) * index // max(1, count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    if not means:
        return ""
    low, high = min(means), max(means)
    steps = [0 if high == low else round((len(signs) - 1) * (mean - low) / (high - low)) for mean in means]
    return f"{''.join(signs[step] for step in steps)} {low:.3g} to {high:.3g}"


def _plain_line(text: str) -> str:
    """Return `text` on one line, with terminal control characters escaped."""
    return escape_controls(redact(text.replace("\n", " ").replace("\t", " ")), "")
