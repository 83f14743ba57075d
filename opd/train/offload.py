"""Where tensors of the trainer are while others use the device: in pinned memory of the host, or on a CPU,
whose memory is all there is, in a file.

The file has no name, so that a process which is killed leaves none behind, and what is read back is compared
with the digest of what was written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from opd.errors import CheckpointError, reason_of, writing

PART_BYTES = 1 << 20
"""Digested and written at a time, while it is in the cache."""


class Shelf:
    """Takes the contents of tensors, which have no memory meanwhile, and are the same tensors afterwards.

    Args:
        folder: Where the file of those on a CPU is made.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._away: dict[str, tuple[list[Tensor], list[tuple[int, ...]], _Copy]] = {}

    def put(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Take `tensors`, of one device, until `take` asks for `name`; of those cut over ranks this rank's
        parts. Nothing where that name is away already.

        Raises `OSError` if they cannot be written; all of them are as they were then.
        """
        if name in self._away:
            return
        parts = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
        own = list({id(part): part for part in parts if part.numel() and part.is_contiguous()}.values())
        if own:
            copy = _OnHost(own) if own[0].device.type == "cuda" else _OnDisk(own, self._folder)
            self._away[name] = own, [tuple(part.shape) for part in own], copy
            for part in own:
                part.data = part.new_empty(0)

    def take(self, name: str) -> None:
        """Give the tensors that were put under `name` their contents again; nothing if there are none.

        Raises `CheckpointError` if these are not what was written.
        """
        if name in self._away:
            own, shapes, copy = self._away.pop(name)
            for part, shape in zip(own, shapes, strict=True):
                part.data = part.new_empty(shape)
            copy.fill(own)

    def close(self) -> None:
        """Forget what is away: those tensors stay without memory."""
        for _, _, copy in self._away.values():
            copy.close()
        self._away.clear()


class _Copy(Protocol):
    def fill(self, tensors: Sequence[Tensor]) -> None: ...

    def close(self) -> None: ...


class _OnHost:
    """In pinned memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for host, tensor in zip(self._pinned, tensors, strict=True):
            host.copy_(tensor.detach(), non_blocking=True)  # before what the device is given next

    def fill(self, tensors: Sequence[Tensor]) -> None:
        for host, tensor in zip(self._pinned, tensors, strict=True):
            tensor.detach().copy_(host, non_blocking=True)

    def close(self) -> None:
        self._pinned.clear()


class _OnDisk:
    """In a file without a name."""

    def __init__(self, tensors: Sequence[Tensor], folder: Path) -> None:
        self._folder, digest = folder, xxhash.xxh3_128()
        with ExitStack() as stack, writing(folder):
            self._file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
            for part in _parts(tensors):
                digest.update(part)
                while part:
                    part = part[self._file.write(part) :]
            stack.pop_all()
        self._digest = digest.digest()

    def close(self) -> None:
        self._file.close()

    def fill(self, tensors: Sequence[Tensor]) -> None:
        digest, wrong = xxhash.xxh3_128(), "is not what was written"
        try:
            with self._file as file:
                file.seek(0)
                for part in _parts(tensors):
                    left = part
                    while left and (count := file.readinto(left)):
                        left = left[count:]
                    digest.update(part)
        except OSError as error:
            wrong = f"cannot be read ({reason_of(error)})"
        if wrong != "is not what was written" or digest.digest() != self._digest:
            raise CheckpointError(
                f"what the trainer had put away in {self._folder} {wrong}; look at that disk, then go on with"
                " --resume, from the newest checkpoint."
            )


def _parts(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """The memory of `tensors`, piece by piece."""
    for tensor in tensors:
        whole = tensor.detach().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(whole), PART_BYTES):
            yield whole[start : start + PART_BYTES]
