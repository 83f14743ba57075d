"""Sandboxes for tests, and whether anything of a command is left on the machine."""

import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

from opd.sandbox.local import LocalSandbox, Sandboxes
from opd.sandbox.protocol import Limits
from opd.sandbox.snapshots import SnapshotStore
from opd.sandbox.substrates import Substrate, find_substrate

SMALL = Limits(
    seconds=300.0, cpu_seconds=200, memory=1 << 28, processes=24, disk=8 << 20, files=200, output=1000
)


@contextlib.asynccontextmanager
async def opened(folder: Path, substrate: Substrate, limits: Limits = SMALL) -> AsyncIterator[LocalSandbox]:
    """One sandbox below `folder`, its snapshots in `folder/store`."""
    boxes = Sandboxes(folder / "boxes", SnapshotStore(folder / "store"), limits, substrate=substrate)
    box = boxes.open("one")
    try:
        yield box
    finally:
        await box.close()
        boxes.close()


def named(substrate: Substrate) -> str:
    """What `found` in another process makes it of."""
    return f"{substrate.kind} {substrate.container.image if substrate.container else ''}".strip()


def found(name: str) -> Substrate:
    """The substrate that `named` has named."""
    return find_substrate(*name.split())  # type: ignore[arg-type]


def running(mark: str) -> list[int]:
    """Processes that have `mark` among their words, but this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            if alive and mark.encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def gone(mark: str) -> bool:
    """Whether nothing with `mark` runs any more, or soon: what is killed takes a moment to go."""
    until = time.monotonic() + 60
    while running(mark) and time.monotonic() < until:
        time.sleep(0.02)
    return not running(mark)
