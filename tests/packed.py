"""Calls of packed attention, and what they are: one softmax in float64 under a mask of who sees whom. The
experts that a plain forward chooses.
"""

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from opd.models.attention import AttentionCall, PackedAttention
from opd.models.causal_lm import CausalLM


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
    sinks: bool = False,
    **options,
) -> AttentionCall:
    """Four query heads; `sizes` are those of a head's keys and of its values. `sinks`: the heads have some,
    from one that is nearly nothing to one that is most of a row.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int, size: int) -> Tensor:
        shape = (1, heads, tokens, size) if head_major else (1, tokens, heads, size)
        drawn = torch.randn(shape, generator=generator, device=device).to(dtype)
        return (drawn if head_major else drawn.transpose(1, 2)).requires_grad_(learns)

    query, key, value = draw(4, sizes[0]), draw(kv_heads, sizes[0]), draw(kv_heads, sizes[1])
    if sinks:
        scores = torch.tensor([-3.0, 0.0, 2.0, 5.0], device=device, dtype=dtype)
        options["sinks"] = scores.requires_grad_(learns)
    return AttentionCall(0, query, key, value, **{"scaling": 0.7} | options)


def inputs_of(call: AttentionCall) -> tuple[Tensor, ...]:
    """Query, key, value and, if there are any, sinks of `call`."""
    return (call.query, call.key, call.value, *(() if call.sinks is None else (call.sinks,)))


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
    if call.sinks is not None:  # a key that all see, with a value of 0
        column = call.sinks.double()[:, None, None].expand(*scores.shape[:2], 1)
        scores = torch.cat([column, scores], -1)
        value = torch.cat([value.new_zeros(len(value), 1, value.shape[2]), value], 1)
    return (torch.softmax(scores, -1) @ value).transpose(0, 1)[None]


def results(output: Tensor, call: AttentionCall, seed: int = 0) -> list[Tensor]:
    """`output` [1, T, H, d] and its gradients in the query, key, value and sinks of `call`."""
    generator = torch.Generator(output.device).manual_seed(seed)
    upstream = torch.randn(output.shape, generator=generator, device=output.device, dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad(output, inputs_of(call), upstream.to(output.dtype))]


def off(ours: Tensor, exact: Tensor) -> float:
    """The largest difference of a row, as a part of its norm, or of the mean row's where that is larger."""
    norm = exact.norm(dim=-1)
    return float(((ours.double() - exact).norm(dim=-1) / norm.clamp_min(norm.mean())).max())


@torch.no_grad()
def plain_choices(model: CausalLM, ids: np.ndarray) -> np.ndarray:
    """[T - 1, L, K]: the experts that `model` chooses in one plain forward of `ids` [T]."""
    routing = model.routing
    assert routing is not None
    tokens = torch.from_numpy(ids.astype(np.int64))[:-1]
    with routing.record(routing.new_choices(len(tokens))) as choices:
        model.run(tokens, torch.arange(len(tokens)), PackedAttention([0, len(tokens)]))
    return choices.numpy().astype(np.uint8)
