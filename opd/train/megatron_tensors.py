"""A student's tensors on Megatron-Core, by Hugging Face's names, of which each rank has slices."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opd.megatron.adapters import adapter_parameters
from opd.megatron.experts import StackedExperts, whole_experts
from opd.megatron.form import (
    EMBEDDING,
    HEAD,
    Cut,
    Elements,
    LayerStage,
    MegatronForm,
    ParameterPart,
    assemble_tensor,
    parts_of,
    rank_parameters,
    read_elements,
)
from opd.megatron.layout import RankLayout
from opd.megatron.module import MegatronModule
from opd.models.adapters import AdaptedLM, weight_name
from opd.models.causal_lm import CausalLM
from opd.models.sharded import width_of
from opd.models.stored_form import StoredForm
from opd.storage.tensors import TensorPiece, copy_to_host, part_of


class SlicePlan:
    """Which slices of the tensors of `model` each rank of `layout` has."""

    def __init__(self, form: MegatronForm, layout: RankLayout, model: CausalLM) -> None:
        self.form, self.layout = form, layout
        self.stage = form.stage_layers(layout.stage_index, layout.stages)
        """The layers of this rank."""
        self.shapes = {weight_name(name): tuple(tensor.shape) for name, tensor in CausalLM.weights(model)}
        """Of all tensors."""
        trained = [name for name, parameter in model.module.named_parameters() if parameter.requires_grad]
        self.learnt = {weight_name(name): name for name in trained}
        """By a trained tensor's name: that of its moments."""
        unlearnt = (
            [] if isinstance(model, AdaptedLM) else [name for name in self.shapes if name not in self.learnt]
        )
        self.kept = tuple(unlearnt)
        """What checkpoints and the model hold beside what is learnt: corrections of routers."""
        stored = StoredForm(model.module) if model.unread is None else model.unread.form
        self.experts = StackedExperts(form, stored)
        self.sources: dict[str, tuple[int, str]] = {}
        """By a tensor's name: the first stage that has it, and its parameter there."""
        for number in range(layout.stages):
            for piece in self.pieces_of(0, form.stage_layers(number, layout.stages)):
                for cut in piece.cuts:
                    self.sources.setdefault(self.experts.owner(cut.source), (number, piece.name))

    def bases_of(self, rank: int, stage: LayerStage) -> list[ParameterPart]:
        """Return every parameter of a tensor-parallel rank in a stage, and the head, without adapters."""
        pieces = rank_parameters(self.form, rank, self.layout.tensor, stage, self.layout.sharing)
        return [self.experts.in_module(piece) for piece in pieces]

    def pieces_of(self, rank: int, stage: LayerStage) -> list[ParameterPart]:
        """Return every parameter of a tensor-parallel rank in a stage, and the head."""
        pieces = self.bases_of(rank, stage)
        return pieces + adapter_parameters(pieces, self.shapes)

    def parameter_bytes(self, width: int, learning: int) -> int:
        """Return the bytes of this rank's parameters: `width` per number, and `learning` more per trained
        number. Padding is not counted.
        """
        tensor = self.layout.tensor
        twice = self.stage.first and self.stage.last and self.form.tied
        return sum(
            math.prod(self.shapes.get(source) or self.experts.shapes[source])
            // (tensor if piece.split else 1)
            * (width + learning * (self.experts.owner(source) in self.learnt))
            for piece in self.pieces_of(0, self.stage)
            if not (twice and piece.name == HEAD)
            for source in {cut.source for cut in piece.cuts}
        )


class RankTensors:
    """This rank's slices: `parameters` of `module` and its head, by Megatron-Core's names.

    `sharing` are the ranks that share experts, `stages` those that have other layers. `None`: none do.
    """

    def __init__(
        self,
        plan: SlicePlan,
        module: MegatronModule,
        parameters: Mapping[str, nn.Parameter],
        sharing: dist.ProcessGroup | None,
        stages: dist.ProcessGroup | None,
    ) -> None:
        self._plan, self._module, self._parameters = plan, module, parameters
        self._sharing, self.stages = sharing, stages
        pieces = plan.pieces_of(module.group.rank(), plan.stage)
        self.pieces = {piece.name: piece for piece in pieces if piece.name in parameters}
        """By Megatron-Core's names."""

    def learning_pieces(self) -> list[ParameterPart]:
        """Return those of trained parameters."""
        return [piece for name, piece in self.pieces.items() if self._parameters[name].requires_grad]

    def kept_pieces(self) -> list[ParameterPart]:
        """Return those of `SlicePlan.kept`."""
        kept = self._plan.kept
        return [piece for piece in self.pieces.values() if piece.cuts and piece.cuts[0].source in kept]

    def gather_tensor(self, name: str) -> Tensor:
        """Return a tensor by Hugging Face's name, unsharded. All ranks call it together."""
        plan, module = self._plan, self._module
        shape, (stage, parameter) = plan.shapes[name], plan.sources[name]
        if stage == plan.layout.stage_index:
            tensor = self._gather_shards(name, self.pieces[parameter])[: shape[0]]
        else:
            dtype = plan.form.dtype_of(name, module.dtype)
            tensor = torch.empty(shape, dtype=dtype, device=module.device)
        return self.broadcast_stage(tensor, stage)

    def broadcast_stage(self, tensor: Tensor, stage: int) -> Tensor:
        """Broadcast `tensor` from a stage to all of them."""
        if self.stages is not None:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, group=self.stages, group_src=stage)
        return tensor

    @torch.no_grad()
    def _gather_shards(self, source: str, piece: ParameterPart) -> Tensor:
        """Gather a full tensor from all ranks' shards. Rows of padding may follow."""
        part, axis, group = self._parameters[piece.name].detach(), 0, self._module.group
        if not piece.split:
            return part
        if piece.name not in (EMBEDDING, HEAD):  # these have equal rows on all ranks, with padding
            cut, part = self.parts_of(piece, part)[source]
            axis = cut.axis
        if piece.experts is not None:
            if self._sharing is None:
                return part
            group = self._sharing
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=axis)

    def parts_of(self, piece: ParameterPart, tensor: Tensor) -> dict[str, tuple[Cut, Tensor]]:
        """`parts_of` by the module's names. Of experts it is all of their rows, on every tensor-parallel
        rank. These call it together.
        """
        if piece.experts is None:
            return parts_of(piece, tensor)
        source = self._plan.experts.owner(piece.cuts[0].source)
        cut = Cut(source, 0, piece.experts.start, piece.experts.stop)
        return {source: (cut, whole_experts(piece, tensor, self._module.group))}

    def add_shard(
        self, shards: dict[str, Tensor | TensorPiece], name: str, piece: ParameterPart, cut: Cut, part: Tensor
    ) -> None:
        """Add this rank's share of `part`, the cut `cut` of `piece`, to a checkpoint's `shards` as `name`."""
        shape, layout, tensor = self._plan.shapes[cut.source], self._plan.layout, self._module.group.rank()
        if not piece.split:
            if layout.copy_index == 0 and tensor == 0:
                shards[name] = part.to("cpu", copy=True)
            return
        rows, first = (part, cut.start) if cut.axis == 0 else self._rows_of_columns(part)
        # Ranks with other samples have the same rows, and each writes a part of them.
        index, copies, count = layout.copy_index, layout.copy_count, rows.numel()
        if piece.experts is not None:  # tensor-parallel ranks have them too
            index = index // layout.experts * layout.tensor + tensor
            copies = copies // layout.experts * layout.tensor
        each = -(-count // copies)
        low, high = min(index * each, count), min((index + 1) * each, count)
        if high > low:
            shards[name] = copy_to_host(rows.reshape(-1)[low:high], shape, first * width_of(shape) + low)

    def _rows_of_columns(self, columns: Tensor) -> tuple[Tensor, int]:
        """Return this rank's rows `[r, C]`, contiguous in the full tensor, and the index of its first row.
        All ranks have `columns` `[R, C / ranks]`.
        """
        group = self._module.group
        ranks, (rows, width) = group.size(), columns.shape
        each = -(-rows // ranks)
        sizes = [min(each, max(0, rows - rank * each)) for rank in range(ranks)]
        count = sizes[group.rank()]
        received = columns.new_empty(ranks * count, width)
        dist.all_to_all_single(received, columns.contiguous(), [count] * ranks, sizes, group=group)
        local = received.view(ranks, count, width).transpose(0, 1).reshape(count, -1)
        return local, group.rank() * each

    def elements_of(self, saved: Mapping[str, Tensor], field: str | None = None) -> Elements:
        """Return a reader of tensors by the module's names, or of a `field` of each one's optimiser state."""

        def read(source: str, first: int, into: Tensor) -> None:
            name, start = self._plan.experts.places.get(source, (source, 0))
            key = name if field is None else f"{self._plan.learnt[name]}/{field}"
            part_of(saved, key, start + first, into)

        return read

    def assemble_parameter(self, piece: ParameterPart, elements: Elements) -> Tensor:
        """Assemble a parameter `[..]` float32 from `elements` of Hugging Face's tensors."""
        plan = self._plan
        shapes = plan.experts.shapes if piece.experts is not None else plan.shapes
        return assemble_tensor(piece, plan.form, read_elements(shapes, elements, self._module.device))
