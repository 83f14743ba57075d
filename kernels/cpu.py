"""The faster of the two float32 matmuls that PyTorch has on a CPU."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

CPU_INFO = Path("/proc/cpuinfo")


@lru_cache(maxsize=1)
def onednn_is_faster() -> bool:
    """Whether float32 matmuls should go to oneDNN: PyTorch gives them to MKL, which takes 1.1 to 1.4 times
    as long on AMD processors with AVX-512.

    Decided by the processor, not by a clock, so that every run on a machine has the same bits.
    """
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and CPU_INFO.exists()
        and "AuthenticAMD" in CPU_INFO.read_text()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def takes_linear(inputs: Tensor) -> bool:
    """Whether `linear` is the faster matmul for `inputs`."""
    return inputs.device.type == "cpu" and inputs.dtype == torch.float32 and onednn_is_faster()


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`inputs` `[M, K]` times the transposed `weight` `[N, K]`, plus `bias` `[N]`, by oneDNN; float32."""
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
