"""Where a TileLang kernel runs, and how it is compiled: one body serves a CPU and an sm_90a GPU.

The targets differ in four ways only: how many lanes work on a row, what a buffer of lanes is, what a loop
over them is, and the compiler's options. TileLang is imported by the functions that need it.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

# TileLang passes no -O by itself, and reads a float's bits through a pointer to int. Nothing here relaxes the
# arithmetic of results (so no -ffast-math, which would also have the whole process flush denormals).
CPU_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing")
# Warp specialisation moves the initialisation of running statistics into the vocabulary loop (README.md).
CUDA_PASSES = {"tl.disable_warp_specialized": True}
HOPPER = "sm_90a"


@dataclass(frozen=True)
class Target:
    """A machine, and the shape of a row kernel's work on it.

    A row is read in tiles of `unroll * lanes` logits; each lane keeps statistics of its own.
    """

    name: str
    lanes: int
    unroll: int
    threads: int

    @property
    def is_cpu(self) -> bool:
        """Whether the kernel is C++ for this machine's processor."""
        return self.name == "cpu"

    def lane_buffer(self, language: Any) -> Callable[..., Any]:
        """What allocates one number per lane: an array on a CPU, registers of the block on a GPU."""
        return language.alloc_local if self.is_cpu else language.alloc_fragment

    def lane_loop(self, language: Any) -> Callable[..., Any]:
        """What loops over lanes: a vectorised loop nest on a CPU, the block's threads on a GPU."""
        return language.grid if self.is_cpu else language.Parallel

    def step_loop(self, language: Any) -> Callable[..., Any]:
        """What loops over the steps of a tile: the C++ compiler unrolls for itself."""
        return language.serial if self.is_cpu else language.unroll


# 64 lanes are four AVX-512 registers of float32: enough additions in flight to hide their latency.
CPU = Target("cpu", lanes=32, unroll=16, threads=1)
CUDA = Target(HOPPER, lanes=512, unroll=8, threads=512)


def language() -> Any:
    """`tilelang.language`, imported on demand and untyped: a kernel is not Python to a type checker."""
    import tilelang.language

    return tilelang.language


@lru_cache(maxsize=4)
def missing(device: str) -> str | None:
    """Why compiled kernels cannot run on `device` (`cpu` or `cuda`), and how to mend it; None if they can."""
    if importlib.util.find_spec("tilelang") is None:
        return "TileLang is not installed; install opd[tilelang]"
    if device == "cpu":
        if shutil.which("g++") is None and shutil.which("c++") is None:
            return "TileLang compiles its CPU kernels with a C++ compiler and finds none; install g++"
        return None
    if device != "cuda":
        return f"compiled kernels run on cpu and cuda, not on {device}; use chunked"
    if not torch.cuda.is_available():
        return "no CUDA device can be used"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"the kernels are written for {HOPPER} and this GPU is another; use chunked"
    if shutil.which("nvcc") is None:
        return "TileLang compiles its CUDA kernels with nvcc and finds none; install the CUDA toolkit"
    return None


def target_of(tensor: torch.Tensor) -> Target:
    """The target of kernels that read `tensor`.

    Raises `RuntimeError` where they cannot run.
    """
    device = tensor.device.type
    reason = missing(device)
    if reason is not None:
        raise RuntimeError(f"the TileLang kernels cannot run on {device}: {reason}")
    return CPU if device == "cpu" else CUDA


@lru_cache(maxsize=128)
def build(factory: Callable[..., Any], target: Target, *options: Any) -> Any:
    """Compile `factory(target, *options)` once per process; TileLang keeps the result on disk as well.

    Kernels leave the number of tokens and the vocabulary's size open, so neither asks for a new compilation.
    """
    import tilelang

    function = factory(target, *options)
    if target.is_cpu:
        return tilelang.compile(
            function, target="c", execution_backend="cython", compile_flags=list(CPU_FLAGS)
        )
    return tilelang.compile(
        function,
        target={"kind": "cuda", "arch": HOPPER},
        execution_backend="tvm_ffi",
        pass_configs=dict(CUDA_PASSES),
    )
