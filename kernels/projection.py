"""Matrix products by the fastest library of this processor: those around the row kernels (hidden states ->
logits, and logits' gradient -> hidden states and head), and on a CPU those of linear layers and of decode.

PyTorch gives float32 products to MKL. On AMD processors with AVX-512 oneDNN, which PyTorch includes as well,
takes about half of its time for most shapes. On many processors products of 16-bit numbers take longer than
those of the same numbers widened to float32 (`tests/bench/matmul.py`). The processor decides, not a clock, so
every run on a machine has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from opd.kernels.divergences import Columns

if TYPE_CHECKING:
    from opd.kernels.head import Head

CPU_INFO = Path("/proc/cpuinfo")
LARGE = 1 << 16
"""Minimum numbers in a weight for oneDNN if it is faster, because a call costs 10 us more."""
LARGER = 1 << 18
"""The same if only its own layout makes it faster, for a few rows at a time."""
CHUNK, CHUNK_DEVICE = 1024, 4096
"""Default number of tokens whose logits exist at a time, on a CPU and at most on a GPU."""


def _is_amd() -> bool:
    return CPU_INFO.exists() and "AuthenticAMD" in CPU_INFO.read_text()


@lru_cache(maxsize=1)
def onednn_packs() -> bool:
    """Return True if a float32 weight should be laid out for oneDNN for products with few rows."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


@lru_cache(maxsize=1)
def onednn_is_faster() -> bool:
    """Return True if all float32 products should go to oneDNN."""
    return onednn_packs() and _is_amd()


@lru_cache(maxsize=4)
def widens(dtype: torch.dtype) -> bool:
    """Return True if products of `dtype` should be taken in float32 on this CPU.

    Without an instruction for their products 16-bit numbers are multiplied in plain loops. Intel's processors
    with AVX-512's for bfloat16, but without AMX, reach half the rate of their float32.
    """
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    if dtype == torch.bfloat16:
        fast = (
            capabilities.get("amx_bf16")
            or capabilities.get("bf16")
            or (capabilities.get("avx512_bf16") and _is_amd())
        )
    elif dtype == torch.float16:
        other = capabilities.get("architecture") not in ("x86_64", None)
        fast = other or capabilities.get("amx_fp16") or capabilities.get("avx512_fp16")
    else:
        return False
    return not fast


def tokens_per_chunk(tokens: int | None, device: torch.device, vocabulary: int) -> int:
    """Return the number of tokens whose logits over `vocabulary` exist at a time on `device`. `tokens`
    overrides the default.

    On a GPU a chunk reads and writes the head's whole gradient beside products that take little longer, so
    chunks are large: two chunks of float32 logits take up to a sixteenth of the memory.
    """
    if tokens is not None or device.type != "cuda":
        return tokens or CHUNK
    memory = torch.cuda.get_device_properties(device).total_memory
    fits = memory // 16 // (2 * 4 * vocabulary)
    return max(CHUNK, min(CHUNK_DEVICE, 1 << max(0, fits.bit_length() - 1)))


def takes_onednn(inputs: Tensor) -> bool:
    """Return True if `onednn_linear` is the faster product for `inputs`."""
    return inputs.device.type == "cpu" and inputs.dtype == torch.float32 and onednn_is_faster()


def onednn_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`inputs` `[M, K]` times the transposed `weight` `[N, K]`, plus `bias` `[N]`, by oneDNN; float32."""
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")


def other_way(inputs: Tensor, weight: Tensor) -> bool:
    """Return True if a faster product than PyTorch's own exists here."""
    if inputs.numel() == 0 or inputs.dtype != weight.dtype:
        return False
    if inputs.dtype == torch.float32:
        return weight.numel() >= LARGE and takes_onednn(inputs)
    return inputs.device.type == "cpu" and widens(inputs.dtype)


def _fast_product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `inputs` `[M, K]` times the transposed `weight` `[N, K]`, plus `bias` `[N]`, all of a dtype. It
    uses the faster library, in float32, and rounds once.
    """
    shift = None if bias is None else bias.float()
    product = onednn_linear if weight.numel() >= LARGE and onednn_is_faster() else functional.linear
    return product(inputs.float(), weight.float(), shift).to(inputs.dtype)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear`: `[..., K]` by `weight` `[N, K]`, plus `bias` `[N]`. Differentiable once."""
    if torch.compiler.is_compiling() or not other_way(inputs, weight) or torch.is_autocast_enabled("cpu"):
        return functional.linear(inputs, weight, bias)
    return _Linear.apply(inputs, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        flat = inputs.reshape(-1, inputs.shape[-1])
        return _fast_product(flat, weight, bias).view(*inputs.shape[:-1], len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        for_inputs, for_weight, for_bias = ctx.needs_input_grad
        upstream = upstream.reshape(-1, len(weight))
        flat = inputs.reshape(-1, inputs.shape[-1])
        return (
            _fast_product(upstream, weight.t()).view(inputs.shape) if for_inputs else None,
            _fast_product(upstream.t(), flat.t()) if for_weight else None,
            upstream.sum(dim=0) if for_bias else None,
        )


class Linear(nn.Linear):
    """`nn.Linear` with `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., K]` -> `[..., N]`."""
        return linear(input, self.weight, self.bias)


def speed_up(module: nn.Module) -> None:
    """Make every plain `nn.Linear` in `module` a `Linear` if that is faster for some dtype."""
    if onednn_is_faster() or widens(torch.bfloat16) or widens(torch.float16):
        for part in module.modules():
            if type(part) is nn.Linear:
                part.__class__ = Linear


class DecodeWeight:
    """A copy of a weight for products with few rows, laid out once for this processor. Slow 16-bit numbers
    become float32.
    """

    __slots__ = ("_packed", "_wide", "laid_out")

    def __init__(self, weight: Tensor) -> None:
        """Take over `weight` `[N, K]`, which nothing else may hold."""
        on_cpu, least = weight.device.type == "cpu", LARGE if onednn_is_faster() else LARGER
        self._wide = on_cpu and widens(weight.dtype)
        if self._wide:
            weight = weight.float()
        self._packed = on_cpu and weight.numel() >= least and weight.dtype == torch.float32 and onednn_packs()
        self.laid_out: Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _FEW) if self._packed else weight.t()
        )
        """Its numbers, in their memory layout."""

    def copy_(self, other: DecodeWeight) -> None:
        """Copy the numbers of `other`, of the same shape, in place. Not for a layout of oneDNN's."""
        self.laid_out.copy_(other.laid_out)

    def project_rows(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map `inputs` `[M, K]` to `[M, N]`, plus `bias` `[N]`."""
        dtype = inputs.dtype
        if self._wide:
            inputs, bias = inputs.float(), None if bias is None else bias.float()
        if self._packed:
            outputs = onednn_linear(inputs, self.laid_out, bias)
        elif bias is None:
            outputs = torch.mm(inputs, self.laid_out)
        else:
            outputs = torch.addmm(bias, inputs, self.laid_out)
        return outputs.to(dtype)

    def add_product(self, total: Tensor, inputs: Tensor, alpha: float = 1.0) -> Tensor:
        """Return `total` `[M, N]`, whose memory the result may reuse, plus `alpha` times the product with
        `inputs` `[M, K]`.
        """
        if not self._packed and not self._wide:
            return total.addmm_(inputs, self.laid_out, alpha=alpha)
        product = self.project_rows(inputs.float())
        sum_ = product.add_(total) if alpha == 1.0 else torch.add(total, product, alpha=alpha)
        return sum_.to(total.dtype)


_FEW = 16
"""Rows that the layout is chosen for; any number works."""


Rows = slice | Tensor
"""A chunk of tokens: a slice if all count, int64 indices if some are left out."""

# Rows of a bf16 or fp16 weight that are widened, or whose product is, at a time: few enough to be still in a
# cache when they are read, enough for the matmul.
TILE_ROWS = 1024
# Columns of the logits' gradient that are copied and multiplied at a time.
COPIED_COLUMNS = 512
# A matmul's tokens are filled up to a multiple of this. Libraries use other inner loops, with other rounding,
# for a few rows and for the rows that remain beside their tiles. A multiple of 64 meets none of them.
ROW_TILE = 64


def token_chunks(tokens: int, size: int, counted: Tensor | None = None) -> Iterator[Rows]:
    """Split the tokens (only the `counted` `[M]` int64, if given) into chunks of at most `size`."""
    if counted is None:
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))
    else:
        yield from (rows for rows in counted.split(size) if rows.numel())


def some_of(counts: Tensor, counted: Tensor | None = None) -> tuple[Tensor | None, int]:
    """Return the indices `[M]` int64 of True in `counts` `[N]` bool for `token_chunks`, `None` if all are,
    and their number. It waits once for the device, or not at all if the indices are given (`counted`).
    """
    places = counts.nonzero().squeeze(1) if counted is None else counted
    return None if len(places) == len(counts) else places, len(places)


def matmul_rows(tokens: int, chunk: int) -> int:
    """Return the rows of the matmuls for a chunk of `tokens`, at most `chunk`: see `ROW_TILE`.

    Always `chunk` under `torch.use_deterministic_algorithms`, so the shape is the same for any batch.
    """
    if torch.are_deterministic_algorithms_enabled():
        return chunk if tokens else 0
    return min(chunk, -(-tokens // ROW_TILE) * ROW_TILE)


def padded_rows(tensor: Tensor, rows: Rows, chunk: int) -> Tensor:
    """Return the `rows` of `tensor` `[T, ...]`, filled up with zeros to `matmul_rows`."""
    part = tensor[rows]
    missing = matmul_rows(len(part), chunk) - len(part)
    return part if missing == 0 else torch.cat([part, part.new_zeros(missing, *part.shape[1:])])


def narrow_matmul(hidden: Tensor, weight: Tensor) -> bool:
    """Return True if this machine multiplies these two faster in bfloat16 than widened to float32."""
    if hidden.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return False
    return hidden.device.type != "cpu" or not widens(torch.bfloat16)


def wide_product(hidden: Tensor, weight: Tensor) -> bool:
    """Return True if a matmul of 16-bit inputs with an unrounded float32 result exists (CUDA has one)."""
    halves = (torch.bfloat16, torch.float16)
    return hidden.is_cuda and hidden.dtype == weight.dtype and hidden.dtype in halves


def weight_tiles(head: Head, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield the weight's vocabulary rows in `dtype`: all at once if it has that dtype, else tile by tile.

    A tile is valid until the next one, because all are written into the same memory.
    """
    weight = head.weight.detach()[: head.vocabulary]
    if weight.dtype == dtype:
        yield slice(0, head.vocabulary), weight
        return
    buffer = torch.empty(min(TILE_ROWS, head.vocabulary), head.hidden_size, dtype=dtype, device=weight.device)
    for start in range(0, head.vocabulary, TILE_ROWS):
        rows = slice(start, min(start + TILE_ROWS, head.vocabulary))
        yield rows, buffer[: rows.stop - start].copy_(weight[rows])


def write_logits(hidden: Tensor, head: Head, temperature: float, out: Tensor) -> Tensor:
    """Write logits of `hidden` `[C, D]` divided by `temperature` into `out` `[C, V]`."""
    hidden, factor = hidden.detach(), head.scale / (head.softcap or temperature)
    bias = None if head.bias is None else head.bias.detach()[: head.vocabulary].to(out.dtype)
    if out.dtype == torch.float32 and wide_product(hidden, head.weight):
        weight = head.weight.detach()[: head.vocabulary]
        if bias is None and factor != 1.0:  # the product scales by itself: no pass over `out`
            options = {"beta": 0, "alpha": factor, "out_dtype": torch.float32, "out": out}
            torch.addmm(out, hidden, weight.t(), **options)
        else:
            torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
            _scale_and_shift_(out, factor, bias)
    elif head.allow_bf16_logits and out.dtype == torch.float32 and narrow_matmul(hidden, head.weight):
        for start in range(0, head.vocabulary, TILE_ROWS):
            columns = slice(start, min(start + TILE_ROWS, head.vocabulary))
            out[:, columns] = hidden @ head.weight.detach()[columns].t()
        _scale_and_shift_(out, factor, bias)
    else:
        hidden = hidden.to(out.dtype)
        for rows, tile in weight_tiles(head, out.dtype):
            part, shift = out[:, rows], None if bias is None else bias[rows]
            if takes_onednn(hidden):
                for start in range(0, len(tile), TILE_ROWS):  # a tile is in the cache when it is copied
                    columns = slice(start, min(start + TILE_ROWS, len(tile)))
                    product = onednn_linear(hidden, tile[columns], None if shift is None else shift[columns])
                    torch.mul(product, factor, out=part[:, columns])
            elif shift is None:
                part.addmm_(hidden, tile.t(), beta=0, alpha=factor)
            else:
                torch.addmm(shift, hidden, tile.t(), beta=factor, alpha=factor, out=part)
    return out if head.softcap is None else out.tanh_().mul_(head.softcap / temperature)


def _scale_and_shift_(logits: Tensor, factor: float, bias: Tensor | None) -> None:
    """Replace `logits` by `factor * (logits + bias)`."""
    if bias is not None:
        logits.add_(bias)
    if factor != 1.0:
        logits.mul_(factor)


class Gradients:
    """Collects the gradients of the student's hidden states, weight and bias from each chunk.

    Sums over chunks are kept in statistics precision. If hidden states and weight are bfloat16 and the
    machine multiplies those faster, the logits' gradient is rounded to bfloat16 for its two matmuls, as
    autograd does in a bfloat16 model. With `single` one chunk holds all tokens, so nothing is summed. If the
    head has a `total` of the statistics' dtype, the weight's part goes there.
    """

    def __init__(
        self, hidden: Tensor, head: Head, needs: tuple[bool, bool, bool], dtype: torch.dtype, single: bool
    ) -> None:
        self.head = head
        self.narrow = dtype == torch.float32 and narrow_matmul(hidden, head.weight)
        self.shared = needs[1] and head.total is not None and head.total.dtype == dtype
        """True if the weight's gradient is part of a sum that others add to."""
        self.first = not self.shared
        device = hidden.device
        self.hidden = self.weight = self.bias = None
        if needs[0]:
            self.hidden = torch.zeros(
                hidden.shape, dtype=hidden.dtype if self.narrow else dtype, device=device
            )
        if self.shared:
            self.weight = head.total
        elif needs[1]:
            weight_dtype = head.weight.dtype if self.narrow and single else dtype
            # Written, not added to, by the first chunk: zeros would cost one more pass over it.
            self.weight = torch.empty(head.weight.shape, dtype=weight_dtype, device=device)
            self.weight[head.vocabulary :].zero_()
        if needs[2]:
            self.bias = torch.zeros(head.weight.shape[0], dtype=dtype, device=device)

    def add(self, rows: Rows, hidden: Tensor, grad_logits: Tensor, spare: Tensor | None = None) -> None:
        """Add one chunk. `grad_logits` `[M, V]` is the loss gradient at `h W^T + b` of its tokens, filled up
        with rows of zeros like `hidden` `[M, D]`. `rows` are the tokens' indices. If the two matmuls are
        narrow it may be bfloat16 already.

        `spare` is memory of at least half the size of `grad_logits` that may be overwritten.
        """
        vocabulary = self.head.vocabulary
        if self.bias is not None:
            self.bias[:vocabulary] += grad_logits.sum(dim=0)
        if self.narrow and grad_logits.dtype != torch.bfloat16:
            if spare is None:
                grad_logits = grad_logits.to(torch.bfloat16)
            else:
                rounded = spare.view(-1).view(torch.bfloat16)[: grad_logits.numel()].view(grad_logits.shape)
                grad_logits = rounded.copy_(grad_logits)
        if grad_logits.dtype == torch.bfloat16 and not grad_logits.is_cuda:
            # With AMX a product of bfloat16 rows reads the memory between them (PyTorch 2.13), which may hold
            # NaN.
            grad_logits = grad_logits.contiguous()
        tokens = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        if self.hidden is not None:
            weight = self.head.weight.detach()[:vocabulary]
            if self.narrow:
                part = grad_logits @ weight
            elif weight.dtype == grad_logits.dtype and takes_onednn(grad_logits):
                part = onednn_linear(grad_logits, weight.t())
            else:
                part = grad_logits.new_empty(len(grad_logits), weight.shape[1])
                for columns, tile in weight_tiles(self.head, grad_logits.dtype):
                    part.addmm_(grad_logits[:, columns], tile, beta=0 if columns.start == 0 else 1)
            self.hidden[rows] = part[:tokens]
            del part  # before the next product needs memory
        if self.weight is not None:
            self._add_weight(self.weight[:vocabulary], grad_logits, hidden.detach())
        self.first = False

    def _add_weight(self, total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
        beta, transposed = 0 if self.first else 1, grad_logits.t()
        if not self.narrow and total.numel() >= LARGE and takes_onednn(grad_logits):
            # oneDNN cannot add to existing values, and reads columns of long rows slowly. Tiles that fit in
            # the cache are copied before and added after.
            across = hidden.to(grad_logits.dtype).t()
            self._add_parts(
                total,
                COPIED_COLUMNS,
                lambda columns: onednn_linear(grad_logits[:, columns].contiguous().t(), across),
            )
        elif not self.narrow:
            total.addmm_(transposed, hidden.to(grad_logits.dtype), beta=beta)
        elif total.dtype == torch.bfloat16:
            torch.mm(transposed, hidden, out=total)
        elif hidden.is_cuda:
            torch.addmm(total, transposed, hidden, beta=beta, out_dtype=total.dtype, out=total)
        else:
            self._add_parts(total, TILE_ROWS, lambda columns: transposed[columns] @ hidden)

    def _add_parts(self, total: Tensor, size: int, product: Callable[[slice], Tensor]) -> None:
        """Add `product` of `size` rows of the weight at a time to `total`, or write it the first time."""
        for start in range(0, len(total), size):
            columns = slice(start, min(start + size, len(total)))
            part = product(columns)
            if self.first:
                total[columns] = part
            else:
                total[columns] += part

    def merge_from(self, other: Gradients) -> None:
        """Add the gradients of another run over the same tokens. A shared weight has them already."""
        if self.hidden is not None and other.hidden is not None:
            self.hidden += other.hidden
        if self.bias is not None and other.bias is not None:
            self.bias += other.bias

    def as_inputs(self, hidden: Tensor, head: Head) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the three gradients in their inputs' dtypes; None for a weight whose `total` has it."""
        if self.first and self.weight is not None:
            self.weight.zero_()
        bias = None if self.bias is None or head.bias is None else self.bias.to(head.bias.dtype)
        return (
            None if self.hidden is None else self.hidden.to(hidden.dtype),
            None if self.weight is None or self.shared else self.weight.to(head.weight.dtype),
            bias,
        )


def blocks_with_slope(
    logits: Tensor, head: Head, temperature: float, gradient: bool, columns: Columns
) -> Iterator[tuple[slice, Tensor]]:
    """Yield row blocks of `logits` `[C, V]` for a row kernel.

    The softcap's slope is taken before the caller overwrites a block, and multiplied in afterwards.
    """
    for block in columns.kernel_blocks(logits):
        part = logits[block]
        slope = None
        if gradient and head.softcap is not None:  # `1 - (z / softcap)^2` for tempered logits
            slope = part.mul(temperature / head.softcap).square_().neg_().add_(1)
        yield block, part
        if slope is not None:
            part.mul_(slope)
