"""One unit of a published model into memory: 1/N read by each of N ranks, then gathered by all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from opd.errors import OpdError, TeacherError

if TYPE_CHECKING:
    from opd.storage.published import PublishedModel


_HAS_READ, _FAILED, _LEAVES = 0, 1, 2
# The older name warns where the newer one is there.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class UnitGather:
    """Reads into memory of `device`; with a `group`, together with its other ranks."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.device = device
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1
        self._broken: TeacherError | None = None
        self._cuda = device.type == "cuda"
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device) if self._cuda else None

    def room(self, model: PublishedModel, unit: str) -> int:
        """Bytes of memory that `read` needs: every rank's part counted as the largest.

        Raises `StorageError` if this machine has less.
        """
        model.require_memory(unit)
        return model.part_bytes(unit, self.world) * self.world

    def read(self, model: PublishedModel, unit: str, into: Tensor) -> Tensor:
        """All bytes of `unit` [nbytes] uint8, at the beginning of `into`, which has at least `room` bytes.

        Raises `StorageError` from the reader; the other ranks then raise `TeacherError`, and so do all that
        are left when a rank has left or died, now and at every later call.
        """
        if self._broken is not None:
            raise self._broken
        if not self._cuda:
            return self._read(model, unit, into)
        with torch.cuda.stream(self._stream):
            flat = self._read(model, unit, into)
        assert self._stream is not None
        self._stream.synchronize()
        return flat

    def leave(self) -> None:
        """Read no more. Waits for the other ranks, who leave too, or learn of it at their next unit."""
        if self.world > 1 and self._broken is None:
            with suppress(TeacherError):  # one that is gone needs not be told
                self._tell("", _LEAVES)

    def finish_compute(self) -> None:
        """Wait until kernels that use the last unit are done, so that its memory can be written again."""
        if self._cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def _read(self, model: PublishedModel, unit: str, into: Tensor) -> Tensor:
        part = model.part_bytes(unit, self.world)
        parts = into[: part * self.world]
        mine = parts[self.rank * part : (self.rank + 1) * part]
        nbytes = model.manifest.units[unit].nbytes
        error = self._read_part(model, unit, mine)
        if self.world == 1:
            if error is not None:
                raise error
            return into[:nbytes]
        self._agree(model, unit, error)
        if part:
            with self._lasting(), naming_lost_ranks(_not_gathered(model, unit)):
                _all_gather(parts, mine, group=self.group)
        self._close_gaps(model, unit, parts)
        return into[:nbytes]

    def _read_part(self, model: PublishedModel, unit: str, mine: Tensor) -> Exception | None:
        start, stop = model.part(unit, self.rank, self.world)
        host = self._host(len(mine)) if self._cuda else mine
        try:
            model.read_part(unit, self.rank, self.world, host.numpy().data[: stop - start])
        except Exception as error:
            return error
        if self._cuda:
            mine.copy_(host, non_blocking=True)
        return None

    def _host(self, nbytes: int) -> Tensor:
        # Used again for every unit: the copy to the device is done before the next read begins.
        if len(self._staging) < nbytes:
            self._staging = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._staging[:nbytes]

    def _agree(self, model: PublishedModel, unit: str, error: Exception | None) -> None:
        """Stop on all ranks if one of them could not read: a gather without it would wait for ever."""
        said = self._tell(_not_gathered(model, unit), _HAS_READ if error is None else _FAILED)
        if error is not None:
            raise error
        if ranks := _ranks(said, _FAILED):
            raise TeacherError(
                f"rank {ranks} could not read its part of {unit} of teacher weights"
                f" {model.manifest.digest[:12]}; its own error says why."
            )

    def _tell(self, failure: str, state: int) -> list[int]:
        """What every rank says of the next unit. Raises `TeacherError` if one is gone, for good."""
        said = torch.zeros(self.world, dtype=torch.int32, device=self.device)
        said[self.rank] = state
        with self._lasting(), naming_lost_ranks(failure):
            dist.all_reduce(said, group=self.group)
            if (ranks := _ranks(said.tolist(), _LEAVES)) and state != _LEAVES:
                raise TeacherError(
                    f"{failure}, rank {ranks} has stopped to read teachers; look for that rank's own error."
                )
        return said.tolist()

    @contextmanager
    def _lasting(self) -> Iterator[None]:
        """Remember a `TeacherError`: who goes on without a rank waits for it for ever."""
        try:
            yield
        except TeacherError as error:
            self._broken = error
            raise

    def _close_gaps(self, model: PublishedModel, unit: str, parts: Tensor) -> None:
        """Move the parts together where they are not all of one size, except the last."""
        part = model.part_bytes(unit, self.world)
        for rank in range(1, self.world):
            start, stop = model.part(unit, rank, self.world)
            if start != rank * part and stop > start:
                moved = parts[rank * part : rank * part + stop - start].clone()
                parts[start:stop] = moved


def _ranks(said: list[int], state: int) -> str:
    return ", ".join(str(rank) for rank, own in enumerate(said) if own == state)


def _not_gathered(model: PublishedModel, unit: str) -> str:
    return f"{unit} of teacher weights {model.manifest.digest[:12]} was not gathered"


@contextmanager
def naming_lost_ranks(failure: str) -> Iterator[None]:
    """The back end's own errors as a `TeacherError` that begins with `failure`."""
    try:
        yield
    except OpdError:
        raise
    except RuntimeError as error:
        reason = " ".join(str(error).split()).removesuffix(".")
        raise TeacherError(
            f"{failure}, another rank is gone or does not answer ({reason}); look for that rank's own error,"
            " then start all of them again."
        ) from error
