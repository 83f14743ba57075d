"""One Megatron-Core `GPTModel` without weights of its own: token ids to last hidden states, packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from opd.megatron.form import MegatronForm
from opd.megatron.layers import layer_spec, packed_params
from opd.megatron.runtime import inside_megatron, megatron_core

if TYPE_CHECKING:
    import torch.distributed as dist


class MegatronModule:
    """The decoder of one `form`, this rank's slice of it. Weights are whatever memory held until loaded.

    Args:
        form: Shapes and arithmetic.
        group: The tensor-parallel ranks, from `model_parallel`, inside whose block this lives.
        dtype: Of weights and hidden states.
        device: Where it runs.
        trained: Keep what a backward needs, and let gradients add up over ranks instead of being averaged.
    """

    def __init__(
        self,
        form: MegatronForm,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        trained: bool = False,
    ) -> None:
        form.check_divisible(group.size())
        self.form = form
        self.group = group
        self.dtype = dtype
        self.device = device
        with inside_megatron(device):
            self.module = _build(form, group.size(), dtype, device)
        self.module.requires_grad_(trained)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by Megatron-Core's names; the head is not among them."""
        return self.module.named_parameters()

    @torch.no_grad()
    def hidden(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """`run` without a gradient."""
        return self.run(input_ids, position_ids, cu_seqlens)

    def run(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Last hidden states after the final norm [T, D], on every rank, of sequences packed end to end.

        `input_ids` and `position_ids` [T] int64, `cu_seqlens` [B + 1] int32: the same on all ranks.
        """
        if not len(input_ids):
            return torch.zeros(0, self.form.hidden_size, dtype=self.dtype, device=self.device)
        with inside_megatron(self.device):
            rows = self.module(
                input_ids=input_ids.unsqueeze(0),
                position_ids=position_ids.unsqueeze(0),
                attention_mask=None,
                packed_seq_params=packed_params(cu_seqlens),
            )
        return rows[:, 0]


def _build(form: MegatronForm, ranks: int, dtype: torch.dtype, device: torch.device) -> Any:
    core = megatron_core()
    config = _transformer_config(form, ranks, dtype, device)
    model = core.models.gpt.gpt_model.GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config, qk_norm=form.qk_norm),
        vocab_size=form.padded_vocabulary(ranks),
        max_sequence_length=2**20,  # unused with rotary embeddings
        position_embedding_type="rope",
        # The head is a teacher's own and read when the loss needs it: here it gets no memory, and without
        # `post_process` the forward ends at the final norm, which is built all the same.
        share_embeddings_and_output_weights=True,
    )
    model.post_process = False
    model.rotary_pos_emb.inv_freq = torch.tensor(form.rope, dtype=torch.float32, device=device)
    for layer, window in zip(model.decoder.layers, form.windows, strict=True):
        layer.self_attention.core_attention.sliding_window = window
    return model.eval()


def _transformer_config(form: MegatronForm, ranks: int, dtype: torch.dtype, device: torch.device) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts: dict[str, Any] = {}
    if form.experts:
        experts = {
            "num_moe_experts": form.experts,
            "moe_ffn_hidden_size": form.expert_ffn,
            "moe_router_topk": form.experts_per_token,
            # Softmax over the chosen experts is what transformers calls renormalising.
            "moe_router_pre_softmax": not form.renormalise,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "allgather",
            "moe_layer_freq": list(form.moe_layers),
            "expert_tensor_parallel_size": ranks,
        }
    return TransformerConfig(
        num_layers=form.layers,
        hidden_size=form.hidden_size,
        ffn_hidden_size=form.ffn,
        num_attention_heads=form.heads,
        num_query_groups=form.groups,
        kv_channels=form.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=form.norm_eps,
        qk_layernorm=form.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=form.qkv_bias,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=device.type != "cuda",
        # Weights are loaded before anything runs: random numbers would be drawn for nothing.
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        # Weights of the loss hold the normaliser of the whole step: gradients are sums, never means.
        calculate_per_token_loss=True,
        persist_layer_norm=False,
        **experts,
    )
