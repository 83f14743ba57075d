"""The trainer's tensors between its steps: counted, and offloaded while others use the device, to pinned host
memory, or on a CPU, whose memory is all there is, to a file.

The offload empties the storage of tensors, not the tensors. Views of a library (FSDP2, Megatron-Core's
buffers, DeepSpeed's flat groups) stay valid, and must not be read meanwhile. The file has no name, so a
killed process leaves none behind. Data read back is compared with the digest of the data written.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from opd.errors import CheckpointError, TrainingError, add_path_note, from_system, reason_of
from opd.models.causal_lm import bytes_of, held_bytes, local_shard
from opd.ranks import Ranks

PART_BYTES = 1 << 20
"""Bytes digested and written at a time, while they are in the cache."""


class OffloadBuffer:
    """Offloads the contents of tensors. They have no memory meanwhile, and are the same tensors afterwards.

    Args:
        folder: Folder of the file, for tensors on a CPU.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._away: dict[str, tuple[list[torch.UntypedStorage], list[int], _StoredCopy]] = {}

    def put(self, name: str, tensors: Iterable[Tensor], *, zero: bool = False) -> None:
        """Offload `tensors` until `take` reloads `name`. If some are on a GPU, only these; of sharded ones
        this rank's shards. No-op if the name is offloaded already. With `zero` they hold only zeros and
        nothing is kept.

        Raises `OSError` if they cannot be written. All tensors are unchanged then.
        """
        if name in self._away:
            return
        by_address: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = local_shard(tensor).untyped_storage()
            if storage.nbytes() and storage.resizable():
                by_address[storage.data_ptr()] = storage
        on_gpu = [storage for storage in by_address.values() if storage.device.type == "cuda"]
        storages = on_gpu or list(by_address.values())
        if not storages:
            return
        copy: _StoredCopy
        if zero:
            copy = _ZeroCopy()
        elif on_gpu:
            copy = _HostCopy(_byte_views(storages))
        else:
            copy = _DiskCopy(_byte_views(storages), self._folder)
        self._away[name] = storages, [storage.nbytes() for storage in storages], copy
        for storage in storages:
            storage.resize_(0)

    def take(self, name: str) -> None:
        """Reload the tensors offloaded under `name`. No-op if there are none.

        Raises `CheckpointError` if the contents differ from the written ones.
        """
        if name in self._away:
            storages, sizes, copy = self._away.pop(name)
            for storage, size in zip(storages, sizes, strict=True):
                storage.resize_(size)
            copy.copy_back(_byte_views(storages))

    def close(self) -> None:
        """Drop the offloaded contents. Those tensors stay without memory."""
        for _, _, copy in self._away.values():
            copy.close()
        self._away.clear()


@dataclass(frozen=True, slots=True)
class BackendTensors:
    """Tensors of a back end on this rank, resident or offloaded."""

    weights: Iterable[Tensor]
    """The layers' weights, and their copies in the optimiser's precision."""
    gradients: Iterable[Tensor]
    moments: Iterable[Tensor]
    """The optimiser's state other than weights. Only a step needs it."""
    stays: Iterable[Tensor] = ()
    """Tensors of the model that are never offloaded."""


TRIMMED = 64 << 20
"""Minimum bytes of weights for returning freed memory to the system within a step. Smaller models free
little, and their steps are so short that allocating again would show."""


def resident_bytes() -> int:
    """Resident bytes of this process, or 0 if the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError):
        return 0


class TrainerMemory(ABC):
    """The memory of a back end's tensors on this rank.

    Args:
        shelf: Stores offloaded tensors. `None`: they stay.
        weight_bytes: Bytes of all weights, counting all shards.
    """

    empty_buffers = False
    """Gradients keep their memory between steps, with nothing in it."""
    weights_shared = False
    """An engine generates with these very weights, so they are never offloaded."""
    together: Ranks
    """All ranks of one pass through the model."""

    def __init__(self, shelf: OffloadBuffer | None, weight_bytes: int) -> None:
        self._shelf = shelf
        self._trims = weight_bytes >= TRIMMED
        self._trimmed = 0
        """Resident bytes after freed memory was last returned."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    def close(self) -> None:
        """Release resources that outlive the object."""
        if self._shelf is not None:
            self._shelf.close()

    @abstractmethod
    def local_tensors(self) -> BackendTensors:
        """Return this rank's tensors."""

    def resident(self) -> dict[str, int]:
        """Return this rank's resident bytes of weights, gradients and moments."""
        tensors = self.local_tensors()
        return {
            "trainer_weights": held_bytes((*tensors.weights, *tensors.stays)),
            "trainer_gradients": held_bytes(tensors.gradients),
            "trainer_moments": held_bytes(tensors.moments),
        }

    def offload_state(self, weights: bool = True) -> None:
        """Offload moments (and `weights`) between two steps, until their next use. No-op unless offloading is
        on. Raises `OSError` on all ranks if they cannot be written. Nothing is lost then.
        """
        if self._shelf is None:
            return
        if self.together.is_alone:
            self._put_away(self._shelf, weights)
            return
        shelf = self._shelf

        def offload_locally() -> None:
            try:
                self._put_away(shelf, weights)
            except OSError as error:
                raise from_system(error) or TrainingError(f"{reason_of(error)}.") from error

        self.together.run_on_ranks(offload_locally, "putting away what learns")

    def _put_away(self, shelf: OffloadBuffer, weights: bool) -> None:
        tensors = self.local_tensors()
        shelf.put("moments", tensors.moments)
        if self.empty_buffers:
            shelf.put("gradients", tensors.gradients, zero=True)
        if weights and not self.weights_shared:
            shelf.put("weights", tensors.weights)
        self._return_memory()

    def reload_weights(self) -> None:
        """Reload the weights. Raises `CheckpointError` if they differ from the offloaded ones."""
        self._reload_tensors("weights")

    def _reload_tensors(self, *names: str) -> None:
        if self._shelf is not None:
            for name in names:
                self._shelf.take(name)

    def _return_memory(self, least: int = 0) -> None:
        """Return freed memory to the system, unless it is less than `least` bytes since the last call.

        On a CPU glibc keeps free memory between fragments that are still in use. Each phase and micro-batch
        has fragments of its own sizes, so together they would need the sum of their memory instead of the
        maximum.
        """
        if not self._trims or self.device.type != "cpu":
            return
        if least and resident_bytes() - self._trimmed < least:
            return
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if give_back is not None:
            give_back(0)
        self._trimmed = resident_bytes()


def copy_mapped(tensors: Iterable[Tensor]) -> None:
    """Copy those of `tensors` that lie in mapped files, so that their memory can be freed."""
    for tensor in tensors:
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.detach().clone()


def _byte_views(storages: Sequence[torch.UntypedStorage]) -> list[Tensor]:
    """Return each storage as `[nbytes]` uint8."""
    return [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in storages]


class _StoredCopy(Protocol):
    def copy_back(self, memory: Sequence[Tensor]) -> None: ...

    def close(self) -> None: ...


class _ZeroCopy:
    """A copy of zeros, stored nowhere."""

    def copy_back(self, memory: Sequence[Tensor]) -> None:
        for part in memory:
            part.zero_()

    def close(self) -> None:
        return


class _HostCopy:
    """A copy in pinned memory."""

    def __init__(self, memory: Sequence[Tensor]) -> None:
        self._pinned = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in memory]
        for host, part in zip(self._pinned, memory, strict=True):
            host.copy_(part, non_blocking=True)  # ordered before later work of the device

    def copy_back(self, memory: Sequence[Tensor]) -> None:
        for host, part in zip(self._pinned, memory, strict=True):
            part.copy_(host, non_blocking=True)

    def close(self) -> None:
        self._pinned.clear()


class _DiskCopy:
    """A copy in a file without a name."""

    def __init__(self, memory: Sequence[Tensor], folder: Path) -> None:
        self._folder, digest = folder, xxhash.xxh3_128()
        with ExitStack() as stack, add_path_note(folder):
            self._file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
            for part in _byte_chunks(memory):
                digest.update(part)
                while part:
                    part = part[self._file.write(part) :]
            stack.pop_all()
        self._digest = digest.digest()

    def close(self) -> None:
        self._file.close()

    def copy_back(self, memory: Sequence[Tensor]) -> None:
        digest, wrong = xxhash.xxh3_128(), "is not what was written"
        try:
            with self._file as file:
                file.seek(0)
                for part in _byte_chunks(memory):
                    unread = part
                    while unread and (count := file.readinto(unread)):
                        unread = unread[count:]
                    if unread:  # stale memory may match by chance
                        wrong = "was cut short"
                        break
                    digest.update(part)
        except OSError as error:
            wrong = f"cannot be read ({reason_of(error)})"
        if wrong != "is not what was written" or digest.digest() != self._digest:
            raise CheckpointError(
                f"what the trainer had put away in {self._folder} {wrong}; look at that disk, then go on with"
                " --resume, from the newest checkpoint."
            )


def _byte_chunks(memory: Sequence[Tensor]) -> Iterator[memoryview]:
    for tensor in memory:
        data = bytes_of(tensor)
        for start in range(0, len(data), PART_BYTES):
            yield data[start : start + PART_BYTES]
