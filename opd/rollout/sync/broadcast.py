"""Weights broadcast in a process group, in buckets of one size, two of them in turn.

While one bucket is on its way the sender fills the other and a receiver reads the other, so that neither end
ever has more than two buckets and one tensor in memory beside the model. The buckets carry one stream of
bytes: for each tensor the length of its description, the description as JSON, and its bytes. So nobody need
know the names or shapes beforehand, and a tensor may be larger than a bucket.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

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

BUCKET_BYTES = 64 << 20
MORE = 0
"""Place in a bucket of the byte that says whether another one follows."""
LENGTH = 8
"""Bytes of a length; 0 ends the stream."""


class Group(Protocol):
    """What is needed of a `torch.distributed` process group or of one of its back ends."""

    def broadcast(self, tensors: list[Tensor], opts: Any, /) -> Any: ...


class BroadcastSender:
    """See `WeightSender`. Every receiver is a member of the group; the sender is its rank 0.

    Args:
        group: Its members make no other collective calls in it meanwhile.
        bucket_bytes: Size of a bucket.
        device: Where buckets lie: what the group's back end can send.
    """

    def __init__(
        self, group: Group, bucket_bytes: int = BUCKET_BYTES, device: str | torch.device = "cpu"
    ) -> None:
        self._group, self._size, self._device = group, bucket_bytes, device

    def send(self, weights: Weights, version: int, tell: Tell) -> tuple[str, Sequence[str]]:
        """See `WeightSender`. Raises `RolloutError` if a receiver is lost."""
        digest = WeightsDigest()
        answers = tell(Parcel("broadcast", version, {"bucket_bytes": self._size}))
        buckets = _Outgoing(self._group, self._size, self._device)
        for name, tensor in digest.watch(weights):
            header = json.dumps(described(name, tensor)).encode()
            buckets.write(_as_tensor(len(header).to_bytes(LENGTH, "little") + header))
            buckets.write(raw_bytes(tensor))
        buckets.write(_as_tensor(bytes(LENGTH)))
        buckets.end()
        return digest.hex(), answers()

    def close(self) -> None:
        """The group is its owner's."""


class BroadcastReceiver:
    """See `WeightReceiver`; a member of the sender's group other than rank 0."""

    def __init__(self, group: Group, device: str | torch.device = "cpu") -> None:
        self._group, self._device = group, device

    def receive(self, parcel: Parcel) -> Iterator[tuple[str, Tensor]]:
        """See `WeightReceiver`. Exhaust it: the sender waits. Raises `RolloutError` if that is lost."""
        buckets = _Incoming(self._group, parcel.where["bucket_bytes"], self._device)
        while length := int.from_bytes(buckets.read(LENGTH).numpy().tobytes(), "little"):
            entry = json.loads(buckets.read(length).numpy().tobytes())
            yield rebuilt(entry, buckets.read(size_of(entry)))


class _Buckets:
    """Two buckets in turn."""

    def __init__(self, group: Group, size: int, device: str | torch.device) -> None:
        if size < 2:
            raise RolloutError(f"bucket_bytes must be at least 2, not {size}.")
        self._group, self._size = group, size
        # Rows of the CPU side; where the group needs another device, each has a twin there.
        self._here = torch.empty(2, size, dtype=torch.uint8)
        self._there = self._here if str(device) == "cpu" else self._here.to(device)
        self._works: list[Any] = [None, None]
        self._turn = 0
        self._at = 1

    def _start(self, turn: int) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        try:
            self._works[turn] = self._group.broadcast([self._there[turn]], options)
        except RuntimeError as error:
            raise _lost(error) from None

    def _wait(self, turn: int) -> None:
        work, self._works[turn] = self._works[turn], None
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise _lost(error) from None


class _Outgoing(_Buckets):
    """Fills one bucket while the other is on its way."""

    def write(self, content: Tensor) -> None:
        """Append `content` [n] uint8."""
        while len(content):
            if self._at == self._size:
                self._send(more=True)
            taken = min(len(content), self._size - self._at)
            self._here[self._turn, self._at : self._at + taken] = content[:taken]
            content, self._at = content[taken:], self._at + taken

    def end(self) -> None:
        """Send what is left, and wait until everything has been sent."""
        self._send(more=False)
        for turn in (0, 1):
            self._wait(turn)

    def _send(self, *, more: bool) -> None:
        bucket = self._here[self._turn]
        bucket[MORE] = more
        if self._there is not self._here:
            self._there[self._turn].copy_(bucket)
        self._start(self._turn)
        self._turn, self._at = 1 - self._turn, 1
        self._wait(self._turn)  # the other one, before it is filled again


class _Incoming(_Buckets):
    """Reads one bucket while the other arrives."""

    def __init__(self, group: Group, size: int, device: str | torch.device) -> None:
        super().__init__(group, size, device)
        self._turn, self._at = 1, size
        self._start(0)

    def read(self, count: int) -> Tensor:
        """The next `count` bytes, [count] uint8."""
        found = torch.empty(count, dtype=torch.uint8)
        done = 0
        while done < count:
            if self._at == self._size:
                self._next()
            taken = min(count - done, self._size - self._at)
            found[done : done + taken] = self._here[self._turn, self._at : self._at + taken]
            done, self._at = done + taken, self._at + taken
        return found

    def _next(self) -> None:
        self._turn, self._at = 1 - self._turn, 1
        self._wait(self._turn)
        if self._there is not self._here:
            self._here[self._turn].copy_(self._there[self._turn])
        if self._here[self._turn, MORE]:
            self._start(1 - self._turn)


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _lost(error: RuntimeError) -> RolloutError:
    return RolloutError(
        f"a member of the weight group was lost ({str(error).splitlines()[0]}); restart it and --resume."
    )
