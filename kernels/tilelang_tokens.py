"""Single tokens in TileLang: log-probabilities and entropy of a chunk's logits, and their gradient.

The twin of `opd.kernels.triton_tokens`, for this machine's processor and for sm_90a. The forward reads each
logit once and keeps it. The backward reads it twice and writes it once. A lane keeps its maximum `m`, `sum
e^(z - m)` and, for the entropy, `sum e^(z - m) (z - m)`. Moving to a larger maximum is the exact algebra of
`opd.kernels.tilelang_rows`.
"""

# No `from __future__ import annotations` with kernels: TileLang evaluates their annotations.
# pyright: reportInvalidTypeForm=false
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opd.kernels import chunked, tilelang_rows, verification
from opd.kernels.chunked import compiled_token_rows
from opd.kernels.tilelang_rows import DTYPES, LOWEST, logit_reader, quiet_compilation, run_rows
from opd.kernels.tilelang_target import (
    Target,
    build_kernel,
    elementary_functions,
    target_of,
    tilelang_language,
)


def launch_statistics(logits: Tensor, ids: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    """`opd.kernels.divergences.token_statistics_` by the kernel, but `logits` stay unchanged."""
    picked = logits.gather(1, ids)
    maximum, log_total, spread = logits.new_empty(3, len(logits))
    _launch("statistics", logits, maximum, log_total, spread)
    logprobs = picked.sub_(maximum.unsqueeze(1)).sub_(log_total.unsqueeze(1))
    # An entropy is never negative, but rounding may give a few -1e-8. NaN passes through.
    return logprobs, spread.clamp_min_(0) if entropy else spread.zero_()


def launch_gradient(
    logits: Tensor,
    ids: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    rounded: Tensor | None,
) -> None:
    """`opd.kernels.divergences.token_gradient_` by the kernel."""
    spread = grad_logprobs.sum(dim=1).to(logits.dtype).neg_()
    if grad_entropy is None:
        _launch("gradient", logits, spread, spread, spread)
    else:
        of_entropy = grad_entropy.to(logits.dtype).contiguous()
        _launch("entropy_gradient", logits, spread, of_entropy, spread)
    logits.scatter_add_(1, ids, grad_logprobs.to(logits.dtype))
    if rounded is not None:
        rounded.copy_(logits.to(torch.bfloat16))  # not in place: the two may share memory


def _launch(work: str, logits: Tensor, *numbers: Tensor) -> None:
    kernel = build_kernel(token_kernel, target_of(logits), work, DTYPES[logits.dtype])
    run_rows(kernel, logits, *numbers)


@lru_cache(maxsize=64)
def trusted(vocabulary: int, device: torch.device) -> bool:
    """Return True if the kernels agree with float64 on this processor, with equal bits twice.

    As in `opd.kernels.tilelang_rows.trusted`, the result decides and never a clock.
    """
    quiet_compilation()
    fault = verification.token_fault(launch_statistics, launch_gradient, vocabulary, device)
    subject = f"the TileLang kernel of single tokens over {vocabulary} tokens"
    if not verification.accept_kernel(subject, fault, "here", "PyTorch's row kernel is"):
        return False
    tilelang_rows.PROVED.add("tokens")
    return True


class TokenLanes(NamedTuple):
    """Buffers `[1, lanes]` and, from `row_maximum` on, totals `[1]`."""

    maximum: Any
    total: Any
    mean: Any
    part: Any
    """One tile's maximum, then its share of `total`."""
    part_mean: Any
    x: Any
    e: Any
    row_maximum: Any
    row_total: Any
    row_mean: Any
    """Not yet divided by `row_total`."""

    @classmethod
    def allocate_lanes(cls, target: Target, dtype: str) -> "TokenLanes":
        """Allocate the buffers; call it inside a kernel."""
        buffer = target.lane_buffer(tilelang_language())
        lanes = [buffer((1, target.lanes), dtype) for _ in range(7)]
        return cls(*lanes, *(buffer((1,), dtype) for _ in range(3)))


def token_kernel(target: Target, work: str, dtype: str) -> Any:
    """Build the kernel's TileLang function, for any number of rows and any vocabulary.

    Arguments: logits `[R, V]` and three numbers a row `[R]`. For `statistics` it writes maximum, logarithm of
    the sum, and entropy there. For `gradient` and `entropy_gradient` it reads the negated sum of a row's
    gradients of log-probabilities, and the gradient of its entropy. It leaves in `logits` their gradient, to
    which the caller adds at the row's tokens.
    """
    T = tilelang_language()

    rows, vocabulary, tile = T.dynamic("rows"), T.dynamic("vocabulary"), target.lanes * target.unroll
    each, lanes = target.lane_loop(T), target.lanes
    start, rescale, merge = _lane_macros(target, work != "gradient", dtype)
    absorb = _absorb_tile(target, work != "gradient", dtype, rescale)
    write = _gradient_sweep(target, work == "entropy_gradient", dtype)

    @T.prim_func
    def tokens(
        logits: T.Tensor((rows, vocabulary), dtype),
        first: T.Tensor((rows,), dtype),
        second: T.Tensor((rows,), dtype),
        third: T.Tensor((rows,), dtype),
    ):
        with T.Kernel(rows, threads=target.threads) as row:
            s = TokenLanes.allocate_lanes(target, dtype)
            start(s)
            for t in T.serial(vocabulary // tile):
                absorb(s, logits, row, t * tile, vocabulary, False)
            for t in T.serial(vocabulary // tile, T.ceildiv(vocabulary, tile)):
                absorb(s, logits, row, t * tile, vocabulary, True)
            merge(s)
            if work != "statistics":
                for o, i in each(1, lanes):  # the lanes' sums are spent
                    s.part_mean[o, i] = s.row_mean[o] / s.row_total[o]
                for t in T.serial(vocabulary // tile):
                    write(s, logits, first, second, row, t * tile, vocabulary, False)
                for t in T.serial(vocabulary // tile, T.ceildiv(vocabulary, tile)):
                    write(s, logits, first, second, row, t * tile, vocabulary, True)
            else:
                for o in each(1):
                    first[row] = s.row_maximum[o]
                    second[row] = T.log(s.row_total[o])
                    third[row] = T.log(s.row_total[o]) - s.row_mean[o] / s.row_total[o]

    return tokens


def _lane_macros(target: Target, entropy: bool, dtype: str) -> tuple[Any, Any, Any]:
    """Build the macros that read no logits: `start`, `rescale` and `merge`. Without `entropy` means are 0."""
    T = tilelang_language()

    exp, each, lanes = elementary_functions(dtype).exp, target.lane_loop(T), target.lanes

    @T.macro
    def start(s):
        for o, i in each(1, lanes):
            s.maximum[o, i] = LOWEST
            s.total[o, i] = 0.0
            s.mean[o, i] = 0.0

    @T.macro
    def rescale(s):
        """Move the sums by `x`, which is at most 0."""
        for o, i in each(1, lanes):
            s.e[o, i] = exp(s.x[o, i])
        for o, i in each(1, lanes):
            if entropy:
                s.mean[o, i] = (s.mean[o, i] + s.total[o, i] * s.x[o, i]) * s.e[o, i]
            s.total[o, i] = s.total[o, i] * s.e[o, i]

    @T.macro
    def merge(s):
        T.reduce_max(s.maximum, s.row_maximum, dim=1)
        for o, i in each(1, lanes):
            s.x[o, i] = s.maximum[o, i] - s.row_maximum[o]
        rescale(s)
        T.reduce_sum(s.total, s.row_total, dim=1)
        T.reduce_sum(s.mean, s.row_mean, dim=1)

    return start, rescale, merge


def _absorb_tile(target: Target, entropy: bool, dtype: str, rescale: Any) -> Any:
    """Build the macro that adds a tile of the row to the lanes."""
    T = tilelang_language()

    exp, at = elementary_functions(dtype).exp, logit_reader(dtype)
    each, steps, lanes, unroll = target.lane_loop(T), target.step_loop(T), target.lanes, target.unroll

    @T.macro
    def absorb(s, logits, row, begin, vocabulary, masked):
        for o, i in each(1, lanes):
            s.part[o, i] = s.maximum[o, i]
        for u in steps(unroll):
            for o, i in each(1, lanes):
                s.part[o, i] = T.max(s.part[o, i], at(logits, row, begin + u * lanes + i, vocabulary, masked))
        for o, i in each(1, lanes):
            s.x[o, i] = s.maximum[o, i] - s.part[o, i]
        rescale(s)
        for o, i in each(1, lanes):
            s.maximum[o, i] = s.part[o, i]
            s.part[o, i] = 0.0
            s.part_mean[o, i] = 0.0
        for u in steps(unroll):
            for o, i in each(1, lanes):
                s.x[o, i] = at(logits, row, begin + u * lanes + i, vocabulary, masked) - s.maximum[o, i]
            for o, i in each(1, lanes):
                s.e[o, i] = exp(s.x[o, i])
            for o, i in each(1, lanes):
                s.part[o, i] = s.part[o, i] + s.e[o, i]
                if entropy:
                    s.part_mean[o, i] = s.part_mean[o, i] + s.e[o, i] * s.x[o, i]
        for o, i in each(1, lanes):
            s.total[o, i] = s.total[o, i] + s.part[o, i]
            s.mean[o, i] = s.mean[o, i] + s.part_mean[o, i]

    return absorb


def _gradient_sweep(target: Target, entropy: bool, dtype: str) -> Any:
    """Build the macro that writes `p (g - h (log p + H))` over a tile: `g` and `h` are the row's numbers."""
    T = tilelang_language()

    exp, at = elementary_functions(dtype).exp, logit_reader(dtype)
    each, steps, lanes, unroll = target.lane_loop(T), target.step_loop(T), target.lanes, target.unroll

    @T.macro
    def write(s, logits, spread, of_entropy, row, begin, vocabulary, masked):
        for u in steps(unroll):
            for o, i in each(1, lanes):
                s.x[o, i] = at(logits, row, begin + u * lanes + i, vocabulary, masked) - s.row_maximum[o]
            for o, i in each(1, lanes):
                s.e[o, i] = exp(s.x[o, i]) / s.row_total[o]
            for o, i in each(1, lanes):
                if not masked or begin + u * lanes + i < vocabulary:
                    if entropy:
                        # log p + H is z - max less the mean of it.
                        logits[row, begin + u * lanes + i] = s.e[o, i] * (
                            spread[row] - of_entropy[row] * (s.x[o, i] - s.part_mean[o, i])
                        )
                    else:
                        logits[row, begin + u * lanes + i] = s.e[o, i] * spread[row]

    return write


def _fits_kernel(logits: Tensor) -> bool:
    is_plain = logits.dtype == torch.float32 and logits.is_contiguous()
    return is_plain and trusted(logits.shape[1], logits.device)


ROWS = compiled_token_rows(_fits_kernel, launch_statistics, launch_gradient)
"""Functions for the operations of `opd.kernels.chunked`."""

_BOTH: dict[str, Any] = {"row_kernel": tilelang_rows.divergence_, "token_rows": ROWS}
OPERATIONS = {
    "linear_class_kl": partial(chunked.linear_class_kl, row_kernel=tilelang_rows.divergence_),
    "linear_kl": partial(chunked.linear_kl, **_BOTH),
    "linear_logprobs": partial(chunked.linear_logprobs, token_rows=ROWS),
    "linear_logprobs_entropy": partial(chunked.linear_logprobs_entropy, token_rows=ROWS),
    "linear_mixture_kl": partial(chunked.linear_mixture_kl, **_BOTH),
}
"""The operations with compiled kernels; the others are those of `opd.kernels.chunked`."""
