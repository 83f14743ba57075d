"""What a Hugging Face configuration means in Megatron-Core's terms, or why it cannot run there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opd.errors import ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
"""Values of `model_type` that are known to be these layers and no others."""


@dataclass(frozen=True, slots=True)
class MegatronForm:
    """A decoder of one of the `FAMILIES`: everything that decides shapes and arithmetic, no weights."""

    family: str
    layers: int
    hidden_size: int
    heads: int
    groups: int
    """Key-value heads."""
    head_dim: int
    ffn: int
    """Width of a dense layer's gate."""
    vocabulary: int
    """Rows of the embedding and of the head; may exceed the tokenizer's."""
    norm_eps: float
    tied: bool
    rope: tuple[float, ...]
    """Inverse frequencies of the rotary embedding, [head_dim / 2], as transformers computes them."""
    windows: tuple[int | None, ...]
    """Sliding window of every layer."""
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    moe_layers: tuple[int, ...] = ()
    """1 for every layer whose MLP is a mixture of experts, else 0; empty without experts."""
    renormalise: bool = True
    """Whether the chosen experts' weights sum to 1."""

    @classmethod
    def from_config(cls, config: Any) -> MegatronForm:
        """From a Hugging Face configuration.

        Raises `ModelError` for a family or a setting that these layers do not have.
        """
        config = config.get_text_config()
        _refuse(config)
        family = config.model_type
        heads = config.num_attention_heads
        experts = {} if family not in ("qwen3_moe", "mixtral") else _experts(config)
        return cls(
            family=family,
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            heads=heads,
            groups=config.num_key_value_heads or heads,
            head_dim=_head_dim(config),
            ffn=config.intermediate_size,
            vocabulary=config.vocab_size,
            norm_eps=config.rms_norm_eps,
            tied=bool(config.tie_word_embeddings),
            rope=tuple(_inverse_frequencies(config).tolist()),
            windows=_windows(config),
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            **experts,
        )

    def check_divisible(self, ranks: int) -> None:
        """`ModelError` if the decoder cannot be cut into `ranks` equal slices."""
        widths = {"key-value heads": self.groups, "attention heads": self.heads}
        widths |= {"units of an expert": self.expert_ffn} if self.experts else {}
        widths |= {"units of an MLP": self.ffn} if 0 in (self.moe_layers or (0,)) else {}
        for what, count in widths.items():
            if count % ranks:
                raise ModelError(
                    f"a model with {count} {what} cannot be cut into {ranks} equal slices; choose a tensor"
                    " parallel size that divides it."
                )

    def padded_vocabulary(self, ranks: int) -> int:
        """Rows of the embedding and the head over all ranks: the same number on each."""
        return -(-self.vocabulary // ranks) * ranks


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _refuse(config: Any) -> None:
    family = config.model_type
    if family not in FAMILIES:
        raise ModelError(
            f"a model on Megatron-Core cannot be of model_type {family!r}; known are {', '.join(FAMILIES)}."
            " take the torch back end for this one."
        )
    others = {
        "attention_bias": getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "hidden_act": config.hidden_act if config.hidden_act != "silu" else None,
    }
    for name, value in others.items():
        if value:
            raise ModelError(
                f"a model on Megatron-Core of model_type {family} cannot have {name} {value!r}; take"
                " the torch back end for this one."
            )


def _experts(config: Any) -> Mapping[str, Any]:
    count = getattr(config, "num_local_experts", None) or config.num_experts
    layers = range(config.num_hidden_layers)
    if config.model_type == "mixtral":
        width, where, renormalise = config.intermediate_size, [1 for _ in layers], True
    else:
        width, renormalise = config.moe_intermediate_size, bool(config.norm_topk_prob)
        step, dense = config.decoder_sparse_step, config.mlp_only_layers or []
        where = [int(i not in dense and (i + 1) % step == 0) for i in layers]
    return {
        "experts": count,
        "experts_per_token": config.num_experts_per_tok,
        "expert_ffn": width,
        "moe_layers": tuple(where),
        "renormalise": renormalise,
    }


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None) or []
    if not kinds:
        kinds = ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if kind not in known or (kind == "sliding_attention" and window is None):
            raise ModelError(
                f"a model on Megatron-Core cannot have a layer of kind {kind!r} with window {window}; take"
                " the torch back end for this one."
            )
    return tuple(known[kind] for kind in kinds)


def _inverse_frequencies(config: Any) -> Tensor:
    """[head_dim / 2] float32."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, _head_dim(config), 2, dtype=torch.int64).float() / _head_dim(config)
        return 1.0 / rope["rope_theta"] ** exponents
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if kind not in ("linear", "llama3") or factor != 1.0 or len(frequencies) * 2 != _head_dim(config):
        raise ModelError(
            f"a model on Megatron-Core cannot have rotary embeddings of rope_type {kind!r}; known are"
            " default, linear and llama3. Take the torch back end for this one."
        )
    return frequencies
