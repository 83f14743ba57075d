"""Units of published models, read ahead in the background into one buffer of bounded size.

One thread serves every teacher that shares a stream, in the order in which they asked: rank `r` of `N` reads
its 1/N of a unit, the ranks gather the whole of it, and the caller gets its bytes while the next units
arrive. ZeRO-3 (Rajbhandari et al., 2020, section 5.3) gathers parameters from the ranks' memory in the same
way; here nobody holds them, they come from the store each time.

One unit of a published model into memory: 1/N read by each of N ranks, then gathered by all of them.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from opd.errors import OpdError, TeacherError, reason_of

if TYPE_CHECKING:
    from opd.storage.published import PublishedModel
    from opd.storage.shard_cache import ShardCache

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
        raise TeacherError(
            f"{failure}, another rank is gone or does not answer ({reason_of(error)}); look for that"
            " rank's own error, then start all of them again."
        ) from error


T = TypeVar("T")


def work_on(device: torch.device) -> None:
    """Let this thread use `device`: every thread begins with the first one, whatever that of its maker is."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def in_background(name: str, call: Callable[[], T], device: torch.device) -> Future[T]:
    """Start `call` now, on `device`. Unlike an executor's, its thread never keeps the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            work_on(device)
            future.set_result(call())
        except BaseException as error:  # handed to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class ByteMeter:
    """Adds and takes away bytes from any thread, and remembers the most there were."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may run inside `hold`
        self._now = 0
        self._peak = 0

    @property
    def now(self) -> int:
        """Bytes held now."""
        return self._now

    def hold(self, nbytes: int) -> None:
        """`nbytes` more exist."""
        with self._lock:
            self._now += nbytes
            self._peak = max(self._peak, self._now)

    def let_go(self, nbytes: int) -> None:
        """`nbytes` less exist."""
        with self._lock:
            self._now -= nbytes

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        """`nbytes` more exist inside the block."""
        self.hold(nbytes)
        try:
            yield
        finally:
            self.let_go(nbytes)

    def take_peak(self) -> int:
        """The most bytes held at once since this was last asked."""
        with self._lock:
            peak, self._peak = self._peak, self._now
            return peak


ALIGNMENT = 256
"""Bytes; what CUDA allocations have, and a multiple of what every dtype and SIMD load asks for."""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to `ALIGNMENT`, at least one."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


class ByteRing:
    """Tracks what is free in a buffer of `capacity` bytes; owns no memory.

    Every piece is contiguous, so what is left at the end of the buffer may stay unused for a round. Space is
    used again in the order in which it was taken: a piece given back early counts only when all older ones
    are back too. A piece of at most `capacity` bytes always fits into an empty ring.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = aligned(capacity)
        self._live: OrderedDict[int, int] = OrderedDict()  # start -> stop, oldest first
        self._back: set[int] = set()

    def __len__(self) -> int:
        """Pieces whose space cannot be used yet."""
        return len(self._live)

    def take(self, nbytes: int) -> int | None:
        """Where `nbytes` may be written; `None` while there is no room for them."""
        size = aligned(nbytes)
        start = self._place(size)
        if start is not None:
            self._live[start] = start + size
        return start

    def give_back(self, start: int) -> None:
        """The piece that begins at `start` is no longer needed. `KeyError` if there is none."""
        if start not in self._live or start in self._back:
            raise KeyError(start)
        self._back.add(start)
        while self._live and (oldest := next(iter(self._live))) in self._back:
            del self._live[oldest]
            self._back.discard(oldest)

    def _place(self, size: int) -> int | None:
        if not self._live:
            return 0 if size <= self.capacity else None
        oldest = next(iter(self._live))
        newest, end = next(reversed(self._live.items()))
        if newest < oldest:  # wrapped: free space lies between the newest and the oldest
            return end if oldest - end >= size else None
        if self.capacity - end >= size:
            return end
        return 0 if oldest >= size else None


_CLOSE_TIMEOUT = 60.0
"""Seconds a rank that closes its stream waits for the others."""


@dataclass(eq=False)
class UnitPass:
    """Some units of one model, asked for in this order, to be used once."""

    model: PublishedModel
    units: tuple[str, ...]
    largest: int
    """Bytes of memory its largest unit needs."""
    total: int
    """Bytes of memory all of its units need, each aligned."""
    cancelled: bool = False
    error: BaseException | None = None
    ready: deque[tuple[int, Tensor]] = field(default_factory=deque)
    """Place and bytes of the units that were read and not used yet."""
    asked: int = 0
    """Units the thread has begun to read."""
    used: int = 0
    """Units the caller is done with."""


class LayerStream:
    """Reads units ahead; at most the largest unit and `prefetch_bytes` more are in memory.

    Its buffer is never larger than two passes need, the one in use and the next one, whatever the budget.

    Args:
        prefetch_bytes: How much may lie ready, or be on its way, beside the unit in use.
        device: Where the bytes go.
        group: The ranks that share the reading, each 1/N. The background thread uses it alone: make one with
            `torch.distributed.new_group`. Every rank must ask for the same units in the same order.
        cache: This node's copies of what its teachers read from object stores.
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
        self.meter = ByteMeter()
        """Its buffer, and whatever its teachers add: converted layers and heads."""
        self.stall_seconds = 0.0
        """How long callers have waited for bytes."""
        self._changed = threading.Condition()
        self._ring = ByteRing(0)
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._queue: deque[UnitPass] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def collective(self) -> bool:
        """Whether several ranks read together."""
        return self.gather.world > 1

    @property
    def nbytes(self) -> int:
        """Bytes of its buffer."""
        return self._arena.nbytes

    def ask(self, model: PublishedModel, units: Sequence[str]) -> UnitPass:
        """Begin to read `units` of `model`, after everything asked for before."""
        rooms = [self.gather.room(model, unit) for unit in units]
        asked = UnitPass(model, tuple(units), max(rooms), sum(map(aligned, rooms)))
        with self._changed:
            if self._closed:
                raise TeacherError("this stream of teacher weights was closed; open a new one.")
            self._queue.append(asked)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="layer-stream", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return asked

    def units(self, asked: UnitPass) -> Generator[tuple[str, Tensor], None, None]:
        """(name, bytes [nbytes] uint8) of each unit, in order; the bytes are valid until the next one.

        Raises what the reader raised (`StorageError`), and `TeacherError` where another rank failed. What was
        asked for before `asked` and not used is dropped, and read again if it is used later. Close the
        iterator to drop what is left.
        """
        if asked.cancelled:
            asked = self.ask(asked.model, asked.units)
        self._overtake(asked)
        try:
            for unit in asked.units:
                yield unit, self._wait(asked)
                self._free(asked)
                asked.used += 1
        finally:
            self.drop(asked)

    def close(self) -> None:
        """Stop reading and free the buffer.

        With a group, all ranks close together: this waits for the others, though not for ever, since one that
        failed may be waiting for this one elsewhere. A rank that goes on reading gets a `TeacherError`.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT if self.collective else None)
            if self._thread.is_alive():
                return  # it waits for a rank that may never come, and needs its buffer if it does
        self._queue.clear()
        self.meter.let_go(self._arena.nbytes)
        self._ring, self._arena = ByteRing(0), torch.empty(0, dtype=torch.uint8)

    def _wait(self, asked: UnitPass) -> Tensor:
        begin = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: asked.ready or asked.error or self._closed)
            self.stall_seconds += time.perf_counter() - begin
            if asked.ready:
                return asked.ready[0][1]
        if asked.error is not None:
            raise asked.error
        raise TeacherError("the stream of teacher weights was closed while a teacher was using it.")

    def _free(self, asked: UnitPass) -> None:
        self.gather.finish_compute()
        with self._changed:
            start, _ = asked.ready.popleft()
            if not self._closed:
                self._ring.give_back(start)
            self._changed.notify_all()

    def _overtake(self, asked: UnitPass) -> None:
        """Drop what stands before `asked`: its bytes would never be used, and they fill the buffer."""
        with self._changed:
            # A pass that failed has left the queue: nothing stands before it.
            queued = asked in self._queue
            earlier = list(takewhile(lambda other: other is not asked, self._queue)) if queued else []
        for other in earlier:
            self.drop(other)

    def drop(self, asked: UnitPass) -> None:
        """Read no more of `asked` and forget what was read."""
        while self.collective and asked.error is None and asked.used < len(asked.units) and not self._closed:
            # The other ranks gather with this one, unit by unit: none of them may leave early.
            self._wait(asked)
            self._free(asked)
            asked.used += 1
        with self._changed:
            asked.cancelled = True
            while asked.ready and not self._closed:
                self._ring.give_back(asked.ready.popleft()[0])
            if asked in self._queue:
                self._queue.remove(asked)
            self._changed.notify_all()

    def _run(self) -> None:
        work_on(self.gather.device)
        while (job := self._next()) is not None:
            asked, unit, start = job
            try:
                flat = self.gather.read(asked.model, unit, self._arena[start:])
            except BaseException as error:  # reaches the caller, who waits for this unit
                self._finish(asked, start, None, error)
            else:
                self._finish(asked, start, flat, None)
        self.gather.leave()

    def _finish(self, asked: UnitPass, start: int, flat: Tensor | None, error: BaseException | None) -> None:
        with self._changed:
            asked.error = error
            if asked.cancelled or flat is None:
                self._ring.give_back(start)
            else:
                asked.ready.append((start, flat))
            if error is not None and asked in self._queue:
                self._queue.remove(asked)
            self._changed.notify_all()

    def _next(self) -> tuple[UnitPass, str, int] | None:
        """The next unit to read and where to; waits for work and for room. `None` when closed."""
        with self._changed:
            while not self._closed:
                job = self._start_next()
                if job is not None:
                    return job
                self._changed.wait()
        return None

    def _start_next(self) -> tuple[UnitPass, str, int] | None:
        asked = next((one for one in self._queue if one.asked < len(one.units)), None)
        if asked is None:
            return None
        # A smaller buffer is used on until it is empty, so that the next teacher is read ahead into it.
        wanted = min(asked.largest + self.prefetch_bytes, 2 * asked.total)
        if self._ring.capacity < wanted and not len(self._ring):
            self._ring = ByteRing(wanted)
            # Freed before the larger one is made: the two never exist together.
            self.meter.let_go(self._arena.nbytes)
            self._arena = torch.empty(0, dtype=torch.uint8)
            self._arena = torch.empty(self._ring.capacity, dtype=torch.uint8, device=self.gather.device)
            self.meter.hold(self._arena.nbytes)
        unit = asked.units[asked.asked]
        start = self._ring.take(self.gather.room(asked.model, unit))
        if start is None:
            return None
        asked.asked += 1
        return asked, unit, start
