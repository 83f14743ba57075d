"""What a compiled kernel has to show before anything is trained with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from opd.kernels import divergences

ROWS = 64
Launch = Callable[[Tensor, Tensor, str, float, Tensor | None, Tensor | None], Tensor]


def accepted(subject: str, found: str | None, where: str, instead: str) -> bool:
    """Whether nothing was `found` wrong with a kernel; else a warning says what, and what is used then."""
    if found is not None:
        warnings.warn(f"{subject} {found} {where}: {instead} used in its place", RuntimeWarning, stacklevel=6)
    return found is None


def passed(
    name: str, where: str, launch: Launch, kind: str, vocabulary: int, device: torch.device, *, rounds: bool
) -> bool:
    """Whether the row kernel of `name` has no `fault`; a warning says which it has, and `where`."""
    found = fault(launch, kind, vocabulary, device, rounds=rounds)
    subject = f"the {name} kernel of {kind} over {vocabulary} tokens"
    return accepted(subject, found, where, "PyTorch's row kernel is")


@torch.no_grad()
def fault(
    launch: Launch,
    kind: str,
    vocabulary: int,
    device: torch.device,
    *,
    rounds: bool,
) -> str | None:
    """What `launch(student, teacher, kind, beta, coef, rounded)` does wrong on float32 logits
    `[ROWS, vocabulary]`, as the end of a sentence; `None` where nothing.

    Compared with float64: values, gradient, NaN, the same bits twice, and where it `rounds` the gradient in
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
    ours, room = student.clone(), student.clone()
    narrow = divergences.first_halves(room) if rounds else None
    try:
        got = launch(ours, teacher.clone(), kind, 0.3, coef, None)
        again = launch(room, teacher.clone(), kind, 0.3, coef, narrow)
        alone = launch(student.clone(), teacher.clone(), kind, 0.3, None, None)
    except Exception as error:  # a compiler's faults have no common class
        return f"cannot be compiled or launched ({error!r})"
    if not torch.equal(got.nan_to_num(-1), again.nan_to_num(-1)) or not torch.allclose(
        got, alone, rtol=1e-6, atol=1e-7, equal_nan=True
    ):
        return "gives other values the second time"
    if not torch.allclose(got.double(), values, rtol=1e-5, atol=2e-6, equal_nan=True):
        return "gives other values than float64"
    exact = wide[0]
    finite = ~values.isnan()
    largest = exact[finite].abs().max()
    if not bool(((ours.double() - exact)[finite].abs() <= 1e-5 * largest).all()):
        return "gives another gradient than float64"
    if narrow is not None and not torch.equal(narrow[finite], ours[finite].to(torch.bfloat16)):
        return "rounds its gradient wrongly"
    if narrow is None and not torch.equal(room[finite], ours[finite]):
        return "gives another gradient the second time"
    return None if bool(ours[1].isnan().all()) else "does not pass NaN on to its gradient"
