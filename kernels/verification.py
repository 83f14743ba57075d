"""Verification of a compiled kernel before anything is trained with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from opd.kernels import divergences

ROWS = 64
Launch = Callable[[Tensor, Tensor, str, float, Tensor | None, Tensor | None], Tensor]


def accept_kernel(subject: str, found: str | None, where: str, instead: str) -> bool:
    """Return True if no fault was `found` in a kernel. Otherwise warn with the fault and the replacement."""
    if found is not None:
        warnings.warn(f"{subject} {found} {where}: {instead} used in its place", RuntimeWarning, stacklevel=6)
    return found is None


def verify_row_kernel(
    name: str, where: str, launch: Launch, kind: str, vocabulary: int, device: torch.device, *, rounds: bool
) -> bool:
    """Return True if the row kernel of `name` has no `fault`. Otherwise warn with the fault and `where`."""
    found = row_kernel_fault(launch, kind, vocabulary, device, rounds=rounds)
    subject = f"the {name} kernel of {kind} over {vocabulary} tokens"
    return accept_kernel(subject, found, where, "PyTorch's row kernel is")


@torch.no_grad()
def row_kernel_fault(
    launch: Launch,
    kind: str,
    vocabulary: int,
    device: torch.device,
    *,
    rounds: bool,
) -> str | None:
    """Return the fault of `launch(student, teacher, kind, beta, coef, rounded)` on float32 logits `[ROWS,
    vocabulary]`, as the end of a sentence, or `None`.

    Compared with float64: values, gradient, NaN, equal bits twice, and if it `rounds` the gradient in
    bfloat16, written into the logits' own memory.
    """
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device}
    student = torch.randn(ROWS, vocabulary, **options).mul_(4)
    teacher = torch.randn(ROWS, vocabulary, **options).add_(student)
    teacher[0] = student[0]
    student[1, vocabulary // 2] = float("nan")
    coef = torch.rand(ROWS, **options)
    wide = student.double(), teacher.double()
    values = divergences.divergence_(*wide, kind, 0.3, coef.double())
    first, second = student.clone(), student.clone()
    room = student.clone() if rounds else None
    narrow = None if room is None else divergences.first_halves(room)
    try:
        got = launch(first, teacher.clone(), kind, 0.3, coef, None)
        again = launch(second, teacher.clone(), kind, 0.3, coef, None)
        rounded = got if room is None else launch(room, teacher.clone(), kind, 0.3, coef, narrow)
        alone = launch(student.clone(), teacher.clone(), kind, 0.3, None, None)
    except Exception as error:  # a compiler's faults have no common class
        return f"cannot be compiled or launched ({error!r})"
    # Launches of another form may differ in bits: each is a compilation with its own order of sums.
    if not _same_bits(got, again) or not _same_bits(first, second):
        return "gives other bits the second time"
    close = {"rtol": 1e-5, "atol": 2e-6, "equal_nan": True}
    if not all(torch.allclose(found.double(), values, **close) for found in (got, rounded, alone)):
        return "gives other values than float64"
    exact, finite = wide[0], ~values.isnan()
    near = 1e-5 * exact[finite].abs().max()
    if not _within_limit(first[finite], exact[finite], near):
        return "gives another gradient than float64"
    limit = near + ROUNDING * exact[finite].abs()
    if narrow is not None and not _within_limit(narrow[finite], exact[finite], limit):
        return "rounds its gradient wrongly"
    return None if bool(first[1].isnan().all()) else "does not pass NaN on to its gradient"


Statistics = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]
TokenGradient = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], None]


@torch.no_grad()
def token_fault(
    statistics: Statistics, gradient: TokenGradient, vocabulary: int, device: torch.device
) -> str | None:
    """Return the fault of the kernels of single tokens on float32 logits `[ROWS, vocabulary]`, as in `fault`.

    Compared with float64: log-probabilities and entropy, their gradient with and without the entropy's, of
    one id a row and of two, in both dtypes, NaN, and equal bits twice.
    """
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device}
    logits = torch.randn(ROWS, vocabulary, **options).mul_(4)
    logits[1, vocabulary // 2] = float("nan")
    ids = torch.randint(vocabulary, (ROWS, 2), **options)
    coef, of_entropy = torch.randn(ROWS, 2, **options), torch.randn(ROWS, **options)
    for width, entropy in ((1, None), (1, of_entropy), (2, of_entropy)):
        found = _token_fault(statistics, gradient, logits, ids[:, :width], coef[:, :width], entropy)
        if found is not None:
            return found
    return None


def _token_fault(
    statistics: Statistics,
    gradient: TokenGradient,
    logits: Tensor,
    ids: Tensor,
    coef: Tensor,
    of_entropy: Tensor | None,
) -> str | None:
    exact, asked = logits.double(), of_entropy is not None
    values = divergences.token_statistics_(exact.clone(), ids, asked)[: 1 + asked]
    divergences.token_gradient_(
        exact, ids, coef.double(), None if of_entropy is None else of_entropy.double()
    )
    first, second, room = (logits.clone() for _ in range(3))
    narrow = divergences.first_halves(room)
    try:
        got, again = (statistics(logits.clone(), ids, asked)[: 1 + asked] for _ in range(2))
        gradient(first, ids, coef, of_entropy, None)
        gradient(second, ids, coef, of_entropy, None)
        gradient(room, ids, coef, of_entropy, narrow)
    except Exception as error:  # a compiler's faults have no common class
        return f"cannot be compiled or launched ({error!r})"
    if not all(map(_same_bits, got, again)) or not _same_bits(first, second):
        return "gives other bits the second time"
    close = {"rtol": 1e-5, "atol": 4e-6, "equal_nan": True}
    if not all(torch.allclose(one.double(), wide, **close) for one, wide in zip(got, values, strict=True)):
        return "gives other values than float64"
    finite = ~exact.isnan().any(dim=1)
    near = 1e-5 * coef.abs().max()
    if not _within_limit(first[finite], exact[finite], near):
        return "gives another gradient than float64"
    if not _within_limit(narrow[finite], exact[finite], near + ROUNDING * exact[finite].abs()):
        return "rounds its gradient wrongly"
    return None if bool(first[1].isnan().all()) else "does not pass NaN on to its gradient"


ROUNDING = 2.0**-8
"""Maximum relative error of rounding to bfloat16: half as much, and a last digit on the other side."""


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _within_limit(found: Tensor, exact: Tensor, limit: Tensor) -> bool:
    return bool(((found.double() - exact).abs() <= limit).all())
