"""A mixture of experts in a layer of Megatron-Core: routed as transformers does, computed on several ranks.

Megatron-Core's own layer asks for its sequence parallelism as soon as tensor-parallel ranks train it, and its
grouped products need Transformer Engine or `grouped_gemm`. Here the tensor-parallel ranks have slices of each
expert, by width, and the ranks that share experts have some of them each. A token travels to its experts and
back, as with FSDP2 (`opd.models.expert_parallel`). Products are transformers' grouped ones.

Shapes: `T` tokens of this rank, each routed to `K` of `E` experts; `N` ranks share them; `D` hidden size, `F`
a rank's width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.integrations.moe import grouped_mm_experts_forward

from opd.megatron.families import FAMILIES
from opd.megatron.form import MegatronForm, ParameterPart, in_stack, rank_parameters
from opd.models.expert_parallel import outputs_of_experts
from opd.models.routing import Choose, Replayed
from opd.models.stored_form import StoredForm

LOGITS = 2
"""Which output of a `MixtureRouter` are its scores."""


class StackedExperts:
    """A mixture's tensors: the module of transformers has one for all experts of a layer, and files have some
    for each. Those of files, in the order of a rank's rows, are the module's number by number.

    Args:
        form: The full decoder's.
        stored: The names of both.
    """

    def __init__(self, form: MegatronForm, stored: StoredForm) -> None:
        self._stored = stored
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of each expert's tensors, by files' names."""
        self.places: dict[str, tuple[str, int]] = {}
        """The module's tensor that has each, and its first number there."""
        for piece in rank_parameters(form, 0, 1):
            first = 0
            for cut in piece.cuts if piece.experts is not None else ():
                whole = cut.stop or 0
                shape = (whole, form.hidden_size) if cut.axis == 0 else (form.hidden_size, whole)
                self.shapes[cut.source] = shape = shape[:1] if cut.source.endswith("_bias") else shape
                place = stored.place(cut.source) if form.clamp is None else in_stack(cut.source)[0]
                self.places[cut.source] = place, first
                first += math.prod(shape)

    def owner(self, source: str) -> str:
        """Return the module's name of a tensor, or of the one that has it."""
        return self.places[source][0] if source in self.places else source

    def in_module(self, piece: ParameterPart) -> ParameterPart:
        """Return `piece` with the module's names, unless it is of experts."""
        if piece.experts is not None:
            return piece
        named = (replace(cut, source=self._stored.place(cut.source)) for cut in piece.cuts)
        return replace(piece, cuts=tuple(named))


def whole_experts(piece: ParameterPart, part: Tensor, tensor: dist.ProcessGroup) -> Tensor:
    """Return `[e, R, C]`, or biases `[e, R]`, the experts of `piece` in the module's form, from the slices
    `part` of all ranks of `tensor`. They call it together.
    """
    assert piece.experts is not None
    each = len(piece.cuts) // len(piece.experts)  # gate and up may be two tensors
    part = part.unflatten(0, (len(piece.experts), each, -1)).contiguous()
    parts = [torch.empty_like(part) for _ in range(tensor.size())]
    dist.all_gather(parts, part, group=tensor)
    return torch.cat(parts, dim=2 + piece.cuts[0].axis).flatten(1, 2)


class MixtureRouter(nn.Module):
    """Chooses the experts of a token: the largest of the softmax over all, in float32, or of a sigmoid among
    the best groups. Those of GPT-OSS share the softmax of their scores alone.
    """

    def __init__(self, form: MegatronForm, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        dtype = form.dtype_of(".mlp.gate.", dtype)
        self.weight = nn.Parameter(torch.empty(form.experts, form.hidden_size, dtype=dtype, device=device))
        self.bias = None if form.clamp is None else nn.Parameter(self.weight.new_empty(form.experts))
        if form.sigmoid:
            self.correction = nn.Parameter(self.weight.new_empty(form.experts), requires_grad=False)
        self.choose: Choose | None = None
        """Chooses in its place, if it is set."""
        self._form = form

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights and numbers `[T, K]` of the experts of `tokens` [T, D], and the scores of all
        `[T, E]` before a softmax or sigmoid.
        """
        form, weight = self._form, self.weight
        wide = form.sigmoid or FAMILIES[form.family].limited
        if wide:
            tokens, weight = tokens.float(), weight.float()
        logits = nn.functional.linear(tokens, weight, self.bias)
        if form.sigmoid:
            scores = logits.sigmoid()
            wanted = self._in_best_groups(scores + self.correction)
        elif form.clamp is not None:
            scores = wanted = logits
        else:
            scores = wanted = self._in_best_groups(logits.softmax(-1, dtype=torch.float32))
        own = partial(wanted.topk, form.experts_per_token)
        _, chosen = own() if self.choose is None else self.choose(wanted, own)
        weights = scores.gather(-1, chosen)
        if form.clamp is not None:
            return weights.softmax(-1), chosen, logits
        if form.renormalise:
            least = 1e-20 if form.sigmoid else 0.0
            weights = weights / (weights.sum(-1, keepdim=True) + least)
        weights = weights * form.expert_factor
        rounds = FAMILIES[form.family].rounds and not wide
        return weights.to(tokens.dtype) if rounds else weights, chosen, logits

    def _in_best_groups(self, wanted: Tensor) -> Tensor:
        """Return `wanted` [T, E] with all but the best groups of experts at minus infinity. A group is as
        good as its two best experts together (DeepSeek-V3: arXiv:2412.19437, section 2.1.2). Of a softmax it
        is as good as its best one, and others are at 0 (DeepSeek-V2: arXiv:2405.04434, section 2.2.2).
        """
        form = self._form
        if form.chosen_groups == form.expert_groups:
            return wanted
        groups = wanted.unflatten(-1, (form.expert_groups, -1))
        best = groups.topk(2 if form.sigmoid else 1, -1)[0].sum(-1).topk(form.chosen_groups, -1)[1]
        is_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return groups.masked_fill(is_out.unsqueeze(-1), -torch.inf if form.sigmoid else 0.0).flatten(-2)


class Experts(nn.Module):
    """This rank's experts of a layer, and its slice of each."""

    # What transformers asks of a module of experts.
    has_gate, has_post_expert_norm = True, False
    _is_expert_parallel = False

    def __init__(
        self,
        form: MegatronForm,
        tensor: dist.ProcessGroup,
        sharing: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._tensor, self._sharing, self._of_all = tensor, sharing, form.experts
        self.num_experts = form.experts // (1 if sharing is None else sharing.size())
        self._clamp, size = form.clamp, tensor.size()
        self.has_bias = self.is_transposed = form.clamp is not None
        width, hidden = form.expert_ffn // size, form.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "linear_fc1": (2 * width, hidden),
            "linear_fc2": (hidden, width),
        }
        if form.clamp is not None:
            shapes = {name: shape[::-1] for name, shape in shapes.items()}
            shapes |= {"linear_fc1_bias": (2 * width,), "linear_fc2_bias": (hidden // size,)}
        for name, (rows, *columns) in shapes.items():
            weight = torch.empty(self.num_experts * rows, *columns, dtype=dtype, device=device)
            self.register_parameter(name, nn.Parameter(weight))
            if sharing is not None:  # Megatron-Core sums these gradients over other ranks
                setattr(self.get_parameter(name), "allreduce", False)  # noqa: B010

    @property
    def gate_up_proj(self) -> Tensor:
        """[E / N, 2 F, D], of GPT-OSS transposed."""
        return self.get_parameter("linear_fc1").unflatten(0, (self.num_experts, -1))

    @property
    def down_proj(self) -> Tensor:
        """[E / N, D, F], of GPT-OSS transposed."""
        return self.get_parameter("linear_fc2").unflatten(0, (self.num_experts, -1))

    @property
    def gate_up_proj_bias(self) -> Tensor:
        """[E / N, 2 F]."""
        return self.get_parameter("linear_fc1_bias").unflatten(0, (self.num_experts, -1))

    @property
    def down_proj_bias(self) -> Tensor:
        """[E / N, D], of which this rank adds its part. Others have zeros there."""
        part = self.get_parameter("linear_fc2_bias").unflatten(0, (self.num_experts, -1))
        width, rank = part.shape[-1], self._tensor.rank()
        return nn.functional.pad(part, (rank * width, (self._tensor.size() - 1 - rank) * width))

    def _apply_gate(self, both: Tensor) -> Tensor:
        if self._clamp is not None:
            alpha, limit = self._clamp
            gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
            return (up + 1) * (gate * torch.sigmoid(gate * alpha))
        gate, up = both.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return `[T, D]`, the sum of the `chosen` experts' outputs for `tokens` [T, D], by `weights`."""
        from megatron.core.tensor_parallel import mappings

        # Every tensor-parallel rank has the same tokens, and adds what its slices make of them.
        tokens = mappings.copy_to_tensor_model_parallel_region(tokens, self._tensor)
        weights = mappings.copy_to_tensor_model_parallel_region(weights, self._tensor)
        if self._sharing is None:
            summed = grouped_mm_experts_forward(self, tokens, chosen, weights)
        else:
            of_rank = list(self.parameters())
            outputs = outputs_of_experts(
                tokens, chosen, self._of_all, self._sharing, self._run_arrived, of_rank
            )
            summed = (outputs * weights.unsqueeze(-1)).sum(-2).to(tokens.dtype)
        return mappings.reduce_from_tensor_model_parallel_region(summed, self._tensor)

    def _run_arrived(self, rows: Tensor, numbers: Tensor) -> Tensor:
        return grouped_mm_experts_forward(self, rows, numbers, rows.new_ones(len(rows), 1))


class SharedGate(nn.Module):
    """Scores the output of the shared expert, on every rank. As Megatron-Core's layers it returns a bias."""

    def __init__(self, form: MegatronForm, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, form.hidden_size, dtype=dtype, device=device))

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """`[T, 1, D]` to `[T, 1, 1]`."""
        return nn.functional.linear(hidden, self.weight), None


class Mixture(nn.Module):
    """In the place of a layer's MLP: a router, its experts, and perhaps some that every token goes to.

    Args:
        form: The full decoder's.
        at: Index of this one among its mixtures.
        tensor: The tensor-parallel ranks.
        sharing: The ranks that share the experts. `None`: this rank has all.
        dtype: Of weights.
        device: Of weights.
    """

    def __init__(
        self,
        form: MegatronForm,
        at: int,
        tensor: dist.ProcessGroup,
        sharing: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.router = MixtureRouter(form, dtype, device)
        self.experts = Experts(form, tensor, sharing, dtype, device)
        self.shared_experts: nn.Module | None = None
        """An MLP of Megatron-Core."""
        self.shared_gate = SharedGate(form, dtype, device) if FAMILIES[form.family].gated else None
        self._at = at

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return `[T, 1, D]` for `hidden` [T, 1, D], and no bias."""
        tokens = hidden.flatten(0, -2)
        weights, chosen, _ = self.router(tokens)
        output = self.experts(tokens, chosen, weights).view_as(hidden)
        if self.shared_experts is None:
            return output, None
        shared = self.shared_experts(hidden)[0]
        if self.shared_gate is not None:
            shared = self.shared_gate(hidden)[0].sigmoid() * shared
        return output + shared, None

    def run_layer(self, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Run a layer's `forward`, whose mixture this is. Its tokens go where `routed` of its packing says,
        also if a backward computes it again.
        """
        routed = options["packed_seq_params"].routed
        if routed is not None:
            self.router.choose = Replayed(routed.choices[:, self._at], routed.count)
        try:
            return forward(*inputs, **options)
        finally:
            self.router.choose = None
