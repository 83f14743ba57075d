"""One unit of a published model, read 1/N by each of N ranks and gathered by all.

ZeRO-3 (Rajbhandari et al., 2020, section 5.3) gathers parameters from the ranks' memory in the same way. Here
nobody holds them: they come from the store each time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from opd.errors import OpdError, TeacherError, TeacherRanksError, reason_of

if TYPE_CHECKING:
    from opd.storage.published import PublishedModel

_HAS_READ, _FAILED, _LEAVES, _WANTS, _DONE = range(5)
# The older name warns where the newer one is there.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


ROWS_BYTES = 1 << 26
"""Bytes of hidden states on their way to a device, at most this much twice in pinned memory."""


class Staging:
    """Two pinned buffers: the host writes into one while the other is on its way to a device."""

    def __init__(self) -> None:
        self._pieces = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 1

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(len(piece) for piece in self._pieces)

    def next_buffer(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 to write into, until `send_buffer`. Waits until old content has been sent."""
        self._turn = 1 - self._turn
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        if len(self._pieces[self._turn]) < nbytes:
            self._pieces[self._turn] = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._pieces[self._turn] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._pieces[self._turn][:nbytes]

    def send_buffer(self, into: Tensor) -> None:
        """Copy the buffer taken last to `into` [nbytes] uint8 on the device, on the stream of this thread."""
        into.copy_(self._pieces[self._turn][: len(into)], non_blocking=True)
        self._events[self._turn] = _record_event(torch.cuda.current_stream(into.device))

    def concatenate_rows(self, rows: Sequence[Tensor], device: torch.device | None) -> Tensor:
        """Return [N, D] of `rows` [r, D] end to end, on `device` or where they are. A single one is returned
        unchanged.

        From the host, where they are usually mapped, they go to CUDA through pinned memory.
        """
        if device is not None and device.type == "cuda" and all(part.device.type == "cpu" for part in rows):
            most = max(1, ROWS_BYTES // max(1, rows[0][:1].nbytes))
            joined = rows[0].new_empty((sum(map(len, rows)), rows[0].shape[1]), device=device)
            flat, at, few = joined.view(-1).view(torch.uint8), 0, len(joined) <= most
            for parts in [rows] if few else ([part] for tensor in rows for part in tensor.split(most)):
                nbytes = sum(part.nbytes for part in parts)
                buffer = self.next_buffer(nbytes).view(joined.dtype).view(-1, joined.shape[1])
                torch.cat(list(parts), out=buffer)
                self.send_buffer(flat[at : at + nbytes])
                at += nbytes
            return joined
        if device is not None:
            rows = [part.to(device, non_blocking=True) for part in rows]
        return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def _record_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event for the end of all work given to `stream` so far."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


class UnitGather:
    """Reads into memory of `device`, with a `group` together with its other ranks.

    On CUDA it waits only for reading: while one unit is on its way to the device, and gathered there, the
    next one is read.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.device = device
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1
        self._broken: TeacherError | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staging = Staging() if self._stream is not None else None

    @property
    def staged_bytes(self) -> int:
        """Bytes of pinned host memory: at most twice this rank's slice of the largest unit. None on a CPU."""
        return 0 if self._staging is None else self._staging.nbytes

    def required_bytes(self, model: PublishedModel, unit: str) -> int:
        """Return the bytes of memory that `read` needs: every rank's slice counted as the largest.

        Raises `StorageError` if this machine has less.
        """
        model.require_memory(unit)
        return model.part_bytes(unit, self.world) * self.world

    def allocate_memory(self, nbytes: int) -> Tensor:
        """Return [nbytes] uint8 to read into, once this thread's stream has finished using that memory."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return memory

    def read(self, model: PublishedModel, unit: str, into: Tensor) -> Tensor:
        """Return all bytes of `unit` [nbytes] uint8, at the beginning of `into` of at least `required_bytes`,
        for the next work of this thread's stream. Raises as `begin_read` does.
        """
        flat, arrives = self.begin_read(model, unit, into)
        self.wait_event(arrives)
        return flat

    def begin_read(
        self, model: PublishedModel, unit: str, into: Tensor
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """`read`, but the caller must wait for the returned event. On a CPU the bytes are ready, and it is
        `None`.

        Raises `StorageError` from the reader. The other ranks then raise `TeacherError`. All remaining ranks
        also raise it if a rank has left or died, now and at every later call.
        """
        part = model.part_bytes(unit, self.world)
        entry = model.manifest.unit(unit)
        ranges = [entry.rank_range(rank, self.world) for rank in range(self.world)]

        def read(host: Tensor) -> None:
            start, stop = ranges[self.rank]
            model.read_part(unit, self.rank, self.world, host.numpy().data[: stop - start])

        with self._on_stream() as reached:
            parts = self._share(model, unit, into[: part * self.world], read)
            # Close the gaps between slices that are smaller than the largest, except the last.
            for rank, (start, stop) in enumerate(ranges):
                if start != rank * part and stop > start:
                    parts[start:stop] = parts[rank * part : rank * part + stop - start].clone()
            return into[: entry.nbytes], reached()

    def blocks_bytes(self, model: PublishedModel, unit: str, blocks: int) -> int:
        """Bytes of memory that `begin_blocks` needs for so many blocks of `unit`."""
        return -(-blocks // self.world) * self.world * model.manifest.unit(unit).block_bytes

    def begin_blocks(
        self, model: PublishedModel, unit: str, blocks: Sequence[int], into: Tensor
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """`begin_read` for `blocks` of `unit` alone, one after another; all ranks name the same ones."""
        share = -(-len(blocks) // self.world)
        mine = blocks[self.rank * share : (self.rank + 1) * share]
        size = share * model.manifest.unit(unit).block_bytes

        def read(host: Tensor) -> None:
            model.read_blocks(unit, mine, host.numpy().data)

        with self._on_stream() as reached:
            return self._share(model, unit, into[: size * self.world], read), reached()

    def wanted(
        self, model: PublishedModel, unit: str, mine: Collection[int] | None, count: int
    ) -> list[int] | None:
        """Which of `count` experts any rank wants, in order; `None` when no rank does, as `mine` says."""
        if self.world == 1:
            return None if mine is None else sorted(mine)
        with self._on_stream():
            failure = _not_gathered(model, unit)
            if not _ranks_in_state(self._exchange_states(failure, _DONE if mine is None else _WANTS), _WANTS):
                return None
            marks = torch.zeros(count, dtype=torch.int32)
            marks[sorted(mine or ())] = 1
            marks = marks.to(self.device)
            with self._remember_failure(), naming_lost_ranks(failure):
                dist.all_reduce(marks, group=self.group)
            return marks.nonzero().flatten().tolist()

    @contextmanager
    def _on_stream(self) -> Iterator[Callable[[], torch.cuda.Event | None]]:
        """Read inside; what it gives says when all that was read until then is on the device."""
        if self._broken is not None:
            raise self._broken
        if (stream := self._stream) is None:
            yield lambda: None
            return
        with torch.cuda.stream(stream):
            yield lambda: _record_event(stream)

    def wait_event(self, arrives: torch.cuda.Event | None) -> None:
        """Make this thread's stream, not the host, wait for the event of `begin_read`."""
        if arrives is not None:
            torch.cuda.current_stream(self.device).wait_event(arrives)

    def usage_event(self) -> torch.cuda.Event | None:
        """Return an event for the end of this thread's stream so far, or `None` on a CPU (reached)."""
        return None if self._stream is None else _record_event(torch.cuda.current_stream(self.device))

    def finish(self) -> None:
        """Wait until nothing is on its way to the device, so that its memory can be freed."""
        if self._stream is not None:
            self._stream.synchronize()

    def stop_reading(self) -> None:
        """Stop reading. Waits for the other ranks, which leave too, or see it at their next unit."""
        if self.world > 1 and self._broken is None:
            with suppress(TeacherError):  # a missing rank needs no message
                self._exchange_states("", _LEAVES)

    def _share(
        self, model: PublishedModel, unit: str, parts: Tensor, read: Callable[[Tensor], None]
    ) -> Tensor:
        """`parts` [nbytes] uint8, one a rank, of which `read` fills this rank's, once all have theirs."""
        part = len(parts) // self.world
        mine, error = parts[self.rank * part : (self.rank + 1) * part], None
        try:
            read(mine if self._staging is None else self._staging.next_buffer(part))
        except Exception as caught:
            error = caught
        states: list[int] = []
        if self.world > 1:
            # Before the copy: a message from the others waits for all earlier work of the stream. If one rank
            # could not read, all stop, as a gather without it would wait for ever.
            state = _HAS_READ if error is None else _FAILED
            states = self._exchange_states(_not_gathered(model, unit), state)
        if error is not None:
            raise error
        if ranks := _ranks_in_state(states, _FAILED):
            raise TeacherRanksError(  # a launcher knows from this class that another rank has the cause
                f"rank {ranks} could not read its part of {unit} of teacher weights"
                f" {model.manifest.digest[:12]}; its own error says why."
            )
        if self._staging is not None:
            self._staging.send_buffer(mine)
        if self.world > 1 and part:
            with self._remember_failure(), naming_lost_ranks(_not_gathered(model, unit)):
                _all_gather(parts, mine, group=self.group)
        return parts

    def _exchange_states(self, failure: str, state: int) -> list[int]:
        """Exchange every rank's state for the next unit. Raises `TeacherError` if one is gone, for good."""
        states = torch.zeros(self.world, dtype=torch.int32, device=self.device)
        states[self.rank] = state
        with self._remember_failure(), naming_lost_ranks(failure):
            dist.all_reduce(states, group=self.group)
            if (ranks := _ranks_in_state(states.tolist(), _LEAVES)) and state != _LEAVES:
                raise TeacherRanksError(
                    f"{failure}, rank {ranks} has stopped to read teachers; look for that rank's own error."
                )
        return states.tolist()

    @contextmanager
    def _remember_failure(self) -> Iterator[None]:
        """Remember a `TeacherError`: a rank that went on without another would wait for it for ever."""
        try:
            yield
        except TeacherError as error:
            self._broken = error
            raise


def _ranks_in_state(states: list[int], state: int) -> str:
    return ", ".join(str(rank) for rank, rank_state in enumerate(states) if rank_state == state)


def _not_gathered(model: PublishedModel, unit: str) -> str:
    return f"{unit} of teacher weights {model.manifest.digest[:12]} was not gathered"


@contextmanager
def naming_lost_ranks(failure: str) -> Iterator[None]:
    """Convert the back end's own errors to a `TeacherRanksError` that begins with `failure`."""
    try:
        yield
    except OpdError:
        raise
    except RuntimeError as error:
        raise TeacherRanksError(
            f"{failure}, another rank is gone or does not answer ({reason_of(error)}); look for that"
            " rank's own error, then start all of them again."
        ) from error
