"""Verification of a compiled kernel before anything is trained with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from opd.kernels import divergences

ROWS = 64
Launch = Callable[[Tensor, Tensor, str, float, Tensor | None, Tensor | None], Tensor]


def accept_kernel(subject: str, fault: str | None, where: str, instead: str) -> bool:
    """Return True if there is no `fault` in a kernel. Otherwise warn with the fault and the replacement."""
    if fault is not None:
        warnings.warn(f"{subject} {fault} {where}: {instead} used in its place", RuntimeWarning, stacklevel=6)
    return fault is None


def verify_row_kernel(
    name: str, where: str, launch: Launch, kind: str, vocabulary: int, device: torch.device, *, rounds: bool
) -> bool:
    """Return True if the row kernel of `name` has no `fault`. Otherwise warn with the fault and `where`."""
    fault = row_kernel_fault(launch, kind, vocabulary, device, rounds=rounds)
    subject = f"the {name} kernel of {kind} over {vocabulary} tokens"
    return accept_kernel(subject, fault, where, "PyTorch's row kernel is")


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
    spare = student.clone() if rounds else None
    narrow = None if spare is None else divergences.first_halves(spare)
    try:
        result = launch(first, teacher.clone(), kind, 0.3, coef, None)
        again = launch(second, teacher.clone(), kind, 0.3, coef, None)
        rounded = result if spare is None else launch(spare, teacher.clone(), kind, 0.3, coef, narrow)
        alone = launch(student.clone(), teacher.clone(), kind, 0.3, None, None)
    except Exception as error:  # a compiler's faults have no common class
        return f"cannot be compiled or launched ({error!r})"
    # Launches of another form may differ in bits: each is a compilation with its own order of sums.
    if not _same_bits(result, again) or not _same_bits(first, second):
        return "gives other bits the second time"
    close = {"rtol": 1e-5, "atol": 2e-6, "equal_nan": True}
    if not all(torch.allclose(values_of.double(), values, **close) for values_of in (result, rounded, alone)):
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
        fault = _token_fault(statistics, gradient, logits, ids[:, :width], coef[:, :width], entropy)
        if fault is not None:
            return fault
    return None


def _token_fault(
    statistics: Statistics,
    gradient: TokenGradient,
    logits: Tensor,
    ids: Tensor,
    coef: Tensor,
    of_entropy: Tensor | None,
) -> str | None:
    exact, wants_entropy = logits.double(), of_entropy is not None
    values = divergences.token_statistics_(exact.clone(), ids, wants_entropy)[: 1 + wants_entropy]
    divergences.token_gradient_(
        exact, ids, coef.double(), None if of_entropy is None else of_entropy.double()
    )
    first, second, spare = (logits.clone() for _ in range(3))
    narrow = divergences.first_halves(spare)
    try:
        result, again = (
            statistics(logits.clone(), ids, wants_entropy)[: 1 + wants_entropy] for _ in range(2)
        )
        gradient(first, ids, coef, of_entropy, None)
        gradient(second, ids, coef, of_entropy, None)
        gradient(spare, ids, coef, of_entropy, narrow)
    except Exception as error:  # a compiler's faults have no common class
        return f"cannot be compiled or launched ({error!r})"
    if not all(map(_same_bits, result, again)) or not _same_bits(first, second):
        return "gives other bits the second time"
    close = {"rtol": 1e-5, "atol": 4e-6, "equal_nan": True}
    if not all(torch.allclose(one.double(), wide, **close) for one, wide in zip(result, values, strict=True)):
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


def _within_limit(values: Tensor, exact: Tensor, limit: Tensor) -> bool:
    return bool(((values.double() - exact).abs() <= limit).all())
