"""The row kernels in Triton: a chunk's logits to divergences and gradient, for any GPU that Triton knows.

One program per row makes two sweeps over the vocabulary (three for the Jensen-Shannon divergence). The first
keeps running statistics in every lane and merges them once at the end. The last writes the gradient. So each
logit is read twice and written once, where PyTorch's row kernels make some 26 passes. With `rounded` the
gradient is written in bfloat16 at once, for its two matmuls.

Triton comes with PyTorch for CUDA. Functions import it when they need it. A kernel is verified at its first
use, once for each (kind, vocabulary, gradient) in a process: see `trusted`.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from opd.kernels import chunked, divergences, verification
from opd.kernels.divergences import MAX_LOG_RATIO
from opd.kernels.triton_tokens import ROWS, TILE, WARPS

KINDS = ("reverse", "forward", "jsd")
"""Kinds of `opd.kernels.divergences` with a kernel here."""


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Return why the kernels cannot run here, with the fix. None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install PyTorch's build for CUDA, which brings it"
    if not torch.cuda.is_available():
        return "no CUDA device can be used"
    if torch.cuda.get_device_capability() < (8, 0):
        return "Triton's kernels here need a GPU of compute capability 8.0 or later; use chunked"
    return None


def divergence_(
    student: Tensor,
    teacher: Tensor,
    kind: str,
    beta: float,
    coef: Tensor | None,
    /,
    rounded: Tensor | None = None,
) -> Tensor:
    """Return the divergence of each row `[R]` between two chunks of logits `[R, V]`; a `RowKernel`.

    A gradient overwrites `student`, and the Jensen-Shannon divergence overwrites `teacher`. With `rounded`
    `[R, V]` bfloat16 the gradient goes there. It may be the memory of `student`'s own rows, so that row `r`
    begins where `student[r]` does. PyTorch computes logits that are not float32 on a GPU, and any kind
    without a verified kernel here.
    """
    fits = kind in KINDS and student.is_cuda and student.dtype == torch.float32
    if fits and trusted(kind, student.shape[1], student.device):
        return launch_rows(student, teacher, kind, beta, coef, rounded)
    values = divergences.divergence_(student, teacher, kind, beta, coef)
    if rounded is not None:
        rounded.copy_(student.to(torch.bfloat16))  # not in place: the two may share memory
    return values


def launch_rows(
    student: Tensor, teacher: Tensor, kind: str, beta: float, coef: Tensor | None, rounded: Tensor | None
) -> Tensor:
    """Run `divergence_` without checking `trusted`."""
    values = torch.empty(len(student), dtype=torch.float32, device=student.device)
    if not len(student):
        return values
    out = student if rounded is None else rounded
    coef = values if coef is None else coef.to(torch.float32).contiguous()
    # A kernel is launched on the current device, whatever its arguments are on.
    with torch.cuda.device_of(student):
        _kernel()[(len(student),)](
            student,
            teacher,
            out,
            coef,
            values,
            student.shape[1],
            student.stride(0),
            teacher.stride(0),
            out.stride(0),
            beta,
            KIND=KINDS.index(kind),
            GRADIENT=coef is not values,
            TILE=TILE,
            LIMIT=MAX_LOG_RATIO,
            num_warps=WARPS,
        )
    # A divergence is never negative, but rounding may give a few -1e-8. NaN passes through.
    return values.clamp_min_(0)


@lru_cache(maxsize=256)
def trusted(kind: str, vocabulary: int, device: torch.device) -> bool:
    """Return True if the kernel agrees with PyTorch's row kernel on this GPU: values, gradient in both
    dtypes, NaN, and equal bits twice, on `verification.ROWS` rows of the real vocabulary.

    It is checked once for each, so another compiler version or GPU is tested before it trains anything. A
    kernel that fails is skipped with a warning.
    """
    where = f"on {torch.cuda.get_device_name(device)}"
    return verification.verify_row_kernel("Triton", where, launch_rows, kind, vocabulary, device, rounds=True)


@lru_cache(maxsize=1)
def _kernel() -> Any:
    """Compile the function; one source for all kinds, each a compilation of its own."""
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    import triton.language.extra.libdevice  # pyright: ignore[reportMissingImports]

    @triton.jit
    def row(
        student,
        teacher,
        out,
        coef,
        values,
        vocabulary,
        student_stride,
        teacher_stride,
        out_stride,
        beta,
        KIND: tl.constexpr,
        GRADIENT: tl.constexpr,
        TILE: tl.constexpr,
        LIMIT: tl.constexpr,
    ):
        index = tl.program_id(0).to(tl.int64)
        student += index * student_stride
        teacher += index * teacher_stride
        out += index * out_stride
        lane = tl.arange(0, TILE)
        # KL(t || p) has the statistics of KL(p || t) with the roles exchanged.
        p = teacher if KIND == 1 else student
        q = student if KIND == 1 else teacher
        # First sweep, in every lane: the maxima, the sums of e^(z - max), and of e^(z_p - max) (z_p - z_q).
        # The difference is taken from that of the two first logits, so heads that differ by a constant lose
        # no digits.
        origin = tl.load(p) - tl.load(q)
        max_p = tl.full((TILE,), -1e30, tl.float32)
        max_q = tl.full((TILE,), -1e30, tl.float32)
        sum_p = tl.zeros((TILE,), tl.float32)
        sum_q = tl.zeros((TILE,), tl.float32)
        mean = tl.zeros((TILE,), tl.float32)
        for begin in range(0, vocabulary, TILE):
            at = begin + lane
            inside = at < vocabulary
            x = tl.load(p + at, mask=inside, other=-1e30)
            y = tl.load(q + at, mask=inside, other=-1e30)
            top_p = tl.maximum(max_p, x)
            top_q = tl.maximum(max_q, y)
            shrink = tl.exp(max_p - top_p)
            e = tl.exp(x - top_p)
            sum_p = sum_p * shrink + e
            mean = mean * shrink + e * (x - y - origin)
            sum_q = sum_q * tl.exp(max_q - top_q) + tl.exp(y - top_q)
            max_p = top_p
            max_q = top_q
        row_max_p = tl.max(max_p, 0)
        row_max_q = tl.max(max_q, 0)
        share_p = tl.exp(max_p - row_max_p)
        row_sum_p = tl.sum(sum_p * share_p, 0)
        row_sum_q = tl.sum(sum_q * tl.exp(max_q - row_max_q), 0)
        # A lane that saw no logit has a maximum of -1e30 and so a share of 0.
        row_mean = tl.sum(mean * share_p, 0) / row_sum_p - ((row_max_p - row_max_q) - origin)
        log_ratio = tl.log(row_sum_p / row_sum_q)
        if KIND == 2:
            total_p = tl.zeros((TILE,), tl.float32)
            total_q = tl.zeros((TILE,), tl.float32)
            for begin in range(0, vocabulary, TILE):
                at = begin + lane
                inside = at < vocabulary
                x = tl.load(p + at, mask=inside, other=-1e30) - row_max_p
                y = tl.load(q + at, mask=inside, other=-1e30) - row_max_q
                r = x - y - log_ratio
                # Unlike min and max, selections pass a NaN on.
                r = tl.where(r < -LIMIT, -LIMIT, tl.where(r > LIMIT, LIMIT, r))
                u = -tl.extra.libdevice.log1p(beta * tl.extra.libdevice.expm1(-r))
                v = -tl.extra.libdevice.log1p((1 - beta) * tl.extra.libdevice.expm1(r))
                total_p += tl.where(inside, tl.exp(x) * u, 0.0)
                total_q += tl.where(inside, tl.exp(y) * v, 0.0)
            row_mean = tl.sum(total_p, 0) / row_sum_p
            tl.store(values + index, beta * (tl.sum(total_q, 0) / row_sum_q) + (1 - beta) * row_mean)
        else:
            tl.store(values + index, row_mean - log_ratio)
        if GRADIENT:
            weight = tl.load(coef + index)
            for begin in range(0, vocabulary, TILE):
                at = begin + lane
                inside = at < vocabulary
                x = tl.load(p + at, mask=inside, other=-1e30) - row_max_p
                y = tl.load(q + at, mask=inside, other=-1e30) - row_max_q
                if KIND == 0:
                    g = tl.exp(x) * (weight / row_sum_p) * (x - y - row_mean)
                elif KIND == 1:
                    g = weight * (tl.exp(y) / row_sum_q - tl.exp(x) / row_sum_p)
                else:
                    r = x - y - log_ratio
                    r = tl.where(r < -LIMIT, -LIMIT, tl.where(r > LIMIT, LIMIT, r))
                    u = -tl.extra.libdevice.log1p(beta * tl.extra.libdevice.expm1(-r))
                    g = tl.exp(x) * ((1 - beta) * weight / row_sum_p) * (u - row_mean)
                # `out` may lie in this row's own memory, two bytes where four were read: no warp may write
                # data that another has still to read.
                tl.debug_barrier()
                tl.store(out + at, g.to(out.dtype.element_ty), mask=inside)

    return row


OPERATIONS = {
    "linear_class_kl": partial(chunked.linear_class_kl, row_kernel=divergence_),
    "linear_kl": partial(chunked.linear_kl, row_kernel=divergence_, rounds=True, token_rows=ROWS),
    "linear_logprobs": partial(chunked.linear_logprobs, token_rows=ROWS),
    "linear_logprobs_entropy": partial(chunked.linear_logprobs_entropy, token_rows=ROWS),
    "linear_mixture_kl": partial(
        chunked.linear_mixture_kl, row_kernel=divergence_, rounds=True, token_rows=ROWS
    ),
}
"""The operations with these row kernels; the others are those of `opd.kernels.chunked`."""
