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


def join(ranges: Sequence[Range], size: int) -> list[Request]:
    """`ranges`, in their order, as requests of about `size` bytes where they are neighbours.

    A run of neighbours is cut where ranges end, as near as can be to every multiple of `size`: its requests
    are equally large, and as many as `size` asks for.
    """
    groups: list[list[Range]] = []
    edge = 0  # where the last request should end
    for wanted in ranges:
        middle = (wanted.start + wanted.stop) // 2
        before = groups[-1][-1] if groups else None
        near = before and before.path == wanted.path and 0 <= wanted.start - before.stop <= MAX_GAP
        if near and middle <= edge:
            groups[-1].append(wanted)
            continue
        groups.append([wanted])
        edge = edge if near else wanted.start
        while edge < middle:
            edge += size
    return [Request(group) for group in groups]


def rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """`views` without their first `done` bytes."""
    left = []
    for view in views:
        if done < len(view):
            left.append(view[done:])
        done = max(0, done - len(view))
    return left
