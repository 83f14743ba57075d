"""What a trajectory costs to train on, and how long micro-batches take whose data is read while others run.

Compute. A sequence of `L` tokens takes `linear * L + quadratic * L^2` floating-point operations: matrix
products with every parameter, and attention of every token to those before it. Forward and backward pass
together are three times the forward one (Kaplan et al. 2020, "Scaling Laws", section 2.1: `6 P` a token;
the causal half of attention: `2 h L^2` forward a layer for hidden size `h`, so `6 h L^2`). In a layer whose
window is `w < L` tokens see `w` of those before: `6 h w (2 L - w)`.

Overlap. A rank works through `K` micro-batches; while one is computed the next is read, as in a pipeline of
two stages with two buffers:

    T = read_1 + sum_{k=1}^{K-1} max(compute_k, read_{k+1}) + compute_K + K * overhead

For equal parts of total compute C and total reading D this is `max(C, D) + min(C, D) / K + K * overhead`:
more micro-batches hide more of the shorter of the two, until `sqrt(min(C, D) / overhead)`, where what another
one launches costs more than it hides. `overhead` is what a micro-batch costs however small it is; the byte
budget bounds its size from above. (DeepSeek-V4, report, section 5.2.4, chooses the number of on-device
mini-batches by workload, to balance compute throughput against I/O overlap; it does not give the rule.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
    """Tokens that those see."""
    operations_per_second: float = 1.0
    bytes_per_second: float = float("inf")
    """At which heavy data comes to the device."""
    overhead_seconds: float = 0.0
    """Of a micro-batch, however small."""

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
        """A decoder with causal attention; `windows` has each layer's, `None` where it sees everything."""
        pair = 6.0 * hidden_size
        cut = [window for window in windows if window is not None]
        return cls(
            linear=6.0 * parameters,
            quadratic=pair * (len(windows) - len(cut)),
            windowed=pair * len(cut),
            window=max(cut, default=1),
            **speeds,
        )

    def attention(self, lengths: np.ndarray) -> np.ndarray:
        """[n] float64: operations on pairs of tokens in sequences of `lengths` (`[n]` tokens)."""
        tokens = np.asarray(lengths, np.float64)
        seen = np.minimum(tokens, self.window)
        return self.quadratic * tokens * tokens + self.windowed * seen * (2.0 * tokens - seen)

    def operations(self, lengths: np.ndarray) -> np.ndarray:
        """[n] float64 of sequences of `lengths` (`[n]` tokens)."""
        return self.linear * np.asarray(lengths, np.float64) + self.attention(lengths)

    def compute_seconds(self, lengths: np.ndarray) -> np.ndarray:
        """[n] float64."""
        return self.operations(lengths) / self.operations_per_second

    def read_seconds(self, sizes: np.ndarray) -> np.ndarray:
        """[n] float64, of `sizes` (`[n]` bytes)."""
        return np.asarray(sizes, np.float64) / self.bytes_per_second

    def pipeline_seconds(self, compute: np.ndarray, read: np.ndarray) -> float:
        """Time of micro-batches that take so long to compute and to read (`[K]` seconds each), in order."""
        if not len(compute):
            return 0.0
        hidden = np.maximum(compute[:-1], read[1:]).sum()
        return float(read[0] + hidden + compute[-1] + len(compute) * self.overhead_seconds)


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """What fits on the device: the activations of the micro-batch in use, its data, and the next one's."""

    max_bytes: float
    bytes_per_token: float = 0.0
    """Activations, and whatever else the micro-batch in use takes for each token."""
    max_tokens: int | None = None
    """Most packed tokens of a micro-batch, if anything else limits them."""

    def __post_init__(self) -> None:
        limit = 1 if self.max_tokens is None else self.max_tokens
        if not self.max_bytes > 0 or self.bytes_per_token < 0 or limit <= 0:
            raise ValueError(f"{self}: limits must be positive; correct them")

    def data_bytes(self, tokens: float) -> float:
        """Most heavy bytes of a micro-batch where none has more than `tokens`: half of what its activations
        leave, so that two of them fit.
        """
        return (self.max_bytes - self.bytes_per_token * tokens) / 2

    def oversize(self, lengths: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """[n] bool: sequences of `lengths` tokens and `sizes` heavy bytes that do not fit even alone."""
        too_long = np.zeros(len(lengths), bool) if self.max_tokens is None else lengths > self.max_tokens
        return too_long | (sizes > self.data_bytes(0.0) - self.bytes_per_token * lengths / 2)
