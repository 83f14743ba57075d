"""Calls of packed attention, and what they are: one softmax in float64 under a mask of who sees whom."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from opd.models.attention import AttentionCall


def bounds(lengths: list[int]) -> list[int]:
    """`cu_seqlens` of `lengths`."""
    return list(accumulate(lengths, initial=0))


def make_call(
    tokens: int,
    kv_heads: int,
    head_major: bool,
    seed: int,
    sizes: tuple[int, int] = (6, 5),
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    learns: bool = True,
    **options,
) -> AttentionCall:
    """Four query heads; `sizes` are those of a head's keys and of its values."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int, size: int) -> Tensor:
        shape = (1, heads, tokens, size) if head_major else (1, tokens, heads, size)
        drawn = torch.randn(shape, generator=generator, device=device).to(dtype)
        return (drawn if head_major else drawn.transpose(1, 2)).requires_grad_(learns)

    query, key, value = draw(4, sizes[0]), draw(kv_heads, sizes[0]), draw(kv_heads, sizes[1])
    return AttentionCall(0, query, key, value, **{"scaling": 0.7} | options)


def reference(call: AttentionCall, lengths: list[int]) -> Tensor:
    """[1, T, H, d] float64: one softmax over everything, with a mask that says who sees whom."""
    query, key, value = (x[0].double() for x in (call.query, call.key, call.value))
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(query.device)
    position = torch.arange(len(owner), device=query.device)
    visible = (owner[:, None] == owner[None]) & (position[:, None] >= position[None])
    if call.sliding_window is not None:
        visible &= position[:, None] - position[None] < call.sliding_window
    scores = scores.masked_fill(~visible, float("-inf"))
    return (torch.softmax(scores, -1) @ value).transpose(0, 1)[None]


def results(output: Tensor, call: AttentionCall, seed: int = 0) -> list[Tensor]:
    """`output` [1, T, H, d] and its gradients in the query, key and value of `call`."""
    generator = torch.Generator(output.device).manual_seed(seed)
    upstream = torch.randn(output.shape, generator=generator, device=output.device, dtype=torch.float64)
    inputs = (call.query, call.key, call.value)
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream.to(output.dtype))]


def off(ours: Tensor, exact: Tensor) -> float:
    """The largest difference of a row, as a part of its norm, or of the mean row's where that is larger."""
    norm = exact.norm(dim=-1)
    return float(((ours.double() - exact).norm(dim=-1) / norm.clamp_min(norm.mean())).max())
