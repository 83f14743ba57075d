"""Public interface of the kernels: exact full-vocabulary divergences and log-probabilities of hidden states.

Inputs may be float32, bfloat16, float16 or float64. Logits, statistics and results are float32 (float64 if
any input is). All values are in nats, all logits are divided by `temperature`. The environment variable
`OPD_KERNELS` chooses the implementation: `chunked`, `reference`, `tilelang`, or `auto` (the default). This
module checks inputs and never computes anything itself.

Where a head may be a `HeadShard`, its vocabulary is spread over ranks (see `opd.kernels.vocab_parallel`). A
teacher's full head is then cut like the student's.

Every operation raises `TypeError` for a wrong dtype, `ValueError` for shapes, vocabularies or options that do
not fit together, and `FloatingPointError` naming the token of a hidden state or result that is not finite.
Empty input (no tokens) works. No operation has a second derivative.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from opd.kernels import checks, chunked, reference, tilelang_target, triton_rows, vocab_parallel
from opd.kernels.chunked import TokenNotes
from opd.kernels.head import Head
from opd.kernels.token_classes import TokenClasses
from opd.kernels.vocab_parallel import AnyHead, HeadShard

__all__ = [
    "Head",
    "geometric_floor",
    "implementation",
    "linear_class_kl",
    "linear_kl",
    "linear_logprobs",
    "linear_logprobs_entropy",
    "linear_mixture_kl",
    "linear_topk",
]

IMPLEMENTATIONS = ("auto", "chunked", "reference", "tilelang", "triton")
_COMPILED = {"tilelang": "opd.kernels.tilelang_tokens", "triton": "opd.kernels.triton_rows"}
LARGE = 16384
"""Minimum vocabulary for TileLang's row kernel by default on a CPU. It saves about 2 ns for a pair of logits,
4 to 8 % of a divergence at widths of 576 to 1024. Over a small one its first use takes more."""


def implementation() -> Any:
    """Return the operations that the environment variable `OPD_KERNELS` names. Raises `ValueError` if they
    are not available; there is no fallback.

    `auto` is `triton` on a machine whose GPU can run it. Otherwise it is `chunked`, with TileLang's row
    kernels over large vocabularies (`LARGE`) if TileLang and a C++ compiler are installed. Over small ones
    they save less than the compilation at their first use takes.
    """
    name = os.environ.get("OPD_KERNELS", "auto")
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"OPD_KERNELS is {name!r}; set it to one of {', '.join(IMPLEMENTATIONS)}, or unset it"
        )
    if name == "auto" and triton_rows.missing() is None:
        return _compiled_operations("triton")
    if name == "auto" and tilelang_target.missing("cpu") is None:
        return _with_large_rows()
    if name in ("auto", "chunked"):
        return chunked
    if name == "reference":
        return reference
    if name == "triton":
        reason = triton_rows.missing()
    else:
        reason = tilelang_target.missing("cuda" if torch.cuda.is_available() else "cpu")
    if reason is not None:
        raise ValueError(f"OPD_KERNELS is {name!r}, which cannot run here: {reason}")
    return _compiled_operations(name)


@lru_cache(maxsize=2)
def _compiled_operations(name: str) -> SimpleNamespace:
    """Return the operations of `chunked`, replaced by the kernels that `name` has."""
    return _with_operations(name, import_module(_COMPILED[name]).OPERATIONS)


@lru_cache(maxsize=1)
def _with_large_rows() -> SimpleNamespace:
    """Return the operations of `chunked`, with TileLang's row kernels over large vocabularies."""

    def with_rows(operation: Callable[..., Any], rows: tuple[str, ...]) -> Callable[..., Any]:
        def run(first: Tensor, second: Any, *rest: Any, **options: Any) -> Any:
            vocabulary = second.vocabulary if isinstance(second, Head) else first.shape[1]
            kernels = {} if vocabulary < LARGE else _row_kernels(rows)
            return operation(first, second, *rest, **options, **kernels)

        return run

    both = ("row_kernel", "token_rows")
    rows = {"linear_kl": both, "linear_mixture_kl": both, "linear_class_kl": both[:1]}
    rows |= {"linear_logprobs": both[1:], "linear_logprobs_entropy": both[1:]}
    return _with_operations("rows", {op: with_rows(getattr(chunked, op), rows[op]) for op in rows})


def _row_kernels(rows: tuple[str, ...]) -> dict[str, Any]:
    """Return TileLang's row kernels as the options `rows`."""
    from opd.kernels import tilelang_rows, tilelang_tokens

    kernels = {"row_kernel": tilelang_rows.verified_divergence_, "token_rows": tilelang_tokens.ROWS}
    return {name: kernels[name] for name in rows}


def _with_operations(name: str, operations: dict[str, Callable[..., Any]]) -> SimpleNamespace:
    return SimpleNamespace(name=name, **{op: getattr(chunked, op) for op in chunked.__all__} | operations)


def _operations(head: AnyHead) -> Any:
    """Return the operations for `head`. Those of a shard are always `chunked`."""
    return vocab_parallel if isinstance(head, HeadShard) else implementation()


def linear_kl(
    student_hidden: Tensor,
    student_head: AnyHead,
    teacher_hidden: Tensor,
    teacher_head: AnyHead,
    *,
    kind: str = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    weight: Tensor | None = None,
    counted: Tensor | None = None,
    notes: TokenNotes | None = None,
    chunk: int = 1024,
) -> Tensor:
    """Return the per-token divergence `[T]` over the whole vocabulary between student `p` and teacher `t`.

    `kind` is a name of `opd.kernels.divergences`. `reverse` is KL(p || t) (MiniLLM, Gu et al. 2024).
    `forward` is KL(t || p). `jsd` is the generalised Jensen-Shannon divergence `beta KL(t || m) + (1 - beta)
    KL(p || m)` with `m = beta t + (1 - beta) p` (GKD, Agarwal et al. 2024, section 2). `skew_reverse` is
    KL(p || m), `skew_forward` is KL(t || m) (DistiLLM, Ko et al. 2024, section 3.1). Differentiable in
    `student_hidden` `[T, Ds]` and the student head's weight and bias. `teacher_hidden` `[T, Dt]` and
    `teacher_head` get no gradient. Both heads need the same vocabulary.

    `weight` `[T]` declares the caller's upstream gradient: `loss = (weight * kl).sum()`. Tokens of weight 0
    are skipped; their value and gradient are 0 for any upstream gradient. The gradient is computed with the
    values, and is free in the backward if the upstream gradient is a multiple of `weight` (of ones if
    `None`). Any other is still right, at the price of a second computation. The result is not multiplied by
    `weight`. `counted` [M] int64 are the tokens of nonzero weight, in order; a caller that knows them saves a
    wait for the device. `notes` are filled with the student's statistics of single tokens.

    At most `chunk` tokens have their logits in memory, two buffers `[chunk, V]`. `[T, V]` never exists.
    """
    checks.check_pair(student_hidden, student_head, teacher_hidden, teacher_head)
    checks.check_divergence(kind, beta)
    checks.check_scalars(temperature, chunk)
    checks.check_token_weight(weight, len(student_hidden))
    weighed = None if weight is None else weight != 0
    checks.check_finite_hidden("student", student_hidden.detach(), weighed)
    checks.check_finite_hidden("teacher", teacher_hidden.detach(), weighed)
    values = _operations(student_head).linear_kl(
        student_hidden,
        student_head,
        teacher_hidden,
        teacher_head,
        kind=kind,
        beta=beta,
        temperature=temperature,
        weight=None if weight is None else weight.detach(),
        counted=counted,
        notes=notes,
        chunk=chunk,
    )
    checks.check_finite_result("divergence", values.detach())
    return values


def linear_class_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    classes: tuple[TokenClasses, TokenClasses],
    *,
    kind: str = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    weight: Tensor | None = None,
    chunk: int = 1024,
) -> Tensor:
    """Return the per-token divergence `[T]` between the probabilities of classes of tokens, where student and
    teacher have vocabularies of their own.

    `classes` are the student's and the teacher's, in one order. Both distributions are given that the token
    has a class. `kind`, `beta`, `weight` and the gradient are as in `linear_kl`. Three buffers `[chunk, V]`.
    """
    checks.check_hidden("student", student_hidden, student_head)
    checks.check_hidden("teacher", teacher_hidden, teacher_head)
    checks.check_classes(classes, (student_head.vocabulary, teacher_head.vocabulary))
    checks.check_sizes(student_hidden, classes[0].count, teacher_hidden, classes[1].count)
    checks.check_divergence(kind, beta)
    checks.check_scalars(temperature, chunk)
    checks.check_token_weight(weight, len(student_hidden))
    weighed = None if weight is None else weight != 0
    checks.check_finite_hidden("student", student_hidden.detach(), weighed)
    checks.check_finite_hidden("teacher", teacher_hidden.detach(), weighed)
    weight = None if weight is None else weight.detach()
    options: dict[str, Any] = {"kind": kind, "beta": beta, "temperature": temperature, "chunk": chunk}
    models = student_hidden, student_head, teacher_hidden, teacher_head
    values = implementation().linear_class_kl(*models, classes, weight=weight, **options)
    checks.check_finite_result("divergence", values.detach())
    return values


def linear_mixture_kl(
    student_hidden: Tensor,
    student_head: AnyHead,
    teacher_hiddens: Sequence[Tensor],
    teacher_heads: Sequence[AnyHead],
    weights: Sequence[float],
    *,
    temperature: float = 1.0,
    weight: Tensor | None = None,
    counted: Tensor | None = None,
    notes: TokenNotes | None = None,
    chunk: int = 1024,
) -> Tensor:
    """Return KL(p || sum_i w_i t_i) `[T]`, the reverse KL to the arithmetic mixture of several teachers.

    `weights` are the `w_i`, positive and summing to 1. `weight` `[T]` and `counted` are per token as in
    `linear_kl`, with the same gradient contract. It uses three buffers `[chunk, V]`.
    """
    checks.check_hidden("student", student_hidden, student_head)
    checks.check_mixture(teacher_hiddens, teacher_heads, weights)
    vocabularies = student_head.vocabulary, teacher_heads[0].vocabulary
    checks.check_sizes(student_hidden, vocabularies[0], teacher_hiddens[0], vocabularies[1])
    checks.check_scalars(temperature, chunk)
    checks.check_token_weight(weight, len(student_hidden))
    weighed = None if weight is None else weight != 0
    checks.check_finite_hidden("student", student_hidden.detach(), weighed)
    for i, hidden in enumerate(teacher_hiddens):
        checks.check_finite_hidden(f"teacher {i}", hidden.detach(), weighed)
    values = _operations(student_head).linear_mixture_kl(
        student_hidden,
        student_head,
        teacher_hiddens,
        teacher_heads,
        weights,
        temperature=temperature,
        weight=None if weight is None else weight.detach(),
        counted=counted,
        notes=notes,
        chunk=chunk,
    )
    checks.check_finite_result("divergence", values.detach())
    return values


def geometric_floor(
    teacher_hiddens: Sequence[Tensor],
    teacher_heads: Sequence[AnyHead],
    weights: Sequence[float] | Sequence[Tensor],
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Tensor:
    """Return `-log Z = -log sum_v prod_i t_i(v)^w_i` `[T]`, the minimum of `sum_i w_i KL(p || t_i)` over `p`.

    It is 0 only if the teachers agree. No gradient. The weights may be `[T]` each, one for every token.
    """
    checks.check_mixture(teacher_hiddens, teacher_heads, weights)
    checks.check_scalars(temperature, chunk)
    for i, hidden in enumerate(teacher_hiddens):
        checks.check_finite_hidden(f"teacher {i}", hidden.detach())
    values = _operations(teacher_heads[0]).geometric_floor(
        teacher_hiddens, teacher_heads, weights, temperature=temperature, chunk=chunk
    )
    checks.check_finite_result("geometric floor", values)
    return values


def linear_logprobs(
    hidden: Tensor, head: AnyHead, ids: Tensor, *, temperature: float = 1.0, chunk: int = 1024
) -> Tensor:
    """Return log-probabilities of `ids` (`[N]` or `[N, K]`, like the result) given `hidden` `[N, D]`.

    Differentiable in the hidden states and the head. The backward recomputes the logits chunk by chunk, and
    only for tokens that receive a gradient. It uses one buffer `[chunk, V]`.
    """
    ids = _checked_token_inputs(hidden, head, ids, temperature, chunk)
    values = _operations(head).linear_logprobs(hidden, head, ids, temperature=temperature, chunk=chunk)
    checks.check_finite_result("log-probability", values.detach())
    return values


def linear_logprobs_entropy(
    hidden: Tensor, head: AnyHead, ids: Tensor, *, temperature: float = 1.0, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Return `linear_logprobs` and the entropy `[N]` of each row's distribution, both differentiable."""
    ids = _checked_token_inputs(hidden, head, ids, temperature, chunk)
    values, entropy = _operations(head).linear_logprobs_entropy(
        hidden, head, ids, temperature=temperature, chunk=chunk
    )
    checks.check_finite_result("log-probability", values.detach())
    return values, entropy


def linear_topk(
    hidden: Tensor, head: AnyHead, k: int, *, temperature: float = 1.0, chunk: int = 1024
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `k` most likely tokens: ids `[N, k]` int64 and log-probabilities `[N, k]`, most likely
    first, and the probability `[N]` of all others. No gradient."""
    checks.check_hidden("given", hidden, head)
    checks.check_scalars(temperature, chunk)
    checks.check_finite_hidden("given", hidden.detach())
    checks.check_k(k, head.vocabulary)
    ids, logprobs, tail = _operations(head).linear_topk(hidden, head, k, temperature=temperature, chunk=chunk)
    checks.check_finite_result("log-probability", logprobs)
    return ids, logprobs, tail


def _checked_token_inputs(
    hidden: Tensor, head: AnyHead, ids: Tensor, temperature: float, chunk: int
) -> Tensor:
    """Check the inputs. Return the ids to compute with."""
    checks.check_hidden("given", hidden, head)
    ids = checks.checked_ids(ids, len(hidden), head.vocabulary)
    checks.check_scalars(temperature, chunk)
    checks.check_finite_hidden("given", hidden.detach())
    return ids
