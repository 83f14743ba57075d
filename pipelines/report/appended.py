"""Read files of a running run: appended lines, and replaced documents.

No file is trusted. Files that are not plain, or too long, are not read. Files may appear later, be cut in the
middle of a line, go away, or be rewritten by a resumed run. Then they are read from their beginning.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

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
