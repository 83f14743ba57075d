"""Single tokens in Triton: log-probabilities and entropy of a chunk's logits, and their gradient.

One program per row. The forward reads each logit once. The backward reads it twice and writes it once, in
bfloat16 if its two matmuls use that. PyTorch's form (`opd.kernels.divergences`) makes some 23 passes. As in
`opd.kernels.triton_rows`, functions import Triton when they need it, and a kernel is verified at its first
use: see `trusted`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from opd.kernels import verification
from opd.kernels.chunked import compiled_token_rows

# A row's tile: 8 logits of each model a lane. More lanes would leave a small vocabulary idle, more logits a
# lane would spill the statistics.
TILE = 2048
WARPS = 8


def launch_statistics(logits: Tensor, ids: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    """`opd.kernels.divergences.token_statistics_` by the kernel, but `logits` stay unchanged."""
    picked = logits.gather(1, ids)
    found = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    _launch_tokens(logits, logits, found, entropy=entropy, gradient=False)
    largest, log_total, spread = found
    return picked.sub_(largest.unsqueeze(1)).sub_(log_total.unsqueeze(1)), spread


def launch_gradient(
    logits: Tensor, ids: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor | None, rounded: Tensor | None
) -> None:
    """`opd.kernels.divergences.token_gradient_` by the kernel. With `rounded` [R, V] bfloat16 the gradient
    goes there. It may be the memory of `logits`' own rows, so that row `r` begins where `logits[r]` does.
    """
    single = ids.shape[1] == 1
    out = logits if rounded is None or not single else rounded
    given = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    given[0] = grad_logprobs.sum(dim=1).neg_()
    if grad_entropy is not None:
        given[1] = grad_entropy
    chosen = ids.contiguous() if single else None
    _launch_tokens(logits, out, given, entropy=grad_entropy is not None, gradient=True, ids=chosen)
    if not single:
        logits.scatter_add_(1, ids, grad_logprobs.to(logits.dtype))
        if rounded is not None:
            rounded.copy_(logits.to(torch.bfloat16))  # not in place: the two may share memory


def _launch_tokens(
    logits: Tensor,
    out: Tensor,
    numbers: Tensor,
    *,
    entropy: bool,
    gradient: bool,
    ids: Tensor | None = None,
) -> None:
    """Run the kernel on the rows of `logits` [R, V]. It writes maximum, logarithm of the sum and entropy into
    `numbers` [3, R]. For a `gradient` it reads a row's two there, and adds at the contiguous `ids` [R, 1].
    """
    if not len(logits):
        return
    # A kernel is launched on the current device, whatever its arguments are on.
    with torch.cuda.device_of(logits):
        _kernel()[(len(logits),)](
            logits,
            out,
            numbers,
            numbers if ids is None else ids,
            len(logits),
            logits.shape[1],
            logits.stride(0),
            out.stride(0),
            GRADIENT=gradient,
            ENTROPY=entropy,
            SINGLE=ids is not None,
            TILE=TILE,
            num_warps=WARPS,
        )


@lru_cache(maxsize=64)
def trusted(vocabulary: int, device: torch.device) -> bool:
    """Return True if the kernel agrees with float64 on this GPU, with equal bits twice (`token_fault`)."""
    fault = verification.token_fault(launch_statistics, launch_gradient, vocabulary, device)
    subject = f"the Triton kernel of single tokens over {vocabulary} tokens"
    return verification.accept_kernel(
        subject, fault, f"on {torch.cuda.get_device_name(device)}", "PyTorch's row kernel is"
    )


@lru_cache(maxsize=1)
def _kernel() -> Any:
    """Compile the function."""
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    @triton.jit
    def token(
        logits,
        out,
        numbers,
        ids,
        rows,
        vocabulary,
        stride,
        out_stride,
        GRADIENT: tl.constexpr,
        ENTROPY: tl.constexpr,
        SINGLE: tl.constexpr,
        TILE: tl.constexpr,
    ):
        index = tl.program_id(0).to(tl.int64)
        logits += index * stride
        out += index * out_stride
        lane = tl.arange(0, TILE)
        # First sweep, in every lane: the maximum, and the sums of e^(z - max) and of e^(z - max) (z - max).
        top = tl.full((TILE,), -1e30, tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        mean = tl.zeros((TILE,), tl.float32)
        for begin in range(0, vocabulary, TILE):
            at = begin + lane
            x = tl.load(logits + at, mask=at < vocabulary, other=-1e30)
            higher = tl.maximum(top, x)
            shrink = tl.exp(top - higher)
            e = tl.exp(x - higher)
            if ENTROPY:
                mean = shrink * (mean + total * (top - higher)) + e * (x - higher)
            total = total * shrink + e
            top = higher
        row_top = tl.max(top, 0)
        share = tl.exp(top - row_top)
        row_total = tl.sum(total * share, 0)
        log_total = tl.log(row_total)
        entropy = log_total * 0.0
        if ENTROPY:
            # A lane that saw no logit has a maximum of -1e30 and so a share of 0.
            entropy = log_total - tl.sum(share * (mean + total * (top - row_top)), 0) / row_total
        if GRADIENT:
            spread = tl.load(numbers + index)
            of_entropy = tl.load(numbers + rows + index)
            chosen = -1
            if SINGLE:
                chosen = tl.load(ids + index)
            for begin in range(0, vocabulary, TILE):
                at = begin + lane
                inside = at < vocabulary
                z = tl.load(logits + at, mask=inside, other=-1e30) - row_top
                factor = spread
                if ENTROPY:
                    factor = spread - of_entropy * (z - log_total + entropy)
                g = tl.exp(z) / row_total * factor
                if SINGLE:
                    g = tl.where(at == chosen, g - spread, g)
                # `out` may lie in this row's own memory, two bytes where four were read: no warp may write
                # data that another has still to read.
                tl.debug_barrier()
                tl.store(out + at, g.to(out.dtype.element_ty), mask=inside)
        else:
            tl.store(numbers + index, row_top)
            tl.store(numbers + rows + index, log_total)
            # An entropy is never negative, but rounding may give a few -1e-8. A selection passes NaN on.
            tl.store(numbers + 2 * rows + index, tl.where(entropy < 0, 0.0, entropy))

    return token


def _fits_kernel(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype == torch.float32 and trusted(logits.shape[1], logits.device)


ROWS = compiled_token_rows(_fits_kernel, launch_statistics, launch_gradient, rounds=True)
"""Functions for the operations of `opd.kernels.chunked`."""
