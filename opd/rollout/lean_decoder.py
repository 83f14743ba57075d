"""One decode step of a plain decoder in few tensor operations.

A Hugging Face module forward of one token per request spends most of its time outside arithmetic when the
model is small. For the families below the same mathematics is done here from fused weights: queries, keys and
values in one product, gate and up projections in another. Families it does not know use the module itself.

Shapes: `B` requests, `D` hidden size, `H` query heads, `Hkv` key-value heads, `d` head size, `F` MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from opd.models.causal_lm import CausalLM
from opd.rollout.cached_attention import AttentionForm, DecodeAttention
from opd.rollout.kv_cache import KVCache

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that are a function of the position alone, so that a table serves every step."""


@dataclass(slots=True)
class LeanLayer:
    """One decoder layer's weights, transposed for `hidden @ weight`."""

    input_norm: Tensor
    """[D]."""
    qkv: Tensor
    """[D, (H + 2 Hkv) d]."""
    qkv_bias: Tensor | None
    """[(H + 2 Hkv) d]."""
    qk_norms: tuple[Tensor, Tensor] | None
    """[d] each: query and key norms (Qwen3)."""
    output: Tensor
    """[H d, D]."""
    mlp_norm: Tensor
    """[D]."""
    gate_up: Tensor
    """[D, 2 F]."""
    down: Tensor
    """[F, D]."""
    form: AttentionForm

    @classmethod
    def read(cls, layer: Any, config: Any, order: Tensor) -> LeanLayer:
        """Copy the weights of a Hugging Face decoder layer; `order` [d] rearranges the features of a head."""
        attention, mlp = layer.self_attn, layer.mlp
        size = len(order)

        def rearranged(x: Tensor) -> Tensor:
            return x.detach().unflatten(0, (-1, size))[:, order].flatten(0, 1)

        query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
        bias = None
        if query.bias is not None:
            bias = torch.cat([rearranged(query.bias), rearranged(key.bias), value.bias.detach()])
        normed = config.model_type == "qwen3"
        # Mistral keeps its window in the config, the Qwens in the layer; Llama and Granite have none.
        window = config.sliding_window if config.model_type == "mistral" else None
        return cls(
            input_norm=layer.input_layernorm.weight.detach().clone(),
            qkv=torch.cat([rearranged(query.weight), rearranged(key.weight), value.weight.detach()]).t(),
            qkv_bias=bias,
            qk_norms=(rearranged(attention.q_norm.weight), rearranged(attention.k_norm.weight))
            if normed
            else None,
            output=attention.o_proj.weight.detach().clone().t(),
            mlp_norm=layer.post_attention_layernorm.weight.detach().clone(),
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach().t(),
            down=mlp.down_proj.weight.detach().clone().t(),
            form=AttentionForm(
                float(attention.scaling), sliding_window=getattr(attention, "sliding_window", window)
            ),
        )


class LeanDecoder:
    """Decode steps for the families of `FAMILIES`; `refresh` after every change of the weights."""

    def __init__(self, model: CausalLM) -> None:
        """Raises `ValueError` if `supports(model)` is false."""
        if not supports(model):
            raise ValueError(f"the lean decoder does not know this form of {model.config.model_type}")
        self._model = model
        self._base: Any = model.decoder
        config = model.config
        attention = self._base.layers[0].self_attn
        self._size = int(attention.head_dim)
        self._heads = attention.q_proj.out_features // self._size
        self._shared = attention.k_proj.out_features // self._size
        self._eps = float(config.rms_norm_eps)
        # Features i and i + d/2 of a head rotate together. Side by side they are one complex number, and the
        # rotation is one product; scores do not change when queries and keys are rearranged alike.
        half = torch.arange(self._size // 2, device=model.device)
        self.key_order = torch.stack([half, half + self._size // 2], dim=1).flatten()
        """[d]: order of the features of a key in the cache."""
        granite = config.model_type == "granite"
        self._embedding_scale = float(config.embedding_multiplier) if granite else 1.0
        self._residual_scale = float(config.residual_multiplier) if granite else 1.0
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the model's weights."""
        self._embedding = self._base.embed_tokens.weight.detach().clone()
        self._layers = [LeanLayer.read(x, self._model.config, self.key_order) for x in self._base.layers]
        self._final_norm = self._base.norm.weight.detach().clone()
        self._rotary = self._rotary_table(256)

    def step(
        self, ids: np.ndarray, positions: np.ndarray, cache: KVCache, attention: DecodeAttention
    ) -> Tensor:
        """[B, D] last hidden states (after the final norm) of one new token per request.

        `ids` and `positions` [B] integers.
        """
        device = self._embedding.device
        if int(positions.max()) >= len(self._rotary):
            self._rotary = self._rotary_table(2 * int(positions.max()))
        rotary = self._rotary.index_select(0, torch.from_numpy(positions).to(device))[:, None]
        hidden = self._embedding.index_select(0, torch.from_numpy(ids.astype(np.int64)).to(device))
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        for index, layer in enumerate(self._layers):
            qkv = self._qkv(hidden, layer, rotary)
            attended = attention.attend(cache.existing(index), *qkv, layer.form).flatten(1)
            hidden = torch.addmm(hidden, attended, layer.output, alpha=self._residual_scale)
            hidden = self._mlp_block(hidden, layer)
        return self._norm(hidden, self._final_norm)

    def _qkv(self, hidden: Tensor, layer: LeanLayer, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated query [B, H, d] and key [B, Hkv, d], value [B, Hkv, d]."""
        normed = self._norm(hidden, layer.input_norm)
        if layer.qkv_bias is None:
            qkv = torch.mm(normed, layer.qkv)
        else:
            qkv = torch.addmm(layer.qkv_bias, normed, layer.qkv)
        qkv = qkv.view(len(hidden), -1, self._size)
        heads, rotated = self._heads, self._heads + self._shared
        if layer.qk_norms is not None:
            qkv[:, :heads] = self._norm(qkv[:, :heads], layer.qk_norms[0])
            qkv[:, heads:rotated] = self._norm(qkv[:, heads:rotated], layer.qk_norms[1])
        _rotate_(qkv[:, :rotated], rotary)
        return qkv[:, :heads], qkv[:, heads:rotated], qkv[:, rotated:]

    def _mlp_block(self, hidden: Tensor, layer: LeanLayer) -> Tensor:
        gate, up = torch.mm(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return torch.addmm(hidden, functional.silu(gate).mul_(up), layer.down, alpha=self._residual_scale)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._eps)

    def _rotary_table(self, length: int) -> Tensor:
        """[length, d / 2] complex64: `cos + i sin` of each angle, by the model's own rotary embedding."""
        device = self._embedding.device
        exact = torch.zeros(1, dtype=torch.float32, device=device)
        cos, sin = self._base.rotary_emb(exact, torch.arange(length, device=device)[None])
        half = self._size // 2
        return torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())


def _rotate_(x: Tensor, rotary: Tensor) -> None:
    """Rotary embedding, in place: `x` [B, H, d] with adjacent pairs, `rotary` [B, 1, d / 2] complex."""
    rows, heads, size = x.shape
    pairs = x.view(rows, heads, size // 2, 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotary)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * rotary))


def supports(model: CausalLM) -> bool:
    """Whether `LeanDecoder` computes exactly this architecture."""
    config = model.config
    if config.model_type not in FAMILIES or getattr(config, "hidden_act", None) != "silu":
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in STATIC_ROPE or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return False
    return all(
        projection.bias is None
        for layer in model.decoder.layers
        for projection in (
            layer.self_attn.o_proj,
            layer.mlp.gate_proj,
            layer.mlp.up_proj,
            layer.mlp.down_proj,
        )
    )
