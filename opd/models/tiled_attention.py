"""Attention on keys that come a part at a time, tile by tile through fused kernels, merged by log-sum-exp.

A tile is a square of queries and keys: either all of its pairs see each other, or it lies on the diagonal and
is causal. What lies beyond the diagonal is no tile. A kernel computes a tile without writing its scores to
memory, and gives the rows' log-sum-exp with the output. The softmax over several tiles is the mean of those
over each, weighted by their sums (Milakov and Gimelshein 2018); the gradient of a tile follows from the
output and the log-sum-exp over all tiles (Liu et al. 2023, "Ring Attention with Blockwise Transformers").

On a CPU the kernel is PyTorch's flash attention for it. On a GPU it is flex attention, compiled by Triton:
`fused_attention.py` says why whatever has a gradient is its. Each proves itself at its first use. What
neither takes goes to the blocks of `attention.py`: a window that hides something here, a softcap, float64,
inputs of several dtypes, gradients of float16; on a CPU values of another size than keys, and in 16 bits
heads below 16; on a GPU heads below 16 or above 256, and tiles of up to 128 tokens.

Shapes: `H` query heads, `Hkv` key-value heads, `G = H / Hkv`, `C` queries, `S` keys, `d` size of a key's
head, `dv` of a value's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from opd.kernels import triton_rows, verification
from opd.models.attention import (
    AttentionCall,
    PackedAttention,
    ScoreForm,
    Triple,
    attend_backward,
    attend_more,
    block_attention,
    nothing_seen,
)
from opd.models.fused_attention import (
    BLOCK,
    HALVES,
    AttentionForm,
    attention_fault,
    compile_function,
    visible,
)

TRIED_SIDE = 200
"""Of the tiles that a kernel is tried on."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys of which all pairs see each other, or, on the diagonal, as many of both."""

    queries: slice
    keys: slice
    causal: bool

    @property
    def shorter(self) -> int:
        """The number of queries or of keys, whichever is less."""
        return min(part.stop - part.start for part in (self.queries, self.keys))


def tiles_of(count: int, size: int, first: int, side: int) -> Iterator[Tile]:
    """The tiles of `count` queries and `size` keys; `first` (0 and above) is where the first query lies."""
    for start in range(0, count, side):
        stop, diagonal = min(start + side, count), first + start
        for key_start in range(0, min(diagonal, size), side):
            yield Tile(
                slice(start, stop), slice(key_start, min(key_start + side, diagonal, size)), causal=False
            )
        if diagonal < size:
            seeing = min(stop, start + size - diagonal)
            yield Tile(slice(start, seeing), slice(diagonal, diagonal + seeing - start), causal=True)
            if seeing < stop:
                yield Tile(slice(seeing, stop), slice(diagonal, size), causal=False)


@dataclass(frozen=True, slots=True)
class TileKernel:
    """A fused kernel. Inputs are `query` [H, C, d], `key` [Hkv, S, d] and `value` [Hkv, S, dv]."""

    name: str
    forward: Callable[[Triple, float, bool], tuple[Tensor, Tensor]]
    """`forward(inputs, scaling, causal)`: output [H, C, dv] and log-sum-exp [H, C] of a tile."""
    backward: Callable[[Triple, Triple, float, bool], Sequence[Tensor]]
    """`backward(inputs, (output, log-sum-exp, upstream), scaling, causal)`: the gradients in `inputs`; output
    and log-sum-exp are those of all tiles."""
    side: int
    """Tokens of a tile: what is made for one has so many rows."""
    takes: Callable[[torch.dtype, tuple[int, int]], bool]
    """`takes(dtype, (d, dv))`: whether it computes heads of these sizes."""
    least: int = 0
    """Tiles of so many queries or keys and fewer are not its."""

    def see_more(self, inputs: Triple, scores: ScoreForm, state: tuple[Tensor, Tensor], first: int) -> None:
        """`attend_more` with this kernel."""
        for tile, part in self._parts(inputs, first):
            so_far = state[0][:, tile.queries], state[1][:, tile.queries]
            if tile.shorter <= self.least:
                attend_more(part, scores, so_far, 0 if tile.causal else part[1].shape[1])
            else:
                merge(so_far, *self.forward(part, scores.scaling, tile.causal))

    def seen_backward(
        self, inputs: Triple, ahead: Triple, gradients: Sequence[Tensor], scores: ScoreForm, first: int
    ) -> None:
        """`attend_backward` with this kernel."""
        for tile, part in self._parts(inputs, first):
            behind = (ahead[0][:, tile.queries], ahead[1][:, tile.queries], ahead[2][:, tile.queries])
            spans = (tile.queries, tile.keys, tile.keys)
            sums = [total[:, span] for total, span in zip(gradients, spans, strict=True)]
            if tile.shorter <= self.least:
                attend_backward(part, behind, sums, scores, 0 if tile.causal else part[1].shape[1])
                continue
            addends = self.backward(part, behind, scores.scaling, tile.causal)
            for total, addend in zip(sums, addends, strict=True):
                total += addend

    def _parts(self, inputs: Triple, first: int) -> Iterator[tuple[Tile, Triple]]:
        query, key, value = inputs
        for tile in tiles_of(query.shape[1], key.shape[1], first, self.side):
            yield tile, (query[:, tile.queries], key[:, tile.keys], value[:, tile.keys])


def merge(state: tuple[Tensor, Tensor], output: Tensor, logsumexp: Tensor) -> None:
    """Add what queries see of other keys, `output` [H, C, dv] and `logsumexp` [H, C], to `state`."""
    sums, level = state
    joint = torch.logaddexp(level, logsumexp)
    sums.mul_((level - joint).exp_()[..., None])
    sums.addcmul_(output.to(sums.dtype), (logsumexp - joint).exp_()[..., None])
    level.copy_(joint)


def _grouped(inputs: Triple) -> Triple:
    """[Hkv, G, C, d] and [Hkv, G, S, d]: the query heads that share keys together, the keys not copied."""
    query, key, value = inputs
    groups = query.shape[0] // key.shape[0]
    keys, values = (x[:, None].expand(-1, groups, -1, -1) for x in (key, value))
    return query.unflatten(0, (-1, groups)), keys, values


def _cpu_forward(inputs: Triple, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, logsumexp = forward(*_grouped(inputs), 0.0, causal, scale=scaling)
    return output.flatten(0, 1), logsumexp.flatten(0, 1)


def _cpu_backward(inputs: Triple, ahead: Triple, scaling: float, causal: bool) -> Sequence[Tensor]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    query, keys, values = _grouped(inputs)
    shape = query.shape[:2]
    output, logsumexp, upstream = (x.unflatten(0, shape) for x in ahead)
    slope = upstream.to(query.dtype).contiguous()
    output = output.to(query.dtype)
    arguments = (slope, query, keys, values, output, logsumexp.contiguous())
    of_query, *of_others = backward(*arguments, 0.0, causal, scale=scaling)
    return of_query.flatten(0, 1), *(x.sum(1, dtype=logsumexp.dtype) for x in of_others)


def attend_tile(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Tensor] | None, scaling: str
) -> tuple[Tensor, Tensor]:
    """`query` [1, H, C, d] on `key` [1, Hkv, S, d] and `value` [1, Hkv, S, dv] -> [1, H, C, dv] and their
    log-sum-exp [1, H, C] float32: what is compiled. `blocks` are those of a causal tile, which
    `fused_attention.visible` makes; `None` where all see all. `scaling` is a number's text, as in
    `fused_attention.attend_compiled`.
    """

    def mask(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        del batch, head
        return column <= row

    block_mask = None
    if blocks is not None:
        lengths = (query.shape[2], key.shape[2])
        block_mask = BlockMask(lengths, *blocks, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask)
    output, rows = flex_attention(
        query,
        key,
        value,
        block_mask=block_mask,
        scale=float(scaling),
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    assert rows.lse is not None
    return output, rows.lse


@lru_cache(maxsize=1)
def compiled_tile() -> Callable[..., tuple[Tensor, Tensor]]:
    """`attend_tile`, compiled for all lengths: once for each `AttentionForm`, causal or not, with and without
    a gradient.
    """
    return compile_function(attend_tile)


@lru_cache(maxsize=8)
def _diagonal(count: int, device: torch.device) -> list[Tensor]:
    """The blocks of a causal tile of `count` tokens: all tiles of a size share them."""
    with torch.inference_mode(False):  # they are kept
        return [torch.from_numpy(x.astype(np.int32)).to(device) for x in visible([count], None)[1:]]


def _flex(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    blocks = _diagonal(query.shape[2], query.device) if causal else None
    return compiled_tile()(query, key, value, blocks, repr(scaling))


def _flex_forward(inputs: Triple, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    query, key, value = (x.detach()[None] for x in inputs)
    output, logsumexp = _flex(query, key, value, scaling, causal)
    return output[0], logsumexp[0]


def _flex_backward(inputs: Triple, ahead: Triple, scaling: float, causal: bool) -> Sequence[Tensor]:
    """Differentiates the tile's own output and log-sum-exp, computed again: of the softmax over all keys the
    tile is a `share` that depends on the latter.
    """
    output, logsumexp, upstream = ahead
    query, key, value = leaves = [x.detach()[None].requires_grad_() for x in inputs]
    with torch.enable_grad():
        tile_output, level = _flex(query, key, value, scaling, causal)
    share = (level.detach() - logsumexp).exp_()
    slope = upstream * share[..., None]
    of_level = ((tile_output.detach() - output.to(share.dtype)) * slope).sum(-1)
    gradients = torch.autograd.grad((tile_output, level), leaves, (slope.to(tile_output.dtype), of_level))
    return [gradient[0] for gradient in gradients]


def _cpu_takes(dtype: torch.dtype, sizes: tuple[int, int]) -> bool:
    # A row of few numbers in 16 bits is too far off to tell a fault from rounding.
    return sizes[0] == sizes[1] and (dtype == torch.float32 or (dtype in HALVES and sizes[0] >= 16))


def _flex_takes(dtype: torch.dtype, sizes: tuple[int, int]) -> bool:
    return dtype in (*HALVES, torch.float32) and min(sizes) >= 16 and max(sizes) <= 256


CPU = TileKernel("flash", _cpu_forward, _cpu_backward, 1024, _cpu_takes)
GPU = TileKernel("flex", _flex_forward, _flex_backward, 1 << 15, _flex_takes, least=BLOCK)


def see_keys(query: Tensor, key: Tensor, value: Tensor, scores: ScoreForm) -> tuple[Tensor, Tensor]:
    """The output [H, C, dv] of the dtype of `value`, and the rows' log-sum-exp [H, C], float32 at least, of
    queries that are the last `C` of the `S` positions. No gradient.
    """
    state = nothing_seen(query, value, scores.sinks)
    see_more((query, key, value), scores, state, key.shape[1] - query.shape[1])
    return state[0].to(value.dtype), state[1]


def see_more(inputs: Triple, scores: ScoreForm, state: tuple[Tensor, Tensor], first: int) -> None:
    """`attend_more` of `attention.py`, by a kernel where one takes it."""
    kernel = kernel_for(inputs, scores, first)
    (attend_more if kernel is None else kernel.see_more)(inputs, scores, state, first)


def seen_backward(
    inputs: Triple, ahead: Triple, gradients: Sequence[Tensor], scores: ScoreForm, first: int
) -> None:
    """`attend_backward` of `attention.py`, by a kernel where one takes it. Gradients in float16 are the
    blocks': a kernel rounds small ones to nothing between its products.
    """
    kernel = None if inputs[0].dtype == torch.float16 else kernel_for(inputs, scores, first)
    behind = attend_backward if kernel is None else kernel.seen_backward
    behind(inputs, ahead, gradients, scores, first)


def kernel_for(inputs: Triple, scores: ScoreForm, first: int) -> TileKernel | None:
    """The kernel that takes this call and gives here what it should; `None` where the blocks of
    `attention.py` compute it, as they do all under `OPD_KERNELS=chunked` or `reference`.
    """
    query, key, value = inputs
    if not query.dtype == key.dtype == value.dtype:
        return None
    hides = scores.window is not None and first + query.shape[1] > scores.window
    if hides or first < 0 or scores.softcap is not None:
        return None
    if os.environ.get("OPD_KERNELS", "auto") not in ("auto", "triton"):
        return None
    sizes, heads = (query.shape[-1], value.shape[-1]), (query.shape[0], key.shape[0])
    kernel = GPU if query.is_cuda else CPU
    if not kernel.takes(query.dtype, sizes) or (query.is_cuda and triton_rows.missing() is not None):
        return None
    form = AttentionForm(kernel.name, query.device, query.dtype, heads, sizes, scores.scaling, False, False)
    return kernel if trusted(form) else None


@lru_cache(maxsize=256)
def trusted(form: AttentionForm) -> bool:
    """Return whether the kernel agrees with PyTorch's attention in float64 on this device: in values and
    gradients, and with the same bits twice. Each form is tried once. A failure is logged as a warning.
    """
    subject = f"{form.kernel} attention by tiles of {form.dtype} with heads of {form.sizes[0]}"
    where = "on this processor"
    if form.device.type == "cuda":
        where = f"on {torch.cuda.get_device_name(form.device)}"
    kernel = replace(CPU if form.device.type == "cpu" else GPU, side=TRIED_SIDE)
    return verification.accept_kernel(
        subject, attention_fault(form, kernel_tried(kernel)), where, "blocks of plain products are"
    )


def kernel_tried(kernel: TileKernel) -> Callable[[PackedAttention, AttentionCall], Tensor]:
    """Packed attention, differentiable, by nothing but `kernel`."""

    def sequence(call: AttentionCall, tokens: slice) -> Tensor:
        query, key, value = (x[:, tokens] for x in call.packed_inputs)
        return block_attention(query, key, value, call.score_form, kernel.see_more, kernel.seen_backward)

    def run(packed: PackedAttention, call: AttentionCall) -> Tensor:
        outputs = [sequence(call, slice(*pair)) for pair in pairwise(packed.bounds)]
        return torch.cat(outputs, dim=1).transpose(0, 1)[None]

    return run
