"""A Hugging Face decoder without weights, run one layer at a time for many packed micro-batches.

The decoder is built on the meta device. Its own forward runs once for each micro-batch with every layer and
the final norm replaced by a stand-in, which notes the layer's arguments: rotary embeddings, the attention
kind, and any others of a family. Then each layer runs over all micro-batches with the weights that are in
memory at that moment. Nothing of a family's forward is written a second time here.

A published model's units as tensors, its head by itself, and all of it as a Hugging Face folder again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedConfig

from opd.errors import ModelError, TeacherError, reason_of
from opd.kernels.head import Head
from opd.kernels.projection import speed_up
from opd.models.architecture import check_architecture, empty_model
from opd.models.attention import (
    ATTENTION_NAME,
    Attend,
    AttentionCall,
    PackedAttention,
    install_attention,
    refuse_pieces,
)
from opd.models.hf_folder import INDEX, config_of, described_in, made_once, names_code, write_checksums
from opd.models.hf_weights import meta_parameters, quiet_loading
from opd.models.long_sequence import FINAL_NORMS, ChunkedLayers, decoder_of, replace_forward
from opd.models.quantisation import KEYS, quantisation_of
from opd.models.quantised_weights import plain_tensors
from opd.models.recurrence import MixerCall, mix_by
from opd.models.stored_form import MISSING, UNKNOWN, StoredForm
from opd.storage.files import atomic_folder, write_atomic
from opd.storage.manifest import EMBEDDING_WEIGHT, HEAD_WEIGHT, LATEST, MANIFEST, TensorEntry, Unit, unit_of
from opd.storage.published import PublishedModel
from opd.storage.tensors import DTYPES, FLOATS, save_tensors
from opd.teachers.published_adapter import DESCRIPTION, PublishedAdapter, is_adapter
from opd.teachers.routed_unit import BlockMemory, PartHolder, RoutedExperts, RoutedUnit, TakeExperts
from opd.teachers.unit_memory import ByteMeter, own_pages

DtypeOf = Callable[[str], torch.dtype]
"""The dtype that the floating-point tensor of a name is wanted in."""


def unit_tensors(unit: Unit, flat: Tensor) -> dict[str, Tensor]:
    """The tensors of `unit` by name: views of its bytes `flat` [nbytes] uint8, valid as long as these.

    Raises `TeacherError` for a dtype that has no torch counterpart here.
    """
    return {
        name: _typed(name, entry, flat[entry.offset : entry.offset + entry.nbytes])
        for name, entry in unit.tensors.items()
    }


def _typed(name: str, entry: TensorEntry, raw: Tensor) -> Tensor:
    if entry.dtype not in DTYPES:
        raise TeacherError(
            f"tensor {name} of a published teacher is {entry.dtype}, which cannot be computed with;"
            f" publish a checkpoint in one of {', '.join(DTYPES)}."
        )
    return raw.view(DTYPES[entry.dtype]).view(tuple(entry.shape))


def converted_bytes(unit: Unit, dtype_of: DtypeOf) -> int:
    """Bytes of those tensors of `unit` that have to be copied into another dtype."""
    kinds = [(name, entry, DTYPES.get(entry.dtype)) for name, entry in unit.tensors.items()]
    return sum(
        entry.nbytes // kind.itemsize * dtype_of(name).itemsize
        for name, entry, kind in kinds
        if kind is not None and kind.is_floating_point and kind != dtype_of(name)
    )


UNIT = "head"
"""Name of the unit with a published model's head."""


Allocate = Callable[[int], Tensor]
"""Allocates memory: [nbytes] uint8."""


def read_head(
    model: PublishedModel,
    dtype: torch.dtype,
    device: torch.device,
    vocabulary: int | None = None,
    pages: Allocate = own_pages,
) -> Head:
    """Return the head of `model` over the first `vocabulary` tokens (default: all rows). On a CPU its weight
    is in memory of `pages`.

    Every rank reads all of it: ranks come to a teacher's head at different times, and some not at all. Raises
    `StorageError` from the reader, and `ModelError` if it has fewer rows than `vocabulary`.
    """
    model.require_memory(UNIT)
    unit, entry = model.manifest.units[UNIT], model.manifest.head
    if device.type == "cuda":
        host = torch.empty(unit.nbytes, dtype=torch.uint8, pin_memory=True)
    else:
        host = (own_pages if converted_bytes(unit, lambda _: dtype) else pages)(unit.nbytes)
    model.read_part(UNIT, 0, 1, host.numpy().data)
    read = unit_tensors(unit, host.to(device))
    tensors = {name: _convert_tensor(tensor, dtype, pages) for name, tensor in read.items()}
    weight = next(tensor for name, tensor in tensors.items() if name.endswith(".weight"))
    bias = next((tensor for name, tensor in tensors.items() if name.endswith(".bias")), None)
    if vocabulary is not None and vocabulary > weight.shape[0]:
        raise ModelError(
            f"the head of published teacher {model.manifest.digest[:12]} has {weight.shape[0]} rows, fewer"
            f" than the {vocabulary} tokens asked for; use the tokenizer the model was made for."
        )
    return Head(weight, bias=bias, scale=entry.scale, softcap=entry.softcap, vocab_size=vocabulary)


def _convert_tensor(tensor: Tensor, dtype: torch.dtype, pages: Allocate) -> Tensor:
    if tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    if tensor.device.type != "cpu":
        return tensor.to(dtype)
    allocate = pages if tensor.ndim > 1 else own_pages
    copy = allocate(tensor.numel() * dtype.itemsize).view(dtype).view(tensor.shape)
    return copy.copy_(tensor)


def head_bytes(head: Head) -> int:
    """Bytes `head` keeps in memory."""
    tensors: list[Tensor] = [head.weight] if head.bias is None else [head.weight, head.bias]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def download_model(url: str, folder: Path) -> Path:
    """Write the published model at `url` to `folder`, one safetensors file per unit. Return `folder`.

    An existing folder is kept if it was written from the current publication and no byte of it has changed.
    Otherwise it is written again. Memory is that of the largest unit. Raises `StorageError` if the model
    cannot be read, or its bytes have changed.
    """
    adapter = PublishedAdapter.open(url) if is_adapter(url) else None
    with PublishedModel.open(adapter.base if adapter else url) as published:
        if adapter is not None:
            adapter.require_base(published.manifest.digest)
        digest = adapter.digest if adapter else published.manifest.digest
        return made_once(folder, digest, lambda: _write_folder(published, adapter, folder))


def _write_folder(published: PublishedModel, adapter: PublishedAdapter | None, folder: Path) -> None:
    manifest = published.manifest
    form = quantisation_of(manifest.config, folder) if adapter else None  # merged, it is quantised no more
    with atomic_folder(folder, replace=True) as target:
        _write_small_files(published, target, plain=form is not None)
        weight_map: dict[str, str] = {}
        for unit in manifest.units.values():
            if unit.name == "head" and manifest.head.tied:
                continue
            published.require_memory(unit.name)
            buffer = bytearray(max(unit.nbytes, 1))
            published.read_unit(unit.name, memoryview(buffer))
            file = f"{unit.name}.safetensors"
            tensors = unit_tensors(unit, torch.frombuffer(buffer, dtype=torch.uint8))
            if form is not None:
                tensors = plain_tensors(form, tensors, lambda _: torch.float32)
            save_tensors(target / file, adapter.merge(tensors) if adapter else tensors)
            weight_map |= dict.fromkeys(tensors, file)
        write_atomic(target / INDEX, _json_bytes({"metadata": {}, "weight_map": weight_map}))
        write_checksums(target)


@contextmanager
def small_files(source: str) -> Iterator[Path]:
    """Yield a folder with the configuration and tokenizer of a teacher.

    For a Hugging Face folder it is that folder. Raises `StorageError` if a published one cannot be read.
    """
    if not is_published(source):
        yield described_in(Path(source))
        return
    adapter = PublishedAdapter.open(source) if is_adapter(source) else None
    url = adapter.base if adapter else source
    with TemporaryDirectory(prefix="opd-") as folder, PublishedModel.open(url) as published:
        if adapter is not None:
            adapter.require_base(published.manifest.digest)
        _write_small_files(published, Path(folder))
        yield Path(folder)


def is_published(source: str) -> bool:
    """Return whether `source` was written by `opd publish`, or is a URL, and not a Hugging Face folder."""
    if "://" in source:
        return True
    return any((Path(source) / name).exists() for name in (LATEST, MANIFEST, DESCRIPTION))


def _write_small_files(published: PublishedModel, folder: Path, plain: bool = False) -> None:
    """`plain`: the configuration says of no quantisation."""
    manifest = published.manifest
    config = {key: value for key, value in manifest.config.items() if not plain or key != KEYS[0]}
    write_atomic(folder / "config.json", _json_bytes(config))
    if manifest.generation_config is not None:
        write_atomic(folder / "generation_config.json", _json_bytes(manifest.generation_config))
    for name, content in published.tokenizer_files().items():
        write_atomic(folder / name, content)


def _json_bytes(data: object) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()


_IGNORED = ("rotary_emb.inv_freq",)  # older checkpoints hold it; it follows from the configuration


@dataclass(slots=True)
class PackedWork:
    """One packed micro-batch on its way through the layers. `T` tokens, hidden size `D`."""

    input_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64."""
    attend: CheckedAttention
    pieces: ChunkedLayers | None = None
    """Its chunks, if it goes through the layers in chunks. Then each overwrites `hidden`."""
    hidden: Tensor | None = None
    """[1, T, D]: the input of the next layer."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """The other arguments of each layer."""
    link_name: str | None = None
    """The argument by which a layer takes what the one before gave beside hidden states (GLM-5)."""
    link: Any = None

    def last_hidden(self) -> Tensor:
        """Return [T, D]: the output of the last module that ran."""
        assert self.hidden is not None
        return self.hidden[0]


_KINDS = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "linear_attention",
    "conv",
    "hybrid",
    "hybrid_sliding",
}
"""Kinds of layers that are streamed."""


class CheckedAttention:
    """`PackedAttention` that detects layers it cannot replace."""

    def __init__(self, attend: Attend, kinds: list[str]) -> None:
        self.attend = attend
        self.kinds = kinds
        self.called = False

    def __call__(self, call: AttentionCall) -> Tensor:
        """Call `PackedAttention`. Raises `TeacherError` if a sliding layer does not give its window."""
        self.called = True
        if self.kinds[call.layer_index] == "sliding_attention" and call.sliding_window is None:
            raise TeacherError(
                f"layer {call.layer_index} of a published teacher slides but does not say its window; this"
                " architecture cannot be streamed."
            )
        return self.attend(call)

    def mix(self, call: MixerCall) -> Tensor:
        """Call `PackedAttention.mix`. Raises `ModelError` if the layer gets a part of a sequence."""
        self.called = True
        return mix_by(self.attend, call)


class Skeleton:
    """The decoder that `config`, the dictionary of a config.json, describes.

    Raises `TeacherError` for an architecture that transformers does not know or that is not a plain chain:
    embedding, layers in order, final norm.
    """

    def __init__(self, config: Mapping[str, object], dtype: torch.dtype, device: torch.device) -> None:
        settings = published_config(config)
        with _convert_errors(config), meta_parameters(), quiet_loading():
            module = AutoModelForCausalLM.from_config(
                settings, dtype=dtype, attn_implementation=ATTENTION_NAME, trust_remote_code=False
            ).eval()
            install_attention(module)
            speed_up(module)  # as in `CausalLM`: streamed and resident teachers compute the same
        self._set_module(module)
        for part in self._decoder.modules():
            for name, buffer in part.named_buffers(recurse=False):
                part._buffers[name] = buffer.to(device)

    @classmethod
    def of_names(cls, module: Any) -> Skeleton:
        """Return the skeleton of a full causal language model on the meta device, used only for names."""
        skeleton = cls.__new__(cls)
        skeleton._set_module(module)
        return skeleton

    _pairs = False
    """Whether its layers give a pair, of which the next takes both."""

    def _set_module(self, module: Any) -> None:
        self._decoder: Any = decoder_of(module)
        self._stored = StoredForm(module)
        self._form = quantisation_of(module.config, f"a published {type(self._decoder).__name__}")
        self._dtype: torch.dtype = module.dtype
        self._prefix = next(name for name, part in module.named_modules() if part is self._decoder)
        norms = [name for name in FINAL_NORMS if hasattr(self._decoder, name)]
        missing = [name for name in ("embed_tokens", "layers") if not hasattr(self._decoder, name)]
        if missing or not norms:
            lacks = missing[0] if missing else "final norm"
            raise self._unusable_error(f"it has no {lacks} (read are an embed_tokens, layers and a norm)")
        self._norm = norms[0]
        self.config = module.config.get_text_config()
        self.layers: list[nn.Module] = list(self._decoder.layers)
        if (counted := getattr(self.config, "num_hidden_layers", None)) != len(self.layers):
            raise self._unusable_error(
                f"its configuration counts {counted} layers where it has {len(self.layers)}"
            )
        default = ["full_attention"] * len(self.layers)
        self.kinds = list(getattr(self.config, "layer_types", None) or default)
        if unknown := set(self.kinds) - _KINDS:
            raise self._unusable_error(f"a layer is of kind {min(unknown)!r}")

    def require_shapes(self, tensors: Mapping[str, Sequence[int]]) -> None:
        """Raise the error of publishing and streaming weights of these names and shapes: a `StorageError` or
        `TeacherError` before there are any. Needs `of_names`.
        """
        units: dict[str, dict[str, Tensor]] = {}
        for name, shape in tensors.items():
            unit = unit_of(name)
            if unit is not None:
                units.setdefault(unit, {})[name] = torch.empty(tuple(shape), device="meta")
        ids = torch.zeros(2, dtype=torch.int64, device="meta")
        self.run_embedding(units.get("embedding", {}), self.pack_sequences(ids, ids, [0, 2]))
        for index in range(len(self.layers)):
            path, stored = f"layers.{index}", units.get(f"layer.{index}", {})
            self._refuse_stored(path, f"{self._prefix}.{path}.", stored)
            self._module_tensors(path, stored)
        self._module_tensors(self._norm, units.get("norm", {}))

    def require_floats(self, formats: Mapping[str, str], where: str | Path) -> None:
        """Raise `TeacherError` for a tensor that files hold in no floating-point format, as `formats` says,
        and the decoder computes with in one.
        """
        for name, dtype in formats.items():
            kind, due = FLOATS.get(dtype), self._stored.dtype_of(name)
            if due is None or not due.is_floating_point or kind is not None:
                continue
            floats = ", ".join(FLOATS)
            raise TeacherError(
                f"{where} holds {name} as {dtype}, which is not computed with; give a model whose weights are"
                f" in one of {floats}."
            )

    def dtype_of(self, name: str) -> torch.dtype:
        """What is computed in with the published tensor `name`: a few stay in float32."""
        return self._stored.dtype_of(name) or self._dtype

    def added_bytes(self, unit: Unit) -> int:
        """Bytes that a layer takes beside those of `unit`: tensors in another dtype, quantised matrices as
        numbers, experts put together.
        """
        plain, decoded = self._plain_names(unit), 0
        shapes = {name: unit.tensors[one].shape for one, name in plain.items()}
        if self._form is not None:
            parts = self._form.parts_of(unit.tensors)
            shapes |= {
                name: self._form.plain_shape(unit.tensors[part_names[0]].shape)
                for name, part_names in parts.items()
            }
            decoded = sum(math.prod(shapes[name]) * self.dtype_of(name).itemsize for name in parts)
            unit = replace(
                unit, tensors={one: e for one, e in unit.tensors.items() if plain[one] not in parts}
            )
        merged = sum(
            math.prod(shape) * self.dtype_of(name).itemsize
            for name, shape in shapes.items()
            if self._stored.merges(name)
        )
        return converted_bytes(unit, self.dtype_of) + decoded + merged

    def _plain_names(self, unit: Unit) -> dict[str, str]:
        """The model's name for each of the unit's tensors, of which a quantised matrix is several."""
        plain = {name: name for name in unit.tensors}
        if self._form is not None:
            for name, stored in self._form.parts_of(unit.tensors).items():
                plain |= dict.fromkeys(stored, name)
        return plain

    def unit_tensors(self, unit: Unit, flat: Tensor) -> dict[str, Tensor]:
        """Do what the function of this name does, in the dtypes that are computed in: a tensor of another one
        is a copy. A matrix that the unit holds quantised is made of its codes and scales.
        """
        return self._plain(unit_tensors(unit, flat))

    def block_tensors(self, memory: BlockMemory, names: Iterable[str]) -> dict[str, Tensor]:
        """Do what `unit_tensors` does for the tensors `names` of a unit that is in memory in parts."""
        entries = ((name, memory.unit.tensors[name]) for name in names)
        return self._plain({name: _typed(name, entry, memory.raw(entry)) for name, entry in entries})

    def _plain(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        plain = stored if self._form is None else plain_tensors(self._form, stored, self.dtype_of)
        return {
            name: tensor.to(self.dtype_of(name)) if tensor.is_floating_point() else tensor
            for name, tensor in plain.items()
        }

    def pack_sequences(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | Sequence[int],
        chunk: int | None = None,
    ) -> PackedWork:
        """Return a micro-batch of sequences packed end to end: [T] and [T] on the skeleton's device, and [B +
        1].

        One of more than `chunk` tokens goes through the layers in chunks of so many.
        """
        attend = PackedAttention(cu_seqlens)
        cut = chunk is not None and attend.tokens > chunk
        if cut:
            refuse_pieces(self.config)
        pieces = ChunkedLayers(attend.bounds, chunk) if cut and chunk is not None else None
        return PackedWork(input_ids, position_ids, CheckedAttention(attend, self.kinds), pieces)

    def run_embedding(self, tensors: Mapping[str, Tensor], work: PackedWork) -> None:
        """Compute the first layer's input from token ids. `tensors` are the embedding's."""
        renamed = self._module_tensors("embed_tokens", tensors)
        weights = {f"embed_tokens.{name}": tensor for name, tensor in renamed.items()}
        arguments = {
            "input_ids": work.input_ids[None],
            "position_ids": work.position_ids[None],
            "use_cache": False,
            "attend": work.attend,
        }
        for pairs in (self._pairs, True):
            chain = _Chain(pairs)
            with chain.replace_forwards([*self.layers, getattr(self._decoder, self._norm)]):
                try:
                    output = functional_call(self._decoder, weights, (), arguments, tie_weights=False)
                    if pairs and chain.link_name is None:
                        raise ValueError("what a layer gives beside hidden states goes to no other")
                    break
                except (ValueError, TypeError, IndexError) as error:
                    failure = error
        else:
            cause = "its decoder takes more from a layer than hidden states"
            raise self._unusable_error(cause) from failure
        self._pairs, work.link_name = pairs, chain.link_name
        if not chain.is_chain or output.last_hidden_state is not chain.passed:
            raise self._unusable_error("its layers and final norm are not one chain")
        work.hidden, work.calls = chain.first, chain.calls[:-1]

    def routed_unit(self, index: int, unit: Unit) -> RoutedUnit | None:
        """The unit of layer `index` by its experts, if they can be read one by one."""
        names = self._plain_names(unit)
        targets = {one: self._stored.place(name) for one, name in names.items() if self._stored.merges(name)}
        if len(paths := {target.rpartition(".")[0] for target in targets.values()}) != 1:
            return None
        full_path = paths.pop()
        path = full_path.removeprefix(f"{self._prefix}.")
        if not path.startswith(f"layers.{index}."):
            return None
        part: Any = self._decoder.get_submodule(path)
        shapes = {name: tensor.shape for name, tensor in part.state_dict().items()}
        last_names = {target.rpartition(".")[2] for target in targets.values()}
        routed = RoutedUnit.of_names(unit, f"{self._prefix}.layers.{index}.", full_path, targets)
        count = getattr(part, "num_experts", None)
        if routed is None or len(routed.experts) != count or shapes.keys() != last_names:
            return None
        return routed if all(shape[0] == count for shape in shapes.values()) else None

    def run_layer(self, index: int, tensors: Mapping[str, Tensor], works: Sequence[PackedWork]) -> None:
        """Run layer `index`, whose weights are `tensors`, on each of `works`."""
        self._with_weights(f"layers.{index}", tensors, partial(self._run_works, index, works))

    def routed_layer(
        self,
        index: int,
        tensors: Mapping[str, Tensor],
        works: Sequence[PackedWork],
        layer: RoutedUnit,
        take_experts: TakeExperts,
        meter: ByteMeter,
    ) -> None:
        """Run `layer`, whose experts are not among `tensors` but taken when tokens were routed to them."""
        inside = layer.path.removeprefix(f"{self._prefix}.")
        part = self._decoder.get_submodule(inside)
        experts = RoutedExperts(part, layer.path, self._stored, take_experts, meter)
        with experts.installed():
            self._with_weights(f"layers.{index}", tensors, partial(self._run_works, index, works), inside)

    def _run_works(self, index: int, works: Sequence[PackedWork], layer: nn.Module) -> None:
        for work in works:
            self._run_attention(index, layer, work)

    def _run_attention(self, index: int, layer: nn.Module, work: PackedWork) -> None:
        work.attend.called = False
        # A layer's arguments are used once: tensors that only it needs are freed with them.
        arguments, work.calls[index] = work.calls[index], {}
        if work.link_name is not None:
            arguments[work.link_name] = work.link

        def call_layer(hidden: Tensor | None, **options: Any) -> Any:
            # The check of its kind runs first, whatever attends to a chunk.
            work.attend.attend = options["attend"] if work.pieces is not None else work.attend.attend
            return layer(hidden, **(options | {"attend": work.attend}))

        if work.pieces is not None and work.hidden is not None:
            output = work.pieces.prefill(work.hidden, arguments, call_layer)
        else:
            output = call_layer(work.hidden, **arguments)
        if work.link_name is not None and isinstance(output, tuple) and len(output) == 2:
            output, work.link = output
        if not isinstance(output, Tensor) or not work.attend.called:
            raise self._unusable_error(
                f"layer {index} does not take hidden states to hidden states by attention"
            )
        work.hidden = output

    def run_norm(self, tensors: Mapping[str, Tensor], works: Sequence[PackedWork]) -> None:
        """Run the final norm on each of `works`, which are then done."""

        def run_works(norm: nn.Module) -> None:
            for work in works:
                if work.pieces is not None and work.hidden is not None:
                    work.pieces.prefill(work.hidden, {}, norm, attends=False)
                else:
                    work.hidden = norm(work.hidden)

        self._with_weights(self._norm, tensors, run_works)

    def _with_weights(
        self,
        path: str,
        tensors: Mapping[str, Tensor],
        call: Callable[[nn.Module], None],
        without: str | None = None,
    ) -> None:
        """`call` the submodule at `path` while `tensors` are its weights, except those of `without`.

        They are set once for all micro-batches: setting them for each took a quarter of a layer's time on the
        host.
        """
        parameters = {
            f"part.{name}": tensor for name, tensor in self._module_tensors(path, tensors, without).items()
        }
        holder = PartHolder(self._decoder.get_submodule(path))
        functional_call(holder, parameters, (call,), tie_weights=False)

    def _module_tensors(
        self, path: str, tensors: Mapping[str, Tensor], without: str | None = None
    ) -> dict[str, Tensor]:
        """`tensors` under the names they have inside the submodule at `path`, all of them and no others."""
        prefix = f"{self._prefix}.{path}." if self._prefix else f"{path}."
        stored = {name: tensor for name, tensor in tensors.items() if not name.endswith(_IGNORED)}
        try:
            renamed = self._stored.of_module(stored)
        except ValueError as error:
            self._refuse_stored(path, prefix, stored)
            raise self._unusable_error(f"of {path} {error}") from None
        renamed = {name.removeprefix(prefix): tensor for name, tensor in renamed.items()}
        needed = self._decoder.get_submodule(path).state_dict()
        if without is not None:
            later = f"{without.removeprefix(f'{path}.')}."
            needed = {name: tensor for name, tensor in needed.items() if not name.startswith(later)}
        odd = sorted(set(renamed) ^ set(needed))
        if odd:
            self._refuse_stored(path, prefix, stored)
            raise self._unusable_error(
                f"{path} has {'an unknown' if odd[0] in renamed else 'no'} tensor {odd[0]}"
            )
        for name, tensor in renamed.items():
            if tensor.shape != needed[name].shape:
                self._refuse_stored(path, prefix, stored)
                raise self._unusable_error(
                    f"{path}.{name} has shape {list(tensor.shape)} where {list(needed[name].shape)} is needed"
                )
        return renamed

    def _refuse_stored(self, path: str, prefix: str, stored: Mapping[str, Tensor]) -> None:
        """Raise `TeacherError` for the first of the `stored` tensors that is at fault, if it can be told."""
        fault = self._stored.fault({name: tensor.shape for name, tensor in stored.items()}, prefix)
        if fault is None:
            return
        name, problem = fault[0].removeprefix(prefix), fault[1]
        if problem in (MISSING, UNKNOWN):
            raise self._unusable_error(
                f"{path} has {'no' if problem == MISSING else 'an unknown'} tensor {name}"
            )
        raise self._unusable_error(f"{path}.{name} {problem}")

    def _unusable_error(self, reason: str) -> TeacherError:
        return TeacherError(
            f"a published {type(self._decoder).__name__} cannot be streamed: {reason}; if `opd sample`"
            " answers from its folder, give that to a teacher of type local, else choose another model."
        )


def check_streams(
    config: PreTrainedConfig,
    where: str | Path,
    tensors: Mapping[str, Sequence[int]] | None = None,
    formats: Mapping[str, str] | None = None,
) -> None:
    """Check that a model of `config`, which is read from `where`, can be streamed. No weights are read or
    made.

    `tensors`: names and shapes in its folder or manifest. `None`: those of a new model that is saved.
    `formats`: safetensors' names of their types, by name.

    Every caller gets the same errors, in this order: `ModelError` for an architecture that cannot be used at
    all, `TeacherError` for one that is no chain of layers, `StorageError` or `TeacherError` for tensors that
    have no place in it, `TeacherError` for weights that are no floating-point numbers.
    """
    check_architecture(config, where)
    module, form = empty_model(config, where), quantisation_of(config, where)
    if tensors is None:
        tensors = StoredForm(module).saved
    elif form is not None and formats is not None:
        quantised = form.parts_of(tensors)
        if apart := next((name for name in (HEAD_WEIGHT, EMBEDDING_WEIGHT) if name in quantised), None):
            raise TeacherError(
                f"{where} holds {apart} quantised, which is not streamed; give it to a teacher of type local."
            )
        tensors, formats = form.plain_form(tensors, formats, where)
    if getattr(config.get_text_config(), "tie_word_embeddings", False) and HEAD_WEIGHT in tensors:
        tensors = {EMBEDDING_WEIGHT: tensors[HEAD_WEIGHT], **tensors}  # as it is published
    skeleton = Skeleton.of_names(module)
    skeleton.require_shapes(tensors)
    skeleton.require_floats(formats or {}, where)


class _Chain:
    """Stand-ins for modules that must be called one after the other, each with the last one's output."""

    def __init__(self, pairs: bool) -> None:
        """`pairs`: each module but the last gives the next one something beside hidden states."""
        self.link_name: str | None = None
        self._link = object() if pairs else None
        self.first: Tensor | None = None
        self.passed: Tensor | None = None
        self.calls: list[dict[str, Any]] = []
        self.is_chain = True
        self._modules = 0

    @contextmanager
    def replace_forwards(self, modules: list[nn.Module]) -> Iterator[None]:
        with ExitStack() as undo:
            self._modules = len(modules)
            for index, module in enumerate(modules):
                undo.enter_context(replace_forward(module, self._stand_in(index)))
            yield
        self.is_chain = self.is_chain and len(self.calls) == len(modules)

    def _stand_in(self, index: int) -> Any:
        def forward(hidden_states: Tensor, *others: Any, **arguments: Any) -> Any:
            if self._link is not None:
                taken = [name for name, value in arguments.items() if value is self._link]
                self.link_name = taken[0] if taken else self.link_name
            if index == 0:
                self.first = hidden_states
            apart = index != len(self.calls) or (index > 0 and hidden_states is not self.passed)
            if apart or any(one is not None for one in others):  # such as an input of each layer's own
                self.is_chain = False
            self.calls.append(arguments)
            # Another object each time, so that a step left out or put in between is seen.
            self.passed = hidden_states.view_as(hidden_states)
            return (self.passed, self._link) if self._link and index + 1 < self._modules else self.passed

        return forward


def published_config(described: Mapping[str, object]) -> PreTrainedConfig:
    """Return the configuration of a published model. `TeacherError` if it names code or is not known."""
    if names_code(dict(described)):
        raise TeacherError(
            f"the configuration of a published {described.get('model_type')} names Python code of its own,"
            " which is never run; publish a model that transformers knows."
        )
    with _convert_errors(described):
        return config_of(dict(described))


@contextmanager
def _convert_errors(described: Mapping[str, object]) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise TeacherError(
            f"the configuration of a published {described.get('model_type')} does not describe a causal"
            f" language model that transformers knows: {reason_of(error)}"
        ) from error
