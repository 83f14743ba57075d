"""Every tried family as a tiny random model, built once."""

import functools

import pytest
import tiny

from opd.models.causal_lm import CausalLM

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    # Large enough weights that a missing mask, scale or softcap shows in the numbers.
    "initializer_range": 0.3,
}
_MLA = {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}

FAMILIES: dict[str, dict] = {
    "llama": {},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"logits_scaling": 7.0},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": 4},
    "phi3": {"resid_pdrop": 0.0},
    "phi": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": _MLA,
    "gpt_oss": {
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
        | {"rope_theta": 1e4, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
}


@functools.cache
def family_model(name: str) -> CausalLM:
    config = {"model_type": name} | _SHAPE | FAMILIES[name]
    if name == "deepseek_v3":
        del config["head_dim"]
    return CausalLM.from_config(config, tokenizer=tiny.tokenizer(), seed=3)


@pytest.fixture(params=FAMILIES, scope="session")
def family(request: pytest.FixtureRequest) -> CausalLM:
    """One tiny model of each family. Read-only: tests that change weights make their own."""
    return family_model(request.param)
