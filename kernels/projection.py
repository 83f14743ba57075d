"""The matmuls around the row kernels: hidden states -> logits, and logits' gradient -> hidden states and
head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from opd.kernels.head import Head
from opd.kernels.rows import row_blocks

Rows = slice | Tensor
"""A chunk of tokens: a slice where all count, int64 indices where some are left out."""

# Rows of a bf16 or fp16 weight that are widened to float32 at a time.
TILE_ROWS = 4096


def chunks(tokens: int, size: int, counted: Tensor | None = None) -> Iterator[Rows]:
    """Cut the tokens (those that are `counted` `[N]` bool, if given) into chunks of at most `size`."""
    if counted is None or bool(counted.all()):
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))
    else:
        yield from (rows for rows in counted.nonzero().squeeze(1).split(size) if rows.numel())


def weight_tiles(head: Head, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The weight's vocabulary rows in `dtype`: whole if it has it already, else tile by tile."""
    size = head.vocabulary if head.weight.dtype == dtype else TILE_ROWS
    for start in range(0, head.vocabulary, size):
        rows = slice(start, min(start + size, head.vocabulary))
        yield rows, head.weight.detach()[rows].to(dtype)


def write_logits(hidden: Tensor, head: Head, temperature: float, out: Tensor) -> Tensor:
    """Logits of `hidden` `[C, D]` divided by `temperature`, written into `out` `[C, V]`."""
    hidden = hidden.to(out.dtype)
    factor = head.scale / (head.softcap or temperature)
    for columns, tile in weight_tiles(head, out.dtype):
        if head.bias is None:
            out[:, columns].addmm_(hidden, tile.t(), beta=0, alpha=factor)
        else:
            bias = head.bias.detach()[columns].to(out.dtype)
            torch.addmm(bias, hidden, tile.t(), beta=factor, alpha=factor, out=out[:, columns])
    return out if head.softcap is None else out.tanh_().mul_(head.softcap / temperature)


def softcap_slope(logits: Tensor, head: Head, temperature: float) -> Tensor | None:
    """`1 - (z / softcap)^2` for tempered logits `[R, V]`: the derivative of the softcap. None without
    one."""
    if head.softcap is None:
        return None
    return logits.mul(temperature / head.softcap).square_().neg_().add_(1)


class Gradients:
    """Collects what the student's hidden states, weight and bias get from each chunk, in statistics
    precision."""

    def __init__(
        self, hidden: Tensor, head: Head, needs: tuple[bool, bool, bool], dtype: torch.dtype
    ) -> None:
        self.head = head
        self.hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if needs[0] else None
        self.weight = torch.zeros(head.weight.shape, dtype=dtype, device=hidden.device) if needs[1] else None
        self.bias = torch.zeros(head.weight.shape[0], dtype=dtype, device=hidden.device) if needs[2] else None

    def add(self, rows: Rows, hidden: Tensor, grad_logits: Tensor) -> None:
        """`grad_logits` `[C, V]` is the loss gradient at `scale * (h W^T + b)` divided by `scale`'s chain
        factor already, that is at `h W^T + b`; `hidden` `[C, D]` are the rows' hidden states."""
        vocabulary, dtype = self.head.vocabulary, grad_logits.dtype
        if self.hidden is not None:
            part = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
            for columns, tile in weight_tiles(self.head, dtype):
                part.addmm_(grad_logits[:, columns], tile, beta=0 if columns.start == 0 else 1)
            self.hidden[rows] = part
        if self.weight is not None:
            self.weight[:vocabulary].addmm_(grad_logits.t(), hidden.to(dtype))
        if self.bias is not None:
            self.bias[:vocabulary] += grad_logits.sum(dim=0)

    def as_inputs(self, hidden: Tensor, head: Head) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The three gradients in their inputs' dtypes."""
        bias = None if self.bias is None or head.bias is None else self.bias.to(head.bias.dtype)
        return (
            None if self.hidden is None else self.hidden.to(hidden.dtype),
            None if self.weight is None else self.weight.to(head.weight.dtype),
            bias,
        )


def blocks_with_slope(
    logits: Tensor, head: Head, temperature: float, gradient: bool
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Row blocks of `logits` `[C, V]` for a row kernel, and the softcap's slope there.

    The slope is taken before the caller overwrites the block, and multiplied in after it has.
    """
    for block in row_blocks(logits):
        part = logits[block]
        slope = softcap_slope(part, head, temperature) if gradient else None
        yield block, part, slope
        if slope is not None:
            part.mul_(slope)
