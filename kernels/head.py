"""The head of a causal language model: everything after the last hidden state (the final norm included)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opd.kernels.projection import linear, wide_product

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def statistics_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if any of `tensors` is, else float32: the dtype of logits and their statistics."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


@dataclass(frozen=True, eq=False)
class Head:
    """Hidden states to logits, over the first `vocab_size` rows of `weight`.

    `logits = scale * (h W^T + b)`, and `softcap * tanh(logits / softcap)` if there is a softcap (Gemma 2).
    `scale` is a family's factor of its logits (Cohere) or the inverse of its divisor (Granite). The tensors
    are kept as they are, so gradients flow to a model's own parameters. Raises `TypeError` for tensors that
    are not floating point and `ValueError` for shapes and numbers that do not fit together.
    """

    weight: Tensor
    """[V, D]; may be padded beyond the tokenizer's vocabulary."""
    bias: Tensor | None = None
    """[V]."""
    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None
    """Number of rows for tokens. The others are padding and take no probability. `None`: all."""
    allow_bf16_logits: bool = False
    """Let the matmul of bfloat16 hidden states and weights round the logits to bfloat16, as a model in
    bfloat16 does itself. The error is up to 2^-8 of each logit. It saves time if no matmul with a float32
    result exists (on a CPU)."""
    total: Tensor | None = None
    """[V, D]: sum to which the chunked operations add the weight's gradient instead of giving it to autograd,
    so it exists once for any number of operations. A divergence adds the gradient of its declared weights in
    its forward, so code that sets this runs backward through everything with a gradient. Operations whose
    statistics have another dtype ignore it."""

    def __post_init__(self) -> None:
        if self.weight.dtype not in FLOATS:
            raise TypeError(
                f"the head's weight is {self.weight.dtype}; give one of {', '.join(map(str, FLOATS))}"
            )
        if self.weight.ndim != 2 or 0 in self.weight.shape:
            raise ValueError(f"the head's weight has shape {list(self.weight.shape)}; it must be [V, D]")
        rows = self.weight.shape[0]
        if self.total is not None and self.total.shape != self.weight.shape:
            raise ValueError(
                f"the head's total has shape {list(self.total.shape)}; its weight has"
                f" {list(self.weight.shape)}"
            )
        if self.bias is not None and self.bias.dtype not in FLOATS:
            raise TypeError(
                f"the head's bias is {self.bias.dtype}; give one of {', '.join(map(str, FLOATS))}"
            )
        if self.bias is not None and self.bias.shape != (rows,):
            raise ValueError(
                f"the head's bias has shape {list(self.bias.shape)}; its weight asks for [{rows}]"
            )
        if not math.isfinite(self.scale):
            raise ValueError(f"the head's scale is {self.scale}; it must be finite")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ValueError(
                f"the head's softcap is {self.softcap}; it must be positive, or None for no softcap"
            )
        if self.vocab_size is not None and not 1 <= self.vocab_size <= rows:
            raise ValueError(f"the head's vocab_size is {self.vocab_size}; its weight has {rows} rows")

    @property
    def vocabulary(self) -> int:
        """Number of logits `V`: `vocab_size`, or all rows of the weight."""
        return self.weight.shape[0] if self.vocab_size is None else self.vocab_size

    @property
    def hidden_size(self) -> int:
        """Width `D` of its hidden states."""
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, padding rows included."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[N, V]` float32 (float64 if hidden states or weight are) of `[N, D]`. Plain and
        differentiable."""
        dtype = statistics_dtype(hidden, self.weight)
        rows = slice(0, self.vocabulary)
        if self.allow_bf16_logits and hidden.dtype == self.weight.dtype == torch.bfloat16:
            logits = (hidden @ self.weight[rows].t()).to(dtype)
        elif wide_product(hidden, self.weight) and not torch.is_grad_enabled():
            logits = torch.mm(hidden, self.weight[rows].t(), out_dtype=dtype)
        else:
            logits = linear(hidden.to(dtype), self.weight[rows].to(dtype))
        if self.bias is not None:
            logits = logits + self.bias[rows].to(dtype)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


@contextmanager
def summed_gradients(module: Any) -> Iterator[Tensor | None]:
    """Collect the gradients of a head and of an embedding, each in one tensor for a whole step.

    Autograd makes a gradient `[V, D]` for every operation on the head, and one for every reading of the
    embedding, and adds each to `.grad`. From the second micro-batch on a step holds two of them, and three if
    head and embedding are one weight.

    The block gets a sum `[V, D]` for the gradient of the head's weight; of the embedding's gradient only rows
    exist. Afterwards all of it is in the `.grad` of both. `None` for a frozen head.

    For float32 and float64 the sum is `.grad` itself. For 16-bit numbers it is float32 and rounded once, at
    the end, and the embedding's gradient stays dense, because rows of 16 bits would be rounded each time.
    """
    weight, embedding = module.get_output_embeddings().weight, module.get_input_embeddings()
    wide = weight.dtype == statistics_dtype(weight)
    with ExitStack() as undo:
        table = embedding.weight if isinstance(embedding, nn.Embedding) else None
        if wide and type(table) is nn.Parameter and table.requires_grad:
            _ensure_grad(table)
            embedding.sparse = True
            undo.callback(setattr, embedding, "sparse", False)
            undo.callback(table.register_hook(_in_order).remove)
        if not weight.requires_grad:
            yield None
        elif wide:
            yield _ensure_grad(weight)
        else:
            total = torch.zeros_like(weight, dtype=torch.float32)
            yield total
            if weight.grad is not None:
                total += weight.grad
            weight.grad = total.to(weight.dtype)


def _ensure_grad(weight: nn.Parameter) -> Tensor:
    """Return its `.grad`, created as zeros if missing."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _in_order(gradient: Tensor) -> Tensor:
    """Sum the rows of each token, so that adding them has one order on every device."""
    return gradient.coalesce() if gradient.is_sparse else gradient
