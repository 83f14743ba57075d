"""Teachers that are adapters on one published base: the base passes by once, whoever is asked.

Each layer of the base that arrives is merged with one teacher's adapter after another, in memory of its own,
and run over that teacher's samples. What comes out are the hidden states of the merged models; what is read
is one base and the adapters.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.models.causal_lm import torch_device
from opd.storage.published import PublishedModel
from opd.teachers.layer_stream import LayerStream
from opd.teachers.published_adapter import PublishedAdapter, is_adapter
from opd.teachers.score_cache import response_rows
from opd.teachers.skeleton import PackedWork
from opd.teachers.streamed_teacher import Placement, StreamedTeacher
from opd.teachers.units import converted_bytes, unit_tensors
from opd.types import HiddenStates, Sample

if TYPE_CHECKING:
    import torch.distributed as dist


class SharedBase(StreamedTeacher):
    """A published base, its head, and the adapters that are run on it."""

    def __init__(self, url: str, *, placement: Placement, stream: LayerStream) -> None:
        super().__init__("base", url, placement=placement, stream=stream)
        self.members: list[LoRATeacher] = []
        self._works: dict[LoRATeacher, list[PackedWork]] = {}
        self._shared: weakref.ref[Head] | None = None
        self._reading = threading.Lock()

    @torch.no_grad()
    def score_all(self, asked: Mapping[LoRATeacher, Sequence[Sample]]) -> dict[LoRATeacher, list[Tensor]]:
        """Hidden states `[R, D]` of each teacher's samples, all in one pass over the layers."""
        packed = {teacher: self._pack(samples) for teacher, samples in asked.items()}
        self._works = {teacher: [work for work, _ in batches] for teacher, batches in packed.items()}
        everything = [work for works in self._works.values() for work in works]
        try:
            if everything or self.collective:
                self._pass_by(everything)
        finally:
            self._works = {}
        return {teacher: self._rows(batches) for teacher, batches in packed.items()}

    def _rows(self, batches: list[tuple[PackedWork, Sequence[Sample]]]) -> list[Tensor]:
        rows = []
        for work, samples in batches:
            hidden = work.last_hidden()
            rows += [hidden[first:last].clone() for _, first, last in response_rows(samples)]
        return rows

    def _run(self, unit: str, flat: Tensor, batches: list[PackedWork]) -> None:
        if not unit.startswith("layer."):
            super()._run(unit, flat, batches)
            return
        entry = self.published.manifest.units[unit]
        with self.stream.meter.held(converted_bytes(entry, self._dtype)):
            tensors = unit_tensors(entry, flat, self._dtype)
            for teacher, works in self._works.items():
                if not works:
                    continue
                own = teacher.adapter.merge(tensors)
                added = sum(own[name].nbytes for name in tensors if own[name] is not tensors[name])
                with self.stream.meter.held(added):
                    for work in works:
                        self.skeleton.layer(int(unit.removeprefix("layer.")), own, work)

    def _read_head(self, published: PublishedModel) -> Head:
        """The head, read unless one of the teachers still has it: adapters leave it as it is."""
        with self._reading:
            head = None if self._shared is None else self._shared()
            if head is None:
                head = super()._read_head(published)
                self._shared = weakref.ref(head)
            return head


class LoRATeacher:
    """A teacher that is an adapter on a `SharedBase`.

    Without a group of ranks, the first teacher whose `score` is called runs the pass for all that were asked
    by `begin`; the others give what it left. With a group each call is a pass of its own, as all ranks must
    agree.
    """

    def __init__(self, name: str, adapter: PublishedAdapter, base: SharedBase) -> None:
        """Raises `TeacherError` if the published base is not the one `adapter` belongs to."""
        self.name, self.adapter, self.base = name, adapter, base
        if base.published.manifest.digest != adapter.base_digest:
            raise TeacherError(
                f"teacher {name} is an adapter on a base of digest {adapter.base_digest[:12]}, but"
                f" {base.url} has {base.published.manifest.digest[:12]}; publish the adapter again."
            )
        self._asked: dict[str, Sample] = {}
        self._scored: dict[str, Tensor] = {}
        base.members.append(self)
        base.stream.meter.hold(adapter.nbytes)

    @property
    def digest(self) -> str:
        """Of base and adapter."""
        return self.adapter.digest

    @property
    def collective(self) -> bool:
        """Whether all ranks of a group must call `score` together."""
        return self.base.collective

    @property
    def device(self) -> torch.device:
        """Where its hidden states and head are."""
        return self.base.device

    @property
    def bytes_read(self) -> int:
        """Bytes read for it; what is read of the base counts for the first of its teachers."""
        first = self.base.members[0] is self
        return self.adapter.bytes_read + (self.base.bytes_read if first else 0)

    @property
    def stall_seconds(self) -> float:
        """How long callers have waited; waits for the base count for the first of its teachers."""
        return self.base.stall_seconds if self.base.members[0] is self else 0.0

    def begin(self, samples: Sequence[Sample]) -> None:
        """Say what `score` will be called with, so that one pass serves all teachers of the base."""
        self._asked |= {sample.uid: sample for sample in samples if sample.uid not in self._scored}

    def score(self, samples: Sequence[Sample]) -> HiddenStates:
        """Last hidden states `[N, D]` at the rows `C-1 ... C+R-2` of every sample, in order.

        Raises what `StreamedTeacher.score` raises.
        """
        if self.collective:
            self._scored = self._named(samples, self.base.score_all({self: samples})[self])
        elif any(sample.uid not in self._scored for sample in samples):
            self.begin(samples)
            self._score_members()
        rows = [self._scored.pop(sample.uid) for sample in samples]
        if rows:
            return HiddenStates(torch.cat(rows))
        width = int(self.base.skeleton.config.hidden_size)
        return HiddenStates(torch.zeros(0, width, dtype=self.base._dtype, device=self.device))

    def _score_members(self) -> None:
        asked = {member: list(member._asked.values()) for member in self.base.members}
        for member, rows in self.base.score_all(asked).items():
            member._scored = self._named(asked[member], rows)
            member._asked = {}

    @staticmethod
    def _named(samples: Sequence[Sample], rows: Sequence[Tensor]) -> dict[str, Tensor]:
        return {sample.uid: own for sample, own in zip(samples, rows, strict=True)}

    def prefetch(self) -> None:
        """Begin to read the base's layers, unless this teacher has been scored along with another."""
        if not self._scored:
            self.base.prefetch()

    def prefetch_head(self) -> None:
        """Begin to read the head of the next `load_head`."""
        self.base.prefetch_head()

    def discard_head(self) -> None:
        """Forget a head that was prefetched and is not needed."""
        self.base.discard_head()

    def load_head(self) -> Head:
        """The base's head; read once while any of its teachers has it."""
        return self.base.load_head()

    def take_weight_bytes_peak(self) -> int:
        """The most bytes of weights in memory since this was last asked: of all teachers on its stream."""
        return self.base.take_weight_bytes_peak()

    def close(self) -> None:
        """Close the base, and with it every teacher on its stream."""
        self.base.close()


def published_teachers(
    urls: Mapping[str, str],
    placement: Placement,
    *,
    prefetch_bytes: int = 2**28,
    group: dist.ProcessGroup | None = None,
) -> dict[str, StreamedTeacher | LoRATeacher]:
    """Teachers by name, whole models and adapters alike, that share one stream and so its memory.

    Adapters on one base share that base. `group` is the ranks that share the reading; see `LayerStream`.
    """
    stream = LayerStream(prefetch_bytes=prefetch_bytes, device=torch_device(placement.device), group=group)
    bases: dict[str, SharedBase] = {}
    found: dict[str, StreamedTeacher | LoRATeacher] = {}
    for name, url in urls.items():
        if not is_adapter(url):
            found[name] = StreamedTeacher(name, url, placement=placement, stream=stream)
            continue
        adapter = PublishedAdapter.open(url)
        if adapter.base_digest not in bases:
            bases[adapter.base_digest] = SharedBase(adapter.base, placement=placement, stream=stream)
        found[name] = LoRATeacher(name, adapter, bases[adapter.base_digest])
    return found
