"""What stands in for the kernels of a GPU that is not there: fused attention, and Triton's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pretend_cuda import OnDevice, current, no_modes
from torch import Tensor

from opd.kernels import divergences, triton_rows


class _Fused(torch.autograd.Function):
    """Attention as one kernel forward and one backward."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict
    ) -> Tensor:
        with no_modes(), torch.enable_grad():
            given = [current().get(x).clone().requires_grad_() for x in (query, key, value)]
            hidden = None if mask is None else current().get(mask)
            output = torch._C._nn.scaled_dot_product_attention(*given, attn_mask=hidden, **options)
        ctx.given, ctx.output = given, output
        current().counts.launches["attention"] += 1
        return OnDevice(output.detach(), query.device)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        with no_modes(), torch.enable_grad():
            found = torch.autograd.grad(ctx.output, ctx.given, current().get(upstream))
        current().counts.launches["attention_backward"] += 1
        return (*(OnDevice(x, upstream.device) for x in found), None, None)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """`scaled_dot_product_attention` where CUDA has a fused kernel; where it would write the scores
    [B, H, L, L] to memory an error. Flash attention takes 16 bits and no mask, the other kernel one head of
    keys for each of queries.
    """
    if not isinstance(query, OnDevice):
        return torch._C._nn.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
    flash = query.dtype in (torch.float16, torch.bfloat16) and attn_mask is None
    grouped = query.shape[-3] != key.shape[-3]
    if query.dtype == torch.float64 or (grouped and not flash):
        raise RuntimeError(
            f"attention of {query.dtype}, mask {attn_mask is not None}, grouped {grouped} is not fused"
        )
    return _Fused.apply(query, key, value, attn_mask, options)


class _Launcher:
    """Stands where Triton's compiled kernel does: the same arguments, computed by PyTorch's rows."""

    def __init__(self, grid: tuple[int]) -> None:
        self._grid = grid

    def __call__(
        self,
        student: OnDevice,
        teacher: OnDevice,
        out: OnDevice,
        coef: OnDevice,
        values: OnDevice,
        vocabulary: int,
        *strides_and_beta: Any,
        KIND: int,
        GRADIENT: bool,
        **_: Any,
    ) -> None:
        assert current().current == student.device.index, (
            "Triton launches on the device that the thread works on"
        )
        assert self._grid == (len(student),)
        assert vocabulary == student.shape[1]
        with no_modes():
            rows = student.host.clone(), teacher.host.clone()
            given = coef.host if GRADIENT else None
            found = divergences.divergence_(*rows, triton_rows.KINDS[KIND], strides_and_beta[-1], given)
            values.host.copy_(found)
            if GRADIENT:
                out.host.copy_(rows[0])
        current().counts.launches["triton"] += 1


class _Kernel:
    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return _Launcher(grid)


def install_triton(patch: pytest.MonkeyPatch) -> None:
    """Let `auto` find Triton, whose kernels are `_Launcher`."""
    patch.setattr(triton_rows, "missing", lambda: None)
    patch.setattr(triton_rows, "trusted", lambda *_: True)
    patch.setattr(triton_rows, "_kernel", _Kernel)
