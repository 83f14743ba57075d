"""Random Llamas of real sizes, made on the device."""

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from opd.models.causal_lm import CausalLM
from opd.types import Sample, Status
from tests.gpu.clock import Place


def random_sample(
    rng: np.random.Generator, number: int, prompt: int, response: int, vocabulary: int
) -> Sample:
    """A sample of teacher `t` with random tokens."""
    return Sample(
        uid=f"s{number}",
        group_uid=f"g{number}",
        domain="a",
        prompt_ids=rng.integers(1, vocabulary, prompt).astype(np.int32),
        response_ids=rng.integers(1, vocabulary, response).astype(np.int32),
        rollout_logprobs=np.zeros(response, dtype=np.float32),
        policy_versions=np.zeros(response, dtype=np.int32),
        loss_mask=np.ones(response, dtype=bool),
        teacher="t",
        status=Status.COMPLETED,
    )


SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "1.7B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "2B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
}
DRY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}


def config(name: str, place: Place) -> LlamaConfig:
    """The shape called `name`, or a tiny one."""
    shape = DRY if place.dry else SHAPES[name]
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return LlamaConfig(**shape, **ids, max_position_embeddings=4096)


def module(name: str, place: Place, dtype: torch.dtype, attention: str = "opd") -> Any:
    """A Hugging Face model with random weights."""
    torch.manual_seed(0)
    with place.device:
        return AutoModelForCausalLM.from_config(
            config(name, place), dtype=dtype, attn_implementation=attention
        )


def model(name: str, place: Place, dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    """The same, for the engine and for training."""
    return CausalLM(module(name, place, dtype))


def parameter_bytes(made: Any) -> int:
    """Bytes of the weights, tied ones once."""
    return sum(p.numel() * p.element_size() for p in made.parameters())


def layer_weights(config: LlamaConfig) -> int:
    """Weights of the products in all layers: without embedding, head and norms."""
    head = config.head_dim or config.hidden_size // config.num_attention_heads
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    return config.num_hidden_layers * config.hidden_size * (heads * head + 3 * config.intermediate_size)
