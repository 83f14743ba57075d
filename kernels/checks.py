"""Checks of every operation's inputs. An error is one sentence with the fault, its location and the fix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from opd.kernels.divergences import DIVERGENCES
from opd.kernels.head import FLOATS
from opd.kernels.token_classes import TokenClasses
from opd.kernels.vocab_parallel import AnyHead

_unread: ContextVar[list[tuple[Tensor, Callable[[], None]]] | None] = ContextVar("unread", default=None)
"""Unread checks inside `deferred_checks`, each with its failure call."""


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Defer checks of numbers on a device to the end of the block, which raises the first failure. Reading a
    number waits until the device has finished its work, so all are read at once. A check on the CPU, or of
    another thread, raises at once. If the block raises, a failed check is raised first, because it may be the
    cause.
    """
    waiting: list[tuple[Tensor, Callable[[], None]]] = []

    def read_checks() -> None:
        checks, waiting[:] = list(waiting), []
        flags = torch.stack([fine for fine, _ in checks]).tolist() if checks else []
        for flag, (_, fail) in zip(flags, checks, strict=True):
            if not flag:
                fail()

    token = _unread.set(waiting)
    try:
        yield
    except Exception:
        read_checks()
        raise
    else:
        read_checks()
    finally:
        _unread.reset(token)


def require_true(fine: Tensor, fail: Callable[[], None]) -> None:
    """Call `fail` unless `fine` [] bool holds. Inside `deferred_checks` it may be called later."""
    unread = _unread.get()
    if unread is not None and fine.device.type != "cpu":
        unread.append((fine, fail))
    elif not bool(fine):
        fail()


def check_hidden(name: str, hidden: Tensor, head: AnyHead) -> None:
    """Require floating point `[N, D]` with the width and on the device of `head`."""
    if hidden.dtype not in FLOATS:
        raise TypeError(f"{name} hidden states are {hidden.dtype}; give one of {', '.join(map(str, FLOATS))}")
    if hidden.ndim != 2 or hidden.shape[1] != head.hidden_size:
        raise ValueError(
            f"{name} hidden states have shape {list(hidden.shape)}; this head takes "
            f"[tokens, {head.hidden_size}]"
        )
    if hidden.device != head.weight.device:
        raise ValueError(
            f"{name} hidden states are on {hidden.device} and the head on {head.weight.device}; "
            "move one of them"
        )


def check_pair(student_hidden: Tensor, student: AnyHead, teacher_hidden: Tensor, teacher: AnyHead) -> None:
    """Require that student and teacher fit their heads, and one another in tokens and vocabulary."""
    check_hidden("student", student_hidden, student)
    check_hidden("teacher", teacher_hidden, teacher)
    check_sizes(student_hidden, student.vocabulary, teacher_hidden, teacher.vocabulary)


def check_sizes(student: Tensor, student_vocabulary: int, teacher: Tensor, teacher_vocabulary: int) -> None:
    """Require that row `i` of both can be the same token, and the same number of logits or classes."""
    if student.shape[0] != teacher.shape[0]:
        raise ValueError(
            f"the student has {student.shape[0]} tokens and the teacher {teacher.shape[0]}; row i of both "
            "must be the same token"
        )
    if student_vocabulary != teacher_vocabulary:
        raise ValueError(
            f"the student's vocabulary has {student_vocabulary} tokens and the teacher's"
            f" {teacher_vocabulary}; set vocab_size of both heads to the size of the tokenizer they share"
        )


def check_classes(classes: tuple[TokenClasses, TokenClasses], vocabularies: tuple[int, int]) -> None:
    """Require as many classes of the student's tokens as of the teacher's, and ids in the vocabularies."""
    ours, theirs = classes
    if ours.count != theirs.count or not ours.count:
        raise ValueError(
            f"the student's tokens have {ours.count} classes and the teacher's {theirs.count}; each class of"
            " one needs its class of the other"
        )
    for one, vocabulary in zip(classes, vocabularies, strict=True):
        checked_ids(one.ids, len(one.ids), vocabulary)


def check_divergence(kind: str, beta: float) -> None:
    """Require a known kind and, if it uses a weight `beta`, one strictly between 0 and 1."""
    if kind not in DIVERGENCES:
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(DIVERGENCES)}")
    if DIVERGENCES[kind].uses_beta and not 0 < beta < 1:
        raise ValueError(
            f"beta is {beta}; it must lie strictly between 0 and 1 (use forward or reverse at the ends)"
        )


def check_scalars(temperature: float, chunk: int = 1) -> None:
    """Require a positive, finite temperature and at least one row per chunk."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"temperature is {temperature}; it must be positive (greedy sampling is scored at 1)"
        )
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1 token")


def check_token_weight(weight: Tensor | None, tokens: int) -> None:
    """Require one finite floating-point weight per token."""
    if weight is None:
        return
    if weight.dtype not in FLOATS:
        raise TypeError(f"weight is {weight.dtype}; give one floating-point number per token")
    if weight.shape != (tokens,):
        raise ValueError(f"weight has shape {list(weight.shape)}; {tokens} tokens ask for [{tokens}]")

    def fail() -> None:
        bad = int((~torch.isfinite(weight)).nonzero()[0])
        raise FloatingPointError(
            f"weight[{bad}] is {float(weight[bad])}; every token's weight must be finite"
        )

    require_true(torch.isfinite(weight).all(), fail)


def checked_ids(ids: Tensor, tokens: int, vocabulary: int) -> Tensor:
    """Return integer ids `[N]` or `[N, K]`. Raise for an id outside the vocabulary. The returned ids are
    inside, even before the check is read (`deferred_checks`).
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids are {ids.dtype}; give int64 or int32 token ids")
    if ids.ndim not in (1, 2) or ids.shape[0] != tokens:
        raise ValueError(
            f"ids have shape {list(ids.shape)}; {tokens} tokens ask for [{tokens}] or [{tokens}, K]"
        )
    if not ids.numel():
        return ids

    def fail() -> None:
        bad = ((ids < 0) | (ids >= vocabulary)).nonzero()[0].tolist()
        raise ValueError(f"ids{bad} is {int(ids[tuple(bad)])}; the vocabulary has ids 0 to {vocabulary - 1}")

    inside = ids.clamp(0, vocabulary - 1)
    require_true((inside == ids).all(), fail)
    return inside


def check_k(k: int, vocabulary: int) -> None:
    """Require `k` between 1 and the vocabulary's size."""
    if not 1 <= k <= vocabulary:
        raise ValueError(f"k is {k}; it must lie between 1 and the vocabulary's size, {vocabulary}")


def check_mixture(
    hiddens: Sequence[Tensor], heads: Sequence[AnyHead], weights: Sequence[float] | Sequence[Tensor]
) -> None:
    """Require as many hidden states as heads and weights, over the same tokens, and positive weights that sum
    to 1. Of weights `[T]` only the shape is checked, because their values may be on a device.
    """
    if not heads or not len(hiddens) == len(heads) == len(weights):
        raise ValueError(
            f"a mixture got {len(hiddens)} teachers' hidden states, {len(heads)} heads and {len(weights)} "
            "weights; give one of each per teacher"
        )
    for i, (hidden, head) in enumerate(zip(hiddens, heads, strict=True)):
        check_hidden(f"teacher {i}", hidden, head)
        check_sizes(hiddens[0], heads[0].vocabulary, hidden, head.vocabulary)
    by_token = [weight for weight in weights if isinstance(weight, Tensor)]
    if by_token:
        if len(by_token) < len(weights) or any(w.shape != hiddens[0].shape[:1] for w in by_token):
            raise ValueError("weights by token are not one of each token and teacher; give [T] for all")
        return
    if not all(weight > 0 for weight in weights) or abs(sum(weights) - 1) > 1e-5:
        raise ValueError(f"the teachers' weights are {list(weights)}; they must be positive and sum to 1")


def check_finite_hidden(name: str, hidden: Tensor, counted: Tensor | None = None) -> None:
    """Raise `FloatingPointError` naming the first token whose hidden state is not finite.

    `counted` `[N]` bool excludes rows that are never read, so they may hold anything.
    """

    def fail() -> None:
        bad = ~torch.isfinite(hidden).all(dim=1)
        if counted is not None:
            bad &= counted
        if bool(bad.any()):
            raise FloatingPointError(
                f"the {name} hidden state of token {int(bad.nonzero()[0])} holds NaN or infinity; look at"
                " the model's weights and at overflow in its dtype"
            )

    # One reduction and one comparison in the usual case; the rows are searched only after it fails.
    require_true(torch.isfinite(hidden.sum(dtype=torch.float32)), fail)


def check_finite_result(name: str, values: Tensor) -> None:
    """Raise `FloatingPointError` naming the first token whose result is not finite."""
    finite = torch.isfinite(values)

    def fail() -> None:
        token = int((~finite).nonzero()[0, 0])
        raise FloatingPointError(
            f"the {name} of token {token} is not finite though its hidden states are: a head's weight or "
            "bias, or a logit, is NaN or infinite (mask logits with a large finite negative number, never "
            "with -inf)"
        )

    require_true(finite.all(), fail)
