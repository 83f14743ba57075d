"""Read an adapter folder as peft writes it.

It must be plain LoRA, possibly with ranks and alphas by layer. Otherwise it is refused with the offending
setting.

`adapter_config.json` and `adapter_model.safetensors`, with tensors named `base_model.model.` +
`model.layers.0.self_attn.q_proj.lora_A.weight` `[r, in]` and `lora_B` `[out, r]`. The model is its base with
`W + scaling * B A` instead of each `W`. Other settings must be known to change none of this. A setting of a
peft newer than this table is refused unless it is empty.

Patterns in `rank_pattern` and `alpha_pattern` are matched as peft matches them. They are regular expressions
of other people. Plain names, such as `self_attn.q_proj`, are matched here. Repetitions run in a process with
a limit of seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from opd.errors import CheckpointError, ModelError, reason_of
from opd.models.config_values import match_patterns
from opd.models.hf_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    check_adapter_file,
    read_object,
)
from opd.models.quantised_weights import folder_parts
from opd.storage.tensors import require_numbers
from opd.untrusted import bounded_integer, is_unset, safe_excerpt

PREFIX = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
_COPIED = ".base_layer.weight"
_KNOWN_PARTS = re.compile(r"^((?!lora_|modules_to_save)[^.]+\.)+(lora_[AB]\.)?weight$")
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""A head that a base does not store because it is the embedding."""
_MAX_RANK = 1 << 20
_FREE = frozenset(
    {
        "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",  # read below
        "fan_in_fan_out",  # the base's layers tell, as they tell peft
        "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "inference_mode",
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",  # tensors tell
        "lora_dropout", "eva_config", "megatron_core", "qalora_group_size", "ensure_weight_tying",
    }
)  # fmt: skip
"""Settings that never change the meaning of the tensors."""
_ONE_OF: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none",),
    "init_lora_weights": (
        True,
        False,
        None,
        "gaussian",
        "orthogonal",
        "eva",
    ),  # which leave the base as it is
}
"""Settings with their supported values. Any other setting must be empty or false."""


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """A plain LoRA adapter."""

    scaling: float
    """`W + scaling * B A`. If layers have different scalings it is the largest, and `B` has the remaining
    factor."""
    pairs: dict[str, tuple[Tensor, Tensor]]
    """`A` `[r, in]` and `B` `[out, r]` by the weight's name."""
    targets: tuple[str, ...] = ()
    """Last parts of the names of layers that all have adapters; empty if unknown."""


def read_peft(folder: Path, base: Path | None = None) -> PeftAdapter:
    """Read the adapter in `folder`, for the model in `base`.

    peft stores the weight of an adapted head beside its adapter, and both embeddings of a vocabulary that has
    grown. Such copies must equal the `base`'s weights. Without `base` there may be none. Raises
    `CheckpointError` naming a missing or damaged file, or the setting or tensor that plain LoRA without
    biases does not have.
    """
    path = folder / ADAPTER_CONFIG
    config = read_object(path)
    other = _other_kind(config)
    if other is not None:
        raise CheckpointError(
            f"{path} describes {other}, and only plain LoRA without biases can be read; give the merged"
            " model."
        )
    check_adapter_file(folder)
    try:
        tensors = safetensors.torch.load_file(folder / ADAPTER_WEIGHTS)
        copies = _base_copies(folder, tensors)
        if len(copies) == len(tensors):
            raise CheckpointError(f"{folder / ADAPTER_WEIGHTS} holds no adapter of any layer; copy it again.")
        halves = {name: tensor for name, tensor in tensors.items() if name.endswith((LORA_A, LORA_B))}
        pairs = adapter_pairs((name.removeprefix(PREFIX), tensor) for name, tensor in halves.items())
        ranks, scalings = _layer_forms(config, [name.removesuffix(".weight") for name in pairs])
    except CheckpointError:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(
            f"{folder} is not a whole adapter ({reason_of(error)}); copy it again."
        ) from error
    _check_pairs(folder, config, ranks, pairs)
    require_numbers(folder, tensors.items())
    parts = folder_parts(base) if copies and base is not None else {}
    for name, tensor in copies.items():
        weight = next((parts[one] for one in (name, _TIED.get(name, name)) if one in parts), None)
        if weight is None or weight.shape != tensor.shape or not torch.equal(weight.to(tensor.dtype), tensor):
            raise CheckpointError(
                f"{folder / ADAPTER_WEIGHTS} brings {safe_excerpt(name)}, which is not that of its base (a"
                " vocabulary that has grown, or weights trained beside the adapter); merge them with peft,"
                " and give that model."
            )
    largest = max(scalings.values(), key=abs)
    for name, (a, b) in list(pairs.items()):
        scaling = scalings[name.removesuffix(".weight")]
        if scaling != largest:
            pairs[name] = (a, b.float() * (scaling / largest))
    targets = config.get("target_modules")
    some = any(config.get(key) for key in ("exclude_modules", "layers_to_transform", "layers_pattern"))
    return PeftAdapter(
        largest, pairs, tuple(map(str, targets)) if isinstance(targets, list) and not some else ()
    )


def _layer_forms(config: Mapping[str, Any], layers: list[str]) -> tuple[dict[str, int], dict[str, float]]:
    """Return rank and scaling of each layer by name, from the defaults or a matching pattern. Raises
    `KeyError`, `TypeError` or `ValueError` with the reason.
    """
    rank = {"": bounded_integer(config["r"], 1, _MAX_RANK, "r")}
    alpha = {"": float(config["lora_alpha"])}
    for name, value in _pattern_object(config, "rank_pattern").items():
        rank[name] = bounded_integer(value, 1, _MAX_RANK, "a rank in rank_pattern")
    for name, value in _pattern_object(config, "alpha_pattern").items():
        alpha[name] = float(value)
    if not all(math.isfinite(value) for value in alpha.values()):
        raise ValueError("lora_alpha or a value of alpha_pattern is not finite")
    of_rank, of_alpha = (match_patterns([name for name in of if name], layers) for of in (rank, alpha))
    ranks = {layer: rank[of_rank.get(layer, "")] for layer in layers}
    root = math.sqrt if config.get("use_rslora") else float
    return ranks, {layer: alpha[of_alpha.get(layer, "")] / root(ranks[layer]) for layer in layers}


def _pattern_object(config: Mapping[str, object], key: str) -> dict[str, Any]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict) or "" in patterns:
        raise ValueError(f"{key} is no object of patterns and numbers")
    return patterns


def _other_kind(config: Mapping[str, object]) -> str | None:
    """Return the setting that makes this another kind than plain LoRA, or `None`."""
    kind = safe_excerpt(config.get("peft_type"))
    if config.get("peft_type") != "LORA":
        return kind
    for key, values in _ONE_OF.items():
        value = config.get(key, values[0])
        if not any(value is choice or (type(value) is str and value == choice) for choice in values):
            return (
                f"{key} {safe_excerpt(value)}" if key != "bias" else f"{kind} with bias {safe_excerpt(value)}"
            )
    if type(config.get("use_rslora", False)) is not bool:
        return f"use_rslora {safe_excerpt(config['use_rslora'])}"
    for key, value in config.items():
        if key not in _FREE and key not in _ONE_OF and _says_something(key, value):
            return safe_excerpt(key)
    return None


def _says_something(key: str, value: object) -> bool:
    if key == "runtime_config" and isinstance(value, dict):
        return any(value.values())
    return not is_unset(value)


def _base_copies(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an adapter file's copies of base weights, by their names in the base. Raises `CheckpointError`
    naming a tensor that is neither such a copy nor half of a pair.
    """
    copies = {}
    for name, tensor in tensors.items():
        stripped = name.removeprefix(PREFIX)
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{folder / ADAPTER_WEIGHTS} holds {safe_excerpt(name)} as {tensor.dtype}, which is no"
                " floating-point"
                " format; save the adapter again with peft."
            )
        if stripped == name or not stripped.endswith(".weight") or _KNOWN_PARTS.search(stripped) is None:
            raise CheckpointError(
                f"{folder / ADAPTER_WEIGHTS} holds {safe_excerpt(name)}, which is no lora_A or lora_B of a"
                " linear"
                " layer as peft names them; give the merged model."
            )
        if not stripped.endswith((LORA_A, LORA_B)):
            copies[stripped.replace(_COPIED, ".weight")] = tensor
    return copies


def _check_pairs(
    folder: Path,
    config: Mapping[str, object],
    ranks: Mapping[str, int],
    pairs: Mapping[str, tuple[Tensor, Tensor]],
) -> None:
    """Raise `CheckpointError` for an adapter whose rank or layers differ from its configuration. peft would
    refuse the former and leave out the latter.
    """
    targets = config.get("target_modules")
    for name, (a, _) in pairs.items():
        layer = name.removesuffix(".weight")
        if a.shape[0] != ranks[layer]:
            raise CheckpointError(
                f"{folder} has an adapter of rank {a.shape[0]} on {safe_excerpt(layer)} and says r"
                f" {ranks[layer]} in"
                f" {ADAPTER_CONFIG}; copy both files from one training."
            )
        if isinstance(targets, list) and not any(f".{layer}".endswith(f".{target}") for target in targets):
            raise CheckpointError(
                f"{folder} has an adapter on {safe_excerpt(layer)}, which target_modules of its"
                f" {ADAPTER_CONFIG} does"
                " not name; copy both files from one training."
            )


@torch.no_grad()
def merge_into(module: Any, adapter: PeftAdapter, folder: Path) -> None:
    """Add `adapter`, read from `folder`, to the weights of `module` in place. On the meta device only check.

    Raises `CheckpointError` naming a tensor that the base does not have in that shape, or not as a linear
    layer's own weight, or a layer of the base that lacks its adapter.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    parts = dict(module.named_modules())
    layers = {name for name, part in parts.items() if isinstance(part, nn.Linear | Conv1D)}
    for name, (a, b) in adapter.pairs.items():
        weight, shape = parameters.get(name), (b.shape[0], a.shape[1])
        if weight is not None and isinstance(parts.get(name.removesuffix(".weight")), Conv1D):
            weight = weight.T  # Conv1D stores [in, out]
        if weight is None or weight.shape != shape:
            raise CheckpointError(
                f"{folder} adapts {safe_excerpt(name)} {list(shape)}, which its base does not have in that"
                " shape;"
                " give the base it was trained on, or the merged model."
            )
        if parameters[name] is module.get_input_embeddings().weight:
            raise shares_head(folder, name)
        if name.removesuffix(".weight") not in layers:
            raise CheckpointError(
                f"{folder} adapts {safe_excerpt(name)}, which is no linear layer of its base; give the"
                " merged model."
            )
        if not weight.is_meta:
            weight.copy_(merge_weight(weight, a.to(weight.device), b.to(weight.device), adapter.scaling))
    for layer in sorted(layers):
        is_target = any(f".{layer}".endswith(f".{target}") for target in adapter.targets)
        if is_target and f"{layer}.weight" not in adapter.pairs:
            raise CheckpointError(
                f"{folder} names {safe_excerpt(layer)} by target_modules in its {ADAPTER_CONFIG} and has no"
                " adapter of it; copy both files from one training."
            )


def shares_head(folder: str | Path, name: str) -> CheckpointError:
    """Return the error for an adapter on a head that is the embedding too."""
    return CheckpointError(
        f"{folder} adapts {safe_excerpt(name)}, which its base shares with its embedding"
        " (tie_word_embeddings):"
        " merged, both would change, where peft changes the head alone; train without it in target_modules,"
        " or on a base with an embedding and a head of their own."
    )


def merge_weight(base: Tensor, a: Tensor, b: Tensor, scaling: float, rows: slice = slice(None)) -> Tensor:
    """Return `base + scaling * b a` `[out, in]` in `base`'s dtype, summed in float32 and rounded once. `base`
    may be some `rows` of the matrix alone.
    """
    delta = (b.float() @ a.float())[rows]  # a product of fewer rows may round otherwise
    return delta.mul_(scaling).add_(base.float()).to(base.dtype)


def adapter_pairs(adapters: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return `A` and `B` by the name of their weight. Raises `ModelError` for anything else."""
    tensors, pairs = dict(adapters), {}
    for name in tensors:
        if not name.endswith((LORA_A, LORA_B)):
            raise ModelError(f"{name} is not a LoRA adapter's tensor; give lora_A and lora_B of each layer.")
        layer = name.removesuffix(LORA_A).removesuffix(LORA_B)
        if layer + LORA_A not in tensors or layer + LORA_B not in tensors:
            raise ModelError(f"the adapter of {layer} has only one of lora_A and lora_B; write it again.")
        a, b = tensors[layer + LORA_A], tensors[layer + LORA_B]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise ModelError(
                f"the adapter of {safe_excerpt(layer)} has lora_A and lora_B that do not fit together."
            )
        pairs[f"{layer}.weight"] = (a, b)
    return pairs
