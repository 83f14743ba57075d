"""A teacher on Megatron-Core in this process: tensor parallel, packed, several of them on one module.

A rank's slice comes from a Hugging Face folder or a published model (`open_source`). It is swapped into the
module when its teacher's turn comes (`WeightTags`). The head is gathered from the ranks' rows or left cut.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from opd.config import Recipe
from opd.config.teachers import MegatronTeacherConfig
from opd.errors import MissingExtraError, TeacherError
from opd.kernels.head import Head
from opd.kernels.vocab_parallel import HeadShard
from opd.megatron.form import (
    HEAD,
    Cut,
    MegatronForm,
    ParameterPart,
    assemble_tensor,
    check_tensors,
    head_shard,
    in_stack,
    one_by_one,
    rank_parameters,
    read_elements,
    read_from,
    tokens_of,
)
from opd.megatron.module import MegatronModule, model_parallel
from opd.models.causal_lm import torch_device, torch_dtype
from opd.models.hf_folder import check_folder, quantisation_in, read_config, weight_files
from opd.models.quantisation import quantisation_of
from opd.models.quantised_weights import folder_parts, plain_tensors
from opd.storage.files import file_digest
from opd.storage.published import PublishedModel
from opd.storage.tensors import TensorParts
from opd.storage.weight_folder import read_headers
from opd.teachers.kinds import Placement, TeacherKind, TeacherOpening
from opd.teachers.skeleton import is_published, small_files, unit_tensors
from opd.teachers.unit_gather import UnitGather
from opd.train.packing import copy_to_device, pack_tokens, split_by_tokens
from opd.types import HiddenStates, Sample

if TYPE_CHECKING:
    from opd.storage.shard_cache import ShardCache


class WeightSource(Protocol):
    """A model's weights, read parameter by parameter."""

    @property
    def form(self) -> MegatronForm: ...

    @property
    def digest(self) -> str:
        """Identity of the weights."""
        ...

    @property
    def bytes_read(self) -> int:
        """Bytes of weights this rank has read so far."""
        ...

    @property
    def cached_bytes(self) -> int:
        """Bytes of weights this rank has taken from the node's cache, instead of the store."""
        ...

    def read(self, pieces: Sequence[ParameterPart]) -> Iterator[tuple[str, Tensor]]:
        """Yield each of `pieces` by name, in their order, in the source's dtype and new memory.

        With a group all its ranks read the same pieces together.
        """
        ...

    def close(self) -> None: ...


class FolderSource:
    """A Hugging Face folder. A rank reads the bytes of its own slices and no others."""

    def __init__(self, folder: str | Path) -> None:
        """Raises `CheckpointError` for a missing or damaged folder, `ModelError` for an unknown form."""
        self.folder = Path(folder)
        check_folder(self.folder)
        self.form = _read_form(self.folder)
        self._tensors = read_headers(self.folder)
        self._parts = folder_parts(self.folder) if quantisation_in(self.folder) else None
        """What reads quantised tensors."""
        self._shapes = {name: entry.shape for name, entry in self._tensors.items()}
        if self._parts is not None:
            self._shapes = {name: self._parts.shape(name) for name in self._parts}
        check_tensors(self.form, self._shapes, str(self.folder))
        self.bytes_read = 0
        self.cached_bytes = 0
        self._digest: str | None = None

    @property
    def digest(self) -> str:
        """sha256 over configuration and weight files, read once."""
        if self._digest is None:
            digest = hashlib.sha256()
            for name in ["config.json", *weight_files(self.folder)]:
                digest.update(f"{name} {file_digest(self.folder / name)}\n".encode())
            self._digest = digest.hexdigest()
        return self._digest

    def read(self, pieces: Sequence[ParameterPart]) -> Iterator[tuple[str, Tensor]]:
        """Copy the slices out of the mapped files, open meanwhile. Those of quantised tensors are float32."""
        if self._parts is not None:
            yield from self._read_quantised(pieces, self._parts)
            return
        with ExitStack() as stack:
            handles: dict[Path, Any] = {}

            def read_slice(cut: Cut) -> Tensor:
                at: list[int | slice] = []
                source = cut.source
                if source not in self._tensors:
                    source, expert = in_stack(source)
                    at.append(expert)
                path = self._tensors[source].path
                if path not in handles:
                    handles[path] = stack.enter_context(safe_open(path, framework="pt"))
                at += [slice(None)] * cut.axis + [slice(cut.start, cut.stop)]
                part = handles[path].get_slice(source)[tuple(at)]
                self.bytes_read += part.nbytes
                return part

            for piece in pieces:
                yield piece.name, assemble_tensor(piece, self.form, read_slice)

    def _read_quantised(
        self, pieces: Sequence[ParameterPart], parts: TensorParts
    ) -> Iterator[tuple[str, Tensor]]:
        def read(source: str, first: int, into: Tensor) -> None:
            if source not in parts:
                source, expert = in_stack(source)
                first += expert * math.prod(parts.shape(source)[1:])
            parts.read(source, first, into)

        elements = read_elements(one_by_one(self.form, self._shapes), read, torch.device("cpu"))
        for piece in pieces:
            before = parts.bytes_read
            yield piece.name, assemble_tensor(piece, self.form, elements)
            self.bytes_read += parts.bytes_read - before

    def close(self) -> None:
        """Do nothing: no file stays open between reads."""


class PublishedSource:
    """A model written by `opd publish`. Each rank of the group reads 1/N of every unit from the store.

    Blocks are verified as they arrive, and their ends are not Megatron-Core's cuts: a projection back is cut
    by columns, which lie all over its bytes. So the ranks read disjoint slices, gather the unit, keep their
    own slices and drop the rest. Every byte leaves the store once, and one unit is in memory beyond the
    slices.
    """

    def __init__(
        self, url: str, group: dist.ProcessGroup | None, device: torch.device, cache: ShardCache | None = None
    ) -> None:
        """Raises `StorageError` if nothing is published there, `ModelError` for an unknown form."""
        self.published = PublishedModel.open(url, cache=cache)
        try:
            manifest = self.published.manifest
            where = f"published model {manifest.digest[:12]}"
            self.form = _published_form(self.published)
            self._quantised = quantisation_of(manifest.config, where)
            shapes: Mapping[str, Sequence[int]] = manifest.tensor_shapes
            if self._quantised is not None:
                shapes, _ = self._quantised.plain_form(shapes, manifest.tensor_formats, where)
            check_tensors(self.form, shapes, where)
        except BaseException:
            self.published.close()
            raise
        shared = group is not None and group.size() > 1
        self._gather = UnitGather(device, group if shared else None)

    @property
    def digest(self) -> str:
        return self.published.manifest.digest

    @property
    def bytes_read(self) -> int:
        """Bytes received, manifest and repeated reads included."""
        return self.published.bytes_read

    @property
    def cached_bytes(self) -> int:
        """Bytes from the node's cache."""
        return self.published.cached_bytes

    def read(self, pieces: Sequence[ParameterPart]) -> Iterator[tuple[str, Tensor]]:
        """Raises `StorageError` from the reader, and `TeacherError` if another rank could not read."""
        for unit, members in groupby(pieces, key=_source_name):
            entry = self.published.manifest.unit(unit)
            into = self._gather.allocate_memory(self._gather.required_bytes(self.published, unit))
            weights = unit_tensors(entry, self._gather.read(self.published, unit, into))
            if unit == "head" and self.form.tied:
                # The published copy of a tied head has a name of its own.
                weight = next(tensor for name, tensor in weights.items() if name.endswith(".weight"))
                weights["model.embed_tokens.weight"] = weight
            for piece in members:
                yield piece.name, assemble_tensor(piece, self.form, read_from(self._plain(piece, weights)))

    def _plain(self, piece: ParameterPart, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what `piece` is cut from, in float32 if it is quantised."""
        if self._quantised is None:
            return weights
        needed = {cut.source for cut in piece.cuts}
        needed |= {in_stack(source)[0] for source in needed}
        quantised = self._quantised.parts_of(weights)
        names = {part for name in needed for part in quantised.get(name, (name,)) if part in weights}
        return plain_tensors(self._quantised, {n: weights[n] for n in names}, lambda _: torch.float32)

    def close(self) -> None:
        self.published.close()


def open_source(
    source: str, group: dist.ProcessGroup, device: torch.device, cache: ShardCache | None = None
) -> WeightSource:
    """Open the weights at a URL of a published model, or in a Hugging Face folder."""
    return PublishedSource(source, group, device, cache) if is_published(source) else FolderSource(source)


def _source_name(piece: ParameterPart) -> str:
    """Return the published unit that holds all cuts of `piece`."""
    if piece.name == HEAD:
        return "head"
    parts = piece.name.split(".")
    if parts[0] == "embedding":
        return "embedding"
    return f"layer.{parts[2]}" if parts[1] == "layers" else "norm"


def _read_form(folder: Path) -> MegatronForm:
    return MegatronForm.from_config(read_config(folder))


def _published_form(published: PublishedModel) -> MegatronForm:
    entry = published.manifest.head
    with TemporaryDirectory(prefix="opd-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(dict(published.manifest.config)), "utf-8")
        form = _read_form(Path(folder))
    if entry.bias or entry.scale != 1.0 or entry.softcap is not None:
        raise TeacherError(
            f"published model {published.manifest.digest[:12]} has a head with bias, scale or softcap, which"
            " a Megatron-Core teacher cannot have; give it the type streamed or local."
        )
    return form


def gather_head(rows: Tensor, form: MegatronForm, vocabulary: int | None, group: dist.ProcessGroup) -> Head:
    """Return the head over the first `vocabulary` tokens from every rank's `rows` [padded V / ranks, D].

    A collective call with more than one rank. Raises `ModelError` for a vocabulary the head does not have.
    """
    tokens = tokens_of(form, vocabulary)
    if group.size() > 1:
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        rows = torch.cat(parts)[: form.vocabulary]
    return Head(rows, vocab_size=tokens)


@dataclass(slots=True)
class _Tag:
    source: WeightSource
    slices: dict[str, Tensor] | None = None
    """This rank's slices in host memory, the head among them, or `None` before the first use."""


class WeightTags:
    """Swaps teachers' weights into `module`, and knows where the other teachers' weights are.

    Args:
        module: One decoder. All tags are of its form.
        keep: Keep every tag's slices in host memory after they were read. On a CPU the module then uses them
            in place, so that a swap copies nothing. Otherwise they are copied to its device. Without `keep` a
            swap reads the tag's source again, and one teacher's weights are in memory.
    """

    def __init__(self, module: MegatronModule, *, keep: bool) -> None:
        self.module = module
        self.keep = keep
        self.active: str | None = None
        self.loads = 0
        """Number of swaps."""
        self._tags: dict[str, _Tag] = {}
        self._pieces = rank_parameters(module.form, module.group.rank(), module.group.size())

    def add_tag(self, tag: str, source: WeightSource) -> None:
        """Register `tag`. Raises `TeacherError` if it exists already, or if its form is not the module's."""
        if tag in self._tags:
            raise TeacherError(f"there are two teachers named {tag}; give each its own name.")
        if source.form != self.module.form:
            raise TeacherError(
                f"teacher {tag} has another form than the module it was to share; give it one of its own."
            )
        self._tags[tag] = _Tag(source)

    def activate(self, tag: str) -> MegatronModule:
        """Return the module with the weights of `tag`. Nothing moves if it has them already. All ranks must
        call it.

        Raises as its source raises. The module then has no teacher's weights.
        """
        if self.active == tag:
            return self.module
        self.active = None
        parameters = dict(self.module.parameters())
        if self.keep:
            tensors = ((name, tensor) for name, tensor in self._host_slices(tag).items() if name != HEAD)
        else:
            tensors = self._tags[tag].source.read(self._pieces[:-1])
        for name, tensor in tensors:
            parameter = parameters[name]
            if parameter.shape != tensor.shape:
                raise TeacherError(
                    f"{name} of teacher {tag} has shape {list(tensor.shape)}, but its configuration asks for"
                    f" {list(parameter.shape)}; copy or publish the model again."
                )
            if self.keep and tensor.device == parameter.device:
                parameter.data = tensor
            else:
                parameter.data.copy_(tensor, non_blocking=True)
        self.active = tag
        self.loads += 1
        return self.module

    def head_rows(self, tag: str) -> Tensor:
        """Return this rank's rows of the head of `tag`, [padded V / ranks, D], on the module's device.

        Read from its source, or from host memory. The module's own weights stay as they are.
        """
        if self.keep:
            rows = self._host_slices(tag)[HEAD]
        else:
            _, rows = next(iter(self._tags[tag].source.read(self._pieces[-1:])))
        return rows.to(device=self.module.device, dtype=self.module.dtype)

    def _host_slices(self, tag: str) -> dict[str, Tensor]:
        entry = self._tags[tag]
        if entry.slices is None:
            wanted = self._pieces if not self.module.form.tied else self._pieces[:-1]
            parameters = dict(self.module.parameters())
            entry.slices = {
                name: self._to_host(
                    tensor, parameters[name].dtype if name in parameters else self.module.dtype
                )
                for name, tensor in entry.source.read(wanted)
            }
            if self.module.form.tied:
                entry.slices[HEAD] = entry.slices[_EMBEDDING]
        return entry.slices

    def _to_host(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        tensor = tensor.to(device="cpu", dtype=dtype)
        return tensor.pin_memory() if self.module.device.type == "cuda" else tensor


_EMBEDDING = "embedding.word_embeddings.weight"


class MegatronTeacher:
    """One tag of a module that other teachers may share, made by `megatron_teachers`.

    With tensor parallelism every rank of the group makes the same calls with the same samples, and gets the
    same results.
    """

    def __init__(
        self, name: str, source: WeightSource, tags: WeightTags, *, max_tokens: int, vocabulary: int | None
    ) -> None:
        self.name = name
        self.source = source
        self.tags = tags
        self._max_tokens = max_tokens
        self._vocabulary = vocabulary

    @property
    def digest(self) -> str:
        return self.source.digest

    @property
    def bytes_read(self) -> int:
        """Bytes of weights this rank has read for it."""
        return self.source.bytes_read

    @property
    def cached_bytes(self) -> int:
        """Bytes this rank has taken from the node's cache for it, instead of the store."""
        return self.source.cached_bytes

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> HiddenStates:
        """Return last hidden states `[N, D]` at the rows `C-1 ... C+R-2` of every sample, in order.

        Swaps the teacher's weights in if another's are there. Raises `StorageError` or `CheckpointError` if
        they cannot be read.
        """
        module = self.tags.activate(self.name)
        lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
        parts = [torch.zeros(0, module.form.hidden_size, dtype=module.dtype, device=module.device)]
        for start, stop in split_by_tokens(lengths, [None] * len(lengths), self._max_tokens):
            input_ids, position_ids, cu_seqlens, rows = pack_tokens(samples[start:stop])
            input_ids, position_ids, rows = copy_to_device([input_ids, position_ids, rows], module.device)
            parts.append(module.hidden(input_ids, position_ids, cu_seqlens)[rows])
        return HiddenStates(torch.cat(parts))

    def load_head(self) -> Head:
        """Return the full head, on every rank. With tensor parallelism the ranks' rows are gathered."""
        return gather_head(self.tags.head_rows(self.name), *self._head_arguments())

    def load_head_shard(self) -> HeadShard:
        """Return this rank's rows of the head, for the operations of `opd.kernels.ops`."""
        return head_shard(self.tags.head_rows(self.name), *self._head_arguments())

    def _head_arguments(self) -> tuple[MegatronForm, int | None, dist.ProcessGroup]:
        module = self.tags.module
        return module.form, self._vocabulary, module.group


@contextmanager
def megatron_teachers(
    sources: Mapping[str, str],
    placement: Placement,
    *,
    tensor_parallel: int = 1,
    keep: bool = False,
    cache: ShardCache | None = None,
) -> Iterator[dict[str, MegatronTeacher]]:
    """Open teachers by name, while the block runs. Teachers of one form take turns on one module.

    Args:
        sources: Hugging Face folders, or URLs of published models.
        placement: Dtype, device, packing and vocabulary.
        tensor_parallel: Ranks that share each teacher, see `model_parallel`.
        keep: Keep every teacher's slices in host memory, see `WeightTags`.
        cache: This node's cache of data from object stores.

    Raises `MissingExtraError` without Megatron-Core, `TeacherError` if the process group does not fit,
    `ModelError` if a teacher cannot run on it, and the errors of opening the sources.
    """
    dtype, device = torch_dtype(placement.dtype), torch_device(placement.device)
    with ExitStack() as stack:
        group = stack.enter_context(model_parallel(tensor_parallel))
        modules: dict[MegatronForm, WeightTags] = {}
        teachers = {}
        for name, where in sources.items():
            source = open_source(where, group, device, cache)
            stack.callback(source.close)
            if source.form not in modules:
                module = MegatronModule(source.form, group, dtype, device)
                modules[source.form] = WeightTags(module, keep=keep)
            tags = modules[source.form]
            tags.add_tag(name, source)
            teachers[name] = MegatronTeacher(
                name, source, tags, max_tokens=placement.max_tokens, vocabulary=placement.vocabulary
            )
        yield teachers


@contextmanager
def _open_teachers(
    teachers: Mapping[str, MegatronTeacherConfig], opening: TeacherOpening
) -> Iterator[dict[str, MegatronTeacher]]:
    alike: dict[tuple[int, bool], dict[str, str]] = {}
    for name, settings in teachers.items():
        group = alike.setdefault((settings.tensor_parallel, settings.keep), {})
        group[name] = opening.sources[name]
    with ExitStack() as stack:
        opened: dict[str, MegatronTeacher] = {}
        for (ranks, keep), sources in alike.items():
            cache = None if keep else opening.cache  # weights that stay in memory are read once
            context = megatron_teachers(
                sources, opening.placement, tensor_parallel=ranks, keep=keep, cache=cache
            )
            opened |= stack.enter_context(context)
        yield opened


def _check_teacher(name: str, settings: MegatronTeacherConfig, recipe: Recipe) -> Iterator[str]:
    """Check that Megatron-Core is installed and knows the teacher's architecture."""
    if find_spec("megatron") is None:
        raise MissingExtraError(f"teacher {name} on Megatron-Core", "megatron")
    source = recipe.given_teachers().get(name) or recipe.model.path
    if source is not None:
        with small_files(source) as folder:
            form = _read_form(folder)
        form.check_divisible(settings.tensor_parallel)
        yield f"{form.family} on Megatron-Core, tensor parallel size {settings.tensor_parallel}"


KIND = TeacherKind(_open_teachers, _check_teacher)
