"""One Megatron-Core `GPTModel` without weights of its own: token ids to last hidden states, packed.

Tried with Megatron-Core 0.16.1, on a CPU with gloo. Nothing here reads or writes a Megatron checkpoint.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opd.errors import TeacherError, needs_extra
from opd.megatron.attention import RMSNorm, attention_spec, finish_attention
from opd.megatron.experts import Mixture
from opd.megatron.families import FAMILIES
from opd.megatron.form import CORRECTION, LayerStage, MegatronForm
from opd.models.attention import Attend, PackedAttention
from opd.models.long_sequence import recompute_layers
from opd.models.routing import RoutedTokens, counted
from opd.ranks import process_group

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


def megatron_core() -> ModuleType:
    """Import `megatron.core`. Raises `MissingExtraError` if it is not installed."""
    # It warns of Apex and Transformer Engine, and nothing here uses them.
    with needs_extra("a model on Megatron-Core", "megatron"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core
        import megatron.core.models.gpt.gpt_model
    return megatron.core


@contextmanager
def inside_megatron(device: torch.device) -> Iterator[None]:
    """Run Megatron-Core in the block: its current CUDA device is `device`, and its warnings are hidden.

    Its modules ask `torch.cuda.current_device()` where to put a tensor, which fails without CUDA. For a CPU
    the answer is "cpu" while the block runs. It warns of its own defaults and calls.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\..*")
        with torch.cuda.device(device) if device.type == "cuda" else _cpu_as_current_device():
            yield


@contextmanager
def _cpu_as_current_device() -> Iterator[None]:
    original = torch.cuda.current_device
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        torch.cuda.current_device = original


@contextmanager
def model_parallel(tensor_parallel: int, stages: int = 1) -> Iterator[dist.ProcessGroup]:
    """Yield the tensor-parallel group of this rank: Megatron-Core's own if it has been initialised, else a
    new one.

    Ranks are taken in order: `tensor_parallel` neighbours share layers, and ranks of other `stages` of layers
    lie furthest apart (`layout.py`). With a size of 1 and no process group in this process, one of this
    process alone is made, without a port. A group made here is destroyed when the block ends. Raises
    `TeacherError` if the sizes do not fit.
    """
    core = megatron_core()
    state = core.parallel_state
    _check_world(tensor_parallel, stages)
    with process_group(), ExitStack() as stack:
        if not state.model_parallel_is_initialized():
            state.initialize_model_parallel(
                tensor_model_parallel_size=tensor_parallel,
                pipeline_model_parallel_size=stages,
                distributed_timeout_minutes=dist.distributed_c10d.default_pg_timeout.total_seconds() / 60,
            )
            stack.callback(_destroy_groups, state)
        group = state.get_tensor_model_parallel_group()
        others = [state.get_pipeline_model_parallel_world_size(), state.get_context_parallel_world_size()]
        if dist.get_world_size(group) != tensor_parallel or others != [stages, 1]:
            raise TeacherError(
                f"Megatron-Core runs with tensor parallel size {dist.get_world_size(group)}, pipeline size"
                f" {others[0]} and context size {others[1]} in this process, but a teacher was asked to run"
                f" with tensor parallel size {tensor_parallel} and no pipeline; give both the same."
            )
        yield group


def _destroy_groups(state: Any) -> None:
    """Destroy all groups that Megatron-Core has made in this process. Its own `destroy_model_parallel` only
    forgets most of them, and the threads of each go on: three with gloo.
    """
    for group in getattr(state, "_global_process_group_list", None) or []:
        if isinstance(group, dist.ProcessGroup):  # the first is the default group's place
            dist.destroy_process_group(group)
    state.destroy_model_parallel()


def _check_world(tensor_parallel: int, stages: int) -> None:
    """Raise `TeacherError` if the processes cannot be grouped like that."""
    if not dist.is_initialized():
        if tensor_parallel * stages != 1:
            raise TeacherError(
                f"tensor parallel size {tensor_parallel} needs {tensor_parallel * stages} processes with a"
                " process group, and this one has none; make it first, or set its tensor_parallel to 1."
            )
        return
    if dist.get_world_size() % (tensor_parallel * stages):
        raise TeacherError(
            f"{dist.get_world_size()} processes cannot be divided into groups of {tensor_parallel}; choose a"
            " tensor parallel size that divides their number."
        )


def packed_params(
    cu_seqlens: Tensor,
    device: torch.device,
    attend: Attend | None = None,
    routed: RoutedTokens | None = None,
) -> PackedSeqParams:
    """Return the packing of `T` tokens that every layer of one forward pass gets: `thd`, as one sequence.

    `attend` knows where sequences begin, and only `PackedCoreAttention` looks at it. `Rotary` gets the
    positions. Nothing else in a decoder sees more than one token. `None` attends inside each of the sequences
    `cu_seqlens` [B + 1] int32. All layers share it, so the index of the packing is computed once. Mixtures
    send the tokens to the experts that `routed` names.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    bounds = torch.cat([cu_seqlens[:1], cu_seqlens[1:][lengths > 0]])
    ends = bounds[[0, -1]]
    tokens = int(ends[1])
    ends = ends.to(device, non_blocking=True)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=tokens,
        max_seqlen_kv=tokens,
    )
    params.attend = attend or PackedAttention(bounds)  # type: ignore[attr-defined]
    params.routed = routed  # type: ignore[attr-defined]
    return params


class Rotary(nn.Module):
    """Replaces Megatron-Core's rotary embedding, which counts positions from `cu_seqlens`: returns the angles
    of the tokens' own positions.

    Args:
        frequencies: Inverse frequencies, [d / 2] float32.
    """

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.positions = torch.zeros(0, dtype=torch.int64)
        """[T] int64, of the next pass."""

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Megatron-Core asks for it before a pass."""
        return len(self.positions)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """[T, 1, 1, d] float32."""
        angles = torch.outer(self.positions.float(), self.frequencies)
        return torch.cat([angles, angles], dim=-1)[:, None, None]


def layer_spec(form: MegatronForm) -> Any:
    """Return the specification of the layers of a decoder, for `GPTModel`. Mixtures are put in later."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    attention = attention_spec(form)
    kinds = {moe: _one_layer(attention, moe) for moe in (False, True)}
    norm: Any = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[kinds[form.is_mixture(layer)] for layer in range(form.layers)], layer_norm=norm
    )


def _one_layer(attention: Any, moe: bool) -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    add: Any = get_bias_dropout_add
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=add,
            pre_mlp_layernorm=RMSNorm,
            mlp=IdentityOp if moe else ModuleSpec(module=MLP, submodules=linears),
            mlp_bda=add,
        ),
    )


class MegatronModule:
    """This rank's slice of the decoder of one `form`. Weights are uninitialised until loaded.

    Args:
        form: Shapes and arithmetic.
        group: The tensor-parallel ranks, from `model_parallel`. Use this object inside that block.
        dtype: Of weights and hidden states.
        device: Where it runs.
        trained: Keep the activations for a backward, and let gradients add up over ranks instead of being
            averaged.
        stage: The layers that are here. Default: all.
        sharing: The ranks that share experts. Default: each rank has all.
    """

    def __init__(
        self,
        form: MegatronForm,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        trained: bool = False,
        stage: LayerStage | None = None,
        sharing: dist.ProcessGroup | None = None,
    ) -> None:
        form.check_divisible(group.size())
        self.recompute = False
        """Keep only the input of each layer for the backward, which computes the rest again."""
        self.form = form
        self.stage = stage or form.stage_layers(0, 1)
        self.group = group
        self.dtype = dtype
        self.device = device
        with inside_megatron(device):
            self.module = _build_model(form.stage_form(self.stage), group.size(), dtype, device, self.stage)
            for at, layer in enumerate(self.stage.layers):
                if form.is_mixture(layer):
                    built, number = self.module.decoder.layers[at], sum(form.moe_layers[:layer])
                    built.mlp = Mixture(form, number, group, sharing, dtype, device)
                    if form.shared_ffn:
                        built.mlp.shared_experts = _shared_experts(form, self.module.config)
                    built.forward = partial(built.mlp.run_layer, built.forward)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(trained and not name.endswith(CORRECTION))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters by Megatron-Core's names, without the head."""
        return self.module.named_parameters()

    @torch.no_grad()
    def hidden(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """`run` without a gradient."""
        return self.run(input_ids, position_ids, cu_seqlens)

    def run(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        attend: Attend | None = None,
        received: Tensor | None = None,
        routed: RoutedTokens | None = None,
    ) -> Tensor:
        """Return last hidden states after the final norm [T, D], on every rank, of sequences packed end to
        end.

        A stage before the last returns those after its layers, without a norm. `input_ids` and `position_ids`
        [T] int64, `cu_seqlens` [B + 1] int32: the same on all ranks. `attend`: see `packed_params`.
        `received` [T, 1, D]: output of the stage before the first layer of this one. The tokens go to the
        experts that `routed` names, and its count grows.
        """
        if not len(input_ids):
            return torch.zeros(0, self.form.hidden_size, dtype=self.dtype, device=self.device)
        self.module.rotary_pos_emb.positions = position_ids
        self.module.set_input_tensor(received)
        layers = self.module.decoder.layers if self.recompute and torch.is_grad_enabled() else ()
        with inside_megatron(self.device), recompute_layers(layers), counted(routed):
            rows = self.module(
                input_ids=input_ids.unsqueeze(0),
                position_ids=position_ids.unsqueeze(0),
                attention_mask=None,
                packed_seq_params=packed_params(cu_seqlens, self.device, attend, routed),
            )
        return rows[:, 0]


def _build_model(
    form: MegatronForm, ranks: int, dtype: torch.dtype, device: torch.device, stage: LayerStage
) -> Any:
    """Build a `GPTModel` of `form`'s layers, as if they were all. It ignores other stages."""
    core = megatron_core()
    config = _transformer_config(form, ranks, dtype, device)
    model = core.models.gpt.gpt_model.GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(form),
        vocab_size=form.padded_vocabulary(ranks),
        max_sequence_length=2**20,  # unused with rotary embeddings
        position_embedding_type="rope",
        # The teacher or the back end has the head: here it gets no memory, and without `post_process` the
        # forward ends at the final norm.
        share_embeddings_and_output_weights=True,
        pre_process=stage.first,
        post_process=False,
    )
    if stage.last:
        model.decoder.final_layernorm = RMSNorm(config, form.hidden_size, form.norm_eps)
    model.rotary_pos_emb = Rotary(torch.tensor(form.rope, dtype=torch.float32, device=device))
    for number, layer in enumerate(model.decoder.layers):
        finish_attention(layer.self_attention, form, number)
    for part in model.modules():
        if isinstance(part, RMSNorm):
            part.late = FAMILIES[form.family].late_norms
    return model.eval()


def _shared_experts(form: MegatronForm, config: Any) -> Any:
    """Return an MLP as wide as the shared experts are together."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    config = copy(config)
    config.ffn_hidden_size = form.shared_ffn  # of both its layers
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return MLP(config, linears, ffn_hidden_size=form.shared_ffn)


def _transformer_config(form: MegatronForm, ranks: int, dtype: torch.dtype, device: torch.device) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=form.layers,
        hidden_size=form.hidden_size,
        ffn_hidden_size=form.ffn,
        num_attention_heads=form.heads,
        num_query_groups=form.groups,
        kv_channels=form.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=form.norm_eps,
        qk_layernorm=form.qk_norm == "head",
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
        # Weights of the loss hold the normaliser of the full step, so gradients are sums, never means.
        calculate_per_token_loss=True,
        persist_layer_norm=False,
    )
    # It multiplies cosine and sine by 1 + mscale / 10 x the logarithm of the scaling factor.
    scaling = {"rotary_scaling_factor": math.e, "mscale": 10 * (form.rope_factor - 1), "mscale_all_dim": 0.0}
    for name, value in scaling.items():
        setattr(config, f"yarn_{name}", value)
    return config
