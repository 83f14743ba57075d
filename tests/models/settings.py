"""Settings of common families that change what their weights compute, away from their defaults."""

from collections.abc import Mapping
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    """Rotary positions of a kind."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | settings}


def window(**settings: Any) -> dict[str, Any]:
    """A window that the sequences of a test reach beyond."""
    return {"sliding_window": 8} | settings


_LONGROPE = {
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.1, 2.2, 2.3],
}
ROPES = {
    "linear": rope("linear", factor=2.0),
    "dynamic": rope("dynamic", factor=2.0),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=32),
    "yarn, its own factor": rope(
        "yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.3, beta_fast=16.0
    ),
    "yarn, mscale": rope(
        "yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.0
    ),
    "llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    ),
    "longrope": rope("longrope", **_LONGROPE),
    "partial": rope("default", partial_rotary_factor=0.5),
    "theta": rope("default", rope_theta=100.0),
}
SHAPES = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "one key head": {"num_key_value_heads": 1},
    "all key heads": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 16},
    "gelu": {"hidden_act": "gelu"},
    "relu2": {"hidden_act": "relu2"},
}
BIASES = {"attention bias": {"attention_bias": True}, "mlp bias": {"mlp_bias": True}}
WINDOWS = {
    "window": window(),
    "no window": {"sliding_window": None},
    "narrow window": window(sliding_window=2),
}
TURNED_ON = {
    "window of later layers": window(use_sliding_window=True, max_window_layers=1),
    "window of all layers": window(use_sliding_window=True, max_window_layers=0),
    "window left off": window(use_sliding_window=False),
    "kinds of layers": window(use_sliding_window=True, layer_types=[FULL, SLIDING]),
    "kinds of layers, window left off": window(layer_types=[FULL, SLIDING]),
}
ROUTER = {
    "normed": {"norm_topk_prob": True},
    "not normed": {"norm_topk_prob": False},
    "one expert": {"num_experts_per_tok": 1},
    "router's logits": {"output_router_logits": True},
}
MULTIPLIERS = {
    "logits": {"logits_scaling": 7.0},
    "embedding": {"embedding_multiplier": 5.0},
    "residual": {"residual_multiplier": 0.3},
    "attention": {"attention_multiplier": 0.3},
}
_GEMMA = {"head_dim": 8, "global_head_dim": 16}
_SHARING = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "num_kv_shared_layers": 3,
}
_CHOSEN = {"index_topk": 6, "index_n_heads": 8}
"""Fewer keys than the sequences of a test have."""
_KEYS = {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
_PLAIN = SHAPES | ROPES

SETTINGS: dict[str, Mapping[str, dict[str, Any]]] = {
    "llama": _PLAIN
    | BIASES
    | {"unread scale": {"logit_scale": 0.5}, "unread softcap": {"logits_soft_cap": 2.0}},
    "mistral": _PLAIN | WINDOWS,
    "qwen2": _PLAIN | TURNED_ON,
    "qwen3": _PLAIN | BIASES | TURNED_ON,
    "gemma": SHAPES | {"bias": BIASES["attention bias"], "activation": {"hidden_activation": "gelu"}},
    "gemma2": SHAPES
    | {
        "no softcaps": {"final_logit_softcapping": None, "attn_logit_softcapping": None},
        "softcaps": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0},
        "scale of queries": {"query_pre_attn_scalar": 3},
        "windows everywhere": {"layer_types": [SLIDING, SLIDING]},
        "no windows": {"layer_types": [FULL, FULL]},
    },
    "gemma3_text": {
        "softcap": {"final_logit_softcapping": 2.0},
        "softcap of scores": {"attn_logit_softcapping": 2.0},
        "kinds of layers": {"layer_types": [SLIDING, FULL]},
        "sees what follows": {"use_bidirectional_attention": True},
        "positions by kind": {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    },
    "gemma4_text": {
        # Of the published sizes: E2B and E4B, 31B, 26B-A4B.
        "keys of earlier layers": _GEMMA | _SHARING,
        "wide layers of shared keys": _GEMMA | _SHARING | {"use_double_wide_mlp": True},
        "keys are values": _GEMMA | _KEYS,
        "keys are values, experts": _GEMMA
        | _KEYS
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
        "softcap": _GEMMA | {"final_logit_softcapping": 2.0},
        "all kinds alike": {"head_dim": 8, "global_head_dim": 8},
        "sees what follows": _GEMMA | {"use_bidirectional_attention": "all"},
        "images see what follows": _GEMMA | {"use_bidirectional_attention": "vision"},
    },
    "gemma3n_text": {
        "keys of earlier layers": _SHARING
        | {"activation_sparsity_pattern": [0.9] + [0.0] * 5, "intermediate_size": 48},
    },
    **{name: {"chosen keys": _CHOSEN} for name in ("deepseek_v32", "axk2", "hy_v4")},
    "glm_moe_dsa": {
        "chosen keys": _CHOSEN,
        "keys chosen by earlier layers": _CHOSEN
        | {
            "num_hidden_layers": 4,
            "layer_types": ["indexed_attention"] * 4,
            "mlp_layer_types": ["dense", "sparse"] * 2,
            "indexer_types": ["full", "shared"] * 2,
        },
    },
    "llama4_text": {
        # Maverick's queries and keys are not normed, and Scout's are.
        "not normed, one expert": {"use_qk_norm": False, "num_experts_per_tok": 1},
        "dense": {"moe_layers": []},
        "no growth": {"attn_temperature_tuning": False},
        "one chunk": {"attention_chunk_size": 64},
        "no chunks": {"attention_chunk_size": None},
    },
    "phi": SHAPES | {"normed queries": {"qk_layernorm": True}, "partial": ROPES["partial"]},
    "phi3": WINDOWS | {"tied": SHAPES["tied"]},
    "gpt2": {
        "untied": SHAPES["untied"],
        "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
        "not scaled": {"scale_attn_weights": False},
        "upcast": {"reorder_and_upcast_attn": True},
        "relu": {"activation_function": "relu"},
    },
    "gpt_neox": {
        "serial": {"use_parallel_residual": False},
        "partial": ROPES["partial"],
        "linear": ROPES["linear"],
        "no bias": {"attention_bias": False},
    },
    "falcon": {
        "new": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "alibi": {"alibi": True},
        "not multi-query": {"multi_query": False},
        "serial": {"parallel_attn": False},
    },
    "stablelm": {
        "bias": {"use_qkv_bias": True},
        "normed queries": {"qk_layernorm": True},
        "parallel": {"use_parallel_residual": True},
        "whole": rope("default", partial_rotary_factor=1.0),
    },
    "olmo": SHAPES | {"clipped": {"clip_qkv": 0.5}},
    "olmo2": SHAPES | ROPES | {"bias": BIASES["attention bias"]},
    "cohere": SHAPES | {"scale": {"logit_scale": 3.0}, "normed queries": {"use_qk_norm": True}},
    "granite": _PLAIN | BIASES | MULTIPLIERS,
    "mixtral": WINDOWS | ROUTER | {"linear": ROPES["linear"]},
    "qwen2_moe": ROUTER | TURNED_ON | {"dense": {"mlp_only_layers": [0]}},
    # Of Qwen3-MoE with several kinds of layers transformers itself cannot generate.
    "qwen3_moe": ROUTER
    | {what: changes for what, changes in TURNED_ON.items() if what != "kinds of layers"}
    | {"dense": {"mlp_only_layers": [0]}},
    "deepseek_v3": {
        "whole queries": {"q_lora_rank": None},
        "dense": {"first_k_dense_replace": 2},
        "not normed": {"norm_topk_prob": False},
        "not interleaved": {"rope_interleave": False},
        "yarn": ROPES["yarn, mscale"],
    },
    "starcoder2": WINDOWS | {"no bias": {"use_bias": False}, "untied": SHAPES["untied"]},
    "opt": {
        "norm after": {"do_layer_norm_before": False},
        "projected": {"word_embed_proj_dim": 16},
        "no bias": {"enable_bias": False},
        "no norm's weights": {"layer_norm_elementwise_affine": False},
    },
    "bloom": {"norm after": {"apply_residual_connection_post_layernorm": True}},
    "mpt": {"no alibi": {"attn_config": {"alibi": False}}, "unread scale": {"logit_scale": 0.5}},
    "smollm3": SHAPES
    | BIASES
    | {
        "no positions": {"no_rope_layers": [0, 0]},
        "some positions": {"no_rope_layers": [1, 0]},
        "kinds of layers": TURNED_ON["kinds of layers"],
    },
    "granitemoe": MULTIPLIERS,
    "gptj": {"untied": SHAPES["untied"], "rotary": {"rotary_dim": 8}},
    "gpt_bigcode": {"not multi-query": {"multi_query": False}, "not scaled": {"scale_attn_weights": False}},
}
"""Type -> what is set -> settings."""
