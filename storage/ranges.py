"""Ranges of objects, and the requests they are joined into: every request costs a round trip and some CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_GAP = 64 * 1024
"""Bytes between two ranges of one object that are rather read and dropped than skipped by a new request."""


@dataclass(frozen=True, slots=True)
class Range:
    """`len(into)` bytes of the object `path`, from byte `start` on."""

    path: str
    start: int
    into: memoryview
    """Writable, contiguous, of bytes."""

    @property
    def stop(self) -> int:
        return self.start + len(self.into)


@dataclass(frozen=True, slots=True)
class Request:
    """Neighbouring ranges of one object, in order, that one request reads."""

    ranges: Sequence[Range]

    @property
    def path(self) -> str:
        return self.ranges[0].path

    @property
    def start(self) -> int:
        return self.ranges[0].start

    @property
    def stop(self) -> int:
        return self.ranges[-1].stop

    def views(self) -> list[memoryview]:
        """Where the bytes `start ... stop - 1` go, gaps into memory nobody looks at."""
        found, at = [], self.start
        for wanted in self.ranges:
            if wanted.start > at:
                found.append(memoryview(bytearray(wanted.start - at)))
            found.append(wanted.into)
            at = wanted.stop
        return found


def join(ranges: Sequence[Range], most: int) -> list[Request]:
    """`ranges`, in their order, as requests of at most `most` bytes where they are neighbours.

    A range larger than `most` is a request of its own.
    """
    groups: list[list[Range]] = []
    for wanted in ranges:
        last = groups[-1] if groups else None
        near = (
            last is not None
            and last[-1].path == wanted.path
            and 0 <= wanted.start - last[-1].stop <= MAX_GAP
            and wanted.stop - last[0].start <= most
        )
        if last is not None and near:
            last.append(wanted)
        else:
            groups.append([wanted])
    return [Request(group) for group in groups]


def rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """`views` without their first `done` bytes."""
    left = []
    for view in views:
        if done < len(view):
            left.append(view[done:])
        done = max(0, done - len(view))
    return left
