"""Expert parallelism: ranks share the experts of each layer, and tokens travel to them.

A rank keeps `E / N` experts of a layer and never gathers others. Its tokens are sent to the ranks of the
experts that they are routed to, and the results come back (Lepikhin et al. 2020, "GShard"; no token is
dropped). The family's own code computes the experts of a rank, with transformers' grouped products. Every
other weight is FSDP2's.

Shapes: `T` tokens of this rank, each routed to `K` experts; `E` experts of a layer, `N` ranks; `R` rows that
arrive at this rank; `D` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from opd.errors import ModelError
from opd.models.architecture import expert_parts

ExpertParallel = int | Literal["auto"]
"""How many ranks share experts: all, 1 for none, or `auto`."""
_INTERFACE = "_is_expert_parallel"
"""Attribute of every module that transformers' `use_experts_implementation` made."""


def expert_modules(module: nn.Module) -> list[Any]:
    """Return the parts of `module` with all experts of a layer, each weight one tensor `[E, ...]`. They are
    called as `experts(hidden [T, D], chosen [T, K], weights [T, K]) -> [T, D]`.
    """
    return [
        part
        for part, _, _ in expert_parts(module)
        if hasattr(part, _INTERFACE) and all(one.ndim > 1 for one in part.parameters(recurse=False))
    ]


def sharing_fault(module: nn.Module, size: int) -> str | None:
    """Return why `size` ranks cannot share the experts of `module`, as the end of a sentence about it. `None`
    if they can.
    """
    counts = {part.num_experts for part in expert_modules(module)}
    if not counts:
        return "has no experts that ranks can share"
    uneven = [count for count in sorted(counts) if count % size]
    return f"has {uneven[0]} experts a layer, which {size} ranks cannot share equally" if uneven else None


def shares_experts(module: nn.Module, expert_parallel: ExpertParallel, size: int) -> bool:
    """Return whether `size` ranks share the experts of `module`: with `auto` if they can. Raises `ModelError`
    if they are told to and cannot.
    """
    fault = sharing_fault(module, size)
    if fault is not None and expert_parallel not in (1, "auto"):
        raise ModelError(
            f"train.expert_parallel is {expert_parallel}, and a {type(module).__name__} {fault}; set it to"
            " auto or 1."
        )
    return fault is None and expert_parallel != 1


@torch.no_grad()
def share_experts(module: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Let the ranks of `mesh` share all experts of `module`, each of which keeps its part. Return their
    parameters: `DTensor`s that are split by experts, and that FSDP2 must ignore.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    shared: set[nn.Parameter] = set()
    for experts in expert_modules(module):
        for name, whole in list(experts.named_parameters(recurse=False)):
            each = len(whole) // size
            local = whole.detach()[rank * each : (rank + 1) * each].clone()
            split = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            experts._parameters[name] = nn.Parameter(split, requires_grad=whole.requires_grad)
            shared.add(experts._parameters[name])
        experts.forward = SharedExperts(experts, mesh)
    return shared


def experts_are_shared(module: nn.Module) -> bool:
    """Return whether ranks share the experts of `module`."""
    return any(isinstance(vars(part).get("forward"), SharedExperts) for part in module.modules())


class SharedExperts:
    """The forward of `experts`, which the ranks of `mesh` share. All ranks call it, and run its backward,
    equally often.

    A gradient of a weight is the sum over all ranks' tokens, divided by the number of ranks, as FSDP2 divides
    those of other weights.
    """

    def __init__(self, experts: Any, mesh: DeviceMesh) -> None:
        self._experts = experts
        self._group = mesh.get_group()
        self._size = mesh.size()

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return `[T, D]`, the sum of the `chosen` experts' outputs for `hidden` [T, D], by `weights`
        [T, K].
        """
        local = {
            name: _LocalWeight.apply(parameter.to_local(), hidden.dtype, self._size)
            for name, parameter in self._experts.named_parameters(recurse=False)
        }
        part = _ExpertsPart(self._experts, local, self._experts.num_experts // self._size)

        def run(rows: Tensor, numbers: Tensor) -> Tensor:
            return type(self._experts).forward(part, rows, numbers, rows.new_ones(len(rows), 1))

        outputs = outputs_of_experts(
            hidden, chosen, self._experts.num_experts, self._group, run, list(local.values())
        )
        return (outputs * weights.unsqueeze(-1)).sum(-2).to(hidden.dtype)


def outputs_of_experts(
    hidden: Tensor,
    chosen: Tensor,
    count: int,
    group: dist.ProcessGroup,
    run: Callable[[Tensor, Tensor], Tensor],
    weights: Sequence[Tensor],
) -> Tensor:
    """Return `[T, K, D]`, the output of each of the `chosen` [T, K] experts for `hidden` [T, D].

    The ranks of `group` share all `count` experts. `run(rows [R, D], numbers [R, 1]) -> [R, D]` computes
    those of this rank, counted from 0, with these `weights`. It is not called if no row arrives, and the
    gradient of `weights` is zero then.
    """
    experts, width, size = chosen.reshape(-1), chosen.shape[-1], group.size()
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=count)
    arriving = torch.empty_like(counts)  # by rank that sends, then by expert of this one
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received = torch.stack([counts, arriving]).view(2, size, -1).sum(-1).tolist()
    rows = _Exchange.apply(hidden[order // width], group, sent, received)
    if len(rows):
        each = torch.arange(count // size, device=rows.device).repeat(size)
        numbers = each.repeat_interleave(arriving, output_size=len(rows))
        output = run(rows, numbers.unsqueeze(-1))
    else:  # the backward takes part in the exchange all the same
        output = rows + sum(one.flatten()[:0].sum() for one in weights)
    returned = _Exchange.apply(output, group, received, sent)
    return returned[torch.argsort(order)].view(*chosen.shape, -1)


class _ExpertsPart:
    """Stands for a module of experts in its own code, with `count` of them."""

    def __init__(self, experts: nn.Module, weights: dict[str, Tensor], count: int) -> None:
        self.__dict__.update(weights, num_experts=count, _experts=experts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


class _LocalWeight(torch.autograd.Function):
    """This rank's experts of a weight, in the layers' dtype."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dtype: torch.dtype, size: int) -> Tensor:
        ctx.dtype, ctx.size = local.dtype, size
        return local.view_as(local) if local.dtype == dtype else local.to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return upstream.to(ctx.dtype) / ctx.size, None, None


class _Exchange(torch.autograd.Function):
    """Rows of all ranks travel, `sent[rank]` of this one's to each, and their gradients travel back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:
        ctx.travel = (group, received, sent)
        return _travel(rows, group, sent, received)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return _travel(upstream, *ctx.travel), None, None, None


def _travel(rows: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:
    """Send consecutive `rows` `[sum(sent), D]` to the ranks. Return those that arrive, by rank."""
    arrived = rows.new_empty(sum(received), rows.shape[-1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
