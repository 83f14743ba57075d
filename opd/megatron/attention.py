"""Attention of Megatron-Core's layers: packed without crossing, with a form's norms, or from latent vectors.

Its own attention without Transformer Engine ignores `cu_seqlens`. Here the core attention is the packed
attention of every other model of `opd`: no token sees another sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opd.megatron.families import FAMILIES, LATENT_EPS
from opd.megatron.form import MegatronForm
from opd.models.attention import AttentionCall


class PackedCoreAttention(nn.Module):
    """Causal attention inside each packed sequence, on this rank's heads: `[T, H, d]` to `[T, H * d]`."""

    def __init__(self, config: Any, layer_number: int, *_: Any, **options: Any) -> None:
        super().__init__()
        self.layer_index = layer_number - 1
        scale = options.get("softmax_scale")
        self.scaling = config.kv_channels**-0.5 if scale is None else float(scale)
        self.sliding_window: int | None = None
        """Set by the module's builder: each layer has its own window, but Megatron-Core has one setting."""
        self.sinks: nn.Parameter | None = None
        """[H], see `AttentionCall`."""

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
        """Query `[T, H, d]`, key and value `[T, Hkv, d]`. `H` and `Hkv` are this rank's."""
        if attention_mask is not None or not hasattr(packed_seq_params, "attend"):
            raise ValueError("this attention needs `packed_params` and no mask")
        call = AttentionCall(
            layer_index=self.layer_index,
            query=query.transpose(0, 1).unsqueeze(0),
            key=key.transpose(0, 1).unsqueeze(0),
            value=value.transpose(0, 1).unsqueeze(0),
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            sinks=self.sinks,
        )
        return packed_seq_params.attend(call)[0].flatten(1)


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019), computed in float32, rounded as in transformers."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Megatron-Core sums the gradients of parameters with this flag over the ranks of a sequence.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        self.eps = eps
        self.late = False
        """Whether it is rounded after it is weighted."""

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., D]` to `[..., D]`."""
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.late:
            return (self.weight * normed).to(hidden.dtype)
        return self.weight * normed.to(hidden.dtype)


class WholeNorm(RMSNorm):
    """`RMSNorm` over all heads of a token together, of which each tensor-parallel rank has some."""

    def __init__(self, config: Any, size: int, eps: float, group: dist.ProcessGroup) -> None:
        super().__init__(config, size, eps)
        self._group = group

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., H, d]` of this rank's heads to the same."""
        from megatron.core.tensor_parallel import mappings

        wide = hidden.float()
        squares = wide.pow(2).sum((-2, -1), keepdim=True)
        squares = mappings.reduce_from_tensor_model_parallel_region(squares, self._group)
        # Every rank has a part of its gradient.
        squares = mappings.copy_to_tensor_model_parallel_region(squares, self._group)
        mean = squares / (len(self.weight) * self._group.size())
        normed = wide * torch.rsqrt(mean + self.eps)
        return self.weight.view(hidden.shape[-2:]) * normed.to(hidden.dtype)


def attention_spec(form: MegatronForm) -> Any:
    """Return the specification of the attention of a layer."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    if form.latent is not None:
        return ModuleSpec(module=LatentAttention, params={"form": form})
    norm = RMSNorm if form.qk_norm == "head" else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def finish_attention(attention: Any, form: MegatronForm, layer: int) -> None:
    """Give the attention of a layer what Megatron-Core's settings cannot say."""
    attention.core_attention.sliding_window = form.windows[layer]
    if form.latent is not None:
        return
    weight, group = attention.linear_proj.weight, attention.pg_collection.tp
    if FAMILIES[form.family].sinks:
        attention.core_attention.sinks = nn.Parameter(weight.new_empty(form.heads // group.size()))
    if form.out_bias:
        attention.linear_proj.bias = nn.Parameter(weight.new_empty(form.hidden_size))
    if form.qk_norm == "all":
        for name, heads in (("q_layernorm", form.heads), ("k_layernorm", form.groups)):
            size = heads // group.size() * form.head_dim
            setattr(attention, name, WholeNorm(attention.config, size, form.norm_eps, group))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2: arXiv:2405.04434, section 2.1) on this rank's heads.

    Names and cuts are those of Megatron-Core's own, which cannot be built without Transformer Engine.
    """

    def __init__(
        self, config: Any, layer_number: int, form: MegatronForm, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        assert form.latent is not None
        self._form, self._latent, self._group = form, form.latent, pg_collection.tp
        latent, heads = form.latent, form.heads
        options = {"config": config, "bias": False, "tp_group": self._group}

        def cut_by_rows(width: int, rows: int) -> nn.Module:
            return ColumnParallelLinear(width, rows, init_method=config.init_method, **options)

        if latent.query_rank:
            self.linear_q_down_proj = cut_by_rows(form.hidden_size, latent.query_rank)
            self.q_layernorm = RMSNorm(config, latent.query_rank, LATENT_EPS)
            self.linear_q_up_proj = cut_by_rows(latent.query_rank, heads * form.head_dim)
        else:
            self.linear_q_proj = cut_by_rows(form.hidden_size, heads * form.head_dim)
        self.linear_kv_down_proj = cut_by_rows(form.hidden_size, latent.rank + latent.turned)
        self.kv_layernorm = RMSNorm(config, latent.rank, LATENT_EPS)
        self.linear_kv_up_proj = cut_by_rows(latent.rank, heads * (latent.still + latent.value))
        self.core_attention = PackedCoreAttention(config, layer_number, softmax_scale=latent.scaling)
        self.linear_proj = RowParallelLinear(
            heads * latent.value,
            form.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **options,
        )

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: Any,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Return `[T, 1, D]` for `hidden` [T, 1, D], and no bias. `rotary_pos_emb` [T, 1, 1, d]: angles."""
        query, key, value = self._tensors(hidden, rotary_pos_emb.squeeze(1))
        output = self.core_attention(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        return self.linear_proj(output.unsqueeze(1))

    def _tensors(self, hidden: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query and key `[T, H, d]` and value `[T, H, dv]` of this rank's heads."""
        from megatron.core.tensor_parallel import mappings

        latent, form = self._latent, self._form
        if latent.query_rank:
            low = self._gathered(self.linear_q_down_proj(hidden))
            query, _ = self.linear_q_up_proj(self.q_layernorm(low))
        else:
            query, _ = self.linear_q_proj(hidden)
        still, turned = (
            query.squeeze(1).unflatten(-1, (-1, form.head_dim)).split((latent.still, latent.turned), -1)
        )
        query = torch.cat([still, turn(turned, angles, form.rope_factor, latent.interleaved)], -1)
        low = self._gathered(self.linear_kv_down_proj(hidden))
        low, shared = low.split((latent.rank, latent.turned), -1)
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(low))
        both = both.squeeze(1).unflatten(-1, (-1, latent.still + latent.value))
        still, value = both.split((latent.still, latent.value), -1)
        # The heads of every rank use it: its gradient is their sum.
        shared = mappings.copy_to_tensor_model_parallel_region(shared, self._group)
        shared = turn(shared, angles, form.rope_factor, latent.interleaved)
        return query, torch.cat([still, shared.expand(-1, still.shape[1], -1)], -1), value

    def _gathered(self, outputs: tuple[Tensor, Tensor | None]) -> Tensor:
        """Return the output of a linear layer with the rows of all ranks. Its gradient is the same on all."""
        from megatron.core.tensor_parallel import mappings

        return mappings.gather_from_tensor_model_parallel_region(outputs[0], self._group)


def turn(heads: Tensor, angles: Tensor, factor: float, interleaved: bool) -> Tensor:
    """Return `heads` [T, H, d] turned by `angles` [T, 1, d], as transformers does."""
    cos, sin = ((f(angles) * factor).to(heads.dtype) for f in (torch.cos, torch.sin))
    if interleaved:
        heads = torch.cat([heads[..., 0::2], heads[..., 1::2]], -1)
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin
