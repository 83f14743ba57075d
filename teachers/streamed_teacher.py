"""Published teachers that are never fully in memory: their layers pass by, one at a time.

Teachers that are adapters on one published base share its pass. Each layer that arrives is merged with one
teacher's adapter after another, in memory of its own, and run over that teacher's samples. The output is the
hidden states of the merged models. The input is one base and the adapters.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opd.config.teachers import StreamedTeacherConfig
from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.models.causal_lm import torch_device, torch_dtype
from opd.storage.published import PublishedModel
from opd.teachers.kinds import Placement, TeacherKind, TeacherOpening
from opd.teachers.layer_stream import LayerStream, UnitPass, in_background
from opd.teachers.published_adapter import PublishedAdapter, is_adapter
from opd.teachers.routed_unit import ExpertRequests, RoutedUnit
from opd.teachers.score_cache import RowPieces, response_rows, row_pieces
from opd.teachers.skeleton import (
    UNIT,
    PackedWork,
    Skeleton,
    check_streams,
    converted_bytes,
    head_bytes,
    published_config,
    read_head,
)
from opd.train.packing import copy_to_device, pack_tokens, split_by_tokens
from opd.types import HiddenStates, Sample

if TYPE_CHECKING:
    import torch.distributed as dist

    from opd.storage.shard_cache import ShardCache


class StreamedTeacher:
    """A model written by `opd publish`, read layer by layer for every call of `score`.

    One call reads each layer once and runs it over all micro-batches, so the store is read once a mini-batch
    of any size. With a group, every rank scores samples of its own but reads only its share of the layers:
    all ranks must call `score` equally often, those without samples too.

    Args:
        name: Its name in recipes and metrics.
        url: Target of `opd publish`: a folder, or a URL such as `s3://bucket/teacher`.
        placement: Dtype, device, packing and vocabulary.
        stream: Reads its layers. Teachers that share one also share its memory.
    """

    streams = True

    def __init__(self, name: str, url: str, *, placement: Placement, stream: LayerStream) -> None:
        self.name = name
        self.url = url
        self.stream = stream
        self._placement = placement
        self._device = torch_device(placement.device)
        self._dtype = torch_dtype(placement.dtype)
        self.sequence_chunk = placement.sequence_chunk
        """Packed tokens of a chunk of a long sequence."""
        self.collective = stream.collective
        """All ranks of a group must call `score` together."""
        self._pass: UnitPass | None = None
        self._head: Future[Head] | None = None
        self.stall_seconds = 0.0
        """How long callers have waited for layers and heads that were not there yet."""

    @cached_property
    def published(self) -> PublishedModel:
        """The published model. Raises `StorageError` if it is missing or incomplete."""
        return PublishedModel.open(self.url, cache=self.stream.cache)

    @cached_property
    def skeleton(self) -> Skeleton:
        """The decoder without weights. Raises as `check_streams` does if it cannot be streamed."""
        manifest = self.published.manifest
        config = published_config(manifest.config)
        check_streams(config, self.url, manifest.tensor_shapes, manifest.tensor_formats)
        return Skeleton(manifest.config, self._dtype, self._device)

    @property
    def digest(self) -> str:
        """Digest of the published weights."""
        return self.published.manifest.digest

    @property
    def device(self) -> torch.device:
        """Device of its hidden states and head."""
        return self._device

    @property
    def bytes_read(self) -> int:
        """Bytes this process has read from the store for it, repeated reads included."""
        return self.published.bytes_read if "published" in self.__dict__ else 0

    @property
    def cached_bytes(self) -> int:
        """Bytes this process has taken from the node's cache for it, instead of the store."""
        return self.published.cached_bytes if "published" in self.__dict__ else 0

    def prefetch(self) -> None:
        """Begin to read the layers of the next `score`."""
        if self._pass is None:
            self._pass = self.stream.request_pass(self.published, self._layer_names(), self._routed)

    def prefetch_head(self) -> None:
        """Begin to read the head of the next `load_head`."""
        if self._head is None:
            published = self.published  # opened by this thread alone
            read = partial(self._read_head, published)
            self._head = in_background(f"head-{self.name}", read, self._device)

    def discard_head(self) -> None:
        """Drop a head that was prefetched and is not needed."""
        self._head = None

    def take_weight_bytes_peak(self) -> int:
        """Return the most bytes of weights in memory since the last call: of all teachers on its stream."""
        return self.stream.meter.drain_peak()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in memory now, of all teachers on its stream."""
        return self.stream.meter.current_bytes

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> HiddenStates:
        """Return last hidden states `[N, D]` at the rows `C-1 ... C+R-2` of every sample, in order.

        Raises `StorageError` if its weights cannot be read, and `TeacherError` if they do not fit their
        configuration or another rank could not read them.
        """
        parts = [rows for _, rows in self.score_pieces(samples)]
        if parts:
            return HiddenStates(torch.cat(parts))
        width = int(self.skeleton.config.hidden_size)
        return HiddenStates(torch.zeros(0, width, dtype=self._dtype, device=self._device))

    def score_pieces(self, samples: Sequence[Sample]) -> RowPieces:
        """Yield the rows of `score`, those of a long sample in chunks. Each micro-batch keeps one [T, D]."""
        if not samples and not self.collective:
            return
        self.prefetch()  # concurrent with packing
        batches = self._pack_batches(samples)
        with torch.no_grad():
            self._pass_by([work for work, _ in batches])
        while batches:
            work, part = batches.pop(0)  # its hidden states go with it
            yield from row_pieces(part, work.last_hidden(), self.sequence_chunk)

    def close(self) -> None:
        """Stop its stream, and with it every teacher that shares it, and close the store."""
        self.stream.close()
        if self._head is not None:
            wait([self._head])  # it reads through the store that is closed next
        if "published" in self.__dict__:
            self.published.close()

    def load_head(self) -> Head:
        """Return the head, read now or taken from `prefetch_head`. The caller keeps and drops it."""
        self.prefetch_head()
        pending, self._head = self._head, None
        assert pending is not None
        start = time.perf_counter()
        try:
            return pending.result()
        finally:
            self.stall_seconds += time.perf_counter() - start

    @cached_property
    def _routed(self) -> dict[str, RoutedUnit]:
        """The layers whose experts can be read one by one."""
        units = self.published.manifest.units
        layers = {
            f"layer.{index}": self.skeleton.routed_unit(index, units[f"layer.{index}"])
            for index in range(len(self.skeleton.layers))
        }
        return {name: layer for name, layer in layers.items() if layer is not None}

    def _layer_names(self) -> list[str]:
        layers = len(self.skeleton.layers)
        names = ["embedding", *(f"layer.{index}" for index in range(layers)), "norm"]
        published = [name for name in self.published.manifest.units if name != "head"]
        if published != names:
            odd = min(set(published) ^ set(names), default="in another order")
            raise TeacherError(
                f"the published teacher {self.name} has other units than its configuration asks for ({odd});"
                " publish it again."
            )
        return names

    def _pack_batches(self, samples: Sequence[Sample]) -> list[tuple[PackedWork, Sequence[Sample]]]:
        lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
        batches = []
        for start, stop in split_by_tokens(lengths, [None] * len(lengths), self._placement.max_tokens):
            part = samples[start:stop]
            *tensors, cu_seqlens, _ = pack_tokens(part)
            input_ids, position_ids = copy_to_device(tensors, self._device)
            work = self.skeleton.pack_sequences(input_ids, position_ids, cu_seqlens, self.sequence_chunk)
            batches.append((work, part))
        return batches

    def _pass_by(self, batches: list[PackedWork]) -> None:
        """Take every prefetched unit once, in order, and run it over all micro-batches."""
        unit_pass, self._pass = self._pass, None
        assert unit_pass is not None
        stalled = self.stream.stall_seconds
        try:
            with closing(self.stream.iterate_pass(unit_pass)) as units:
                for unit, flat in units:
                    self._run_tensors(unit, flat, batches)
        finally:
            self.stall_seconds += self.stream.stall_seconds - stalled

    def _run_tensors(self, unit: str, flat: Tensor, batches: list[PackedWork]) -> None:
        if not batches:
            return
        entry = self.published.manifest.units[unit]
        if self.stream.requests is not None:
            self._run_routed(int(unit.removeprefix("layer.")), flat, self.stream.requests, batches)
            return
        with self.stream.meter.track_bytes(self.skeleton.added_bytes(entry)):
            tensors = self.skeleton.unit_tensors(entry, flat)
            if unit == "embedding":
                for work in batches:
                    self.skeleton.run_embedding(tensors, work)
            elif unit == "norm":
                self.skeleton.run_norm(tensors, batches)
            else:
                self.skeleton.run_layer(int(unit.removeprefix("layer.")), tensors, batches)

    def _run_routed(
        self, index: int, flat: Tensor, requests: ExpertRequests, batches: list[PackedWork]
    ) -> None:
        """Run a layer of which `flat` holds all but the experts."""
        layer = requests.layer

        def take(experts: Collection[int]) -> dict[int, dict[str, Tensor]]:
            start = time.perf_counter()
            arrived = requests.take(experts, self.stream.gather)
            self.stream.stall_seconds += time.perf_counter() - start
            return {
                expert: self.skeleton.block_tensors(memory, layer.experts[expert])
                for numbers, memory in arrived
                for expert in numbers
            }

        tensors = self.skeleton.block_tensors(layer.placed(layer.shared_blocks, flat), layer.shared)
        self.skeleton.routed_layer(index, tensors, batches, layer, take, self.stream.meter)

    def _read_head(self, published: PublishedModel) -> Head:
        meter, entry = self.stream.meter, published.manifest.units[UNIT]
        with meter.track_bytes(entry.nbytes + converted_bytes(entry, lambda _: self._dtype)):
            pages = self.stream.head_pages.allocate_pages
            head = read_head(published, self._dtype, self._device, self._placement.vocabulary, pages)
        nbytes = head_bytes(head)
        meter.add_bytes(nbytes)
        # Counted until its last user has dropped it.
        weakref.finalize(head, meter.remove_bytes, nbytes)
        return head


class SharedBase(StreamedTeacher):
    """A published base, its head, and the adapters that are run on it.

    Of a mixture all experts are read: adapters route apart.
    """

    _routed: dict[str, RoutedUnit] = {}  # noqa: RUF012

    def __init__(self, url: str, *, placement: Placement, stream: LayerStream) -> None:
        super().__init__("base", url, placement=placement, stream=stream)
        self.members: list[LoRATeacher] = []
        self._works: dict[LoRATeacher, list[PackedWork]] = {}
        self._shared: weakref.ref[Head] | None = None
        self._reading = threading.Lock()

    @torch.no_grad()
    def score_all(
        self, samples_by_teacher: Mapping[LoRATeacher, Sequence[Sample]]
    ) -> dict[LoRATeacher, list[Tensor]]:
        """Return hidden states `[R, D]` of each teacher's samples, all in one pass over the layers."""
        reads = self.collective or any(samples_by_teacher.values())
        if reads:
            self.prefetch()  # concurrent with packing
        packed = {teacher: self._pack_batches(samples) for teacher, samples in samples_by_teacher.items()}
        self._works = {teacher: [work for work, _ in batches] for teacher, batches in packed.items()}
        everything = [work for works in self._works.values() for work in works]
        try:
            if reads:
                self._pass_by(everything)
        finally:
            self._works = {}
        return {
            teacher: [
                work.last_hidden()[first:last].clone()
                for work, samples in batches
                for _, first, last in response_rows(samples)
            ]
            for teacher, batches in packed.items()
        }

    def _run_tensors(self, unit: str, flat: Tensor, batches: list[PackedWork]) -> None:
        if not unit.startswith("layer."):
            super()._run_tensors(unit, flat, batches)
            return
        entry = self.published.manifest.units[unit]
        with self.stream.meter.track_bytes(self.skeleton.added_bytes(entry)):
            tensors = self.skeleton.unit_tensors(entry, flat)
            for teacher, works in self._works.items():
                if not works:
                    continue
                merged = teacher.adapter.merge(tensors)
                added = sum(merged[name].nbytes for name in tensors if merged[name] is not tensors[name])
                with self.stream.meter.track_bytes(added):
                    self.skeleton.run_layer(int(unit.removeprefix("layer.")), merged, works)

    def _read_head(self, published: PublishedModel) -> Head:
        """Read the head unless one of the teachers still has it: adapters do not change it."""
        with self._reading:
            head = None if self._shared is None else self._shared()
            if head is None:
                head = super()._read_head(published)
                self._shared = weakref.ref(head)
            return head


class LoRATeacher:
    """A teacher that is an adapter on a `SharedBase`.

    Without a group of ranks, the first teacher whose `score` is called runs the pass for all samples given to
    `begin_scoring`, and the others return its results. With a group each call is a pass of its own, as all
    ranks must agree.
    """

    streams = True

    def __init__(self, name: str, adapter: PublishedAdapter, base: SharedBase) -> None:
        """Raises `TeacherError` if the published base is not the one `adapter` belongs to."""
        self.name, self.adapter, self.base = name, adapter, base
        if base.published.manifest.digest != adapter.base_digest:
            raise TeacherError(
                f"teacher {name} is an adapter on a base of digest {adapter.base_digest[:12]}, but"
                f" {base.url} has {base.published.manifest.digest[:12]}; publish the adapter again."
            )
        self._announced: dict[str, Sample] = {}
        self._scored: dict[str, Tensor] = {}
        base.members.append(self)
        base.stream.meter.add_bytes(adapter.nbytes)

    @property
    def digest(self) -> str:
        """Digest of base and adapter."""
        return self.adapter.digest

    @property
    def collective(self) -> bool:
        """Return whether all ranks of a group must call `score` together."""
        return self.base.collective

    @property
    def device(self) -> torch.device:
        """Device of its hidden states and head."""
        return self.base.device

    @property
    def bytes_read(self) -> int:
        """Bytes read for it. Bytes of the base count for the first of its teachers."""
        first = self.base.members[0] is self
        return self.adapter.bytes_read + (self.base.bytes_read if first else 0)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the base that came from the node's cache, for the first of its teachers."""
        return self.base.cached_bytes if self.base.members[0] is self else 0

    @property
    def stall_seconds(self) -> float:
        """Seconds callers have waited. Waits for the base count for the first of its teachers."""
        return self.base.stall_seconds if self.base.members[0] is self else 0.0

    def begin_scoring(self, samples: Sequence[Sample]) -> None:
        """Announce samples of the next `score`, so that one pass serves all teachers of the base."""
        self._announced |= {sample.uid: sample for sample in samples if sample.uid not in self._scored}

    def score(self, samples: Sequence[Sample]) -> HiddenStates:
        """Return last hidden states `[N, D]` at the rows `C-1 ... C+R-2` of every sample, in order.

        Raises as `StreamedTeacher.score` does.
        """
        if self.collective:
            self._scored = self._rows_by_uid(samples, self.base.score_all({self: samples})[self])
        elif any(sample.uid not in self._scored for sample in samples):
            self.begin_scoring(samples)
            announced = {member: list(member._announced.values()) for member in self.base.members}
            for member, rows in self.base.score_all(announced).items():
                member._scored = self._rows_by_uid(announced[member], rows)
                member._announced = {}
        rows = [self._scored.pop(sample.uid) for sample in samples]
        if rows:
            return HiddenStates(torch.cat(rows))
        width = int(self.base.skeleton.config.hidden_size)
        return HiddenStates(torch.zeros(0, width, dtype=self.base._dtype, device=self.device))

    @staticmethod
    def _rows_by_uid(samples: Sequence[Sample], rows: Sequence[Tensor]) -> dict[str, Tensor]:
        return {sample.uid: part for sample, part in zip(samples, rows, strict=True)}

    def prefetch(self) -> None:
        """Begin to read the base's layers, unless this teacher has been scored along with another."""
        if not self._scored:
            self.base.prefetch()

    def prefetch_head(self) -> None:
        """Begin to read the head of the next `load_head`."""
        self.base.prefetch_head()

    def discard_head(self) -> None:
        """Drop a head that was prefetched and is not needed."""
        self.base.discard_head()

    def load_head(self) -> Head:
        """Return the base's head, read once while any of its teachers has it."""
        return self.base.load_head()

    def take_weight_bytes_peak(self) -> int:
        """Return the most bytes of weights in memory since the last call: of all teachers on its stream."""
        return self.base.take_weight_bytes_peak()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in memory now, of all teachers on its stream."""
        return self.base.weight_bytes

    def close(self) -> None:
        """Close the base, and with it every teacher on its stream."""
        self.base.close()


def streamed_teachers(
    urls: Mapping[str, str],
    placement: Placement,
    *,
    prefetch_bytes: int = 2**28,
    group: dist.ProcessGroup | None = None,
    cache: ShardCache | None = None,
) -> dict[str, StreamedTeacher | LoRATeacher]:
    """Return teachers by name, full models and adapters alike, that share one stream and so its memory.

    Adapters on one base share that base. `group` is the ranks that share the reading, `cache` the node's
    cache. See `LayerStream`.
    """
    device = torch_device(placement.device)
    stream = LayerStream(prefetch_bytes=prefetch_bytes, device=device, group=group, cache=cache)
    bases: dict[str, SharedBase] = {}
    teachers: dict[str, StreamedTeacher | LoRATeacher] = {}
    for name, url in urls.items():
        if not is_adapter(url):
            teachers[name] = StreamedTeacher(name, url, placement=placement, stream=stream)
            continue
        adapter = PublishedAdapter.open(url)
        if adapter.base_digest not in bases:
            bases[adapter.base_digest] = SharedBase(adapter.base, placement=placement, stream=stream)
        teachers[name] = LoRATeacher(name, adapter, bases[adapter.base_digest])
    return teachers


@contextmanager
def _open_teachers(
    teachers: Mapping[str, StreamedTeacherConfig], opening: TeacherOpening
) -> Iterator[dict[str, StreamedTeacher | LoRATeacher]]:
    opened = streamed_teachers(
        {name: opening.sources[name] for name in teachers},
        opening.placement,
        prefetch_bytes=opening.recipe.storage.prefetch_mb << 20,
        group=opening.group,
        cache=opening.cache,
    )
    with ExitStack() as stack:
        for teacher in opened.values():
            stack.callback(teacher.close)
        yield opened


KIND = TeacherKind(_open_teachers)
