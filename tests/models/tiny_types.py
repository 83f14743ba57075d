"""A tiny model with random weights of every causal language model type that transformers knows.

Sizes are cut by the names that families give them; of lists with an entry a layer, layers are chosen so that
every kind of layer is there. What this does not fit is named in `OWN`.
"""

import contextlib
import inspect
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from opd.models.causal_lm import CausalLM
from opd.models.tokenizers import character_tokenizer

VOCABULARY = 56
"""Rows of every head: more than the tokenizer has tokens, as with most published models."""
LARGEST = 8_000_000
"""Parameters of a tiny model, at most."""
_WIDTH, _HEADS, _SHARED, _HEAD = 32, 4, 2, 8

_SIZES = {
    VOCABULARY: (
        "vocab_size unpadded_vocab_size pronunciation_vocab_size shape_vocab_size vocab_size_per_layer_input"
    ),
    _WIDTH: (
        "hidden_size hidden_size_global d_model n_embd dim emb_dim embedding_size hidden_dim "
        "word_embed_proj_dim attention_hidden_size lru_width query_pre_attn_scalar"
    ),
    2: (
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks "
        "num_decoder_layers num_encoder_layers num_experts_per_tok moe_topk num_key_value_heads "
        "num_kv_heads n_head_kv multi_query_group_num moe_k topk_group n_group top_k_experts "
        "num_experts_per_token moe_top_k top_k swa_num_key_value_heads"
    ),
    _HEADS: (
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
        "dim_head_heads linear_num_key_heads linear_num_value_heads linear_num_heads "
        "swa_num_attention_heads"
    ),
    _HEAD: (
        "head_dim kv_channels attention_head_dim dim_head qk_nope_head_dim qk_rope_head_dim "
        "v_head_dim global_head_dim linear_key_head_dim linear_value_head_dim d_kv sliding_window "
        "attention_window local_window attention_chunk_size window_size sliding_window_size "
        "swa_head_dim linear_head_dim index_head_dim"
    ),
    16: (
        "q_lora_rank kv_lora_rank moe_intermediate_size shared_expert_intermediate_size "
        "expert_ffn_hidden_size moe_ffn_hidden_size hidden_size_per_layer_input state_size "
        "ssm_state_size mamba_d_state"
    ),
    48: (
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size dim_ff "
        "shared_intermediate_size block_ff_dim intermediate_size_mlp prefix_dense_intermediate_size"
    ),
    1: "first_k_dense_replace moe_layer_start_index",
    128: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions",
}
"""Value -> names of the sizes that get it."""
NUMBERS = {name: value for value, names in _SIZES.items() for name in names.split()}
_IDS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 1}

_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 16}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LLAMA4 = {
    "num_hidden_layers": 2,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "moe_layers": [1],
    "floor_scale": 4,
    "attn_scale": 0.3,
}
_GEMMA = {"head_dim": 8, "global_head_dim": 16}
OWN: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {"adapter_input_size": 32},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 16},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4": {"text_config": _GEMMA},
    "gemma4_text": _GEMMA,
    "gemma4_unified": {"text_config": _GEMMA},
    "gemma4_unified_text": _GEMMA,
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4": {"text_config": _LLAMA4},
    "llama4_text": _LLAMA4,
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "moshi": {"sliding_window": 128},  # as many as positions, as by default
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _INDEXER | {"ngram_vocab_size_base": 64}},
    "qwen4_exp_text": _INDEXER | {"ngram_vocab_size_base": 64},
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 16],
        "attn_layers": ["local", "local"],
        "feed_forward_size": 48,
        "attention_head_size": 8,
    },
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "hybrid"] * 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings of a type beside those, or instead of them."""


def causal_types() -> dict[str, str]:
    """Every model type with a causal language model in the installed transformers, and its class's name."""
    return {name: str(cls) for name, cls in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())}


def tokenizer() -> Any:
    """Digits and "=", a tag, and an end."""
    return character_tokenizer("0123456789=", ["<sort>"])


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a tiny model of `model_type`, with `changes` of its settings."""
    return _shrunk(CONFIG_MAPPING[model_type], OWN.get(model_type, {}) | changes)


def _shrunk(made: type[PreTrainedConfig], own: dict[str, Any]) -> PreTrainedConfig:
    own = deepcopy(own)  # some configurations change what they are given
    default = made()
    arguments: dict[str, Any] = {}
    for name, value in _plain(made, default).items():
        if isinstance(value, PreTrainedConfig):
            arguments[name] = _shrunk(type(value), own.pop(name, {}))
        elif name in NUMBERS and isinstance(value, int) and not isinstance(value, bool):
            arguments[name] = NUMBERS[name]
        elif name in _IDS and value is not None:
            arguments[name] = _IDS[name]
        elif name == "is_decoder":
            arguments[name] = True
    if "kv_lora_rank" in arguments and "num_key_value_heads" in arguments:
        arguments["num_key_value_heads"] = _HEADS
    arguments |= _layered(default, arguments)
    return made(**(arguments | own))


def _plain(made: type[PreTrainedConfig], default: PreTrainedConfig) -> dict[str, Any]:
    """Arguments of the configuration, with their defaults."""
    known = set(inspect.signature(made.__init__).parameters) | set(getattr(made, "__dataclass_fields__", {}))
    found = {}
    for name in sorted(known):
        with contextlib.suppress(Exception):  # of what differs by layer no number is given
            found[name] = getattr(default, name)
    return found


def _layered(default: PreTrainedConfig, arguments: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry a layer, cut to one layer of each kind, and two at least."""
    layers = getattr(default, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return {}
    lists = {
        n: v
        for n, v in vars(default).items()
        if isinstance(v, list | tuple) and len(v) == layers and n in default.to_dict()
    }
    if not lists:
        return {}
    columns = list(zip(*lists.values(), strict=True))
    chosen = sorted({columns.index(column) for column in columns})
    chosen += [i for i in range(layers) if i not in chosen][: max(0, 2 - len(chosen))]
    name = "num_hidden_layers"
    return {name: len(chosen)} | {n: [v[i] for i in chosen] for n, v in lists.items()}


@torch.no_grad()
def tiny_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A module of transformers with weights that are large enough to show a mask, a scale or a bias."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, **changes)
    with torch.device("meta"):
        count = sum(
            p.numel() for p in AutoModelForCausalLM.from_config(config, trust_remote_code=False).parameters()
        )
    if count > LARGEST:
        raise ValueError(f"a tiny {model_type} has {count} parameters")
    module: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module


def write_folder(model_type: str, folder: Path, **changes: Any) -> Path:
    """A tiny model as its authors would publish it: written by transformers alone."""
    tiny_model(model_type, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def assert_angles_change_behind(model: CausalLM, limit: int) -> None:
    """Require that what is packed behind a sequence changes it only if that is longer than `limit`."""
    ids = torch.arange(60) % model.vocab_size

    def beside(length: int) -> torch.Tensor:
        positions = torch.cat([torch.arange(8), torch.arange(length)])
        with torch.no_grad():
            return model.hidden(ids[: 8 + length], positions, [0, 8, 8 + length])[:8]

    torch.testing.assert_close(beside(limit), beside(1))
    assert (beside(limit + 1) - beside(1)).abs().max() > 0.01
