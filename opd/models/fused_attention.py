"""Packed attention on a GPU in one kernel per layer: sequences end to end, no padding, no Python blocks.

It uses two kernels of PyTorch. `flash` is flash attention over `cu_seqlens` (Dao 2023, FlashAttention-2): not
compiled; 16 bits, windows, no softcap, no sinks. `flex` is flex attention (Dong et al. 2024, "Flex
Attention"), compiled by Triton at its first use: float32 too, windows, softcaps and sinks.

Flex attention computes everything that has a gradient, or is compared with such a result, because its
backward sums each gradient in one program, in one order. Flash attention adds to the gradient of queries in
the order in which its blocks end, so its bits differ from run to run. Only a switch of the whole process
changes that, and it makes other threads' products and cumulative sums raise errors. Flash attention serves
inference mode, the engine's prefill: its forward has one order, and nothing waits for a compiler.

Shapes: `T` packed tokens, `H` query heads, `Hkv` key-value heads, `d` head size, `n` blocks of tokens.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import signature
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from opd.kernels import triton_rows, verification
from opd.models.attention import AttentionCall, PackedAttention

log = logging.getLogger(__name__)

BLOCK = 128
"""Block size in tokens of flex attention, which skips hidden blocks. It does not support fewer tokens."""
HALVES = (torch.bfloat16, torch.float16)
Kernel = Callable[[PackedAttention, AttentionCall], Tensor]
T = TypeVar("T")
_ASKS_FOR_SHARED = "enable_gqa" in signature(varlen_attn).parameters
"""PyTorch up to 2.11 accepts fewer heads of keys than of queries without an argument."""


def run_fused(packed: PackedAttention, call: AttentionCall) -> Tensor | None:
    """`[1, T, H, d]` from one kernel, or `None` if no kernel fits this call or passes its check here."""
    kernel = kernel_for(packed, call)
    if kernel is None or not trusted(AttentionForm.from_call(kernel, call)):
        return None
    return KERNELS[kernel](packed, call)


def kernel_for(packed: PackedAttention, call: AttentionCall) -> str | None:
    """Return a name of `KERNELS`. None under `OPD_KERNELS=chunked` or `reference` (plain PyTorch), in
    float64, for heads of unusual size, and without Triton.
    """
    if os.environ.get("OPD_KERNELS", "auto") not in ("auto", "triton") or triton_rows.missing() is not None:
        return None
    dtype, sizes = call.query.dtype, (call.query.shape[-1], call.value.shape[-1])
    if torch.is_inference_mode_enabled() and dtype in HALVES and call.score_form.is_plain:
        return "flash" if sizes[0] == sizes[1] <= 256 and sizes[0] % 8 == 0 else None
    fits = dtype in (*HALVES, torch.float32) and min(sizes) >= 16 and max(sizes) <= 256
    return "flex" if fits and packed.tokens > BLOCK else None


def flash(packed: PackedAttention, call: AttentionCall) -> Tensor:
    """Flash attention of 16-bit numbers, without a softcap."""

    def copy_ends() -> Tensor:
        ends = np.cumsum([0, *packed.lengths], dtype=np.int32)
        return torch.from_numpy(ends).to(call.query.device, non_blocking=True)

    ends, longest = packed.cached_value(("ends", call.query.device), copy_ends), max(packed.lengths)
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (call.query, call.key, call.value))
    window = call.sliding_window
    # Only (-1, 0) means causal to it. A window counts the keys before the query's own.
    window_size = (-1, 0) if window is None or window >= longest else (window - 1, 0)
    options: dict[str, Any] = {"scale": call.scaling, "window_size": window_size}
    if _ASKS_FOR_SHARED:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    output = varlen_attn(query, key, value, ends, ends, longest, longest, **options)
    assert isinstance(output, Tensor)
    return output.unsqueeze(0)


def flex(packed: PackedAttention, call: AttentionCall) -> Tensor:
    """Flex attention of more than `BLOCK` tokens."""
    device, window, softcap, cap = call.query.device, call.sliding_window, call.softcap, None

    def copy_blocks() -> list[Tensor]:
        arrays = visible(packed.lengths, window)
        return [torch.from_numpy(x.astype(np.int32)).to(device, non_blocking=True) for x in arrays]

    first, *blocks = packed.cached_value(("blocks", window, device), copy_blocks)
    if softcap is not None:  # each number would compile a kernel of its own
        cap = packed.cached_value(
            ("softcap", softcap, device), lambda: torch.full((), float(softcap), device=device)
        )
    inputs = (call.query, call.key, call.value)
    return compiled()(*inputs, first, blocks, cap, call.sinks, repr(call.scaling))


KERNELS: dict[str, Kernel] = {"flash": flash, "flex": flex}


def attend_compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    blocks: Sequence[Tensor],
    cap: Tensor | None,
    sinks: Tensor | None,
    scaling: str,
) -> Tensor:
    """The compiled function: `query` [1, H, T, d] on `key` and `value` [1, Hkv, T, d] -> [1, T, H, d].

    `first` [T] int32 and `blocks` are those of `visible`, `cap` [] the softcap, `sinks` [H]. `scaling` is
    text, because the compiler treats text as a constant and a number as an argument.
    """

    def mask(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        del batch, head
        return (column >= first[row]) & (column <= row)

    def cap_score(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        del batch, head, row, column
        assert cap is not None
        return cap * torch.tanh(score / cap)

    tokens = query.shape[2]
    blocks_seen = BlockMask((tokens, tokens), *blocks, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask)
    options: dict[str, Any] = {
        "score_mod": None if cap is None else cap_score,
        "block_mask": blocks_seen,
        "scale": float(scaling),
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    # Transposed here, so that the incoming gradient is read in its own memory layout and not copied.
    if sinks is None:
        return flex_attention(query, key, value, **options).transpose(1, 2)
    output, rows = flex_attention(query, key, value, return_aux=AuxRequest(lse=True), **options)
    assert rows.lse is not None
    share = torch.sigmoid(rows.lse - sinks[:, None])  # of the keys in a softmax that has the sinks too
    return (output * share[..., None]).to(output.dtype).transpose(1, 2)


@lru_cache(maxsize=1)
def compiled() -> Callable[..., Tensor]:
    """`attend_compiled`, compiled once for each `AttentionForm`, with and without a gradient, for all
    lengths.
    """
    return compile_function(attend_compiled)


def compile_function(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, to be compiled at its first use, for all lengths."""
    set_compiler_folder()
    return torch.compile(function, dynamic=True, fullgraph=True)


def set_compiler_folder() -> None:
    """Keep what the compiler makes where others cannot write."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        # Not below /tmp under a known name: others could put files there for the compiler to load.
        folder = Path.home() / ".cache/opd/torchinductor"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:  # in a container there may be no home
            folder = Path(tempfile.mkdtemp(prefix="opd-torchinductor-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)


def visible(lengths: Sequence[int], window: int | None) -> list[np.ndarray]:
    """Return the visibility among sequences of `lengths` packed end to end. `first` [T] is the first position
    that each position sees. Then come a `BlockMask`'s arrays, numbers [1, 1, n] and indices [1, 1, n, n]: the
    partly and the fully visible blocks of keys of each block of queries, and the same of each block of keys.
    """
    size = np.asarray(lengths, dtype=np.int64)
    first = np.repeat(np.cumsum(size) - size, size)
    tokens = len(first)
    if window is not None:
        first = np.maximum(first, np.arange(tokens) - window + 1)
    starts = np.arange(0, tokens, BLOCK)
    last = np.minimum(starts + BLOCK, tokens) - 1
    block = np.arange(len(starts))
    # `first` never decreases, so a block's first query sees furthest back and its last one least far.
    visible_blocks = (block <= block[:, None]) & (block >= first[starts][:, None] // BLOCK)
    full = (block < block[:, None]) & (starts >= first[last][:, None]) & (last - starts == BLOCK - 1)[:, None]
    part = visible_blocks & ~full
    return [
        first,
        *_ordered_indices(part),
        *_ordered_indices(full),
        *_ordered_indices(part.T),
        *_ordered_indices(full.T),
    ]


def _ordered_indices(dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number [1, 1, n] of True in each row, and their indices, first in [1, 1, n, n]."""
    return dense.sum(-1)[None, None], np.argsort(~dense, axis=-1, kind="stable")[None, None]


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """Compilation key of a kernel."""

    kernel: str
    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int]
    """`H` and `Hkv`."""
    sizes: tuple[int, int]
    """Sizes of a head's keys, and of its values."""
    scaling: float
    capped: bool
    windowed: bool
    sinks: bool = False

    @classmethod
    def from_call(cls, kernel: str, call: AttentionCall) -> AttentionForm:
        query, key, value = call.query, call.key, call.value
        heads, sizes = (query.shape[1], key.shape[1]), (query.shape[-1], value.shape[-1])
        capped, windowed = call.softcap is not None, call.sliding_window is not None
        sinks = call.sinks is not None
        return cls(kernel, query.device, query.dtype, heads, sizes, call.scaling, capped, windowed, sinks)


@lru_cache(maxsize=256)
def trusted(form: AttentionForm) -> bool:
    """Return True if the kernel agrees on this GPU with the float64 result of the path without it. It is
    checked once per form: values and gradients of `LENGTHS`, and equal bits twice. The result decides, never
    a clock. A kernel that fails, or cannot be compiled, is skipped with a warning.
    """
    subject = f"{form.kernel} attention of {form.dtype} with heads of {form.sizes[0]}"
    where = f"on {torch.cuda.get_device_name(form.device)}"
    if form.kernel == "flex":
        log.info("%s is compiled and proven %s: half a minute, the first time on a machine", subject, where)
    return verification.accept_kernel(
        subject, attention_fault(form), where, "padded sequences and PyTorch's own attention are"
    )


LENGTHS = (1, 40, 500, 5, 130, 7)
"""Lengths of the sequences of a kernel's check, with blocks that are fully, partly and not visible."""
WINDOW, SOFTCAP = 300, 5.0
EXACT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Maximum error of a token's row, relative to its norm or the mean row's, if that is larger."""
EXACT_TF32 = 1e-2


@torch.inference_mode(False)
def attention_fault(form: AttentionForm, kernel: Kernel | None = None) -> str | None:
    """What the kernel of `form`, or `kernel`, does wrong, as the end of a sentence; `None` where nothing."""
    kernel = KERNELS[form.kernel] if kernel is None else kernel
    packed = PackedAttention(list(accumulate(LENGTHS, initial=0)))
    generator = torch.Generator(form.device).manual_seed(0)

    def draw_input(heads: int, size: int) -> Tensor:
        shape = (1, packed.tokens, heads, size)
        return torch.randn(shape, generator=generator, device=form.device).to(form.dtype)

    (heads, shared), (size, width) = form.heads, form.sizes
    tensors = [
        draw_input(heads, size),
        draw_input(shared, size),
        draw_input(shared, width),
        draw_input(heads, width),
    ]
    tensors[0] *= size**-0.5 / form.scaling  # equal scores for any scaling
    try:
        # A layer that is computed again would take what is saved here for its own.
        with torch.inference_mode(kernel is flash), saved_tensors_hooks(_same, _same):
            first, second = (_kernel_results(form, kernel, packed, tensors) for _ in range(2))
    except Exception as error:  # a compiler's faults have no common class
        return f"cannot be compiled or launched ({error!r})"
    if not all(torch.equal(*pair) for pair in zip(first, second, strict=True)):
        return "gives other bits the second time"
    with saved_tensors_hooks(_same, _same):
        plain = partial(PackedAttention.__call__, exact=True)
        exact = _kernel_results(form, plain, packed, [x.double() for x in tensors])
    rough = form.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    limit = EXACT_TF32 if rough else EXACT[form.dtype]
    for ours, theirs in zip(first, exact, strict=False):  # flash attention has no gradients here
        norm = theirs.norm(dim=-1)
        off = (ours.double() - theirs).norm(dim=-1) / norm.clamp_min(norm.mean())
        if not bool((off <= limit).all()):
            return "gives another result than float64"
    return None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _kernel_results(
    form: AttentionForm, kernel: Kernel, packed: PackedAttention, tensors: list[Tensor]
) -> list[Tensor]:
    """Return the output without a gradient and, except in inference mode, the output with one and the
    gradients of query, key, value and sinks. `tensors` holds the first three as [1, T, heads, size], and the
    incoming gradient.
    """
    *inputs, upstream = (x.transpose(1, 2) for x in tensors)
    if form.sinks:
        inputs.append(torch.linspace(-1, 3, form.heads[0], device=form.device).to(upstream.dtype))

    def run(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        cap, window = SOFTCAP if form.capped else None, WINDOW if form.windowed else None
        return kernel(packed, AttentionCall(0, query, key, value, form.scaling, cap, window, sinks))

    with torch.no_grad():
        quiet = run(*inputs)
    if torch.is_inference_mode_enabled():
        return [quiet]
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        output = run(*leaves)
    return [quiet, output.detach(), *torch.autograd.grad(output, leaves, upstream.transpose(1, 2))]
