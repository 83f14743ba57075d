"""What a test's own process has told the disk to keep."""

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest


class Told(NamedTuple):
    """A file or folder was `synced`, or has got its name (`named`)."""

    what: str
    inode: int
    size: int


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """What is synced and renamed from now on, in order; the list grows."""
    told: list[Told] = []

    def watch(name: str, what: str, after: Callable[..., os.stat_result]) -> None:
        call = getattr(os, name)

        def both(*given, **options) -> None:
            call(*given, **options)
            found = after(*given)
            told.append(Told(what, found.st_ino, found.st_size))

        monkeypatch.setattr(os, name, both)

    for name in ("fsync", "fdatasync"):
        watch(name, "synced", os.fstat)
    for name in ("rename", "replace"):
        watch(name, "named", lambda source, to: os.lstat(to))
    return told
