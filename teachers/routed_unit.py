"""A layer of a published mixture as blocks: those of its own tensors, and those of each of its experts.

What is published is one unit a layer, whose blocks have a checksum each. An expert's tensors lie side by side
in it, so an expert is read as the few blocks that hold them, and nothing is published otherwise.
`RoutedExperts` stands for a layer's experts as they are needed: only those that tokens were routed to.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from opd.errors import TeacherError
from opd.models.stored_form import StoredForm

if TYPE_CHECKING:
    from opd.storage.manifest import TensorEntry, Unit
    from opd.storage.published import PublishedModel
    from opd.teachers.unit_gather import UnitGather
    from opd.teachers.unit_memory import ByteMeter

_NUMBER = re.compile(r"\.(\d+)\.")
WHOLE_ABOVE = 0.5
"""Share of a layer's experts that were read above which the next layers are read whole, ahead of routing."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Some blocks of a unit, one after another in memory."""

    unit: Unit
    places: Mapping[int, int]
    """Block -> where it begins, in bytes."""
    flat: Tensor
    """[nbytes] uint8."""

    def raw(self, entry: TensorEntry) -> Tensor:
        """[nbytes] uint8 of a tensor, all of whose blocks are there: neighbours lie side by side."""
        block = entry.offset // self.unit.block_bytes
        start = self.places[block] + entry.offset - block * self.unit.block_bytes
        return self.flat[start : start + entry.nbytes]


@dataclass(frozen=True)
class RoutedUnit:
    """A layer's unit, by whose tensors are an expert's."""

    unit: Unit
    experts: Sequence[Sequence[str]]
    """Names of each expert's tensors."""
    path: str
    """Of the module that they are the weights of."""
    shared: Sequence[str] = field(init=False)
    """Names of the others."""
    shared_blocks: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        theirs = {name for names in self.experts for name in names}
        object.__setattr__(self, "shared", [name for name in self.unit.tensors if name not in theirs])
        object.__setattr__(self, "shared_blocks", self.blocks(self.shared))

    @classmethod
    def of_names(cls, unit: Unit, prefix: str, path: str, names: Iterable[str]) -> RoutedUnit | None:
        """That of a layer whose tensors' names begin with `prefix`, `names` being those of single experts in
        the module `path`; `None` where they are not numbered 0, 1, ... or where blocks are so large that
        nothing is saved.
        """
        numbered: dict[int, list[str]] = {}
        for name in names:
            number = _NUMBER.search(name, len(prefix) - 1)
            if number is None:
                return None
            numbered.setdefault(int(number[1]), []).append(name)
        if not numbered or sorted(numbered) != list(range(len(numbered))):
            return None
        routed = cls(unit, [numbered[number] for number in range(len(numbered))], path)
        widest = max(len(routed.blocks(names)) for names in routed.experts)
        return routed if 2 * (len(routed.shared_blocks) + widest) <= unit.block_count else None

    def blocks(self, names: Iterable[str]) -> tuple[int, ...]:
        """The blocks that hold tensors, in order."""
        size, blocks = self.unit.block_bytes, set()
        for entry in (self.unit.tensors[name] for name in names):
            blocks.update(range(entry.offset // size, -(-(entry.offset + entry.nbytes) // size)))
        return tuple(sorted(blocks))

    def blocks_of(self, experts: Iterable[int]) -> tuple[int, ...]:
        """The blocks that hold these experts."""
        return self.blocks(name for expert in experts for name in self.experts[expert])

    def placed(self, blocks: Sequence[int], flat: Tensor) -> BlockMemory:
        """`blocks` as they were read into `flat`."""
        size = self.unit.block_bytes
        return BlockMemory(self.unit, {block: at * size for at, block in enumerate(blocks)}, flat)


Arrived = tuple[list[int], BlockMemory]
"""Experts, and the memory that holds them."""


class ExpertRequests:
    """Asks for the experts of one layer while it runs; another thread reads them, with those of other ranks.

    Every rank asks as often as it has to. A rank that is done goes on reading for those that are not.
    """

    def __init__(self, model: PublishedModel, layer: RoutedUnit, meter: ByteMeter) -> None:
        self.layer = layer
        self._model = model
        self._meter = meter
        self._changed = threading.Condition()
        self._wanted: set[int] = set()
        self._have: set[int] = set()
        self._arrived: list[tuple[Arrived, torch.cuda.Event | None]] = []
        self._used_bytes = 0
        self._done = False
        self._closed = False
        self._error: BaseException | None = None

    @property
    def share(self) -> float:
        """Share of the layer's experts that were read."""
        return len(self._have) / len(self.layer.experts)

    def take(self, experts: Collection[int], gather: UnitGather) -> list[Arrived]:
        """What was read since the last call, once `experts` are among all that was; what the last call gave
        is no longer used. Raises what the reader raised.
        """
        with self._changed:
            self._free_used()
            if missing := set(experts) - self._have:
                self._wanted = missing
                self._changed.notify_all()
            self._changed.wait_for(lambda: missing <= self._have or self._error or self._closed)
            if self._error is not None:
                raise self._error
            if not missing <= self._have:
                raise TeacherError("the stream of teacher weights was closed while a teacher was using it.")
            arrived, self._arrived = self._arrived, []
            self._used_bytes = sum(memory.flat.nbytes for (_, memory), _ in arrived)
        for _, arrives in arrived:
            gather.wait_event(arrives)
        return [one for one, _ in arrived]

    def finish(self, *, closed: bool = False) -> None:
        """Ask for no more; `closed`: not even read for others."""
        with self._changed:
            self._free_used()
            self._done, self._closed = True, self._closed or closed
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let `take` raise `error`."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def serve(self, gather: UnitGather) -> None:
        """Read what is asked for until all ranks are done: for the reader's thread."""
        while (mine := self._next_wanted()) is not None or not self._closed:
            name = self.layer.unit.name
            wanted = gather.wanted(self._model, name, mine, len(self.layer.experts))
            if wanted is None:
                break
            experts = [expert for expert in wanted if expert not in self._have]
            blocks = self.layer.blocks_of(experts)
            memory = gather.allocate_memory(gather.blocks_bytes(self._model, name, len(blocks)))
            self._meter.add_bytes(memory.nbytes)
            flat, arrives = gather.begin_blocks(self._model, name, blocks, memory)
            with self._changed:
                self._have.update(experts)
                if self._done:  # others wanted them
                    self._meter.remove_bytes(flat.nbytes)
                else:
                    self._arrived.append(((experts, self.layer.placed(blocks, flat)), arrives))
                self._changed.notify_all()
        with self._changed:
            unused = sum(memory.flat.nbytes for (_, memory), _ in self._arrived)
            self._arrived.clear()
        self._meter.remove_bytes(unused)

    def _next_wanted(self) -> set[int] | None:
        """Return the experts that this rank lacks, or `None` once it is done or the stream is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._done or self._closed)
            wanted, self._wanted = self._wanted, set()
            return None if self._done or self._closed else wanted

    def _free_used(self) -> None:
        self._meter.remove_bytes(self._used_bytes)
        self._used_bytes = 0


TakeExperts = Callable[[Collection[int]], Mapping[int, Mapping[str, Tensor]]]
"""Experts that tokens were routed to -> those that were read since the last call, by names of files."""


class PartHolder(nn.Module):
    """Lets a caller use `part` for as long as `functional_call` lends it weights."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, call: Callable[[nn.Module], Any]) -> Any:
        return call(self.part)


class RoutedExperts:
    """Stands for the forward of `part`, a layer's experts, whose weights are one tensor for all of them.

    Those that were read are put together in the order in which they came, and tokens' choices renumbered.
    """

    def __init__(
        self, part: nn.Module, path: str, stored: StoredForm, take_experts: TakeExperts, meter: ByteMeter
    ) -> None:
        """`path`: of `part` in the whole model."""
        self._part = part
        self._path = path
        self._stored = stored
        self._take_experts = take_experts
        self._meter = meter
        self._slots: dict[int, int] = {}
        """Expert -> its place among those that were read."""
        self._weights: dict[str, Tensor] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While the block runs it stands for the part's forward; then its weights are let go."""
        self._part.forward = self._forward
        try:
            yield
        finally:
            del self._part.forward
            self._meter.remove_bytes(self._nbytes)
            self._weights = {}

    @property
    def _nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights.values())

    def _forward(self, hidden: Tensor, chosen: Tensor, *others: Any, **options: Any) -> Any:
        """`chosen` [T, K] int64: the experts of each token."""
        part: Any = self._part
        total = int(part.num_experts)
        self._add(self._take_experts(chosen.unique().tolist()))
        if not self._weights:  # there are no tokens
            return torch.zeros_like(hidden)
        slots = torch.tensor([self._slots.get(expert, total) for expert in range(total)])
        renumbered = slots.to(chosen.device)[chosen]

        def call(module: nn.Module) -> Any:
            return type(part).forward(module, hidden, renumbered, *others, **options)

        part.num_experts = len(self._slots)
        try:
            parameters = {f"part.{name}": weight for name, weight in self._weights.items()}
            return functional_call(PartHolder(part), parameters, (call,), tie_weights=False)
        finally:
            part.num_experts = total

    def _add(self, experts: Mapping[int, Mapping[str, Tensor]]) -> None:
        if not experts:
            return
        files = {name: tensor for tensors in experts.values() for name, tensor in tensors.items()}
        try:
            converted = self._stored.of_module(files)
        except ValueError as error:
            raise TeacherError(f"experts of {self._path} cannot be used: {error}.") from None
        for key, tensor in converted.items():
            name = key.removeprefix(f"{self._path}.")
            present = self._weights.get(name)
            self._weights[name] = tensor if present is None else torch.cat([present, tensor])
            self._meter.add_bytes(tensor.nbytes)
        read = len(self._slots)
        self._slots |= {expert: read + index for index, expert in enumerate(sorted(experts))}
