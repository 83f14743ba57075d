"""What stands in for the kernels of a GPU that is not there: attention, and Triton's rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from pretend_cuda import OnDevice, current, no_modes
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module

from opd.kernels import divergences, triton_rows, triton_tokens
from opd.models import fused_attention


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


def one_kernel(
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


class _TokenLauncher:
    """Stands where Triton's kernel of single tokens does."""

    def __init__(self, grid: tuple[int]) -> None:
        self._grid = grid

    def __call__(
        self,
        logits: OnDevice,
        out: OnDevice,
        numbers: OnDevice,
        ids: OnDevice,
        rows: int,
        vocabulary: int,
        *strides: int,
        GRADIENT: bool,
        ENTROPY: bool,
        SINGLE: bool,
        **_: Any,
    ) -> None:
        assert current().current == logits.device.index
        assert self._grid == (len(logits),) == (rows,)
        assert vocabulary == logits.shape[1]
        with no_modes():
            own, given = logits.host.clone(), numbers.host
            if GRADIENT:
                chosen = ids.host if SINGLE else torch.zeros(rows, 1, dtype=torch.int64)
                divergences.token_gradient_(own, chosen, -given[0][:, None], given[1] if ENTROPY else None)
                if not SINGLE:  # the ids are the caller's
                    own[:, :1] += given[0][:, None]
                out.host.copy_(own)
            else:
                given[0] = own.max(dim=1).values
                given[1] = own.logsumexp(dim=1) - given[0]
                first = torch.zeros(rows, 1, dtype=torch.int64)
                given[2] = divergences.token_statistics_(own, first, True)[1]
        current().counts.launches["triton"] += 1


class _Kernel:
    def __init__(self, launcher: Callable[[tuple[int]], Callable[..., None]]) -> None:
        self._launcher = launcher

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return self._launcher(grid)


def install_triton(patch: pytest.MonkeyPatch) -> None:
    """Let `auto` find Triton, whose kernels are `_Launcher` and `_TokenLauncher`."""
    patch.setattr(triton_rows, "missing", lambda: None)
    for module, launcher in ((triton_rows, _Launcher), (triton_tokens, _TokenLauncher)):
        patch.setattr(module, "trusted", lambda *_: True)
        patch.setattr(module, "_kernel", partial(_Kernel, launcher))


FLASH_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
FLASH_PAGE = 256


def _paged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    scale: float,
    left: int,
    seqused_k: Tensor,
    num_splits: int,
    alibi_slopes: None = None,
) -> Tensor:
    """Of one query for each request, `query` [B, H, d], to pages of a pool, [P, N, Hkv, d]."""
    assert keys.shape[1] % FLASH_PAGE == 0
    assert (num_splits, alibi_slopes) == (1, None)
    assert table.dtype == seqused_k.dtype == torch.int32
    assert table.stride(-1) == seqused_k.stride(-1) == 1
    assert len(table) == len(seqused_k) == len(query)
    assert 0 <= int(table.min()) <= int(table.max()) < len(keys)
    parts = []
    for q, pages, length in zip(query.double(), table.long(), seqused_k.tolist(), strict=True):
        assert 0 < length <= len(pages) * keys.shape[1]
        first = 0 if left < 0 else max(0, length - 1 - left)
        k, v = (x[pages].flatten(0, 1)[first:length].double().transpose(0, 1) for x in (keys, values))
        scores = q.unflatten(0, (len(k), -1)) @ k.transpose(1, 2) * scale
        parts.append((scores.softmax(-1) @ v).flatten(0, 1))
    return torch.stack(parts).to(query.dtype)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    ends_of_keys: Tensor,
    longest: int,
    longest_of_keys: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    block_table: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """What CUDA's flash attention computes of `[T, H, d]`, for tensors of the CPU; and what it refuses."""
    assert query.dtype in FLASH_DTYPES
    assert query.dtype == key.dtype == value.dtype
    assert query.shape[-1] == value.shape[-1] <= 256
    assert query.shape[-1] % 8 == 0
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert ends.dtype == ends_of_keys.dtype == torch.int32
    assert len(ends) == len(ends_of_keys)
    nothing = query.new_empty(0)
    if block_table is not None:
        assert (longest, longest_of_keys) == (1, block_table.shape[1] * key.shape[1])
        output = _paged(query, key, value, block_table, scale, window_size_left, **options)
        return output, query.new_empty(query.shape[:2][::-1], dtype=torch.float32), nothing, nothing, nothing
    unused = options
    assert longest == longest_of_keys == int(ends.diff().max())
    assert (dropout, debug, *unused.values()) == (0.0, False, *[None] * len(unused))
    right = 0 if causal else window_size_right
    assert right == 0
    lengths, groups = ends.diff().tolist(), query.shape[1] // key.shape[1]
    parts = []
    for q, k, v in zip(*(x.double().split(lengths) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = (distance >= 0) & ((distance <= window_size_left) if window_size_left >= 0 else True)
        scores = (q.transpose(0, 1) @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
    output = torch.cat(parts).to(query.dtype)
    return output, query.new_empty(query.shape[:2][::-1], dtype=torch.float32), nothing, nothing, nothing


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """PyTorch's operator of flash attention has `flash_forward` for the CPU, where it has nothing."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    try:
        yield
    finally:
        library._destroy()


class _Flex(torch.autograd.Function):
    """Flex attention as one kernel forward and one backward, of what `fused_attention.attend_compiled` is
    given.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rest: tuple) -> Tensor:
        first, blocks, cap, sinks, scaling = rest
        assert sinks is None  # computed by test_fused_attention's own
        assert {x.dtype for x in (first, *blocks)} == {torch.int32}
        assert {x.device for x in (first, *blocks)} == {query.device}
        with no_modes(), torch.inference_mode(False), torch.enable_grad():
            given = [current().get(x).clone().requires_grad_() for x in (query, key, value)]
            groups = query.shape[1] // key.shape[1]
            q, k, v = (x.float() for x in given)
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
            scores = q @ k.transpose(-1, -2) * float(scaling)
            if cap is not None:
                scores = cap.host * torch.tanh(scores / cap.host)
            column = torch.arange(q.shape[2])
            seen = (column >= first.host[:, None]) & (column <= column[:, None])
            ctx.given = given
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            ctx.output = (weights @ v).to(query.dtype).transpose(1, 2)
        current().counts.launches["flex"] += 1
        return OnDevice(ctx.output.detach(), query.device)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        with no_modes(), torch.enable_grad():
            found = torch.autograd.grad(ctx.output, ctx.given, current().get(upstream))
        current().counts.launches["flex_backward"] += 2  # sums of output and gradient first
        return (*(OnDevice(x, upstream.device) for x in found), None)


def allow_gradients(patch: pytest.MonkeyPatch) -> None:
    """Let flex attention differentiate on a CPU: it can where it is not compiled, and refuses."""
    patch.setattr(flex_module, "_validate_device", lambda *_: None)
    patch.setattr(flex_module, "_warn_once", lambda *_, **__: None)  # that it is not compiled


@contextmanager
def attention_kernels(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let packed attention find its kernels on the device that is not there."""
    patch.setattr(triton_rows, "missing", lambda: None)
    patch.setattr(fused_attention, "trusted", lambda _: True)
    patch.setattr(fused_attention, "compiled", lambda: lambda q, k, v, *rest: _Flex.apply(q, k, v, rest))
    with flash_on_cpu():
        yield
