"""Files of the operating system under a process that kills itself in the middle of using them."""

import os
import signal
from pathlib import Path
from zlib import crc32

from opd.storage.framed_log import LogIO


class DyingIO(LogIO):
    """Kills its own process before the `count`-th operation at `place`, and says so to `pipe`.

    The place `tear` is in the middle of an append while frames are written: neither none of its bytes nor all
    of them are there. (`write` is any operation of that time; most of those are no appends.)
    """

    def __init__(self, place: str, count: int, pipe: int) -> None:
        self._place, self._left, self._pipe = place, count, pipe
        self._doing = "opening"
        self.is_open = False

    def _at(self, place: str, appends: bool = False) -> bool:
        """Whether this operation is the one to die before."""
        place = place if self.is_open or place == "compaction" else "opening"
        tears = self._place == "tear" and appends and place == "write"
        if not tears and self._place not in ("any", place):
            return False
        self._left -= 1
        if self._left >= 0:
            return False
        os.write(self._pipe, f"d {'tear' if tears else place}\n".encode())
        return True

    def _maybe_die(self, place: str) -> None:
        if self._at(place):
            os.kill(os.getpid(), signal.SIGKILL)

    def create(self, path: Path) -> int:
        self._doing = "compaction" if ".snapshot" in path.name else "rotation"
        self._maybe_die(self._doing)
        return super().create(path)

    def append(self, file: int, buffers: list) -> None:
        if self._at(self._doing, appends=True):
            data = b"".join(bytes(part) for part in buffers)
            # A tear leaves at least a byte, and at least one out.
            least = int(self._place == "tear")
            super().append(file, [data[: least + crc32(data) % (len(data) + 1 - 2 * least)]])
            os.kill(os.getpid(), signal.SIGKILL)
        super().append(file, buffers)

    def reserve(self, file: int, start: int, count: int) -> None:
        if self._at(self._doing):
            super().reserve(file, start, count // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        super().reserve(file, start, count)

    def truncate_file(self, file: int, size: int) -> None:
        self._maybe_die(self._doing)
        super().truncate_file(file, size)

    def sync(self, file: int) -> None:
        self._maybe_die(self._doing)
        super().sync(file)

    def rename(self, source: Path, target: Path) -> None:
        self._maybe_die(self._doing)
        super().rename(source, target)

    def sync_folder(self, folder: Path) -> None:
        self._maybe_die(self._doing)
        super().sync_folder(folder)
        self._doing = "write"

    def remove(self, path: Path) -> None:
        self._maybe_die("compaction")
        super().remove(path)
