"""Adapters as peft writes them: which base they belong to, and the sum of the two.

FOLDER/adapter_config.json and FOLDER/adapter_model.safetensors, with tensors named
`base_model.model.` + `model.layers.0.self_attn.q_proj.lora_A.weight` `[r, in]` and `lora_B` `[out, r]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from opd.errors import CheckpointError, ModelError
from opd.foreign import shown, whole
from opd.models.hf_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_object

PREFIX = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
_OTHER_KINDS = (
    "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias",
    "target_parameters", "layer_replication", "trainable_token_indices",
)  # fmt: skip
"""Settings with which the merged weights are not `W + scaling * B A`."""
_MAX_RANK = 1 << 20
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base as it is."""


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """A plain LoRA adapter."""

    scaling: float
    """`W + scaling * B A`."""
    pairs: dict[str, tuple[Tensor, Tensor]]
    """`A` `[r, in]` and `B` `[out, r]` by the name of the weight they are added to."""


def read_peft(place: Path) -> PeftAdapter:
    """The adapter in the folder `place`.

    Raises `CheckpointError` naming the file that is missing or damaged, or the setting that makes it another
    kind than plain LoRA without biases.
    """
    path = place / ADAPTER_CONFIG
    config = read_object(path)
    odd = [key for key in _OTHER_KINDS if config.get(key)]
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        odd.append(f"init_lora_weights {shown(config['init_lora_weights'])}")
    if config.get("peft_type") != "LORA" or odd or config.get("bias", "none") != "none":
        other = f"{config.get('peft_type')} with bias {config.get('bias', 'none')}"
        kind = odd[0] if odd else shown(other)
        raise CheckpointError(
            f"{path} describes {kind}, and only plain LoRA without biases can be read; give the merged model."
        )
    try:
        tensors = safetensors.torch.load_file(place / ADAPTER_WEIGHTS)
        rank = whole(config["r"], 1, _MAX_RANK, "r")
        scaling = float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if not math.isfinite(scaling):
            raise ValueError("lora_alpha is not finite")
        pairs = adapter_pairs((name.removeprefix(PREFIX), tensor) for name, tensor in tensors.items())
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{place} is not a whole adapter ({error}); copy it again.") from error
    return PeftAdapter(scaling, pairs)


@torch.no_grad()
def merge_into(module: Any, adapter: PeftAdapter, folder: Path) -> None:
    """Add `adapter`, read from `folder`, to the weights of `module` in place; on the meta device, only look.

    Raises `CheckpointError` naming a tensor that the base does not have in that shape.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    embedding = module.get_input_embeddings().weight
    for name, (a, b) in adapter.pairs.items():
        weight = own.get(name)
        if weight is None or weight is embedding or weight.shape != (b.shape[0], a.shape[1]):
            raise CheckpointError(
                f"{folder} adapts {name}, which its base does not have in that shape or shares with its"
                " embedding; give the base it was trained on, or the merged model."
            )
        if not weight.is_meta:
            weight.copy_(merged(weight, a.to(weight.device), b.to(weight.device), adapter.scaling))


def merged(base: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """`base + scaling * b a` `[out, in]` in `base`'s dtype, summed in float32: one rounding."""
    delta = b.float() @ a.float()
    return delta.mul_(scaling).add_(base.float()).to(base.dtype)


def adapter_pairs(adapters: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """`A` and `B` by the name of the weight they are added to. `ModelError` for anything else."""
    found, pairs = dict(adapters), {}
    for name in found:
        if not name.endswith((LORA_A, LORA_B)):
            raise ModelError(f"{name} is not a LoRA adapter's tensor; give lora_A and lora_B of each layer.")
        layer = name.removesuffix(LORA_A).removesuffix(LORA_B)
        if layer + LORA_A not in found or layer + LORA_B not in found:
            raise ModelError(f"the adapter of {layer} has only one of lora_A and lora_B; write it again.")
        a, b = found[layer + LORA_A], found[layer + LORA_B]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise ModelError(f"the adapter of {shown(layer)} has lora_A and lora_B that do not fit together.")
        pairs[f"{layer}.weight"] = (a, b)
    return pairs
