"""Deal samples to ranks and cut them into micro-batches, from metadata only.

A mini-batch (one optimiser step) is spread over the ranks by cost, teacher by teacher. Each rank packs its
samples into micro-batches, in the order of their teachers. Nothing here reads a token: lengths and teachers
are enough. Training deals and packs so (`packing.py`), and `opd plan` shows it for ranks and speeds.

Compute. A sequence of `L` tokens takes `linear * L + quadratic * L^2` floating-point operations: matrix
products with every parameter, and attention of every token to those before it. Forward and backward pass
together are three times the forward one (Kaplan et al. 2020, "Scaling Laws", section 2.1: `6 P` a token;
the causal half of attention: `2 h L^2` forward a layer for hidden size `h`, so `6 h L^2`). In a layer whose
window is `w < L` tokens see `w` of those before: `6 h w (2 L - w)`.

Overlap. A rank works through `K` micro-batches. While one is computed the next is read, as in a pipeline of
two stages with two buffers:

    T = read_1 + sum_{k=1}^{K-1} max(compute_k, read_{k+1}) + compute_K + K * overhead

`overhead` is the fixed cost of a micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

    from opd.config.train import BatchConfig
    from opd.ranks import Ranks
    from opd.train.backend import Backend

log = logging.getLogger(__name__)


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, in increasing order."""
    return [some for some in range(1, number + 1) if number % some == 0]


def context_size(longest: int, ranks: int, max_tokens: int) -> int:
    """Return how many of `ranks` share each sequence with `train.context_parallel: auto`. It is the least
    divisor that leaves a rank at most `max_tokens` of the `longest` sequence's tokens, or all ranks.
    """
    return next((size for size in divisors(ranks) if -(-longest // size) <= max_tokens), ranks)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Operations of one forward and backward pass, and the speed of the device that does them."""

    linear: float = 1.0
    """Operations a token."""
    quadratic: float = 0.0
    """Operations a pair of tokens, in layers of full attention."""
    windowed: float = 0.0
    """The same, in layers with a window."""
    window: int = 1
    """Window size in tokens."""
    operations_per_second: float = 1.0
    bytes_per_second: float = float("inf")
    """Speed of reading heavy data to the device."""
    overhead_seconds: float = 0.0
    """Fixed time of a micro-batch."""

    def __post_init__(self) -> None:
        speeds = self.operations_per_second > 0 and self.bytes_per_second > 0
        costs = (self.quadratic, self.windowed, self.overhead_seconds)
        if not speeds or min(costs) < 0 or self.linear <= 0:
            raise ValueError(
                f"{self}: linear cost and speeds must be positive, the others not negative; correct them"
            )

    @classmethod
    def of_model(
        cls, parameters: int, hidden_size: int, windows: Sequence[int | None], **speeds: float
    ) -> CostModel:
        """Cost of a decoder with causal attention. `windows` has each layer's, `None` for full attention."""
        pair = 6.0 * hidden_size
        cut = [window for window in windows if window is not None]
        return cls(
            linear=6.0 * parameters,
            quadratic=pair * (len(windows) - len(cut)),
            windowed=pair * len(cut),
            window=max(cut, default=1),
            **speeds,
        )

    def attention_operations(self, lengths: np.ndarray) -> np.ndarray:
        """Return `[n]` float64 operations on pairs of tokens, for sequences of `lengths` (`[n]` tokens)."""
        tokens = np.asarray(lengths, np.float64)
        visible = np.minimum(tokens, self.window)
        return self.quadratic * tokens * tokens + self.windowed * visible * (2.0 * tokens - visible)

    def total_operations(self, lengths: np.ndarray) -> np.ndarray:
        """Return `[n]` float64 operations for sequences of `lengths` (`[n]` tokens)."""
        return self.linear * np.asarray(lengths, np.float64) + self.attention_operations(lengths)

    def compute_seconds(self, lengths: np.ndarray) -> np.ndarray:
        """[n] float64."""
        return self.total_operations(lengths) / self.operations_per_second

    def read_seconds(self, sizes: np.ndarray) -> np.ndarray:
        """[n] float64, of `sizes` (`[n]` bytes)."""
        return np.asarray(sizes, np.float64) / self.bytes_per_second

    def pipeline_seconds(self, compute: np.ndarray, read: np.ndarray) -> float:
        """The seconds of micro-batches with these compute and read times (`[K]` seconds each), in order."""
        if not len(compute):
            return 0.0
        hidden = np.maximum(compute[:-1], read[1:]).sum()
        return float(read[0] + hidden + compute[-1] + len(compute) * self.overhead_seconds)


def deal_samples(costs: Sequence[float], teachers: Sequence[Hashable], ranks: int) -> list[int]:
    """Return a rank for each sample, by its cost and its teacher. The most expensive go first, to the rank
    with the least cost of their teacher, then of all. Ties go to the earlier sample and the lower rank.

    Ranks read a streamed teacher in lock step, so the slowest decides how long it takes.
    """
    total = [0.0] * ranks
    of_teacher: dict[Hashable, list[float]] = {}
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load = of_teacher.setdefault(teachers[index], [0.0] * ranks)
        owner = min(range(ranks), key=lambda rank: (load[rank], total[rank], rank))
        load[owner] += costs[index]
        total[owner] += costs[index]
        owners[index] = owner
    return owners


def split_by_tokens(
    lengths: Sequence[int], keys: Sequence[Hashable], max_tokens: int
) -> list[tuple[int, int]]:
    """Return consecutive ranges `[start, stop)` of at most `max_tokens` and one key each.

    A single sequence longer than `max_tokens` gets a range of its own.
    """
    ranges: list[tuple[int, int]] = []
    start, total = 0, 0
    for i, (length, key) in enumerate(zip(lengths, keys, strict=True)):
        if i > start and (total + length > max_tokens or key != keys[start]):
            ranges.append((start, i))
            start, total = i, 0
        total += length
    if len(lengths) > start:
        ranges.append((start, len(lengths)))
    return ranges


PLAIN = 4096
"""Tokens of a micro-batch on a CPU, and the minimum on CUDA."""
MOST = 32_768
"""Maximum automatic tokens of a micro-batch on CUDA, where a launch costs as much for few tokens as for many.
Launches are rare enough at this size."""
SCORED = 16_384
"""Tokens of a pass on CUDA without a gradient. It saves nothing for a backward pass."""
_STEP = 1024
"""An automatic number of tokens is a multiple of this."""
_SHARE = 2
"""Activations may take 1 / `_SHARE` of the free memory. Norms and gates in plain PyTorch save more than
`LAYER_VALUES`, and memory is freed in fragments."""
LAYER_VALUES = 17
"""Values that a decoder layer saves per token and hidden unit for its backward pass, with fused attention
(Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4: 34 bytes in half precision)."""


def layer_bytes(tokens: int, hidden_size: int, width: int) -> int:
    """Return the bytes that a layer saves of `tokens` for its backward pass, in values of `width` bytes."""
    return tokens * hidden_size * LAYER_VALUES * width


def token_bytes(layers: int, hidden_size: int, width: int, *, recompute: bool) -> int:
    """Return the bytes that `layers` save of a token. With `recompute`: inputs, and one layer's values."""
    of_layer = layer_bytes(1, hidden_size, width)
    return layers * hidden_size * width + of_layer if recompute else layers * of_layer


def logits_bytes(rows: int, vocabulary: int) -> int:
    """Return the peak bytes of the logits of `rows` tokens in the loss: three float32 values of each."""
    return 3 * rows * vocabulary * 4


def scored_tokens(max_tokens: int | Literal["auto"], device: torch.device) -> int:
    """Return the packed tokens of a pass without a gradient. `max_tokens` is that of `batch`."""
    if max_tokens != "auto":
        return max_tokens
    return SCORED if device.type == "cuda" else PLAIN


def fitting_tokens(free_bytes: int, token_bytes: int) -> int:
    """Return how many tokens of `token_bytes` a micro-batch with a gradient packs in `free_bytes`."""
    fits = max(free_bytes, 0) // _SHARE // max(token_bytes, 1)
    return max(PLAIN, min(MOST, fits // _STEP * _STEP))


def choose_tokens(backend: Backend, batch: BatchConfig, ranks: Ranks, *, width: int, reserved: int) -> None:
    """Set the micro-batch size of `backend` to the largest that fits on every one of `ranks`, if `batch`
    leaves it open and the device is CUDA. All ranks call it together, once all resident memory is allocated.

    `width` is the bytes of a value that layers compute. `reserved` is the bytes that others will still
    allocate there.
    """
    if batch.max_tokens != "auto" or backend.device.type != "cuda":
        return
    import torch

    from opd.kernels.projection import tokens_per_chunk
    from opd.models.causal_lm import held_bytes

    free = torch.cuda.mem_get_info(backend.device)[0]
    tensors = backend.local_tensors()
    trained = held_bytes(weight for weight in tensors.weights if weight.requires_grad)
    coming = 3 * trained - held_bytes(tensors.gradients) - held_bytes(tensors.moments)
    chunk = tokens_per_chunk(batch.kl_chunk, backend.device, backend.vocabulary)
    logits = logits_bytes(chunk, backend.vocabulary)
    token = token_bytes(backend.layers, backend.hidden_size, width, recompute=batch.recompute_layers)
    tokens = fitting_tokens(free - coming - logits - reserved, token)
    backend.max_tokens = -ranks.max_over_ranks(-tokens, "the size of micro-batches")
    log.info("micro-batches of up to %d tokens, of what %.1f GiB hold", backend.max_tokens, free / 2**30)


@dataclass(frozen=True, slots=True)
class Workload:
    """Metadata of `n` trajectories, for a plan."""

    lengths: np.ndarray
    """[n] int64: tokens, prompt and response."""
    teachers: np.ndarray
    """[n] integers: index of each trajectory's teacher in the order of teachers."""
    sizes: np.ndarray
    """[n] int64: heavy bytes to read."""

    def __len__(self) -> int:
        return len(self.lengths)


class MicroBatchPlan(NamedTuple):
    """Trajectories that a rank packs together."""

    mini_batch: int
    rank: int
    teachers: tuple[int, ...]
    """Their teachers, in order."""
    rows: np.ndarray
    """[k] int64: rows of the workload."""


def make_plan(
    work: Workload,
    mini_batch: int,
    ranks: int,
    cost: CostModel,
    max_tokens: int,
    *,
    by_teacher: bool = False,
) -> list[MicroBatchPlan]:
    """Return the micro-batches of an epoch, sorted by mini-batch, rank and teacher. A mini-batch has
    `mini_batch` trajectories, the last one perhaps fewer. A micro-batch has at most `max_tokens`, and with
    `by_teacher` one teacher.
    """
    costs, plan = cost.total_operations(work.lengths), []
    for step, start in enumerate(range(0, len(work), mini_batch)):
        part = slice(start, start + mini_batch)
        owners = np.array(deal_samples(costs[part].tolist(), work.teachers[part].tolist(), ranks))
        for rank in range(ranks):
            rows = start + np.flatnonzero(owners == rank)
            rows = rows[np.argsort(work.teachers[rows], kind="stable")]
            teachers = work.teachers[rows].tolist()
            keys = teachers if by_teacher else [None] * len(rows)
            for low, high in split_by_tokens(work.lengths[rows].tolist(), keys, max_tokens):
                found = tuple(dict.fromkeys(teachers[low:high]))
                plan.append(MicroBatchPlan(step, rank, found, rows[low:high]))
    return plan


def rank_seconds(
    plan: Sequence[MicroBatchPlan], work: Workload, cost: CostModel
) -> dict[tuple[int, int], float]:
    """Return the seconds of each rank in each mini-batch: (mini-batch, rank) -> seconds, by `cost`."""
    compute, read = cost.compute_seconds(work.lengths), cost.read_seconds(work.sizes)
    seconds = {}
    for key, group in groupby(plan, key=lambda micro: (micro.mini_batch, micro.rank)):
        rows = [micro.rows for micro in group]
        sums = (np.array([values[part].sum() for part in rows]) for values in (compute, read))
        seconds[key] = cost.pipeline_seconds(*sums)
    return seconds
