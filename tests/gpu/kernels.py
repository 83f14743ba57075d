"""The full-vocabulary KL with its gradients, over the four matmuls that no exact method can do without."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from opd.kernels import tilelang_target, triton_rows
from opd.kernels.head import Head
from opd.kernels.ops import linear_kl
from tests.gpu.clock import Place

SIZES = {"8192 x 4096 x 128256": (8192, 4096, 128256), "4096 x 1024 x 151936": (4096, 1024, 151936)}
DRY = {"64 x 16 x 256": (64, 16, 256)}


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
    def exact(self, rows: int = 256) -> torch.Tensor:
        """The KL of the first tokens in float64."""
        student = (self.hidden[:rows].double() @ self.weight.double().t()).log_softmax(dim=-1)
        teacher = (self.teacher_hidden[:rows].double() @ self.teacher_weight.double().t()).log_softmax(dim=-1)
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


def cases(inputs: Inputs, place: Place) -> dict[str, Callable[[], object]]:
    """What is compared, by its name in the table."""
    found: dict[str, Callable[[], object]] = {}
    names = ["chunked"]
    if place.device.type == "cuda":
        names += ["triton"] if triton_rows.missing() is None else []
        names += ["tilelang"] if tilelang_target.missing("cuda") is None else []
    for name in names:
        for chunk in (16,) if place.dry else (1024, 4096):
            found[f"{name}, {chunk} tokens"] = partial(ours, inputs, name, chunk, 1.0)
        found[f"{name}, {chunk} tokens, temperature 0.7"] = partial(ours, inputs, name, chunk, 0.7)
    if not place.dry and importlib.util.find_spec("liger_kernel"):
        found["liger, triton"] = partial(liger, inputs, True, 1.0)
        found["liger, chunked, eager"] = partial(liger, inputs, False, 1.0)
    found["full logits"] = partial(full_logits, inputs, 1.0)
    return found


def table(place: Place) -> dict[str, Any]:
    """Time over the matmuls, memory and error of every case at every size."""
    before = os.environ.get("OPD_KERNELS")
    found: dict[str, Any] = {}
    for label, size in (DRY if place.dry else SIZES).items():
        inputs = Inputs.make(size, place)
        base = place.milliseconds(matmuls(inputs))
        rows: dict[str, Any] = {"matmuls alone": {"ms": base}}
        exact = inputs.exact()
        for name, case in cases(inputs, place).items():
            try:
                rows[name] = {"ms": place.milliseconds(case, rounds=3)}
                rows[name]["over matmuls"] = rows[name]["ms"] / base
                rows[name]["GiB"] = place.peak_gib(case)
                if isinstance(values := case(), torch.Tensor) and "temperature" not in name:
                    rows[name]["error"] = float((values[: len(exact)] - exact).abs().max() / exact.max())
            except Exception as error:  # a rival that cannot run here says nothing about the others
                rows[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
            inputs.clear()
            place.clear()
        found[label] = rows
    if before is None:
        os.environ.pop("OPD_KERNELS", None)
    else:
        os.environ["OPD_KERNELS"] = before
    return found
