"""Token-chunked operations for any device: exact results without ever holding `[T, V]`.

Only one chunk of tokens has its logits in memory. The divergences compute their gradient in the forward,
while those logits exist. Log-probabilities recompute them in the backward. README.md has the derivations.
Names and arguments equal those of `opd.kernels.reference`. Call both through `opd.kernels.ops`, which checks
inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opd.kernels.divergences import (
    ALL_COLUMNS,
    Columns,
    RowKernel,
    divergence_,
    first_halves,
    log_softmax_,
    row_blocks,
    subtract_max_,
    token_gradient_,
    token_statistics_,
)
from opd.kernels.head import Head, statistics_dtype
from opd.kernels.projection import (
    Gradients,
    Rows,
    blocks_with_slope,
    matmul_rows,
    padded_rows,
    some_of,
    token_chunks,
    write_logits,
)
from opd.kernels.token_classes import TokenClasses

__all__ = [
    "geometric_floor",
    "linear_class_kl",
    "linear_kl",
    "linear_logprobs",
    "linear_logprobs_entropy",
    "linear_mixture_kl",
    "linear_topk",
]

# Maximum relative deviation of a token's upstream gradient from a multiple of its declared weight.
PROPORTIONAL = 1e-6


class TokenRows(NamedTuple):
    """Functions for single tokens of rows of logits."""

    statistics: Callable[[Tensor, Tensor, bool, Columns], tuple[Tensor, Tensor]] = token_statistics_
    gradient: Callable[..., None] = token_gradient_
    """Signature of `token_gradient_`."""
    rounds: bool = False
    """`rounded` saves a pass."""
    keeps: bool = False
    """`statistics` keeps the logits unchanged."""


TOKEN_ROWS = TokenRows()


def compiled_token_rows(
    fits: Callable[[Tensor], bool],
    statistics: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]],
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], None],
    *,
    rounds: bool = False,
) -> TokenRows:
    """Return functions that launch a compiled kernel for logits of the whole vocabulary that `fits`, and
    PyTorch's for others. Its `statistics(logits, ids, entropy)` keep the logits. `gradient(logits, ids,
    grad_logprobs, grad_entropy, rounded)` is `token_gradient_`.
    """

    def keep_statistics(
        logits: Tensor, ids: Tensor, entropy: bool, columns: Columns = ALL_COLUMNS
    ) -> tuple[Tensor, Tensor]:
        if columns is ALL_COLUMNS and fits(logits):
            return statistics(logits, ids, entropy)
        return token_statistics_(logits.clone(), ids, entropy, columns)

    def write_gradient(
        logits: Tensor,
        ids: Tensor,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
        columns: Columns = ALL_COLUMNS,
        rounded: Tensor | None = None,
    ) -> None:
        if columns is ALL_COLUMNS and fits(logits):
            gradient(logits, ids, grad_logprobs, grad_entropy, rounded)
        else:
            token_gradient_(logits, ids, grad_logprobs, grad_entropy, columns, rounded)

    return TokenRows(keep_statistics, write_gradient, rounds=rounds, keeps=True)


@dataclass(frozen=True)
class TokenNotes:
    """The student's statistics of single tokens, noted while a divergence has their logits, so they need no
    product of their own. Tokens that the divergence leaves out stay 0.
    """

    ids: Tensor
    """[T, 1] int64."""
    logprobs: Tensor
    """[T]"""
    entropy: Tensor
    """[T] nats."""

    @classmethod
    def empty_for(cls, ids: Tensor, dtype: torch.dtype) -> TokenNotes:
        """Allocate notes for the tokens `ids` [T], in the `dtype` of their statistics."""
        values = torch.zeros(2, len(ids), dtype=dtype, device=ids.device)
        return cls(as_matrix(ids), values[0], values[1])

    @classmethod
    def join(cls, parts: Sequence[TokenNotes]) -> TokenNotes:
        """Concatenate notes of following tokens."""
        fields = ((one.ids, one.logprobs, one.entropy) for one in parts)
        return cls(*map(torch.cat, zip(*fields, strict=True)))

    def note_tokens(self, rows: Rows, logits: Tensor, ids: Tensor, spec: _Divergence) -> None:
        """Note the tokens at `rows`. Their `logits` [M, V] stay unchanged."""
        statistics = []
        for block in spec.columns.kernel_blocks(logits):
            part = logits[block] if spec.token_rows.keeps else logits[block].clone()
            statistics.append(spec.token_rows.statistics(part, ids[block], True, spec.columns))
        for notes, parts in zip((self.logprobs, self.entropy), zip(*statistics, strict=True), strict=True):
            values = torch.cat([part.reshape(-1) for part in parts])[: len(notes[rows])]
            notes[rows] = values.to(notes.dtype)


@dataclass(frozen=True)
class _Divergence:
    """Settings of a divergence from a teacher."""

    teacher: Callable[[Rows, Tensor], None]
    """Writes the teacher's tempered logits of a chunk of tokens into a given `[M, V]`."""
    kind: str
    beta: float
    temperature: float
    chunk: int
    dtype: torch.dtype
    row_kernel: RowKernel
    columns: Columns
    rounds: bool = False
    """The row kernel takes `rounded`, memory for the gradient in bfloat16."""
    notes: TokenNotes | None = None
    token_rows: TokenRows = TOKEN_ROWS


def _run_chunks(
    hidden: Tensor,
    head: Head,
    token_weight: Tensor,
    spec: _Divergence,
    needs: tuple[bool, bool, bool],
    counted: Tensor | None = None,
    notes: TokenNotes | None = None,
) -> tuple[Tensor, Gradients]:
    """The per-token divergence `[T]` and the gradient of `sum(token_weight * divergence)`, chunk by chunk.

    `counted` [M] int64 are the tokens with a nonzero weight, if known. `notes` are filled.
    """
    values = torch.zeros(hidden.shape[0], dtype=spec.dtype, device=hidden.device)
    some, tokens = some_of(token_weight != 0, counted)
    gradients = Gradients(hidden, head, needs, spec.dtype, single=tokens <= spec.chunk)
    shape = (matmul_rows(min(spec.chunk, len(hidden)), spec.chunk), head.vocabulary)
    student_buffer = torch.empty(shape, dtype=spec.dtype, device=hidden.device)
    teacher_buffer = torch.empty_like(student_buffer)
    for rows in token_chunks(hidden.shape[0], spec.chunk, some):
        part, weights = padded_rows(hidden, rows, spec.chunk), padded_rows(token_weight, rows, spec.chunk)
        student, teacher = student_buffer[: len(part)], teacher_buffer[: len(part)]
        write_logits(part, head, spec.temperature, student)
        if notes is not None:
            notes.note_tokens(rows, student, padded_rows(notes.ids, rows, spec.chunk), spec)
        spec.teacher(rows, teacher)
        coef = weights * (head.scale / spec.temperature) if any(needs) else None
        if coef is not None and spec.rounds and gradients.narrow and head.softcap is None and not needs[2]:
            gradient = first_halves(student)
            rounding: Any = spec.row_kernel
            chunk_values = rounding(student, teacher, spec.kind, spec.beta, coef, rounded=gradient)
        else:
            gradient = student
            chunk_values = _row_values(student, teacher, coef, head, spec)
        values[rows] = chunk_values[: len(values[rows])]
        if any(needs):
            gradients.add(rows, part, gradient, spare=teacher_buffer)
    return values, gradients


def _row_values(
    student: Tensor, teacher: Tensor, coef: Tensor | None, head: Head, spec: _Divergence
) -> Tensor:
    """Return the row kernel's values `[M]` of logits `[M, V]`, with the softcap's slope if there is one."""
    if head.softcap is None or coef is None:
        return spec.row_kernel(student, teacher, spec.kind, spec.beta, coef)
    values = torch.empty(len(student), dtype=spec.dtype, device=student.device)
    for block, logits in blocks_with_slope(student, head, spec.temperature, True, spec.columns):
        values[block] = spec.row_kernel(logits, teacher[block], spec.kind, spec.beta, coef[block])
    return values


class _LinearDivergence(torch.autograd.Function):
    """Computes the gradient for the declared token weights in the forward. The backward scales it if exact.

    It is exact if the upstream gradient is a multiple of the declared weights, or if only the hidden states
    need a gradient (each row scales by itself). Otherwise the chunks run once more for the true one. If the
    head has a `total`, the weight's part is in a sum with others' and cannot be scaled. Unless the upstream
    gradient equals the declared weights, the chunks run once more for the difference, as gradients are
    linear.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_weight: Tensor,
        head: Head,
        spec: _Divergence,
        counted: Tensor | None,
    ) -> Tensor:
        needs = tuple(ctx.needs_input_grad[:3])
        values, gradients = _run_chunks(hidden, head, token_weight, spec, needs, counted, spec.notes)
        if any(needs):
            ctx.save_for_backward(hidden, weight, bias, token_weight)
            ctx.head, ctx.spec, ctx.needs, ctx.gradients = head, spec, needs, gradients
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_weight = ctx.saved_tensors
        # Given away, so that autograd can keep the buffers instead of copying them. A second backward through
        # a retained graph finds none and recomputes.
        gradients, ctx.gradients = ctx.gradients, None
        upstream = torch.where(token_weight != 0, upstream, 0)
        head = replace(ctx.head, weight=weight, bias=bias)
        if gradients is not None and gradients.shared:
            difference = (upstream - token_weight).abs()
            if not bool((difference <= PROPORTIONAL * token_weight.abs()).all()):  # else equal up to rounding
                _, correction = _run_chunks(hidden, head, upstream - token_weight, ctx.spec, ctx.needs)
                gradients.merge_from(correction)
        elif gradients is None or not _rescale_gradients(gradients, upstream, token_weight):
            # Released first: the recomputation needs the same memory again.
            gradients = None
            _, gradients = _run_chunks(hidden, head, upstream, ctx.spec, ctx.needs)
        return (*gradients.as_inputs(hidden, ctx.head), None, None, None, None)


def _rescale_gradients(gradients: Gradients, upstream: Tensor, token_weight: Tensor) -> bool:
    """Turn the gradient for `token_weight` `[T]` into the one for `upstream` `[T]`. Return False if scaling
    is not exact."""
    if len(upstream) == 0:
        return True
    ratio = torch.where(token_weight != 0, upstream / token_weight, 0)
    if gradients.weight is None and gradients.bias is None:
        if gradients.hidden is not None:
            gradients.hidden.mul_(ratio.unsqueeze(1))
        return bool(torch.isfinite(ratio).all())
    common = ratio.index_select(0, token_weight.abs().argmax(keepdim=True))
    expected = common * token_weight
    proportional = ((upstream - expected).abs() <= PROPORTIONAL * expected.abs()).all()
    holds, factor = torch.cat([proportional.to(common.dtype).unsqueeze(0), common]).tolist()  # read once
    if not holds:
        return False
    if factor != 1.0:
        for gradient in (gradients.hidden, gradients.weight, gradients.bias):
            if gradient is not None:
                gradient.mul_(common)
    return True


def _apply_divergence(
    hidden: Tensor, head: Head, weight: Tensor | None, spec: _Divergence, counted: Tensor | None
) -> Tensor:
    if weight is None:
        weight = torch.ones(hidden.shape[0], device=hidden.device)
    declared, leaves = weight.detach().to(spec.dtype), (hidden, head.weight, head.bias)
    if not torch.is_grad_enabled():  # even then a function sees that an input requires a gradient
        leaves = tuple(None if leaf is None else leaf.detach() for leaf in leaves)
    return _LinearDivergence.apply(*leaves, declared, head, spec, counted)


def linear_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    *,
    kind: str,
    beta: float,
    temperature: float,
    weight: Tensor | None,
    chunk: int,
    counted: Tensor | None = None,
    row_kernel: RowKernel = divergence_,
    columns: Columns = ALL_COLUMNS,
    rounds: bool = False,
    notes: TokenNotes | None = None,
    token_rows: TokenRows = TOKEN_ROWS,
) -> Tensor:
    """See `opd.kernels.ops.linear_kl`. A compiled `row_kernel` may replace the PyTorch one.

    `columns` is the heads' part of the vocabulary, with a `row_kernel` made for the same part. With `rounds`
    the row kernel takes `rounded=` and writes the gradient in bfloat16 at once.
    """
    teacher_hidden = teacher_hidden.detach()

    def write_teacher(rows: Rows, out: Tensor) -> None:
        write_logits(padded_rows(teacher_hidden, rows, chunk), teacher_head, temperature, out)

    dtype = statistics_dtype(student_hidden, student_head.weight, teacher_hidden, teacher_head.weight)
    how = (temperature, chunk, dtype, row_kernel, columns, rounds, notes, token_rows)
    spec = _Divergence(write_teacher, kind, beta, *how)
    return _apply_divergence(student_hidden, student_head, weight, spec, counted)


def linear_class_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    classes: tuple[TokenClasses, TokenClasses],
    *,
    kind: str,
    beta: float,
    temperature: float,
    weight: Tensor | None,
    chunk: int,
    row_kernel: RowKernel = divergence_,
) -> Tensor:
    """See `opd.kernels.ops.linear_class_kl`. The row kernel sees a logit for each class."""
    teacher_hidden, (ours, theirs) = teacher_hidden.detach(), classes
    dtype = statistics_dtype(student_hidden, student_head.weight, teacher_hidden, teacher_head.weight)
    buffer = _chunk_buffer(len(teacher_hidden), chunk, teacher_head, teacher_hidden, dtype)

    def write_teacher(rows: Rows, out: Tensor) -> None:
        part = padded_rows(teacher_hidden, rows, chunk)
        logits = write_logits(part, teacher_head, temperature, buffer[: len(part)])
        for block in row_blocks(logits):
            out[block, : theirs.count] = theirs.group_logits(logits[block])

    def class_rows(
        student: Tensor, teacher: Tensor, kind: str, beta: float, coef: Tensor | None, /
    ) -> Tensor:
        values = student.new_empty(len(student))
        for block in row_blocks(student):
            grouped, taught = ours.group_logits(student[block]), teacher[block, : ours.count].contiguous()
            gradient = grouped.clone()
            values[block] = row_kernel(gradient, taught, kind, beta, None if coef is None else coef[block])
            if coef is not None:
                ours.spread_gradient_(student[block], grouped, gradient)
        return values

    spec = _Divergence(write_teacher, kind, beta, temperature, chunk, dtype, class_rows, ALL_COLUMNS)
    return _apply_divergence(student_hidden, student_head, weight, spec, None)


def linear_mixture_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hiddens: Sequence[Tensor],
    teacher_heads: Sequence[Head],
    weights: Sequence[float],
    *,
    temperature: float,
    weight: Tensor | None,
    chunk: int,
    counted: Tensor | None = None,
    row_kernel: RowKernel = divergence_,
    columns: Columns = ALL_COLUMNS,
    rounds: bool = False,
    notes: TokenNotes | None = None,
    token_rows: TokenRows = TOKEN_ROWS,
) -> Tensor:
    """See `opd.kernels.ops.linear_mixture_kl`: a reverse KL with the teacher logits `log sum_i w_i t_i`."""
    hiddens = [hidden.detach() for hidden in teacher_hiddens]

    def write_mixture(rows: Rows, out: Tensor) -> None:
        one = torch.empty_like(out) if len(hiddens) > 1 else out
        for i, (hidden, head, share) in enumerate(zip(hiddens, teacher_heads, weights, strict=True)):
            write_logits(padded_rows(hidden, rows, chunk), head, temperature, one if i else out)
            for block in columns.kernel_blocks(out):
                logprobs = log_softmax_((one if i else out)[block], columns).add_(math.log(share))
                if i:
                    torch.logaddexp(out[block], logprobs, out=out[block])

    tensors = [student_hidden, student_head.weight, *hiddens, *(head.weight for head in teacher_heads)]
    dtype = statistics_dtype(*tensors)
    how = (temperature, chunk, dtype, row_kernel, columns, rounds, notes, token_rows)
    spec = _Divergence(write_mixture, "reverse", 0.5, *how)
    return _apply_divergence(student_hidden, student_head, weight, spec, counted)


class _Settings(NamedTuple):
    temperature: float
    chunk: int
    entropy: bool
    columns: Columns
    token_rows: TokenRows


def _chunk_buffer(tokens: int, chunk: int, head: Head, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate memory for one chunk's logits `[M, V]`."""
    return torch.empty(
        matmul_rows(min(chunk, tokens), chunk), head.vocabulary, dtype=dtype, device=like.device
    )


class _LinearLogprobs(torch.autograd.Function):
    """Log-probabilities `[N, K]` and entropy `[N]`. The backward recomputes each chunk's logits.

    A token whose upstream gradients are all zero is skipped.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        head: Head,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        dtype, chunk, columns = statistics_dtype(hidden, weight), settings.chunk, settings.columns
        logprobs = torch.empty(ids.shape, dtype=dtype, device=hidden.device)
        entropy = torch.empty(len(ids), dtype=dtype, device=hidden.device)
        buffer = _chunk_buffer(len(hidden), chunk, head, hidden, dtype)
        for rows in token_chunks(len(hidden), chunk):
            part, part_ids, count = (
                padded_rows(hidden, rows, chunk),
                padded_rows(ids, rows, chunk),
                len(ids[rows]),
            )
            logits = write_logits(part, head, settings.temperature, buffer[: len(part)])
            statistics = [
                settings.token_rows.statistics(logits[block], part_ids[block], settings.entropy, columns)
                for block in columns.kernel_blocks(logits)
            ]
            logprobs[rows] = torch.cat([values for values, _ in statistics])[:count]
            entropy[rows] = torch.cat([values for _, values in statistics])[:count]
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.head, ctx.settings = head, settings
        ctx.set_materialize_grads(False)
        if not settings.entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, _, ids = ctx.saved_tensors
        head, settings, chunk = ctx.head, ctx.settings, ctx.settings.chunk
        dtype = statistics_dtype(hidden, weight)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(ids.shape, dtype=dtype, device=hidden.device)
        counted = (grad_logprobs != 0).any(dim=1)
        if not settings.entropy:
            grad_entropy = None
        if grad_entropy is not None:
            counted |= grad_entropy != 0
        some, tokens = some_of(counted)
        gradients = Gradients(hidden, head, tuple(ctx.needs_input_grad[:3]), dtype, single=tokens <= chunk)
        buffer = _chunk_buffer(len(hidden), chunk, head, hidden, dtype)
        chain = head.scale / settings.temperature
        rounds = settings.token_rows.rounds and gradients.narrow and head.softcap is None
        rounds &= gradients.bias is None
        for rows in token_chunks(len(hidden), chunk, some):
            part, part_ids = padded_rows(hidden, rows, chunk), padded_rows(ids, rows, chunk)
            logits = write_logits(part, head, settings.temperature, buffer[: len(part)])
            part_grad = padded_rows(grad_logprobs, rows, chunk) * chain
            part_entropy = None if grad_entropy is None else padded_rows(grad_entropy, rows, chunk) * chain
            gradient_ = settings.token_rows.gradient
            if rounds:
                rounded = first_halves(logits)
                gradient_(logits, part_ids, part_grad, part_entropy, settings.columns, rounded)
                gradients.add(rows, part, rounded)
                continue
            blocks = blocks_with_slope(logits, head, settings.temperature, True, settings.columns)
            for block, values in blocks:
                block_entropy = None if part_entropy is None else part_entropy[block]
                gradient_(values, part_ids[block], part_grad[block], block_entropy, settings.columns)
            gradients.add(rows, part, logits)
        return (*gradients.as_inputs(hidden, head), None, None, None)


def as_matrix(ids: Tensor) -> Tensor:
    """Return `[N]` as `[N, 1]`, and `[N, K]` unchanged; int64."""
    return ids.long().unsqueeze(1) if ids.ndim == 1 else ids.long()


def linear_logprobs(
    hidden: Tensor,
    head: Head,
    ids: Tensor,
    *,
    temperature: float,
    chunk: int,
    columns: Columns = ALL_COLUMNS,
    token_rows: TokenRows = TOKEN_ROWS,
) -> Tensor:
    """See `opd.kernels.ops.linear_logprobs`. `columns` is the head's part of the vocabulary."""
    matrix, settings = as_matrix(ids), _Settings(temperature, chunk, False, columns, token_rows)
    logprobs, _ = _LinearLogprobs.apply(hidden, head.weight, head.bias, matrix, head, settings)
    return logprobs.reshape(ids.shape)


def linear_logprobs_entropy(
    hidden: Tensor,
    head: Head,
    ids: Tensor,
    *,
    temperature: float,
    chunk: int,
    columns: Columns = ALL_COLUMNS,
    token_rows: TokenRows = TOKEN_ROWS,
) -> tuple[Tensor, Tensor]:
    """See `opd.kernels.ops.linear_logprobs_entropy`. `columns` is the head's part of the vocabulary."""
    matrix, settings = as_matrix(ids), _Settings(temperature, chunk, True, columns, token_rows)
    logprobs, entropy = _LinearLogprobs.apply(hidden, head.weight, head.bias, matrix, head, settings)
    return logprobs.reshape(ids.shape), entropy


@torch.no_grad()
def linear_topk(
    hidden: Tensor,
    head: Head,
    k: int,
    *,
    temperature: float,
    chunk: int,
    columns: Columns = ALL_COLUMNS,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `opd.kernels.ops.linear_topk`. `columns` is the head's part of the vocabulary."""
    dtype = statistics_dtype(hidden, head.weight)
    tokens, device = len(hidden), hidden.device
    ids = torch.empty(tokens, k, dtype=torch.int64, device=device)
    logprobs = torch.empty(tokens, k, dtype=dtype, device=device)
    tail = torch.empty(tokens, dtype=dtype, device=device)
    buffer = _chunk_buffer(tokens, chunk, head, hidden, dtype)
    for rows in token_chunks(tokens, chunk):
        part = padded_rows(hidden, rows, chunk)
        logits = write_logits(part, head, temperature, buffer[: len(part)])
        blocks = [block_topk_(logits[block], k, columns) for block in columns.kernel_blocks(logits)]
        for result, parts in zip((ids, logprobs, tail), zip(*blocks, strict=True), strict=True):
            result[rows] = torch.cat(parts)[: len(result[rows])]
    return ids, logprobs, tail


def block_topk_(logits: Tensor, k: int, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and log-probabilities `[R, k]` and the rest's probability `[R]`. Overwrites `logits`."""
    subtract_max_(logits, columns)
    top, top_ids = columns.global_topk(logits, k)
    exp = logits.exp_()
    total = exp.sum(dim=1, keepdim=True)
    # Sum the tail itself: 1 - sum(top) would lose a tail below 1e-7.
    total, tail = columns.reduce_sum(total, columns.clear_ids_(exp, top_ids).sum(dim=1, keepdim=True))
    return top_ids, top - total.log(), (tail / total).squeeze(1)


@torch.no_grad()
def geometric_floor(
    teacher_hiddens: Sequence[Tensor],
    teacher_heads: Sequence[Head],
    weights: Sequence[float] | Sequence[Tensor],
    *,
    temperature: float,
    chunk: int,
    columns: Columns = ALL_COLUMNS,
) -> Tensor:
    """See `opd.kernels.ops.geometric_floor`. `columns` is the heads' part of the vocabulary."""
    dtype = statistics_dtype(*teacher_hiddens, *(head.weight for head in teacher_heads))
    tokens = len(teacher_hiddens[0])
    floor = torch.empty(tokens, dtype=dtype, device=teacher_hiddens[0].device)
    pool = _chunk_buffer(tokens, chunk, teacher_heads[0], floor, dtype)
    one = torch.empty_like(pool)
    for rows in token_chunks(tokens, chunk):
        count = len(floor[rows])
        part = pool[: matmul_rows(count, chunk)].zero_()
        # Row scalars in float64: the floor is a small difference of numbers near log V.
        log_sums = torch.zeros(len(part), dtype=torch.float64, device=floor.device)
        for hidden, head, weight in zip(teacher_hiddens, teacher_heads, weights, strict=True):
            logits = write_logits(padded_rows(hidden, rows, chunk), head, temperature, one[: len(part)])
            shares = None
            if isinstance(weight, Tensor):
                shares = log_sums.new_zeros(len(part), 1)
                shares[:count, 0] = weight[rows]
            for block in columns.kernel_blocks(part):
                subtract_max_(logits[block], columns)
                (total,) = columns.reduce_sum(logits[block].exp().sum(dim=1, keepdim=True).double())
                if shares is None:
                    log_sums[block] += weight * total.squeeze(1).log()
                    part[block].add_(logits[block], alpha=weight)  # pyright: ignore[reportArgumentType]
                else:
                    log_sums[block] += (shares[block] * total.log()).squeeze(1)
                    part[block].add_(logits[block].mul_(shares[block]))
        for block in columns.kernel_blocks(part):
            largest = subtract_max_(part[block], columns).squeeze(1).double()
            (total,) = columns.reduce_sum(part[block].exp_().sum(dim=1, keepdim=True).double())
            log_sums[block] -= total.squeeze(1).log() + largest
        floor[rows] = log_sums[:count].to(dtype)
    return floor.clamp_min_(0)
