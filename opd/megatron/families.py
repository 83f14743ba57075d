"""Which layers Megatron-Core builds: a row for each family, and a Hugging Face configuration read by it.

A row says of a `model_type` what its configuration leaves to its code. The student's back end, the teachers
and the checks before a run ask here alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from opd.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """What the layers of one `model_type` have."""

    qkv_bias: bool | None = False
    """Whether query, key and value have a bias. `None`: if `bias_setting` says so."""
    bias_setting: str = "attention_bias"
    out_bias: str = ""
    """Setting that says whether the projection back has a bias. Empty: it has none."""
    sinks: bool = False
    """Whether a learnt score of each head takes part in its softmax and adds no value."""
    late_norms: bool = False
    """Whether a norm is rounded to the dtype of the layers after it is weighted."""
    qk_norm: Literal["", "head", "all"] = ""
    """A norm of queries and keys: none, of each head, or of all heads of a token together."""
    partial_rope: bool = False
    """Whether `partial_rotary_factor` leaves a part of each head without positions."""
    latent: bool = False
    """Whether keys and values come from a latent vector (MLA), and queries may."""
    expert_width: str = ""
    """Setting that has the width of an expert. Empty: no layer has experts."""
    block: str = "mlp"
    """Name of a layer's mixture."""
    linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's gate, up and down."""
    rounds: bool = True
    """Whether a softmax's weights of experts are rounded to the dtype of the layers."""
    sigmoid: bool = False
    """Whether experts are scored by a sigmoid and chosen by groups, with a correction (DeepSeek-V3). There
    are shared experts, and the first layers may be dense.
    """
    limited: bool = False
    """Whether the softmax of experts is in float32 and may be limited to groups (DeepSeek-V2). Experts for
    every token and dense layers are as with `sigmoid`.
    """
    gated: bool = False
    """Whether there is an expert for every token whose output a sigmoid weighs (Qwen2-MoE)."""
    clamped: bool = False
    """Whether experts are those of GPT-OSS. Gate and up alternate and are clamped, and every product has a
    bias. Files have one tensor for all experts. Weights are a softmax of the chosen scores.
    """


_WIDTH = "moe_intermediate_size"
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_BIASED: dict[str, Any] = {"qkv_bias": None, "out_bias": "attention_bias"}
FAMILIES = {
    "llama": Family(**_BIASED),
    "mistral": Family(),
    "ministral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm="head", **_BIASED),
    "seed_oss": Family(qkv_bias=None, out_bias="attention_out_bias"),
    "youtu": Family(latent=True),
    "qwen2_moe": Family(qkv_bias=None, bias_setting="qkv_bias", expert_width=_WIDTH, gated=True),
    "qwen3_moe": Family(qk_norm="head", expert_width=_WIDTH, **_BIASED),
    "mixtral": Family(
        expert_width="intermediate_size",
        block="block_sparse_moe",
        linears=("w1", "w3", "w2"),
        rounds=False,
    ),
    "olmoe": Family(qk_norm="all", expert_width="intermediate_size", **_BIASED),
    "dots1": Family(qk_norm="head", expert_width=_WIDTH, sigmoid=True, **_BIASED),
    "glm4_moe": Family(qkv_bias=None, qk_norm="head", partial_rope=True, expert_width=_WIDTH, sigmoid=True),
    "glm4_moe_lite": Family(latent=True, expert_width=_WIDTH, sigmoid=True),
    "deepseek_v2": Family(latent=True, expert_width=_WIDTH, limited=True),
    "deepseek_v3": Family(latent=True, expert_width=_WIDTH, sigmoid=True),
    "gpt_oss": Family(
        sinks=True,
        late_norms=True,
        expert_width="intermediate_size",
        clamped=True,
        **_BIASED,
    ),
}
"""Values of `model_type` that are known to have these layers and no others."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Widths of multi-head latent attention (DeepSeek-V2: arXiv:2405.04434, section 2.1)."""

    query_rank: int | None
    """Of the latent vector of queries. `None`: they have none."""
    rank: int
    """Of the latent vector of keys and values."""
    still: int
    """Of the part of a head's query and key that has no positions."""
    turned: int
    """Of the part that has. All heads share that of the key."""
    value: int
    """Of a head's value."""
    scaling: float
    """Factor of the dot products."""
    interleaved: bool
    """Whether an angle turns two neighbours, and not numbers of two halves."""


LATENT_EPS = 1e-6
"""Of the norms of latent vectors, whatever `rms_norm_eps` is."""


def read_settings(config: Any) -> dict[str, Any]:
    """Return the fields of the `MegatronForm` of a Hugging Face configuration.

    Raises `ModelError` for a family or a setting that these layers do not have.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ModelError(
            f"a model on Megatron-Core cannot be of model_type {config.model_type!r}; known are"
            f" {', '.join(FAMILIES)}. Take the torch back end for this one."
        )
    _refuse_settings(config, family)
    latent = _latent_widths(config) if family.latent else None
    heads = config.num_attention_heads
    qkv_bias = getattr(config, family.bias_setting) if family.qkv_bias is None else family.qkv_bias
    has_norm = _setting(config, "use_qk_norm", True)
    frequencies, factor = _inverse_frequencies(config, family)
    return {
        "family": config.model_type,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": heads,
        "groups": (None if latent else config.num_key_value_heads) or heads,
        "head_dim": latent.still + latent.turned if latent else _head_dim(config),
        "ffn": config.intermediate_size,
        "vocabulary": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "tied": bool(config.tie_word_embeddings),
        "rope": tuple(frequencies.tolist()),
        "rope_factor": factor,
        "windows": _layer_windows(config),
        "qkv_bias": bool(qkv_bias),
        "out_bias": bool(family.out_bias and getattr(config, family.out_bias)),
        "qk_norm": family.qk_norm if has_norm else "",
        "latent": latent,
        **(_expert_settings(config, family) if family.expert_width else {}),
    }


def _setting(config: Any, name: str, default: Any = None) -> Any:
    """Return a setting, or `default` if this family has none of that name: its layers ignore it in files."""
    return getattr(config, name, default) if hasattr(type(config), name) else default


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _refuse_settings(config: Any, family: Family) -> None:
    others = {
        "attention_bias": getattr(config, "attention_bias", False) if family.qkv_bias is not None else None,
        "attention_out_bias": None if family.out_bias else getattr(config, "attention_out_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "hidden_act": config.hidden_act if config.hidden_act != "silu" else None,
        "clip_qkv": getattr(config, "clip_qkv", None),
        "sliding_window": _unknown_window(config),
        "topk_method": _unknown_method(config),
    }
    if not family.partial_rope and config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        others["partial_rotary_factor"] = config.rope_parameters["partial_rotary_factor"]
    for name, value in others.items():
        if value is not None and value is not False:
            raise ModelError(
                f"a model on Megatron-Core of model_type {config.model_type} cannot have {name} {value!r};"
                " take the torch back end for this one."
            )


def _unknown_window(config: Any) -> int | None:
    """Return a window, for a family without them, that some kernels of transformers would apply."""
    window = getattr(config, "sliding_window", None)
    if window is None or hasattr(type(config), "sliding_window"):
        return None
    return window if window < config.max_position_embeddings else None


def _unknown_method(config: Any) -> str | None:
    """Return a way to choose experts that the family's code does not have."""
    method = _setting(config, "topk_method", "greedy")
    return None if method in ("greedy", "group_limited_greedy") else str(method)


def _latent_widths(config: Any) -> Latent:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    return Latent(
        query_rank=config.q_lora_rank,
        rank=config.kv_lora_rank,
        still=config.qk_nope_head_dim,
        turned=config.qk_rope_head_dim,
        value=config.v_head_dim,
        scaling=float(yarn_apply_mscale(config.rope_parameters, width**-0.5)),
        interleaved=bool(_setting(config, "rope_interleave", True)),
    )


def _expert_settings(config: Any, family: Family) -> Mapping[str, Any]:
    layers, width = range(config.num_hidden_layers), getattr(config, family.expert_width)
    shared: dict[str, Any] = {}
    if family.sigmoid or family.limited:
        kinds = _setting(config, "mlp_layer_types")
        where = [
            int(kinds[layer] == "sparse" if kinds else layer >= config.first_k_dense_replace)
            for layer in layers
        ]
        in_groups = _setting(config, "topk_method") != "greedy"
        shared = {
            "sigmoid": family.sigmoid,
            "expert_groups": (config.n_group if in_groups else None) or 1,
            "chosen_groups": (config.topk_group if in_groups else None) or 1,
            "expert_factor": float(config.routed_scaling_factor),
            "shared_ffn": config.n_shared_experts * width,
        }
    else:
        step, dense = _setting(config, "decoder_sparse_step", 1), _setting(config, "mlp_only_layers")
        where = [int(layer not in (dense or ()) and (layer + 1) % step == 0) for layer in layers]
    if family.gated:
        shared = {"shared_ffn": config.shared_expert_intermediate_size}
    if family.clamped:
        shared = {"clamp": (float(config.swiglu_alpha), float(config.swiglu_limit))}
    return shared | {
        "experts": next(getattr(config, name) for name in _COUNTS if hasattr(type(config), name)),
        "experts_per_token": config.num_experts_per_tok,
        "expert_ffn": width,
        "moe_layers": tuple(where),
        "renormalise": not family.limited and bool(_setting(config, "norm_topk_prob", True)),
    }


def _layer_windows(config: Any) -> tuple[int | None, ...]:
    window = _setting(config, "sliding_window")
    kinds = _setting(config, "layer_types") or []
    if not kinds:
        kinds = ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    windows = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if kind not in windows or (kind == "sliding_attention" and not window):
            raise ModelError(
                f"a model on Megatron-Core cannot have a layer of kind {kind!r} with window {window}; take"
                " the torch back end for this one."
            )
    return tuple(windows[kind] for kind in kinds)


def _inverse_frequencies(config: Any, family: Family) -> tuple[Tensor, float]:
    """Return [d / 2] float32 of the `d` numbers of a head that have positions, and the factor of cosine and
    sine.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, width = config.rope_parameters, _head_dim(config)
    kind = rope.get("rope_type", "default")
    if family.partial_rope:
        width = int(width * rope.get("partial_rotary_factor", 1.0))
    if kind == "default":
        exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        return 1.0 / rope["rope_theta"] ** exponents, 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if kind not in ("linear", "llama3", "yarn") or len(frequencies) * 2 != width:
        raise ModelError(
            f"a model on Megatron-Core cannot have rotary embeddings of rope_type {kind!r}; known are"
            " default, linear, llama3 and yarn. Take the torch back end for this one."
        )
    return frequencies, float(factor)
