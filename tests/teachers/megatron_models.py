"""Tiny random models of every family a Megatron-Core teacher can be, and what a test compares them by."""

from typing import Any

import tiny
import torch

from opd.models.causal_lm import CausalLM
from opd.train.packing import pack_tokens

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
}
DENSE = {"first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "rms_norm_eps": 1e-3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
V2 = SIGMOID | LATENT | {"model_type": "deepseek_v2", "first_k_dense_replace": 1, "num_experts_per_tok": 3}
QWEN2 = {
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "decoder_sparse_step": 2,
}
WIDE = YARN | {"mscale": None, "mscale_all_dim": None, "truncate": False}
OSS = EXPERTS | {"head_dim": 16, "sliding_window": 4, "swiglu_limit": 0.6, "tie_word_embeddings": False}
FAMILIES: dict[str, dict] = {
    "llama": {"tie_word_embeddings": False},
    "llama-tied": {"model_type": "llama", "num_key_value_heads": 4},
    "llama-3-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": False},
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 16, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "qwen3_moe-not-renormalised": EXPERTS
    | {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "norm_topk_prob": False},
    "mixtral": EXPERTS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    "olmoe-renormalised": EXPERTS | {"model_type": "olmoe", "norm_topk_prob": True, "num_key_value_heads": 4},
    "glm4_moe": SIGMOID | DENSE | {"attention_bias": True, "use_qk_norm": True, "tie_word_embeddings": False},
    "glm4_moe-plain": SIGMOID
    | {"model_type": "glm4_moe", "norm_topk_prob": False, "n_group": 1, "topk_group": 1, "head_dim": 16},
    "ministral": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False, "head_dim": 16},
    "dots1": SIGMOID | DENSE | {"sliding_window": 4, "max_window_layers": 1},
    "youtu": LATENT,
    "glm4_moe_lite": SIGMOID | LATENT | {"mlp_layer_types": ["sparse", "dense"]},
    "deepseek_v3": SIGMOID | DENSE | LATENT | {"tie_word_embeddings": False},
    "deepseek_v3-yarn": SIGMOID | DENSE | LATENT | {"model_type": "deepseek_v3", "rope_parameters": YARN},
    "deepseek_v2": V2,
    "deepseek_v2-groups": V2
    | {"topk_method": "group_limited_greedy", "q_lora_rank": None, "rope_parameters": YARN},
    "qwen2_moe": QWEN2,
    "qwen2_moe-renormalised": QWEN2 | {"decoder_sparse_step": 1, "norm_topk_prob": True, "qkv_bias": False},
    "llama-biased": {"model_type": "llama", "attention_bias": True},
    "olmoe-biased": EXPERTS | {"model_type": "olmoe", "attention_bias": True},
    "gpt_oss": OSS | {"rope_parameters": WIDE},
    "gpt_oss-plain": OSS | {"model_type": "gpt_oss", "attention_bias": False, "swiglu_alpha": 1.2},
    "llama-yarn": {"model_type": "llama", "rope_parameters": YARN},
    "llama-yarn-factor": {"model_type": "llama", "rope_parameters": WIDE | {"attention_factor": 0.8}},
    "glm4_moe-yarn": SIGMOID
    | {"model_type": "glm4_moe", "rope_parameters": WIDE | {"partial_rotary_factor": 0.5}},
    "deepseek_v3-whole-queries": SIGMOID
    | LATENT
    | {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "rope_interleave": False,
        "first_k_dense_replace": 0,
    },
}
LENGTHS = [(3, 4), (5, 0), (2, 1), (7, 12), (1, 6), (4, 2)]


def model(family: str, seed: int = 3, **changes) -> CausalLM:
    """Large random weights, so that a wrong layout, mask or norm shows in the numbers."""
    config = {"model_type": family, "initializer_range": 0.3} | FAMILIES[family] | changes
    made = tiny.model(seed=seed, **config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.module.named_parameters():
            if name.endswith(("norm.weight", "bias", ".sinks")):  # transformers makes them all ones and zeros
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in made.module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.3 * torch.randn(buffer.shape, generator=generator)
    return made


@torch.no_grad()
def transformers_logits(made: Any) -> torch.Tensor:
    """[N, V] of plain transformers, one sequence at a time, at the rows that predict a response."""
    logits = []
    for sample in tiny.samples(LENGTHS):
        ids = torch.from_numpy(sample.token_ids.astype("int64"))[None]
        made.module.set_attn_implementation("eager")
        out = made.module(input_ids=ids, use_cache=False).logits[0]
        logits.append(out[len(sample.prompt_ids) - 1 : len(ids[0]) - 1])
    return torch.cat(logits)


def packed() -> tuple[torch.Tensor, ...]:
    """`pack_tokens` of the samples."""
    return pack_tokens(tiny.samples(LENGTHS))
