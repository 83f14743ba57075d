"""A real browser, where there is one: told over a pipe what to open, and asked what it then shows."""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 240.0
"""Seconds, of a machine that does much else."""


def installed() -> str | None:
    """The program of a browser that speaks the DevTools protocol."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of it. `events`: what it has said of itself without being asked."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)

    def says(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        found = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until it is true in the page."""
        until = time.monotonic() + PATIENCE
        while not self.says(expression):
            assert time.monotonic() < until, (expression, self.says("document.body.innerText")[:2000])
            time.sleep(0.2)

    def of(self, method: str) -> list[dict[str, Any]]:
        """What events of that name say."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], PATIENCE)[0], "the browser does not answer"
            data = os.read(self._read, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """Started for the block, with a profile of its own."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
    script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", script, program, *options, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out),
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_in, ours_out)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()
        os.close(ours_in)
        os.close(ours_out)
