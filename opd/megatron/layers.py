"""The layer specification of a model on Megatron-Core: stock parallel layers, our attention kernel and norm.

Megatron-Core's own attention without Transformer Engine ignores `cu_seqlens`. Here the core attention is
the packed attention every other model of `opd` runs on: no token sees another sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from opd.models.attention import AttentionCall, PackedAttention

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


def packed_params(cu_seqlens: Tensor) -> PackedSeqParams:
    """What one forward pass tells every layer about its packing: `thd` with `cu_seqlens` [B + 1] int32.

    Its attribute `attend`, which only `PackedCoreAttention` looks at, is shared by all layers, so that the
    index of the packing is computed once.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    bounds = torch.cat([cu_seqlens[:1], cu_seqlens[1:][lengths > 0]])
    longest = int(lengths.max())
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    params.attend = PackedAttention(bounds)  # type: ignore[attr-defined]
    return params


class PackedCoreAttention(nn.Module):
    """Causal attention inside each packed sequence, on this rank's heads: `[T, H, d]` to `[T, H * d]`."""

    def __init__(self, config: Any, layer_number: int, *_: Any, **options: Any) -> None:
        super().__init__()
        self.layer_index = layer_number - 1
        scale = options.get("softmax_scale")
        self.scaling = config.kv_channels**-0.5 if scale is None else float(scale)
        self.sliding_window: int | None = None
        """Set by the module's builder: windows are the layers' own, unlike Megatron-Core's one setting."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """Query `[T, H, d]`, key and value `[T, Hkv, d]`; `H` and `Hkv` are this rank's."""
        if attention_mask is not None or not hasattr(packed_seq_params, "attend"):
            raise ValueError("this attention needs `packed_params` and no mask")
        call = AttentionCall(
            layer_index=self.layer_index,
            query=query.transpose(0, 1).unsqueeze(0),
            key=key.transpose(0, 1).unsqueeze(0),
            value=value.transpose(0, 1).unsqueeze(0),
            scaling=self.scaling,
            sliding_window=self.sliding_window,
        )
        return packed_seq_params.attend(call)[0].flatten(1)


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019), in float32 inside, rounded as transformers rounds it."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Megatron-Core sums the gradients of parameters that say so over the ranks of a sequence.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., D]` to `[..., D]`."""
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(hidden.dtype)


def layer_spec(config: Any, *, qk_norm: bool) -> Any:
    """The specification of all layers of a decoder, dense and mixture-of-experts alike, for `GPTModel`.

    `config` is a Megatron-Core `TransformerConfig`; `qk_norm` puts a norm on every head's query and key.
    """
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    pattern = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    kinds = {moe: _one_layer(config, qk_norm, bool(moe)) for moe in set(pattern)}
    norm: Any = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[kinds[moe] for moe in pattern], layer_norm=norm)


def _one_layer(config: Any, qk_norm: bool, moe: bool) -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    head_norm = RMSNorm if qk_norm else IdentityOp
    add: Any = get_bias_dropout_add
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    if moe:
        mlp = get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=config.num_moe_experts)
    else:
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        mlp = ModuleSpec(module=MLP, submodules=linears)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=add,
        ),
    )
