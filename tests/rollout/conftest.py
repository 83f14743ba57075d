"""Tiny models with decided opinions, and a way to run an engine to the end."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from opd.models.causal_lm import CausalLM
from opd.types import Chunk, RolloutRequest, SamplingParams, Status

VOCABULARY = 24

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-ropescaled": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "llama-dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 12},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.5,
    },
    "gemma2": {
        "head_dim": 8,
        "sliding_window": 6,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma4_text": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "num_kv_shared_layers": 2,
        "head_dim": 8,
        "global_head_dim": 12,
        "sliding_window": 6,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "moe_layers": [],
        "intermediate_size_mlp": 48,
        "head_dim": 8,
        "attention_chunk_size": 6,
        "floor_scale": 4,
        "attn_scale": 0.3,
    },
    "deepseek_v32": {
        "num_key_value_heads": 4,
        "first_k_dense_replace": 2,
        "mlp_layer_types": ["dense", "dense"],
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "index_head_dim": 12,
        "index_n_heads": 8,
        "index_topk": 6,
    },
    "cohere": {"logit_scale": 0.5},
    "olmo2": {},
    "gpt_oss": {
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


@dataclass
class Response:
    """Everything an engine said about one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    status: Status | None = None


def take(responses: dict[str, Response], step: Chunk) -> None:
    """Add one chunk."""
    columns = zip(step.uids, step.positions, step.token_ids, step.logprobs, strict=True)
    for uid, position, token, logprob in columns:
        response = responses.setdefault(uid, Response())
        assert response.status is None, "a token after the end"
        response.positions.append(int(position))
        response.token_ids.append(int(token))
        response.logprobs.append(float(logprob))
        response.versions.append(step.policy_version)
    for uid, status in step.finished.items():
        responses.setdefault(uid, Response()).status = status


@pytest.fixture(scope="session")
def collect() -> Callable[[Iterable[Chunk]], dict[str, Response]]:
    """Run chunks to the end: responses by uid."""

    def run(steps: Iterable[Chunk]) -> dict[str, Response]:
        responses: dict[str, Response] = {}
        for step in steps:
            take(responses, step)
        return responses

    return run


@pytest.fixture(scope="session")
def build() -> Callable[..., tuple[CausalLM, Any]]:
    """`build(family, seed=0)`: a `CausalLM` and a plain `transformers` model with the same weights."""

    def make(family: str = "llama", seed: int = 0) -> tuple[CausalLM, Any]:
        config = AutoConfig.for_model(family.split("-")[0], **(_COMMON | FAMILIES[family]))
        torch.manual_seed(seed)
        plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
        packed = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="opd")
        packed.load_state_dict(plain.state_dict())
        return CausalLM(packed), plain

    return make


@pytest.fixture(scope="session")
def reference() -> Callable[..., np.ndarray]:
    """`reference(plain, prompt, response, temperature)`: [R] log-probabilities by one plain forward."""

    def logprobs(plain: Any, prompt: np.ndarray, response: list[int], temperature: float = 1.0) -> np.ndarray:
        ids = torch.tensor([*prompt.tolist(), *response])[None]
        with torch.no_grad():
            logits = plain(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
        table = torch.log_softmax(logits / temperature, dim=-1)
        return table.gather(1, torch.tensor(response)[:, None])[:, 0].numpy()

    return logprobs


@pytest.fixture(scope="session")
def requests_of() -> Callable[..., list[RolloutRequest]]:
    """`requests_of(count, samples, sampling, seed)`: prompts of 1 to 14 tokens, `samples` requests each."""

    def make(
        count: int, samples: int = 1, sampling: SamplingParams | None = None, seed: int = 0
    ) -> list[RolloutRequest]:
        rng = np.random.default_rng(seed)
        made = []
        for number in range(count):
            prompt = rng.integers(0, VOCABULARY, rng.integers(1, 15)).astype(np.int32)
            settings = sampling or SamplingParams(
                temperature=float(rng.choice([0.0, 0.7, 1.0, 1.3])),
                top_p=float(rng.choice([1.0, 0.8])),
                top_k=int(rng.choice([0, 5])),
                max_new_tokens=int(rng.integers(1, 24)),
                stop_ids=tuple(rng.choice(VOCABULARY, rng.integers(0, 3), replace=False).tolist()),
            )
            made += [RolloutRequest(f"{number}/{s}", prompt, settings, seed=seed) for s in range(samples)]
        return made

    return make
