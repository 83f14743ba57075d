"""The ranks of a stage: their rendezvous, and their messages besides gradients.

Every rank runs the same code on the same decisions. Local facts (a rank's responses, its losses) are gathered
first. So all ranks enter the same collectives in the same order, and a missing rank can be named: each counts
the collectives it has entered in a store that outlives a failed one.

Ranks meet on the requested address alone. torch's own store and gloo's pairs listen on every address, or on
the one that the machine's name resolves to. Then anyone who reaches that machine could join a run, change
messages between ranks, and read its weights.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from opd import errors
from opd.errors import OpdError, RanksError, from_system, reason_of

_T = TypeVar("_T")
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
EVERY = "0.0.0.0"


def host_store(host: str, timeout: float, port: int = 0) -> tuple[TCPStore, int]:
    """Return a store on `port` (0: a free one) of this machine's address `host` alone, and the port.

    `timeout` is in seconds. Raises `OSError` if the port is in use or `host` is no address of this machine.
    """
    listening = socket.create_server((address_of(host), port))
    port = listening.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listening.detach(),
        use_libuv=False,  # the other server takes no socket
    )
    return store, port


def address_of(host: str) -> str:
    """Return the address to listen on for `host`.

    A machine's own name often resolves to loopback on that machine alone, while the others use another
    address of it. Only then this is every address.
    """
    address = socket.gethostbyname(host)
    try:
        ipaddress.ip_address(host)
        is_name = False
    except ValueError:
        is_name = host != "localhost"
    return EVERY if is_name and ipaddress.ip_address(address).is_loopback else address


def gloo_device(host: str) -> object:
    """Return the device of a gloo group whose connections are made on `host`."""
    return dist.ProcessGroupGloo.create_device(hostname=address_of(host))


@contextlib.contextmanager
def gloo_towards(host: str) -> Iterator[None]:
    """Let every gloo group made in the block listen only on the interface that leads to `host`, unless the
    environment names one. If no interface is found (not on Linux), gloo chooses.
    """
    interface = None if _GLOO_INTERFACE in os.environ else interface_towards(host)
    if interface is None:
        yield
        return
    os.environ[_GLOO_INTERFACE] = interface
    try:
        yield
    finally:
        os.environ.pop(_GLOO_INTERFACE, None)


def local_address(host: str) -> str:
    """Return this machine's address towards `host`, without sending. `OSError` if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, 9))
        return asking.getsockname()[0]


def interface_towards(host: str) -> str | None:
    """Return the network interface through which `host` is reached, or `None` if it is unknown."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    try:
        if address_of(host) == EVERY:
            return None
        address = local_address(host)
    except OSError:
        return None
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


_LOST = re.compile(r"gloo|nccl|connection|timed out|timeout|socket|peer|heartbeat", re.IGNORECASE)
"""Words in messages of communication errors, which have no class of their own."""

_BEAT, _BEATS = "beat", 4
"""Key under which the first rank counts its signs of life, and how many it gives within the time-out."""
_LOOK = 0.25
"""Seconds between two looks of a rank that waits for the first one."""
_OTHERS = 3.0
"""Seconds within which ranks that wait for the same one give up after each other."""


def path_of_rank(path: Path, rank: int) -> Path:
    """Return `path` for the first rank, a sibling of it for every other."""
    return path.with_name(f"{path.stem}-rank-{rank}{path.suffix}") if rank else path


class Ranks:
    """One rank's view of all of them. All ranks call every method, in the same order. Properties are local.

    Args:
        group: The processes. `None` is this one alone.
        store: Counts collectives. Without it a missing rank cannot be named.
        name: Tells the collectives of several `Ranks` of one process apart.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, store: Store | None = None, name: str = "run"
    ) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._members = [0] if group is None else dist.get_process_group_ranks(group)
        self._store = store
        self._name = name
        self._entered = 0
        self._main_firsts = 0

    @property
    def is_main(self) -> bool:
        """Return whether this rank writes the files that are written once: metrics, checkpoints, models."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def timeout(self) -> float:
        """Longest wait of a rank for another in seconds, infinite without a store."""
        if self._store is None:
            return math.inf
        return self._store.timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]

    def new_group(self, name: str, members: Sequence[int] | None = None) -> Ranks:
        """Return the same ranks with a new group, for another thread, or only the ranks `members`.

        All ranks call it in the same order, also those that are not among `members` (which get a group they
        must not use).
        """
        if self.group is None:
            return self
        chosen = range(self.size) if members is None else members
        group = dist.new_group([self._members[i] for i in chosen])
        if not isinstance(group, dist.ProcessGroup):
            return Ranks()
        return Ranks(group, self._store, name)

    def one_of(self, groups: Sequence[Sequence[int]], name: str) -> Ranks:
        """Return this rank's group of `groups`, each rank being in exactly one."""
        mine = self
        for number, members in enumerate(groups):
            ranks = self.new_group(f"{name}-{number}", members)
            if self.rank in members:
                mine = ranks
        return mine

    def group_store(self) -> Store | None:
        """Return a key-value store of these ranks alone, or `None` without a store."""
        if self._store is None or self.group is None:
            return None
        return PrefixStore(f"group/{self.group.group_name}", self._store)

    def gather(self, mine: bytes, label: str) -> list[bytes]:
        """Return every rank's bytes, in the order of ranks. `label` names the collective operation, for
        errors.

        Raises `RanksError` naming the ranks that did not come.
        """
        if self.group is None or self.is_alone:
            return [mine]
        with self.collective(label):
            length = torch.tensor([len(mine)])
            lengths = [torch.zeros_like(length) for _ in range(self.size)]
            dist.all_gather(lengths, length, group=self.group)
            sizes = [int(size) for size in lengths]
            padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
            padded[: len(mine)] = torch.frombuffer(bytearray(mine) or bytearray(1), dtype=torch.uint8)[
                : len(mine)
            ]
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=self.group)
        return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def gather_json(self, mine: object, label: str) -> list[Any]:
        """`gather` a JSON value. Floats arrive bit for bit."""
        return [json.loads(message) for message in self.gather(json.dumps(mine).encode(), label)]

    def any_rank(self, flag: bool, label: str) -> bool:
        return flag if self.is_alone else any(self.gather_json(flag, label))

    def max_over_ranks(self, count: int, label: str) -> int:
        """Return the largest of the ranks' counts."""
        return count if self.is_alone else max(self.gather_json(count, label))

    def barrier(self, label: str) -> None:
        """Return once every rank is here."""
        self.gather(b"", label)

    def shard(self, items: Sequence[_T]) -> list[_T]:
        """Return this rank's share of `items`: every `size`-th."""
        return list(items[self.rank :: self.size])

    def unshard(self, shards: Sequence[Sequence[_T]]) -> list[_T]:
        """Merge the shards of all ranks, made by `shard`, back into the original order."""
        values: list[Any] = [None] * sum(map(len, shards))
        for rank, shard in enumerate(shards):
            values[rank :: self.size] = shard
        return values

    def _wait_for(self, event: str, label: str) -> None:
        """Return once the main rank has done its work before `event`, however long that takes.

        Raises `RanksError` if the main rank is gone, or gives no sign of life within the time-out.
        """
        store, beats, silent = self._store, 0, 0.0
        if store is None:
            self.barrier(label)
            return
        while silent <= self.timeout * (1 + 1 / _BEATS):  # not by a clock: all of them may be suspended
            before = beats
            try:  # no `wait`: it keeps this rank's other threads from the store
                came, beats = ask_store(lambda: (store.check([event]), store.add(_BEAT, 0)), self.timeout)
            except TimeoutError:
                break
            except RuntimeError as error:
                raise RanksError(
                    f"rank {self.rank} waited for {label} of rank 0, which is gone; look for that rank's own"
                    " error and start again with --resume."
                ) from error
            if came:
                return
            time.sleep(_LOOK)
            silent = silent + _LOOK if beats == before else 0.0
        raise RanksError(
            f"rank 0 did not come to {label}, for which rank {self.rank} waits, and has given no sign of life"
            f" for {self.timeout:g} s; look for that rank's own error and start again with --resume."
        )

    def main_first(self, work: Callable[[], object], label: str) -> None:
        """Run `work` on the main rank first, however long it takes, then on the others. `label` names it."""
        self._main_firsts += 1
        event = f"{self._name}/main_first/{self._main_firsts}"
        if not self.is_main:
            self._wait_for(event, label)
        work()
        if self.is_main and not self.is_alone:  # release the ranks in `_wait_for`
            if self._store is None:
                self.barrier(label)
            else:
                self._store.set(event, "1")

    def run_on_ranks(self, work: Callable[[], object], label: str) -> None:
        """Run `work` on every rank, and raise the first `OpdError` on all of them. The other ranks add the
        number of the failed rank. So none waits in vain for a rank that has ended.
        """
        mine: OpdError | None = None
        try:
            work()
        except OpdError as error:
            mine = error
        words = None if mine is None else [type(mine).__name__, *map(str, mine.args or ("",))]
        try:
            messages = self.gather_json(words, label)
        except OpdError:  # others may wait inside `work`
            if mine is None:
                raise
            messages = []
        if mine is not None:
            raise mine
        for rank, theirs in enumerate(messages):
            if theirs is not None:
                kind, sentence, *others = theirs
                raise getattr(errors, kind, OpdError)(f"on rank {rank}: {sentence}", *others)

    @contextlib.contextmanager
    def collective(self, label: str) -> Iterator[None]:
        """Wrap any communication: its errors become a `RanksError` that names the missing ranks."""
        if self.is_alone:
            yield
            return
        self._entered += 1
        with self.name_missing_ranks(label):
            if self._store is not None:
                self._store.set(self._rank_key(self.rank), str(self._entered))
            yield

    @contextlib.contextmanager
    def name_missing_ranks(self, label: str) -> Iterator[None]:
        """`collective` for work with many of them, some of them out of sight."""
        try:
            yield
        except OpdError:
            raise
        except RuntimeError as error:
            if not _LOST.search(f"{type(error).__name__} {error}"):
                raise
            late = self._late_ranks()
            who = f"rank {', '.join(map(str, late))}" if late else "another rank"
            raise RanksError(
                f"{who} did not come to {label}, and rank {self._members[self.rank]} cannot go on alone"
                f" ({reason_of(error)[-200:]}); look for that rank's own error and start again with --resume."
            ) from error

    def _rank_key(self, rank: int) -> str:
        return f"entered/{self._name}/{self._members[rank]}"

    def _late_ranks(self) -> list[int]:
        """Return the ranks that have entered fewer collective operations than this one. If there is none,
        return the ranks that miss nobody themselves: one of them hangs in the middle of one. This holds as
        far as the store still knows.
        """
        store = self._store
        if store is None:
            return []

        def count() -> list[int]:
            store.set(f"misses/{self._rank_key(self.rank)}", "1")
            keys = [self._rank_key(rank) for rank in range(self.size)]
            counts = [int(store.get(key)) if store.check([key]) else 0 for key in keys]
            late = [rank for rank, count in enumerate(counts) if count < self._entered]
            if not late:
                time.sleep(_OTHERS)
                late = [rank for rank, key in enumerate(keys) if not store.check([f"misses/{key}"])]
            return [self._members[rank] for rank in late]

        with contextlib.suppress(RuntimeError, TimeoutError):
            return ask_store(count, _OTHERS + 10)
        return []


def ask_store(question: Callable[[], _T], seconds: float) -> _T:
    """Return the answer of the store to `question`. Raises `TimeoutError` if there is none within so many
    seconds: the process that has the store may be stopped, or its machine gone, and torch waits for ever.
    """
    answer: futures.Future[_T] = futures.Future()

    def run() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="question", daemon=True).start()
    for _ in range(_BEATS):  # in pieces: this process may be suspended, too
        futures.wait([answer], seconds / _BEATS)
    return answer.result(0)


def requested_ranks() -> int:
    """Return the number of ranks that the environment sets (torchrun's `WORLD_SIZE`)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def join_ranks(device: str, timeout_seconds: float) -> Iterator[Ranks]:
    """Join the ranks of torchrun's variables while the block runs, or run alone without them.

    `device` is the recipe's. With CUDA each rank takes the device of its `LOCAL_RANK`. A rank waits at most
    `timeout_seconds` for another. Raises `RanksError` if they do not find each other, or `device` is that of
    another rank.
    """
    if requested_ranks() == 1:
        yield Ranks()
        return
    wait = timedelta(seconds=timeout_seconds)
    cuda = device != "cpu" and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(_local_device(device))
    with gloo_towards(os.environ.get("MASTER_ADDR", "localhost")), _default_wait(wait):
        try:
            store, rank, size = _find_others(wait)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=PrefixStore("group", store),
                rank=rank,
                world_size=size,
                timeout=wait,
                # Connects at once: a wrong GPU is an error here, not a hang in the first message.
                device_id=torch.device("cuda", torch.cuda.current_device()) if cuda else None,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise RanksError(_no_rendezvous(os.environ, error)) from error
        own, over = PrefixStore("opd", store), threading.Event()
        if rank == 0:
            every = timeout_seconds / _BEATS
            threading.Thread(target=_beat, args=(own, every, over), name="sign-of-life", daemon=True).start()
        try:
            yield Ranks(dist.group.WORLD, own)
        finally:
            over.set()
            # After an error the others may be gone or waiting. Leaving the group shows it to them.
            with contextlib.suppress(RuntimeError):
                _leave_group()


@contextlib.contextmanager
def _default_wait(wait: timedelta) -> Iterator[None]:
    """Let the ranks of every group made in the block wait so long for each other, also of those that
    libraries make. torch's default is half an hour, however long the first group waits.
    """
    torch_own: Any = dist.distributed_c10d
    before = torch_own.default_pg_timeout, torch_own.default_pg_nccl_timeout
    torch_own.default_pg_timeout = torch_own.default_pg_nccl_timeout = wait
    try:
        yield
    finally:
        torch_own.default_pg_timeout, torch_own.default_pg_nccl_timeout = before


def _beat(store: Store, every: float, over: threading.Event) -> None:
    """Count a sign of life of this rank in `store` every so many seconds, until it is `over`."""
    with contextlib.suppress(RuntimeError):  # without the store the others know that it is gone
        store.add(_BEAT, 1)
        while not over.wait(every):
            store.add(_BEAT, 1)


def _local_device(device: str) -> int:
    """Return the number of this rank's GPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    requested = None if device == "auto" else torch.device(device).index
    if requested not in (None, local_rank):
        rank = os.environ.get("RANK", "?")
        raise RanksError(
            f"model.device is {device}, but rank {rank} works on cuda:{local_rank}, as each needs a GPU of"
            " its own; set model.device to auto or cuda."
        )
    return local_rank


def _find_others(wait: timedelta) -> tuple[Store, int, int]:
    """Return the store that all ranks share, this rank's number, and the number of ranks."""
    environment = os.environ
    if environment.get("RANK") != "0" or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(iter(rendezvous("env://", timeout=wait)))
    host, port = environment.get("MASTER_ADDR", "localhost"), int(environment.get("MASTER_PORT", "29500"))
    store, _ = host_store(host, wait.total_seconds(), port)
    return store, 0, requested_ranks()


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Make sure that a process group exists while the block runs. If there is none, make one of this process
    alone, without a port.
    """
    if dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        _leave_group()


def _leave_group() -> None:
    """End the process group, and clear DTensor's cache of its meshes in this thread.

    That cache may be the last reference to the group, and it is local to the thread. If another thread forks,
    as a reward function with multiprocessing does, the child drops the cache as it begins. Then the group's
    destructor waits for gloo's threads, which only this process has, and the child dies.
    """
    dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        with contextlib.suppress(ImportError, AttributeError):  # a name without promise
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()


def _no_rendezvous(environment: Mapping[str, str], error: Exception) -> str:
    where = f"{environment.get('MASTER_ADDR', '?')}:{environment.get('MASTER_PORT', '?')}"
    message = reason_of(error)[:200]
    if "EADDRINUSE" in message or "already in use" in message or "Address in use" in message:
        return f"{where} is in use by another process; choose another port (torchrun --master-port)."
    who = f"rank {environment.get('RANK', '?')} of {environment.get('WORLD_SIZE', '?')}"
    cause = from_system(error)
    if cause is not None:
        return f"{who} cannot meet the others: {cause}"
    return f"{who} found no others at {where} ({message}); check the address and that all ranks were started."
