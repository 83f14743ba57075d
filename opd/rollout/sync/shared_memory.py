"""Weights over shared memory: written once by the trainer, mapped by every engine of the machine.

A version is one file on a memory file system. It is unlinked as soon as every receiver has answered, and
when the sender is closed. What a killed sender leaves is found by the lock that the system took from it, and
unlinked when the next sender on the machine starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import RolloutError
from opd.models.digest import WeightsDigest, raw_bytes
from opd.rollout.sync.parcel import (
    Parcel,
    Tell,
    Weights,
    described,
    rebuilt,
    size_of,
)

if TYPE_CHECKING:
    from torch import Tensor

FOLDER, PREFIX = Path("/dev/shm"), "opd-weights-"
ALIGNMENT = 64


class SharedMemorySender:
    """See `WeightSender`. Raises `RolloutError` where the machine has no memory file system.

    Args:
        folder: On a memory file system, the same for every sender and receiver of the machine.
    """

    def __init__(self, folder: str | Path = FOLDER) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise RolloutError(f"{folder} is not a folder, so weights cannot be shared there; use disk.")
        self._file: tuple[int, Path] | None = None
        sweep(self._folder)

    def send(self, weights: Weights, version: int, tell: Tell) -> tuple[str, Sequence[str]]:
        """See `WeightSender`. Raises `RolloutError` if the memory file system is full."""
        digest = WeightsDigest()
        descriptor, path = self._file = _locked_file(self._folder)
        try:
            try:
                table = [_append(descriptor, name, tensor) for name, tensor in digest.watch(weights)]
            except OSError as error:
                raise RolloutError(
                    f"weights do not fit into {self._folder} ({error.strerror}); make it larger or use disk."
                ) from None
            return digest.hex(), tell(
                Parcel("shared_memory", version, {"file": str(path), "tensors": table})
            )()
        finally:
            self.close()

    def close(self) -> None:
        """Unlink what is there; receivers that have mapped it may go on reading."""
        if self._file is not None:
            (descriptor, path), self._file = self._file, None
            path.unlink(missing_ok=True)
            os.close(descriptor)


class SharedMemoryReceiver:
    """See `WeightReceiver`: tensors over the mapped file, valid until the iterator is exhausted."""

    def receive(self, parcel: Parcel) -> Iterator[tuple[str, Tensor]]:
        """See `WeightReceiver`."""
        import torch

        path, table = parcel.where["file"], parcel.where["tensors"]
        size = max((entry["start"] + size_of(entry) for entry in table), default=0)
        if not size:
            return
        # `from_file` would make, or lengthen, a file that is not what it should be.
        if not os.path.exists(path) or os.path.getsize(path) < size:
            raise RolloutError(
                f"version {parcel.version} is not in {path}, or not whole; its trainer ended, or runs on"
                " another machine, where disk or broadcast are needed."
            )
        whole = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        for entry in table:
            yield rebuilt(entry, whole[entry["start"] : entry["start"] + size_of(entry)])


def sweep(folder: str | Path = FOLDER) -> list[Path]:
    """Unlink the files of senders that have ended, however they ended; returns which."""
    gone = []
    for path in Path(folder).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                # The lock of a process goes with it, also when it is killed.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                gone.append(path)
            finally:
                os.close(descriptor)
    return gone


def _locked_file(folder: Path) -> tuple[int, Path]:
    """A new file that this process holds the lock of."""
    while True:
        path = folder / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another sender may have swept it away between the two calls.
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor, path
        os.close(descriptor)


def _append(descriptor: int, name: str, tensor: Tensor) -> dict[str, Any]:
    """Write `tensor` at the next aligned place; returns its description with `start`."""
    start = -(-os.fstat(descriptor).st_size // ALIGNMENT) * ALIGNMENT
    content = raw_bytes(tensor).numpy().data
    os.ftruncate(descriptor, start)
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], start + done)
    return described(name, tensor) | {"start": start}
