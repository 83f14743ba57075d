"""Units of published models, read ahead in the background into one buffer of bounded size.

One thread serves every teacher that shares a stream, in the order of their requests. The ranks gather all of
a unit (`unit_gather.py`), and the caller gets its bytes while the next units arrive.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from opd.errors import TeacherError
from opd.teachers.routed_unit import WHOLE_ABOVE, ExpertRequests, RoutedUnit
from opd.teachers.unit_gather import UnitGather
from opd.teachers.unit_memory import ByteMeter, ByteRing, HeadPages, align_size

if TYPE_CHECKING:
    from opd.storage.published import PublishedModel
    from opd.storage.shard_cache import ShardCache

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
        """How long callers have waited for bytes, without a CUDA device's own waiting for the last copy."""
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
