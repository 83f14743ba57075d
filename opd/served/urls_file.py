"""URLs of servers that come while a run works: a file with one on a line, which is read again and again."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from opd.config.base import is_url
from opd.foreign import shown

_log = logging.getLogger(__name__)

LOOK = 5.0
"""Seconds between two looks at the file."""
MOST_BYTES, MOST_LINES = 1 << 20, 10_000


class UrlsFile:
    """What has come into the file since it was asked last. Lines that begin with `#` are passed over.

    Args:
        path: It may be written later.
        known: URLs that are in use already.
        rank, ranks: Of those that come, this one of so many takes its share, by their lines.
    """

    def __init__(self, path: str | Path, known: Sequence[str] = (), rank: int = 0, ranks: int = 1) -> None:
        self._path, self._rank, self._ranks = Path(path), rank, ranks
        self._seen = {url.rstrip("/") for url in known}
        self._due = 0.0
        self._said = ""

    def fresh(self) -> list[str]:
        """New URLs, each once; none while it is not yet time to look. What is no URL is said and left out."""
        now = time.monotonic()
        if now < self._due:
            return []
        self._due = now + LOOK
        found = []
        for place, line in enumerate(self._lines()):
            url = line.strip().rstrip("/")
            if not url or url.startswith("#") or url in self._seen:
                continue
            self._seen.add(url)
            if not is_url(url):
                _log.warning("%s: line %d is no URL of a server: %s", self._path, place + 1, shown(url, 100))
            elif place % self._ranks == self._rank:
                found.append(url)
        return found

    def _lines(self) -> list[str]:
        try:
            with self._path.open("rb") as opened:
                content = opened.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            return self._useless(f"it cannot be read ({error.strerror})")
        lines = content.decode("utf-8", "replace").split("\n")
        if len(content) > MOST_BYTES or len(lines) > MOST_LINES:
            return self._useless(f"it has more than {MOST_LINES} lines or {MOST_BYTES} bytes")
        return lines[:-1]  # the last may be in the middle of being written

    def _useless(self, reason: str) -> list[str]:
        if reason != self._said:
            self._said = reason
            _log.warning("%s: no server is taken from it, %s", self._path, reason)
        return []
