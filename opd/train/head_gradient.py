"""The gradients of a head and of an embedding, each in one place for a whole step.

Autograd makes a gradient `[V, D]` for every operation on the head, and one for every reading of the
embedding, and adds each to `.grad`: from the second micro-batch on a step holds two of them, and three where
head and embedding are one weight. Here the operations of `opd.kernels` add to one sum instead, and the
embedding's gradient has a row for each token that was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from opd.kernels.head import Head, statistics_dtype
from opd.kernels.vocab_parallel import HeadShard


def adding_to(head: Head | HeadShard, total: Tensor | None) -> Head | HeadShard:
    """`head`, whose weight's gradient goes to `total`, of the weight's shape."""
    if total is None:
        return head
    if isinstance(head, HeadShard):
        return replace(head, head=replace(head.head, total=total))
    return replace(head, total=total)


@contextmanager
def gathered(module: Any) -> Iterator[Tensor | None]:
    """While the block runs, a sum `[V, D]` for the gradient of the weight of a language model's head, and
    rows alone of its embedding's; afterwards all of it is in the `.grad` of both. `None` for a head that does
    not learn.

    Of float32 and float64 the sum is `.grad` itself. Of 16-bit numbers it is float32 and rounded once, at the
    end, and the embedding's gradient stays whole: rows of 16 bits would be rounded each time.
    """
    weight, embedding = module.get_output_embeddings().weight, module.get_input_embeddings()
    wide = weight.dtype == statistics_dtype(weight)
    with ExitStack() as undo:
        own = getattr(embedding, "weight", None)
        if wide and type(own) is nn.Parameter and own.requires_grad and isinstance(embedding, nn.Embedding):
            _opened(own)
            embedding.sparse = True
            undo.callback(setattr, embedding, "sparse", False)
            undo.callback(own.register_hook(_in_order).remove)
        if not weight.requires_grad:
            yield None
        elif wide:
            yield _opened(weight)
        else:
            total = torch.zeros_like(weight, dtype=torch.float32)
            yield total
            if weight.grad is not None:
                total += weight.grad
            weight.grad = total.to(weight.dtype)


def _opened(weight: nn.Parameter) -> Tensor:
    """Its `.grad`, of zeros where there is none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _in_order(gradient: Tensor) -> Tensor:
    """Rows of one token summed, so that adding them has one order on every device."""
    return gradient.coalesce() if gradient.is_sparse else gradient
