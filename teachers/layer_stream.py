"""Units of published models, read ahead in the background into one buffer of bounded size.

One thread serves every teacher that shares a stream, in the order of their requests. Rank `r` of `N` reads
its 1/N of a unit, the ranks gather all of it, and the caller gets its bytes while the next units arrive.
ZeRO-3 (Rajbhandari et al., 2020, section 5.3) gathers parameters from the ranks' memory in the same way. Here
nobody holds them: they come from the store each time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from opd.errors import OpdError, TeacherError, TeacherRanksError, reason_of
from opd.teachers.head_pages import HeadPages
from opd.teachers.routed_unit import WHOLE_ABOVE, ExpertRequests, RoutedUnit

if TYPE_CHECKING:
    from opd.storage.published import PublishedModel
    from opd.storage.shard_cache import ShardCache

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
        """Return [nbytes] uint8 to write into, until `send_buffer`. Waits until the old content has been
        sent.
        """
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


T = TypeVar("T")


def work_on(device: torch.device) -> None:
    """Let this thread use `device`: every thread begins with the first one, whatever its creator's is."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def in_background(name: str, call: Callable[[], T], device: torch.device) -> Future[T]:
    """Start `call` now, on `device`. Unlike an executor's, its thread never keeps the process from ending."""
    future: Future[T] = Future()

    def run_call() -> None:
        try:
            work_on(device)
            future.set_result(call())
        except BaseException as error:  # handed to the reader of the result
            future.set_exception(error)

    threading.Thread(target=run_call, name=name, daemon=True).start()
    return future


class ByteMeter:
    """Counts bytes up and down from any thread, and remembers the peak."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may run inside `track_bytes`
        self.current_bytes = 0
        """Bytes held now."""
        self._peak = 0

    def add_bytes(self, nbytes: int) -> None:
        """Count `nbytes` more."""
        with self._lock:
            self.current_bytes += nbytes
            self._peak = max(self._peak, self.current_bytes)

    def remove_bytes(self, nbytes: int) -> None:
        """Count `nbytes` less."""
        with self._lock:
            self.current_bytes -= nbytes

    @contextmanager
    def track_bytes(self, nbytes: int) -> Iterator[None]:
        """Count `nbytes` more inside the block."""
        self.add_bytes(nbytes)
        try:
            yield
        finally:
            self.remove_bytes(nbytes)

    def drain_peak(self) -> int:
        """Return the most bytes held at once since the last call."""
        with self._lock:
            peak, self._peak = self._peak, self.current_bytes
            return peak


ALIGNMENT = 256
"""Bytes. CUDA allocations have it, and it is a multiple of every dtype's and SIMD load's alignment."""


def align_size(nbytes: int) -> int:
    """Return `nbytes` rounded up to `ALIGNMENT`, at least one."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


class ByteRing:
    """Tracks free space in a buffer of `capacity` bytes, without owning memory.

    Every allocation is contiguous, so the end of the buffer may stay unused for a round. Space is used again
    in the order of allocation: one given back early counts only when all older ones are back too. An
    allocation of at most `capacity` bytes always fits into an empty ring.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = align_size(capacity)
        self._live: OrderedDict[int, int] = OrderedDict()  # start -> stop, oldest first
        self._back: set[int] = set()

    def __len__(self) -> int:
        """Number of allocations whose space cannot be used yet."""
        return len(self._live)

    def allocate_bytes(self, nbytes: int) -> int | None:
        """Return the offset for `nbytes`, or `None` while there is no space for them."""
        size = align_size(nbytes)
        start = self._free_offset(size)
        if start is not None:
            self._live[start] = start + size
        return start

    def free_bytes(self, start: int) -> None:
        """Free the allocation that begins at `start`. `KeyError` if there is none."""
        if start not in self._live or start in self._back:
            raise KeyError(start)
        self._back.add(start)
        while self._live and (oldest := next(iter(self._live))) in self._back:
            del self._live[oldest]
            self._back.discard(oldest)

    def _free_offset(self, size: int) -> int | None:
        if not self._live:
            return 0 if size <= self.capacity else None
        oldest = next(iter(self._live))
        newest, end = next(reversed(self._live.items()))
        if newest < oldest:  # wrapped: free space lies between the newest and the oldest
            return end if oldest - end >= size else None
        if self.capacity - end >= size:
            return end
        return 0 if oldest >= size else None


_CLOSE_TIMEOUT, _FAILED_TIMEOUT = 60.0, 2.0
"""Seconds a rank that closes its stream waits for the others. The second holds if an error closes it, which
the others see only once this rank is gone.
"""


@dataclass(eq=False)
class UnitPass:
    """Some units of one model, requested in this order, to be used once."""

    model: PublishedModel
    units: tuple[str, ...]
    largest: int
    """Bytes of memory its largest unit needs."""
    total: int
    """Bytes of memory all of its units need, each aligned."""
    layers: Mapping[str, RoutedUnit] = field(default_factory=dict)
    """Those of the units whose experts are read once it is known which are needed."""
    requests: dict[str, ExpertRequests] = field(default_factory=dict)
    """For them, as long as not most experts are needed."""
    cancelled: bool = False
    error: BaseException | None = None
    ready: deque[tuple[int, Tensor, torch.cuda.Event | None]] = field(default_factory=deque)
    """Offset, bytes and event of arrival on the device of each unit that was read and not used yet."""
    begun: int = 0
    """Units the thread has begun to read."""
    used: int = 0
    """Units the caller is done with."""


class LayerStream:
    """Reads units ahead. At most the largest unit and `prefetch_bytes` more are in memory.

    Its buffer is never larger than one pass, whatever the budget: the next one moves in as this one leaves.

    Args:
        prefetch_bytes: Most bytes ready, or on their way, besides the unit in use.
        device: Target of the bytes.
        group: The ranks that share the reading, each 1/N. The background thread uses it alone: make one with
            `torch.distributed.new_group`. Every rank must request the same units in the same order.
        cache: This node's cache of data from object stores.
    """

    def __init__(
        self,
        *,
        prefetch_bytes: int = 2**28,
        device: str | torch.device = "cpu",
        group: dist.ProcessGroup | None = None,
        cache: ShardCache | None = None,
    ) -> None:
        self.prefetch_bytes = prefetch_bytes
        self.cache = cache
        self.gather = UnitGather(torch.device(device), group)
        self.collective = self.gather.world > 1
        """Several ranks read together."""
        self.meter = ByteMeter()
        """Its buffer, and all that its teachers add: converted layers and heads."""
        self.head_pages = HeadPages()
        self.stall_seconds = 0.0
        """How long callers have waited for bytes; of a CUDA device's own waiting for the last copy it says
        nothing.
        """
        self.requests: ExpertRequests | None = None
        """Of the unit in use, if its experts are asked for."""
        self._changed = threading.Condition()
        self._ring = ByteRing(0)
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._queue: deque[UnitPass] = deque()
        self._leaving: deque[tuple[int, torch.cuda.Event]] = deque()
        """Offsets that kernels still use, and the events that free them."""
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of its buffer."""
        return self._arena.nbytes

    def request_pass(
        self, model: PublishedModel, units: Sequence[str], layers: Mapping[str, RoutedUnit] | None = None
    ) -> UnitPass:
        """Begin to read `units` of `model`, after everything asked for before. Of those in `layers` the
        experts are read as their `ExpertRequests` ask for them.
        """
        layers = layers or {}
        requests = {name: ExpertRequests(model, layer, self.meter) for name, layer in layers.items()}
        unit_pass = UnitPass(model, tuple(units), 0, 0, layers, requests)
        self._measure(unit_pass)
        with self._changed:
            if self._closed:
                raise TeacherError("this stream of teacher weights was closed; open a new one.")
            self._queue.append(unit_pass)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_reader, name="layer-stream", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return unit_pass

    def iterate_pass(self, unit_pass: UnitPass) -> Generator[tuple[str, Tensor], None, None]:
        """Yield (name, bytes [nbytes] uint8) of each unit, in order. The bytes are valid until the next one.

        Raises as the reader did (`StorageError`), and `TeacherError` if another rank failed. Units requested
        before `unit_pass` and not used are dropped, and read again if they are used later. Close the iterator
        to drop the rest.
        """
        if unit_pass.cancelled:
            unit_pass = self.request_pass(unit_pass.model, unit_pass.units, unit_pass.layers)
        with self._changed:
            # The bytes of earlier passes would never be used, and they fill the buffer. A pass that failed
            # has left the queue, so nothing is before it.
            queued = unit_pass in self._queue
            earlier = list(takewhile(lambda other: other is not unit_pass, self._queue)) if queued else []
        for other in earlier:
            self.drop_pass(other)
        try:
            for unit in unit_pass.units:
                flat = self._wait_bytes(unit_pass)
                self.requests = unit_pass.requests.get(unit)
                yield unit, flat
                self.requests = None
                if unit in unit_pass.requests:
                    unit_pass.requests[unit].finish()
                self._free_oldest(unit_pass)
                unit_pass.used += 1
        finally:
            self.drop_pass(unit_pass)

    def close(self) -> None:
        """Stop reading and free the buffer.

        With a group, all ranks close together. This waits for the others, though not for ever, since one that
        failed may be waiting for this one elsewhere. A rank that goes on reading gets a `TeacherError`.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for request in [one for unit_pass in self._queue for one in unit_pass.requests.values()]:
                request.finish(closed=True)
        if self._thread is not None:
            patience = _CLOSE_TIMEOUT if sys.exception() is None else _FAILED_TIMEOUT
            self._thread.join(patience if self.collective else None)
            if self._thread.is_alive():
                return  # it waits for a rank that may never come, and needs its buffer if it does
        self._queue.clear()
        self._free_arena()
        self._ring = ByteRing(0)

    def _wait_bytes(self, unit_pass: UnitPass) -> Tensor:
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: unit_pass.ready or unit_pass.error or self._closed)
            self.stall_seconds += time.perf_counter() - start
            if unit_pass.ready:
                _, flat, arrives = unit_pass.ready[0]
                self.gather.wait_event(arrives)
                return flat
        if unit_pass.error is not None:
            raise unit_pass.error
        raise TeacherError("the stream of teacher weights was closed while a teacher was using it.")

    def _free_oldest(self, unit_pass: UnitPass) -> None:
        used = self.gather.usage_event()
        with self._changed:
            self._free_slot(unit_pass.ready.popleft()[0], used)
            self._changed.notify_all()

    def _free_slot(self, start: int, used: torch.cuda.Event | None) -> None:
        """Free a slot at once on a CPU. Else the reader frees it when it needs space, and waits for it."""
        if used is not None:
            self._leaving.append((start, used))
        elif not self._closed:
            self._ring.free_bytes(start)

    def _free_arena(self) -> None:
        """Free the buffer, which nothing reads or writes any more."""
        while self._leaving:
            self._leaving.popleft()[1].synchronize()
        self.gather.finish()
        self.meter.remove_bytes(self._arena.nbytes)
        self._arena = torch.empty(0, dtype=torch.uint8)

    def drop_pass(self, unit_pass: UnitPass) -> None:
        """Read no more of `unit_pass` and forget what was read."""
        self.requests = None
        with self._changed:
            requests = list(unit_pass.requests.values())
        for request in requests:
            request.finish()
        while (
            self.collective
            and unit_pass.error is None
            and unit_pass.used < len(unit_pass.units)
            and not self._closed
        ):
            # The other ranks gather with this one, unit by unit: none of them may leave early.
            self._wait_bytes(unit_pass)
            self._free_oldest(unit_pass)
            unit_pass.used += 1
        used = self.gather.usage_event()
        with self._changed:
            unit_pass.cancelled = True
            while unit_pass.ready and not self._closed:
                self._free_slot(unit_pass.ready.popleft()[0], used)
            if unit_pass in self._queue:
                self._queue.remove(unit_pass)
            self._changed.notify_all()

    def _run_reader(self) -> None:
        work_on(self.gather.device)
        while (job := self._next_job()) is not None:
            unit_pass, unit, start = job
            layer = unit_pass.layers[unit] if unit in unit_pass.requests else None
            try:
                if layer is None:
                    read = self.gather.begin_read(unit_pass.model, unit, self._arena[start:])
                else:
                    read = self.gather.begin_blocks(
                        unit_pass.model, unit, layer.shared_blocks, self._arena[start:]
                    )
            except BaseException as error:  # reaches the caller, who waits for this unit
                self._finish_read(unit_pass, start, error)
            else:
                self._finish_read(unit_pass, start, read)
                if layer is not None:
                    self._serve(unit_pass, unit)
        self.gather.stop_reading()

    def _serve(self, unit_pass: UnitPass, unit: str) -> None:
        """Read the experts of `unit`. Where most were needed, the layers after it are read whole."""
        requests = unit_pass.requests[unit]
        try:
            requests.serve(self.gather)
        except BaseException as error:  # reaches the caller, who waits for experts or for the next unit
            with self._changed:
                self._fail_pass(unit_pass, error)
                self._changed.notify_all()
            requests.fail(error)
            return
        if requests.share > WHOLE_ABOVE:
            with self._changed:
                for later in unit_pass.units[unit_pass.begun :]:
                    unit_pass.requests.pop(later, None)
                self._measure(unit_pass)

    def _measure(self, unit_pass: UnitPass) -> None:
        """Note what memory the units of `unit_pass` need."""
        sizes = [self._unit_bytes(unit_pass, unit) for unit in unit_pass.units]
        unit_pass.largest, unit_pass.total = max(sizes), sum(map(align_size, sizes))

    def _unit_bytes(self, unit_pass: UnitPass, unit: str) -> int:
        if unit not in unit_pass.requests:
            return self.gather.required_bytes(unit_pass.model, unit)
        return self.gather.blocks_bytes(unit_pass.model, unit, len(unit_pass.layers[unit].shared_blocks))

    def _finish_read(
        self,
        unit_pass: UnitPass,
        start: int,
        read: tuple[Tensor, torch.cuda.Event | None] | BaseException,
    ) -> None:
        with self._changed:
            if isinstance(read, BaseException):
                self._fail_pass(unit_pass, read)
            if isinstance(read, BaseException) or unit_pass.cancelled:
                self._ring.free_bytes(start)
            else:
                unit_pass.ready.append((start, *read))
            self._changed.notify_all()

    def _fail_pass(self, unit_pass: UnitPass, error: BaseException) -> None:
        """Read no more of `unit_pass`, whose caller gets `error`. The lock is held."""
        unit_pass.error = error
        if unit_pass in self._queue:
            self._queue.remove(unit_pass)

    def _next_job(self) -> tuple[UnitPass, str, int] | None:
        """Return the next unit to read and its offset. Waits for work and for space. `None` when closed."""
        while True:
            with self._changed:
                while not self._closed:
                    job = self._start_next()
                    if job is not None:
                        return job
                    if self._leaving:
                        break
                    self._changed.wait()
                else:
                    return None
                start, used = self._leaving.popleft()
            used.synchronize()
            with self._changed:
                self._ring.free_bytes(start)

    def _start_next(self) -> tuple[UnitPass, str, int] | None:
        unit_pass = next((one for one in self._queue if one.begun < len(one.units)), None)
        if unit_pass is None:
            return None
        # A smaller buffer is used until it is empty, so that the next teacher is read ahead into it.
        wanted = min(unit_pass.largest + self.prefetch_bytes, unit_pass.total)
        if self._ring.capacity < wanted and self._leaving:
            return None  # it may be empty as soon as these have left
        if self._ring.capacity < wanted and not len(self._ring):
            self._ring = ByteRing(wanted)
            self._free_arena()  # before the larger one is made: the two never exist together
            self._arena = self.gather.allocate_memory(self._ring.capacity)
            self.meter.add_bytes(self._arena.nbytes)
        unit = unit_pass.units[unit_pass.begun]
        start = self._ring.allocate_bytes(self._unit_bytes(unit_pass, unit))
        if start is None:
            return None
        unit_pass.begun += 1
        return unit_pass, unit, start
