"""The full-vocabulary KL with its gradients, over the four matmuls that no exact method can do without."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from opd.kernels import tilelang_target, triton_rows
from opd.kernels.head import Head
from opd.kernels.ops import linear_kl, linear_logprobs_entropy
from tests.gpu.clock import Place
from tests.gpu.rows import Bound, Sheet

SIZES = {"8192 x 4096 x 128256": (8192, 4096, 128256), "4096 x 1024 x 151936": (4096, 1024, 151936)}
DRY = {"64 x 16 x 256": (64, 16, 256)}
TEMPERATURES = (1.0, 0.7)
RIVALS = {"liger": "liger_kernel.transformers", "cut-cross-entropy": "cut_cross_entropy"}
"""What is compared with, and what is imported of it."""


@dataclass
class Inputs:
    """A student and a teacher close to it, made on the device."""

    hidden: torch.Tensor
    weight: torch.Tensor
    teacher_hidden: torch.Tensor
    teacher_weight: torch.Tensor
    token_weight: torch.Tensor

    @classmethod
    def make(cls, size: tuple[int, int, int], place: Place) -> Inputs:
        tokens, width, vocabulary = size
        generator = torch.Generator(place.device).manual_seed(0)

        def normal(rows: int, scale: float) -> torch.Tensor:
            made = torch.randn(rows, width, device=place.device, generator=generator, dtype=torch.bfloat16)
            return made.mul_(scale)

        hidden, weight = normal(tokens, 1.0), normal(vocabulary, 3 * width**-0.5)
        teacher_hidden = hidden + normal(tokens, 0.1)
        teacher_weight = weight + normal(vocabulary, 0.3 * width**-0.5)
        share = torch.full((tokens,), 1 / tokens, device=place.device)
        return cls(hidden.requires_grad_(), weight.requires_grad_(), teacher_hidden, teacher_weight, share)

    def clear(self) -> None:
        """Forget the gradients of the last call."""
        self.hidden.grad = self.weight.grad = None

    @torch.no_grad()
    def exact(self, temperature: float, rows: int = 256) -> torch.Tensor:
        """The KL of the first tokens in float64."""
        student = self.hidden[:rows].double() @ self.weight.double().t()
        teacher = self.teacher_hidden[:rows].double() @ self.teacher_weight.double().t()
        student, teacher = ((x / temperature).log_softmax(dim=-1) for x in (student, teacher))
        return (student.exp() * (student - teacher)).sum(dim=-1)


def matmuls(inputs: Inputs) -> Callable[[], None]:
    """Both logits and the student's two gradients, each as one product in bfloat16."""
    logits = torch.empty(
        len(inputs.hidden), len(inputs.weight), dtype=torch.bfloat16, device=inputs.hidden.device
    )
    hidden, weight = torch.empty_like(inputs.hidden), torch.empty_like(inputs.weight)

    @torch.no_grad()
    def run() -> None:
        torch.mm(inputs.teacher_hidden, inputs.teacher_weight.t(), out=logits)
        torch.mm(inputs.hidden, inputs.weight.t(), out=logits)
        torch.mm(logits, inputs.weight, out=hidden)
        torch.mm(logits.t(), inputs.hidden, out=weight)

    return run


def ours(inputs: Inputs, name: str, chunk: int, temperature: float) -> torch.Tensor:
    """Forward and backward with the implementation called `name`; the values `[T]`."""
    os.environ["OPD_KERNELS"] = name
    inputs.clear()
    values = linear_kl(
        inputs.hidden,
        Head(inputs.weight),
        inputs.teacher_hidden,
        Head(inputs.teacher_weight),
        temperature=temperature,
        weight=inputs.token_weight,
        chunk=chunk,
    )
    (values @ inputs.token_weight).backward()
    return values.detach()


def liger(inputs: Inputs, triton: bool, temperature: float) -> None:
    """Liger-Kernel's fused linear Jensen-Shannon divergence; beta 1 is the reverse KL."""
    inputs.clear()
    if triton:
        from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

        loss = LigerFusedLinearJSD(jsd_beta=1.0, temperature=temperature)(
            inputs.hidden, inputs.weight, inputs.teacher_hidden, inputs.teacher_weight, None
        )
    else:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        labels = torch.zeros(len(inputs.hidden), dtype=torch.int64, device=inputs.hidden.device)
        loss = LigerFusedLinearJSDLoss(
            weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, compiled=False, temperature=temperature
        )(inputs.hidden, inputs.weight, inputs.teacher_hidden, inputs.teacher_weight, labels)
    loss.backward()


def full_logits(inputs: Inputs, temperature: float) -> None:
    """As one would write it down."""
    inputs.clear()
    student = ((inputs.hidden @ inputs.weight.t()).float() / temperature).log_softmax(dim=-1)
    with torch.no_grad():
        teacher = (inputs.teacher_hidden @ inputs.teacher_weight.t()).float() / temperature
        teacher = teacher.log_softmax(dim=-1)
    ((student.exp() * (student - teacher)).sum(dim=-1) @ inputs.token_weight).backward()


def cut_cross_entropy(inputs: Inputs, filtered: bool, temperature: float) -> None:
    """Apple's fused linear cross-entropy of one target a token: another loss, with as many matrix products as
    the KL. `filtered` skips tiles of the gradient that hold next to nothing, as it does by default.
    """
    from cut_cross_entropy import linear_cross_entropy

    inputs.clear()
    targets = torch.arange(len(inputs.hidden), device=inputs.hidden.device) % len(inputs.weight)
    hidden = inputs.hidden if temperature == 1.0 else inputs.hidden / temperature
    options = {} if filtered else {"filter_eps": None}
    linear_cross_entropy(hidden, inputs.weight, targets, **options).backward()


def our_cases(place: Place) -> list[tuple[str, int]]:
    """Our implementations that run here, each with tokens a chunk; `auto` is what a run takes."""
    names = ["auto", "chunked"]
    if place.device.type == "cuda":
        names += ["triton"] if triton_rows.missing() is None else []
        names += ["tilelang"] if tilelang_target.missing("cuda") is None else []
    return [(name, chunk) for name in names for chunk in ((16,) if place.dry else (1024, 4096))]


def missing(module: str) -> str | None:
    """Why `module` cannot be imported here."""
    try:
        importlib.import_module(module)
    except Exception as error:  # packages probe for devices and compilers when they are imported
        return f"{type(error).__name__}: {error}"[:100]
    return None


def rival_cases(sheet: Sheet, inputs: Inputs, at: str, temperature: float) -> dict[str, Callable[[], object]]:
    """Others' code that is here, by its name; a row says what is not."""
    found: dict[str, Callable[[], object]] = {"full logits": partial(full_logits, inputs, temperature)}
    here = {}
    for name, module in RIVALS.items():
        why = missing(module)
        if why is None:
            here[name] = module
        else:
            sheet.absent(f"{at}: {name}", why)
    if "liger" in here:
        found["liger, triton"] = partial(liger, inputs, True, temperature)
        found["liger, chunked, eager"] = partial(liger, inputs, False, temperature)
    if "cut-cross-entropy" in here:
        found["cut-cross-entropy"] = partial(cut_cross_entropy, inputs, True, temperature)
        found["cut-cross-entropy, unfiltered"] = partial(cut_cross_entropy, inputs, False, temperature)
    return found


def memory_gib(size: tuple[int, int, int], chunk: int) -> float:
    """What `kernels/README.md` promises: two chunks of logits and the two gradients, in float32."""
    tokens, width, vocabulary = size
    return 4 * (2 * chunk * vocabulary + vocabulary * width + tokens * width) / 2**30


def measured(place: Place, case: Callable[[], object], base: float) -> dict[str, float]:
    """Time, over that of the matmuls, and memory."""
    took = place.milliseconds(case, rounds=3)
    return {"ms": took, "over matmuls": took / base, "GiB": place.peak_gib(case)}


def at_one_size(sheet: Sheet, label: str, size: tuple[int, int, int], place: Place) -> None:
    """All rows of one size."""
    inputs = Inputs.make(size, place)
    base = place.milliseconds(matmuls(inputs))
    sheet.row(f"{label}: the four matmuls alone", {"ms": base})
    for temperature in TEMPERATURES:
        at, exact = f"{label}, T {temperature}", inputs.exact(temperature)
        for name, chunk in our_cases(place):
            with sheet.ours(f"{at}: {name}, {chunk} tokens a chunk"):
                case = partial(ours, inputs, name, chunk, temperature)
                numbers = measured(place, case, base)
                error = (case()[: len(exact)] - exact).abs().max() / exact.max()
                numbers |= {"error": float(error)}
                room = Bound("GiB", most=1.25 * memory_gib(size, chunk), timed=False)
                right = Bound("error", most=1e-4, timed=False)
                sheet.row(f"{at}: {name}, {chunk} tokens a chunk", numbers, right, room)
            inputs.clear()
            place.clear()
        for name, case in rival_cases(sheet, inputs, at, temperature).items():
            with sheet.rival(f"{at}: {name}"):
                sheet.row(f"{at}: {name}", measured(place, case, base))
            inputs.clear()
            place.clear()


def divergences(sheet: Sheet, place: Place) -> None:
    """Time over the matmuls, memory and error of every case at every size and temperature."""
    before = os.environ.get("OPD_KERNELS")
    try:
        for label, size in (DRY if place.dry else SIZES).items():
            at_one_size(sheet, label, size, place)
            place.clear()
    finally:
        os.environ.pop("OPD_KERNELS", None)
        if before is not None:
            os.environ["OPD_KERNELS"] = before


def policy_matmuls(inputs: Inputs) -> Callable[[], None]:
    """The student's logits and its two gradients, each as one product in bfloat16."""
    rows, vocabulary = len(inputs.hidden), len(inputs.weight)
    logits = torch.empty(rows, vocabulary, dtype=torch.bfloat16, device=inputs.hidden.device)
    hidden, weight = torch.empty_like(inputs.hidden), torch.empty_like(inputs.weight)

    @torch.no_grad()
    def run() -> None:
        torch.mm(inputs.hidden, inputs.weight.t(), out=logits)
        torch.mm(logits, inputs.weight, out=hidden)
        torch.mm(logits.t(), inputs.hidden, out=weight)

    return run


def policy_gradient(inputs: Inputs, ids: torch.Tensor, chunk: int, entropy: bool) -> torch.Tensor:
    """Log-probabilities `[T]` of `ids` with their gradients, as GRPO's rows take them; with `entropy` its
    gradient, too.
    """
    inputs.clear()
    values, spread = linear_logprobs_entropy(inputs.hidden, Head(inputs.weight), ids, chunk=chunk)
    total = values + 0.01 * spread if entropy else values
    (total @ inputs.token_weight).backward()
    return values.detach()


def policy_rows(sheet: Sheet, place: Place) -> None:
    """Time of GRPO's rows over the three matmuls, memory, and error of the log-probabilities."""
    chunk = 16 if place.dry else 4096
    for label, size in (DRY if place.dry else SIZES).items():
        inputs = Inputs.make(size, place)
        ids = torch.arange(size[0], device=place.device) % size[2]
        base = place.milliseconds(policy_matmuls(inputs))
        sheet.row(f"{label}: the three matmuls alone", {"ms": base})
        rows = inputs.hidden[:256].double() @ inputs.weight.double().t()
        exact = rows.log_softmax(dim=-1).gather(1, ids[:256, None])[:, 0].detach()
        for name, entropy in {"log-probabilities": False, "with entropy": True}.items():
            with sheet.ours(f"{label}: {name}"):
                case = partial(policy_gradient, inputs, ids, chunk, entropy)
                numbers = measured(place, case, base)
                numbers["error"] = float((case()[: len(exact)] - exact).abs().max() / exact.abs().max())
                sheet.row(f"{label}: {name}", numbers, Bound("error", most=1e-4, timed=False))
        inputs.clear()
        place.clear()
