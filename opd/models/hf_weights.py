"""Check that the weights of a Hugging Face folder match its config.json.

transformers loads matching tensors and only logs the rest. It drops layers that the configuration does not
count, casts integers to floats, and leaves a head untied that should be tied. Each result differs from the
model in the folder, so each is refused here.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from opd.errors import CheckpointError, ModelError, from_system, reason_of
from opd.models.attention import ATTENTION_NAME
from opd.models.hf_folder import adapter_base, plain_form_of, read_config, read_object
from opd.models.peft_folder import merge_into, read_peft
from opd.models.quantisation import KEYS, quantisation_of
from opd.models.quantised_weights import PlainParts, folder_parts
from opd.models.stored_form import MISSING, StoredForm
from opd.storage.tensors import TensorParts, require_numbers
from opd.storage.weight_folder import FOLLOWING
from opd.untrusted import safe_excerpt


def empty_module(folder: Path, dtype: torch.dtype) -> Any:
    """Return the module of `load_module` with its parameters on the meta device and computed buffers. A peft
    adapter is only compared with its base. Raises the errors of `load_module`.
    """
    module = load_module(folder, dtype=dtype, device_map="meta")
    with meta_parameters(), quiet_loading():
        built: Any = AutoModelForCausalLM.from_config(
            module.config, dtype=dtype, attn_implementation=ATTENTION_NAME, trust_remote_code=False
        )
    for (name, part), (_, twin) in zip(module.named_modules(), built.named_modules(), strict=True):
        for buffer, value in twin.named_buffers(recurse=False):
            if not hasattr(part, buffer):
                raise ModelError(f"{folder} has no buffer {name}.{buffer}; train it with one rank.")
            part._buffers[buffer] = value
    return module


_BUILDING = threading.Lock()


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Move every parameter of this thread to the meta device as soon as its module gets it.

    A model built under `torch.device("meta")` loses its buffers too, and with them the rotary frequencies.
    """
    original, builder = nn.Module.register_parameter, threading.get_ident()

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == builder:
            param = nn.Parameter(param.data.to("meta"), requires_grad=False)
        original(self, name, param)

    with _BUILDING:
        nn.Module.register_parameter = register
        try:
            yield
        finally:
            nn.Module.register_parameter = original


_FLOATS = ("F64", "F32", "F16", "BF16")
_SHOWN = 3


def check_weights(folder: Path) -> None:
    """Raise the errors of `load_module` without reading the weights, except for a head that may be tied."""
    load_module(folder, dtype=torch.float32, device_map="meta")


def load_module(folder: Path, *, dtype: torch.dtype, device_map: str | None = None) -> Any:
    """Load the `...ForCausalLM` of a complete folder, in `dtype`, with packed attention. A peft adapter is
    merged into its base.

    Raises `CheckpointError` naming tensors that are missing, of another shape, in no floating-point format,
    or unused by the model of config.json. Raises `ModelError` if that is no causal language model.
    """
    base = adapter_base(folder)
    if base is not None:
        module = load_module(base, dtype=dtype, device_map=device_map)
        merge_into(module, read_peft(folder, base), folder)
        return module
    config = read_config(folder)
    shapes, formats = plain_form_of(folder)
    form = quantisation_of(config, folder)
    odd = [name for name in formats if formats[name] not in _FLOATS and not FOLLOWING.search(name)]
    if odd:
        raise CheckpointError(
            f"{folder} holds {_list_names(odd)} as {formats[min(odd)]}, which config.json does not explain;"
            " give"
            " the model's unquantised folder."
        )
    _refuse_parts(folder, config, shapes)
    try:
        with quiet_loading():
            load = AutoModelForCausalLM.from_pretrained if form is None else _load_quantised
            loaded: Any = load(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they can be named below
                trust_remote_code=False,
                device_map=device_map,
            )
    except (
        *(ValueError, RuntimeError, LookupError, ArithmeticError, TypeError, AttributeError, ImportError),
    ) as error:
        if from_system(error) is not None:
            raise
        raise ModelError(
            f"{folder} cannot be loaded as a causal language model: {reason_of(error)}"
        ) from error
    module, info = loaded
    info["unexpected_keys"] = set(info["unexpected_keys"]) - StoredForm(module).left_out(shapes)
    _refuse_disagreement(folder, info, module)
    require_numbers(folder, module.named_parameters())
    if getattr(config.get_text_config(), "tie_word_embeddings", False):
        _refuse_untied(folder, module)
    return module


class _ReadTensor:
    """Stands for a tensor of a file in the loader of transformers, which reads it by `[...]`."""

    def __init__(self, parts: TensorParts, name: str, empty: bool) -> None:
        self._parts, self._name, self._empty = parts, name, empty

    def __getitem__(self, index: Any) -> Tensor:
        if self._empty:
            shape, dtype = self._parts.shape(self._name), self._parts.dtype(self._name)
            return torch.empty(shape, dtype=dtype, device="meta")[index]
        return self._parts[self._name][index]


def _load_quantised(folder: Path, *, config: object, device_map: str | None, **options: Any) -> Any:
    """Do what transformers' `from_pretrained` does, from the model's own tensors: each is made of its codes
    and scales when it is read. The module says no more that it is quantised.
    """
    parts, plain = folder_parts(folder), deepcopy(config)
    assert isinstance(parts, PlainParts)
    parts.check_scales(_LOOKED_AT)
    delattr(plain, KEYS[0])
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(plain, trust_remote_code=False))
    tensors = {name: _ReadTensor(parts, name, device_map == "meta") for name in parts}
    options = {
        key: value for key, value in options.items() if key not in ("use_safetensors", "trust_remote_code")
    }
    options |= {"state_dict": tensors, "device_map": device_map}
    loaded = kind.from_pretrained(None, config=plain, trust_remote_code=False, **options)
    if (folder / "generation_config.json").is_file():
        generation = read_object(folder / "generation_config.json")
        loaded[0].generation_config = GenerationConfig.from_dict(generation)
    return loaded


_LOOKED_AT = 1 << 28
"""Bytes of a model's scales that are looked at before they are used."""
_ONE_OF_MANY = re.compile(r"\.\d+\..*\.\d+\.")
"""In the name of a tensor of one expert: its layer and its number."""


def _refuse_parts(folder: Path, config: object, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise `CheckpointError` for a tensor of one expert that is missing, too many or of another shape.

    Of these transformers says nothing, or names only what it makes of all experts.
    """
    if not any(map(_ONE_OF_MANY.search, shapes)):
        return
    try:
        with torch.device("meta"), quiet_loading():
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:  # which loading meets too, and says
        return
    fault = StoredForm(module).fault(shapes)
    if fault is None:
        return
    name, problem = safe_excerpt(fault[0]), fault[1]
    if problem == MISSING:
        raise CheckpointError(f"{folder} lacks {name}, and has others of its kind; copy the folder again.")
    raise CheckpointError(
        f"{folder} and its config.json do not belong together, {name} {problem}; copy both again from one"
        " source."
    )


def _refuse_disagreement(folder: Path, info: dict[str, Any], module: Any) -> None:
    """Raise `CheckpointError` for missing, unused or mismatched tensors."""
    absent, unused = list(info["missing_keys"]), info["unexpected_keys"]
    unused = [name for name in unused if not FOLLOWING.search(name)]
    other = "the two do not belong together: copy both again from one source."
    if info["mismatched_keys"]:
        name, stored, due = min(info["mismatched_keys"], key=lambda one: str(one[0]))
        others = (
            f" and {len(info['mismatched_keys']) - 1} more so" if len(info["mismatched_keys"]) > 1 else ""
        )
        raise CheckpointError(
            f"{folder} holds {name} in the shape {list(stored)} where its config.json asks for"
            f" {list(due)}{others}; {other}"
        )
    wrapped = next((name for name in unused if ".base_layer." in name), None)
    if wrapped is not None:
        raise CheckpointError(
            f"{folder} names a tensor {safe_excerpt(wrapped)}, as peft does in a model whose adapters were"
            " not merged; save it with `model.merge_and_unload().save_pretrained(...)`."
        )
    prefix = next((name[: -len(one)] for name in unused for one in absent if name.endswith(f".{one}")), None)
    if prefix is not None:
        raise CheckpointError(
            f"{folder} has {safe_excerpt(prefix)} before the names of the model's tensors: what holds the"
            " model was"
            " saved in its place; save the model itself with save_pretrained."
        )
    classes = [str(name) for name in module.config.architectures or []]
    if (absent or unused) and classes and type(module).__name__ not in classes:
        lacks = f"lacks {min(absent)}" if absent else f"has {min(unused)}"
        raise CheckpointError(
            f"{folder} was saved as {safe_excerpt(classes[0])} (`architectures` in its config.json) and"
            f" {lacks}; give"
            " the folder of a causal language model, saved as AutoModelForCausalLM loads it."
        )
    if absent and unused:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of the tensors of the model in its config.json, among them"
            f" {min(absent)}, and holds {len(unused)} others, among them {_list_names(unused)}; {other}"
        )
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of the model's tensors, among them {min(absent)}; copy the folder"
            " again from its source."
        )
    if unused:
        raise CheckpointError(
            f"{folder} holds {len(unused)} tensors that the model of its config.json has no place for, among"
            f" them {_list_names(unused)}; {other}"
        )


def _refuse_untied(folder: Path, module: Any) -> None:
    """Refuse an untied head: transformers does not tie it to an embedding with other values."""
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        return
    names = {id(part): name for name, part in module.named_modules()}
    pair = [f"{names[id(part)]}.weight" for part in (head, embedding)]
    if head.weight.is_meta:
        parts = folder_parts(folder)
        if any(name not in parts for name in pair) or _equal_tensors(parts, *pair):  # else loading reports it
            return
    raise CheckpointError(
        f"{folder}/config.json ties {pair[0]} to {pair[1]}, but the weights hold two different ones; set"
        " tie_word_embeddings to false there, or copy config.json and weights from one source."
    )


def _equal_tensors(parts: TensorParts, one: str, other: str) -> bool:
    """Return True if two stored tensors are equal. Only a few rows of each are in memory."""
    if (parts.shape(one), parts.dtype(one)) != (parts.shape(other), parts.dtype(other)):
        return False
    rows = [torch.empty(1 << 18, dtype=parts.dtype(one)) for _ in range(2)]
    size = math.prod(parts.shape(one))
    for start in range(0, size, len(rows[0])):
        mine, theirs = (row[: size - start] for row in rows)
        parts.read(one, start, mine)
        parts.read(other, start, theirs)
        if not torch.equal(mine, theirs):
            return False
    return True


def _list_names(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def disable_padding(module: nn.Module) -> None:
    """Stop `module` from searching ids for padding and warning about it; nothing here is padded."""
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            part.warn_if_padding_and_no_attention_mask = _no_advice


def _no_advice(input_ids: Any, attention_mask: Any) -> None:
    pass


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence the loading reports and bars of Hugging Face. Real faults are raised as errors."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
