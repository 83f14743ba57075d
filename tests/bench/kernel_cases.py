"""What `kernels.py` compares: one function per way to get the reverse KL and its gradients."""

import importlib.util
import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from opd.kernels import tilelang_target
from opd.kernels.head import Head
from opd.kernels.ops import linear_kl
from opd.kernels.projection import TILE_ROWS, onednn_is_faster, onednn_linear, takes_onednn

TILE = 256


class Inputs:
    """Hidden states and head weights of a student and of a teacher close to it, as in distillation."""

    def __init__(
        self, tokens: int, width: int, vocabulary: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(rows: int, scale: float) -> Tensor:
            return torch.randn(rows, width, generator=generator).mul_(scale)

        student, student_weight = normal(tokens, 1.0), normal(vocabulary, 3 * width**-0.5)
        teacher, teacher_weight = (
            student + normal(tokens, 0.1),
            student_weight + normal(vocabulary, 0.3 * width**-0.5),
        )
        options = {"dtype": dtype, "device": device}
        self.student, self.teacher = student.to(**options).requires_grad_(), teacher.to(**options)
        self.student_weight = student_weight.to(**options).requires_grad_()
        self.teacher_weight = teacher_weight.to(**options)
        self.token_weight = torch.full((tokens,), 1 / tokens, device=device)
        self.kept: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Forget the gradients of the last run."""
        self.student.grad = self.student_weight.grad = None

    @torch.no_grad()
    def exact_loss(self) -> float:
        """The loss of these very inputs in float64."""
        total = 0.0
        for start in range(0, len(self.student), TILE):
            rows = slice(start, start + TILE)
            student = (self.student[rows].double() @ self.student_weight.double().t()).log_softmax(dim=-1)
            teacher = (self.teacher[rows].double() @ self.teacher_weight.double().t()).log_softmax(dim=-1)
            total += float(
                (student.exp() * (student - teacher)).sum(dim=-1) @ self.token_weight[rows].double()
            )
        return total


def naive_loss(
    student: Tensor, student_weight: Tensor, teacher: Tensor, teacher_weight: Tensor, token_weight: Tensor
) -> Tensor:
    """Full logits and autograd, as one would write it down."""
    logprobs = (student @ student_weight.t()).float().log_softmax(dim=-1)
    with torch.no_grad():
        teacher_logprobs = (teacher @ teacher_weight.t()).float().log_softmax(dim=-1)
    return (logprobs.exp() * (logprobs - teacher_logprobs)).sum(dim=-1) @ token_weight


def full_logits(inputs: Inputs, function: Callable[..., Tensor] = naive_loss) -> float:
    """`naive_loss`, or the same compiled."""
    loss = function(
        inputs.student, inputs.student_weight, inputs.teacher, inputs.teacher_weight, inputs.token_weight
    )
    loss.backward()
    return loss.item()


def ours(inputs: Inputs, chunk: int, kernels: str = "chunked", rounded: bool = False) -> float:
    """`opd.kernels.ops.linear_kl` with the implementation called `kernels`."""
    os.environ["OPD_KERNELS"] = kernels
    values = linear_kl(
        inputs.student,
        Head(inputs.student_weight, allow_bf16_logits=rounded),
        inputs.teacher,
        Head(inputs.teacher_weight, allow_bf16_logits=rounded),
        weight=inputs.token_weight,
        chunk=chunk,
    )
    loss = values @ inputs.token_weight
    loss.backward()
    return loss.item()


def liger(inputs: Inputs, compiled: bool, chunk: int) -> float:
    """Liger-Kernel's chunked fused linear distillation loss; its Jensen-Shannon at beta 1 is this KL."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss_module = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, compiled=compiled, chunk_size=chunk
    )
    labels = torch.zeros(len(inputs.student), dtype=torch.int64, device=inputs.student.device)
    loss = loss_module(inputs.student, inputs.student_weight, inputs.teacher, inputs.teacher_weight, labels)
    loss.backward()
    return loss.item()


def liger_triton(inputs: Inputs) -> float:
    """Liger-Kernel's fused linear Jensen-Shannon divergence in Triton, which needs a GPU; beta 1 is this
    KL."""
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    loss_module = LigerFusedLinearJSD(jsd_beta=1.0)
    loss = loss_module(inputs.student, inputs.student_weight, inputs.teacher, inputs.teacher_weight, None)
    loss.backward()
    return loss.item()


def matmuls_outputs(inputs: Inputs) -> None:
    """Memory for what the matmuls give, kept from round to round."""
    if "logits" not in inputs.kept:
        shape = (len(inputs.student), len(inputs.student_weight))
        inputs.kept["logits"] = inputs.student.new_empty(shape)
        inputs.kept["hidden"] = torch.empty_like(inputs.student)
        inputs.kept["weight"] = torch.empty_like(inputs.student_weight)


@torch.no_grad()
def matmuls(inputs: Inputs) -> float:
    """The four matmuls no exact method can do without: both logits, and the student's two gradients.

    The outputs are kept from round to round, so that its best round holds nothing but matmuls.
    """
    matmuls_outputs(inputs)
    logits = inputs.kept["logits"]
    torch.mm(inputs.teacher, inputs.teacher_weight.t(), out=logits)
    torch.mm(inputs.student, inputs.student_weight.t(), out=logits)
    torch.mm(logits, inputs.student_weight, out=inputs.kept["hidden"])
    torch.mm(logits.t(), inputs.student, out=inputs.kept["weight"])
    return float("nan")


def logits_product(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """`hidden weight^T` by the library that `opd.kernels` takes."""
    if not takes_onednn(hidden):
        torch.mm(hidden, weight.t(), out=out)
        return
    for start in range(0, len(weight), TILE_ROWS):
        columns = slice(start, start + TILE_ROWS)
        out[:, columns] = onednn_linear(hidden, weight[columns])


@torch.no_grad()
def matmuls_chosen(inputs: Inputs) -> float:
    """`matmuls` by the library that `opd.kernels` takes for each."""
    matmuls_outputs(inputs)
    logits = inputs.kept["logits"]
    logits_product(inputs.teacher, inputs.teacher_weight, logits)
    logits_product(inputs.student, inputs.student_weight, logits)
    inputs.kept["hidden"].copy_(onednn_linear(logits, inputs.student_weight.t()))
    torch.mm(logits.t(), inputs.student, out=inputs.kept["weight"])
    return float("nan")


@torch.no_grad()
def matmuls_unrounded(inputs: Inputs) -> float:
    """`matmuls` with float32 logits of bfloat16 inputs: what an exact method costs where no matmul gives an
    unrounded result, as on a CPU."""
    kept = inputs.kept
    if "wide" not in kept:
        for name in ("student", "student_weight", "teacher", "teacher_weight"):
            kept[f"wide {name}"] = getattr(inputs, name).float()
        kept["wide"] = kept["wide student"] @ kept["wide student_weight"].t()
        kept["narrow"] = kept["wide"].to(inputs.student.dtype)
        kept["narrow hidden"] = torch.empty_like(inputs.student)
        kept["narrow weight"] = torch.empty_like(inputs.student_weight)
    for model in ("teacher", "student"):
        logits_product(kept[f"wide {model}"], kept[f"wide {model}_weight"], kept["wide"])
    torch.mm(kept["narrow"], inputs.student_weight, out=kept["narrow hidden"])
    torch.mm(kept["narrow"].t(), inputs.student, out=kept["narrow weight"])
    return float("nan")


def cases(
    chunks: list[int], dtype: str, device: str, only: list[str]
) -> dict[str, Callable[[Inputs], float]]:
    """What is compared, by the name it has in the table; `only` keeps the names that contain one of it."""
    found: dict[str, Callable[[Inputs], float]] = {"matmuls alone": matmuls, "full logits": full_logits}
    if dtype == "bfloat16" and device == "cpu":
        found["matmuls, float32 logits"] = matmuls_unrounded
    if dtype == "float32" and device == "cpu" and onednn_is_faster():
        found["matmuls, faster library"] = matmuls_chosen
    found["full logits, compiled"] = partial(full_logits, function=torch.compile(naive_loss))
    if importlib.util.find_spec("liger_kernel"):
        found["liger"] = partial(liger, compiled=False, chunk=1024)
        found["liger, compiled"] = partial(liger, compiled=True, chunk=1024)
        if device == "cuda":
            found["liger, triton"] = liger_triton
    for size in chunks:
        found[f"opd, {size} tokens"] = partial(ours, chunk=size)
        if dtype == "bfloat16":
            found[f"opd, {size} tokens, bf16 logits"] = partial(ours, chunk=size, rounded=True)
        if tilelang_target.missing(device) is None:
            found[f"opd tilelang, {size} tokens"] = partial(ours, chunk=size, kernels="tilelang")
            if dtype == "bfloat16":
                found[f"opd tilelang, {size} tokens, bf16 logits"] = partial(
                    ours, chunk=size, kernels="tilelang", rounded=True
                )
    kept = {name: case for name, case in found.items() if not only or any(word in name for word in only)}
    return {"matmuls alone": matmuls, **kept}
