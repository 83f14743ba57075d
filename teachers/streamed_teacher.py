"""A published teacher that is never in memory as a whole: its layers pass by, one at a time."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opd.errors import TeacherError
from opd.kernels.head import Head
from opd.models.causal_lm import torch_device, torch_dtype
from opd.storage.published import PublishedModel
from opd.teachers.layer_stream import LayerStream, UnitPass, in_background
from opd.teachers.score_cache import RowPieces, row_pieces
from opd.teachers.skeleton import PackedWork, Skeleton
from opd.teachers.units import UNIT, converted_bytes, head_bytes, read_head, unit_tensors
from opd.train.packing import pack_tokens, split_by_tokens
from opd.types import HiddenStates, Sample

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a streamed teacher computes."""

    dtype: str = "float32"
    """Of its weights, while they are in memory, and of its hidden states."""
    device: str = "cpu"
    max_tokens: int = 4096
    """Packed tokens per micro-batch."""
    vocabulary: int | None = None
    """Size of the student's tokenizer; both heads are cut to it, however they are padded."""
    sequence_chunk: int | None = None
    """Micro-batches of more packed tokens go through each layer in pieces of so many."""


class StreamedTeacher:
    """A model written by `opd publish`, read layer by layer for every call of `score`.

    One call reads each layer once and runs it over all micro-batches, so the store is read once a mini-batch
    whatever its size. With a group, every rank scores samples of its own but reads only its share of the
    layers: all ranks must call `score` equally often, those without samples too.

    Args:
        name: How recipes and metrics call it.
        url: What `opd publish` wrote: a folder, or a URL such as `s3://bucket/teacher`.
        placement: Dtype, device, packing and vocabulary.
        stream: What reads its layers; teachers that share one also share its memory.
    """

    def __init__(self, name: str, url: str, *, placement: Placement, stream: LayerStream) -> None:
        self.name = name
        self.url = url
        self.stream = stream
        self._placement = placement
        self._device = torch_device(placement.device)
        self._dtype = torch_dtype(placement.dtype)
        self._pass: UnitPass | None = None
        self._head: Future[Head] | None = None
        self._stalled = 0.0

    @cached_property
    def published(self) -> PublishedModel:
        """The published model. Raises `StorageError` if it is missing or incomplete."""
        return PublishedModel.open(self.url)

    @cached_property
    def skeleton(self) -> Skeleton:
        """The decoder without weights. Raises `TeacherError` if it cannot be streamed."""
        return Skeleton(self.published.manifest.config, self._dtype, self._device)

    @property
    def digest(self) -> str:
        """Digest of the published weights."""
        return self.published.manifest.digest

    @property
    def collective(self) -> bool:
        """Whether all ranks of a group must call `score` together."""
        return self.stream.collective

    @property
    def device(self) -> torch.device:
        """Where its hidden states and head are."""
        return self._device

    @property
    def bytes_read(self) -> int:
        """Bytes this process has read from the store for it, repeated reads included."""
        return self.published.bytes_read if "published" in self.__dict__ else 0

    @property
    def stall_seconds(self) -> float:
        """How long callers have waited for layers and heads that were not there yet."""
        return self._stalled

    def prefetch(self) -> None:
        """Begin to read the layers of the next `score`."""
        if self._pass is None:
            self._pass = self.stream.ask(self.published, self._units())

    def prefetch_head(self) -> None:
        """Begin to read the head of the next `load_head`."""
        if self._head is None:
            published = self.published  # opened by this thread alone
            read = partial(self._read_head, published)
            self._head = in_background(f"head-{self.name}", read, self._device)

    def discard_head(self) -> None:
        """Forget a head that was prefetched and is not needed."""
        self._head = None

    def take_weight_bytes_peak(self) -> int:
        """The most bytes of weights in memory since this was last asked: of all teachers on its stream."""
        return self.stream.meter.take_peak()

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> HiddenStates:
        """Last hidden states `[N, D]` at the rows `C-1 ... C+R-2` of every sample, in order.

        Raises `StorageError` if its weights cannot be read, and `TeacherError` if they do not fit their
        configuration or another rank could not read them.
        """
        parts = [rows for _, rows in self.score_pieces(samples)]
        return HiddenStates(torch.cat(parts) if parts else self._no_rows())

    @property
    def sequence_chunk(self) -> int | None:
        """Packed tokens a piece of a long sequence has."""
        return self._placement.sequence_chunk

    def score_pieces(self, samples: Sequence[Sample]) -> RowPieces:
        """The rows of `score`, those of a long sample in pieces; each micro-batch keeps one [T, D]."""
        batches = self._pack(samples)
        if batches or self.collective:
            with torch.no_grad():
                self._pass_by([work for work, _ in batches])
        while batches:
            work, part = batches.pop(0)  # its hidden states go with it
            yield from row_pieces(part, work.last_hidden(), self.sequence_chunk)

    def close(self) -> None:
        """Stop its stream, and with it every teacher that shares it, and let the store go."""
        self.stream.close()
        if self._head is not None:
            wait([self._head])  # it reads through the store that is closed next
        if "published" in self.__dict__:
            self.published.close()

    def load_head(self) -> Head:
        """The head, read now or taken from `prefetch_head`. The caller's to keep and to drop."""
        self.prefetch_head()
        pending, self._head = self._head, None
        assert pending is not None
        begin = time.perf_counter()
        try:
            return pending.result()
        finally:
            self._stalled += time.perf_counter() - begin

    def _no_rows(self) -> Tensor:
        return torch.zeros(0, int(self.skeleton.config.hidden_size), dtype=self._dtype, device=self._device)

    def _units(self) -> list[str]:
        layers = len(self.skeleton.layers)
        names = ["embedding", *(f"layer.{index}" for index in range(layers)), "norm"]
        found = [name for name in self.published.manifest.units if name != "head"]
        if found != names:
            odd = min(set(found) ^ set(names), default="in another order")
            raise TeacherError(
                f"the published teacher {self.name} has other units than its configuration asks for ({odd});"
                " publish it again."
            )
        return names

    def _pack(self, samples: Sequence[Sample]) -> list[tuple[PackedWork, Sequence[Sample]]]:
        lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
        batches = []
        for start, stop in split_by_tokens(lengths, [None] * len(lengths), self._placement.max_tokens):
            part = samples[start:stop]
            input_ids, position_ids, cu_seqlens, _ = (t.to(self._device) for t in pack_tokens(part))
            work = self.skeleton.work(input_ids, position_ids, cu_seqlens, self.sequence_chunk)
            batches.append((work, part))
        return batches

    def _pass_by(self, batches: list[PackedWork]) -> None:
        """Take every unit once, in order, and run it over all micro-batches."""
        self.prefetch()
        asked, self._pass = self._pass, None
        assert asked is not None
        before = self.stream.stall_seconds
        try:
            with closing(self.stream.units(asked)) as units:
                for unit, flat in units:
                    self._run(unit, flat, batches)
        finally:
            self._stalled += self.stream.stall_seconds - before

    def _run(self, unit: str, flat: Tensor, batches: list[PackedWork]) -> None:
        if not batches:
            return
        entry = self.published.manifest.units[unit]
        with self.stream.meter.held(converted_bytes(entry, self._dtype)):
            tensors = unit_tensors(entry, flat, self._dtype)
            for work in batches:
                if unit == "embedding":
                    self.skeleton.embed(tensors, work)
                elif unit == "norm":
                    self.skeleton.norm(tensors, work)
                else:
                    self.skeleton.layer(int(unit.removeprefix("layer.")), tensors, work)

    def _read_head(self, published: PublishedModel) -> Head:
        meter, entry = self.stream.meter, published.manifest.units[UNIT]
        with meter.held(entry.nbytes + converted_bytes(entry, self._dtype)):
            head = read_head(published, self._dtype, self._device, self._placement.vocabulary)
        nbytes = head_bytes(head)
        meter.hold(nbytes)
        # Counted until the last user has dropped it, whoever that is.
        weakref.finalize(head, meter.let_go, nbytes)
        return head


def streamed_teachers(
    urls: Mapping[str, str],
    placement: Placement,
    *,
    prefetch_bytes: int = 2**28,
    group: dist.ProcessGroup | None = None,
) -> dict[str, StreamedTeacher]:
    """Teachers by name that share one stream, so that all of them need no more memory than the largest one.

    `group` is the ranks that share the reading; see `LayerStream`.
    """
    device = torch_device(placement.device)
    stream = LayerStream(prefetch_bytes=prefetch_bytes, device=device, group=group)
    return {
        name: StreamedTeacher(name, url, placement=placement, stream=stream) for name, url in urls.items()
    }
