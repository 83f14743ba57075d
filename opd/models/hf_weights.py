"""Do the weights of a Hugging Face folder and its config.json describe the same model?

transformers loads what fits and only logs the rest: layers that the configuration does not count are left
out, integers are cast to floats, a head that should be tied stays apart. Each of these is another model than
the one in the folder, so each is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from opd.errors import CheckpointError, ModelError
from opd.models.attention import ATTENTION_NAME
from opd.models.hf_config import read_config
from opd.models.hf_folder import adapter_base, weight_files
from opd.models.peft_folder import merge_into, read_peft

_FLOATS = ("F64", "F32", "F16", "BF16")
_HARMLESS = re.compile(r"(rotary_emb\.inv_freq|\.(attn|attention)\.(masked_)?bias|(^|\.)position_ids)$")
"""Buffers that older releases saved and that follow from the configuration."""
_SHOWN = 3


def check_weights(folder: Path) -> None:
    """Raise what `load_module` raises, without reading the weights (but for a head that may be tied)."""
    load_module(folder, dtype=torch.float32, device_map="meta")


def load_module(folder: Path, *, dtype: torch.dtype, device_map: str | None = None) -> Any:
    """The `...ForCausalLM` of a whole folder, in `dtype`, with packed attention; of an adapter of peft's, its
    base with the adapter merged into it.

    Raises `CheckpointError` naming tensors that are missing, of another shape, in no floating-point format,
    or of no use to the model that config.json describes; `ModelError` if that is no causal language model.
    """
    base = adapter_base(folder)
    if base is not None:
        module = load_module(base, dtype=dtype, device_map=device_map)
        merge_into(module, read_peft(folder), folder)
        return module
    config = read_config(folder)
    formats = _formats(folder)
    odd = [name for name in formats if formats[name] not in _FLOATS and not _HARMLESS.search(name)]
    if odd:
        raise CheckpointError(
            f"{folder} holds {_some(odd)} as {formats[min(odd)]}, which config.json does not explain; give"
            " the model's unquantised folder."
        )
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
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
        reason = " ".join(str(error).split())
        raise ModelError(f"{folder} cannot be loaded as a causal language model: {reason}") from error
    module, info = loaded
    _refuse_disagreement(folder, info)
    if getattr(config.get_text_config(), "tie_word_embeddings", False):
        _refuse_untied(folder, module)
    return module


def _refuse_disagreement(folder: Path, info: dict[str, Any]) -> None:
    absent = [*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])]
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of the model's tensors or has them in another shape, among"
            f" them {min(absent)}; copy the folder again from its source."
        )
    unused = [name for name in info["unexpected_keys"] if not _HARMLESS.search(name)]
    if unused:
        raise CheckpointError(
            f"{folder} holds {len(unused)} tensors that the model of its config.json has no place for, among"
            f" them {_some(unused)}; the two do not belong together: copy both again from one source."
        )


def _refuse_untied(folder: Path, module: Any) -> None:
    """transformers does not tie a head to an embedding of other values, whatever the configuration says."""
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        return
    names = {id(part): name for name, part in module.named_modules()}
    pair = [f"{names[id(part)]}.weight" for part in (head, embedding)]
    if head.weight.is_meta:
        found = _tensors(folder, pair)
        if len(found) < len(pair) or torch.equal(*found):  # under other names: loading tells
            return
    raise CheckpointError(
        f"{folder}/config.json ties {pair[0]} to {pair[1]}, but the weights hold two different ones; set"
        " tie_word_embeddings to false there, or copy config.json and weights from one source."
    )


def _tensors(folder: Path, names: Collection[str]) -> list[torch.Tensor]:
    found = []
    for file in weight_files(folder):
        with safe_open(folder / file, framework="pt") as shard:
            found += [shard.get_tensor(name) for name in shard.keys() if name in names]  # noqa: SIM118
    return found


def _formats(folder: Path) -> dict[str, str]:
    """Name -> element type, as safetensors writes it, of every tensor in the folder."""
    found = {}
    for file in weight_files(folder):
        with safe_open(folder / file, framework="pt") as shard:
            found |= {name: shard.get_slice(name).get_dtype() for name in shard.keys()}  # noqa: SIM118
    return found


def _some(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the loading reports and bars of Hugging Face; what matters is raised as an error."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
