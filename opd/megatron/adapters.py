"""LoRA on Megatron-Core's layers. Each fuses several Hugging Face layers and gets an adapter for each.

Every adapted layer computes `W x + scaling * B (A x)`, as peft does. If Megatron-Core cuts `W` by rows over
the tensor-parallel ranks, `B` is cut by the same rows and every rank has `A`. If it cuts `W` by columns, `A`
is cut by them and every rank has `B`. A sum over the ranks lies between `A` and `B`, of `r` numbers a token
or of their gradients, so the tensor that every rank has gets its whole gradient on each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opd.megatron.form import Cut, ParameterPart
from opd.models.peft_folder import LORA_A, LORA_B


def adapter_parameters(bases: Iterable[ParameterPart], adapted: Collection[str]) -> list[ParameterPart]:
    """Return the adapter parameters of a rank that has the base parameters `bases`. These are `A` and `B` of
    each Hugging Face layer there whose tensors are among the names `adapted`.
    """
    return [piece for base in bases for pair in _adapter_pairs(base, adapted).values() for piece in pair]


def add_adapters(
    module: Any,
    bases: Iterable[ParameterPart],
    shapes: Mapping[str, Sequence[int]],
    scaling: float,
    group: dist.ProcessGroup,
) -> None:
    """Add trainable adapters to the linear layers of a `GPTModel` whose parameters are `bases`.

    `shapes` are those of Hugging Face's tensors, adapters included. `group` are the tensor-parallel ranks.
    Values are uninitialised until they are loaded.
    """
    for base in bases:
        if _adapter_pairs(base, shapes):
            linear = module.get_submodule(base.name.removesuffix(".weight"))
            linear.adapters = LinearAdapters(base, shapes, scaling, group, linear.weight)
            linear.register_forward_hook(_adapter_hook)


class LinearAdapters(nn.Module):
    """The adapters of one linear layer of Megatron-Core.

    Args:
        base: Its weight, with the tensors that it fuses.
        shapes: Shapes of Hugging Face's tensors.
        scaling: Factor of `B A`.
        group: The tensor-parallel ranks.
        like: Has their dtype and device.
    """

    def __init__(
        self,
        base: ParameterPart,
        shapes: Mapping[str, Sequence[int]],
        scaling: float,
        group: dist.ProcessGroup,
        like: Tensor,
    ) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        pairs = _adapter_pairs(base, shapes)
        for source, pair in pairs.items():
            for piece, into in zip(pair, (self.lora_A, self.lora_B), strict=True):
                [cut] = piece.cuts
                shape = list(shapes[cut.source])
                if cut.stop is not None:
                    shape[cut.axis] = cut.stop - cut.start
                into[_layer_name(source)] = nn.Parameter(like.new_empty(shape))
        self._rows = base.cuts[0].axis == 0
        self._scaling, self._group = scaling, group if base.split else None
        sources = [cut.source for cut in base.cuts]
        self._runs = sources.count(sources[0])
        """Number of runs in which the rows of each tensor lie, alternating. All have the same number."""
        in_turn = base.cuts[: len(sources) // self._runs]
        self._widths = [
            cut.stop - cut.start if cut.axis == 0 and cut.stop is not None else like.shape[0]
            for cut in in_turn
        ]
        """Rows of a run of each tensor."""
        self._places = [index for index, cut in enumerate(in_turn) if cut.source in pairs]
        """Indices of the tensors that have an adapter."""

    def forward(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Return the layer's `output` [T, 1, R] for `inputs` [T, 1, C], plus the adapters' output."""
        from megatron.core.tensor_parallel import mappings

        low = nn.functional.linear(inputs, torch.cat(tuple(self.lora_A.values())))
        if self._rows and self._group is not None:  # with a gradient of all ranks' rows
            low = mappings.copy_to_tensor_model_parallel_region(low, self._group)
        elif self._group is not None:  # of all ranks' columns
            low = mappings.reduce_from_tensor_model_parallel_region(low, self._group)
        lows = (self._scaling * low).chunk(len(self.lora_A), dim=-1)
        parts = list(output.unflatten(-1, (self._runs, -1)).split(self._widths, dim=-1))
        for index, mine, weight in zip(self._places, lows, self.lora_B.values(), strict=True):
            added = nn.functional.linear(mine, weight)
            parts[index] = parts[index] + added.unflatten(-1, (self._runs, -1))
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).flatten(-2)


def _adapter_hook(linear: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None]) -> Any:
    """Hook after the forward of an adapted layer, which returns its output and a bias that others add."""
    output, bias = outputs
    return linear.adapters(inputs[0], output), bias


def _adapter_pairs(
    base: ParameterPart, adapted: Collection[str]
) -> dict[str, tuple[ParameterPart, ParameterPart]]:
    """Return `A` and `B` of each adapted tensor in the parameter `base`."""
    merged: dict[str, Cut] = {}
    for cut in base.cuts:  # those of one tensor are adjacent here and are joined
        merged[cut.source] = replace(merged.get(cut.source, cut), stop=cut.stop)
    pairs = {}
    for cut in merged.values():
        layer = cut.source.removesuffix(".weight")
        if layer + LORA_A in adapted:
            a, b = Cut(layer + LORA_A), Cut(layer + LORA_B)
            if cut.axis == 0:
                b = replace(cut, source=b.source)
            else:
                a = replace(cut, source=a.source)
            ours = f"{base.name.removesuffix('.weight')}.adapters"
            pairs[cut.source] = (
                ParameterPart(
                    f"{ours}.lora_A.{_layer_name(cut.source)}", (a,), split=base.split and cut.axis == 1
                ),
                ParameterPart(
                    f"{ours}.lora_B.{_layer_name(cut.source)}", (b,), split=base.split and cut.axis == 0
                ),
            )
    return pairs


def _layer_name(source: str) -> str:
    """Return `q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return source.removesuffix(".weight").rpartition(".")[2]
