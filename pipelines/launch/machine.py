"""Configure the machine for a stage: threads, devices and memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from opd.config import Recipe
from opd.errors import OpdError, from_system, reason_of
from opd.untrusted import core_count, machine_memory, ranks_here

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt(3)


def out_of_memory(error: BaseException) -> str | None:
    """Return the message of `error`, in short, if it means out of memory, else `None`."""
    import torch

    words = ("can't allocate memory", "Cannot allocate memory")  # torch's allocator, the system
    allocator = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    if allocator or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return reason_of(error)[:160] if str(error).strip() else "no more is free"
    return None


def known_error(error: BaseException, *, resumes: bool = True) -> OpdError | None:
    """Convert an error as `from_system` does, and torch's out-of-memory errors too."""
    understood = from_system(error)
    if understood is not None or "torch" not in sys.modules:
        return understood
    reason = out_of_memory(error)
    if reason is None:
        return None
    lower = (
        "lower runtime.decode.kv_cache_mb, then continue with --resume, or batch.max_tokens, then with"
        " --resume --accept-changed-settings"
    )
    free = "end what else takes it, or use a machine with more"
    return OpdError(f"there is no more memory ({reason}); {lower if resumes else free}.")


def threads_here(recipe: Recipe, *, alone: bool = False) -> int:
    """Return the number of threads that `runtime.threads` means on this machine. `null` is one for a model
    made from a configuration. For others it is a share of the cores, at least one. `alone`: no other stage
    trains concurrently with this one.
    """
    if recipe.runtime.threads is not None:
        return recipe.runtime.threads
    if recipe.model.config is not None:
        return 1
    if recipe.launch.type == "ray":
        return max(1, int(recipe.launch.trainer.cpus))
    ranks = recipe.train.ranks or ranks_here()
    return max(1, core_count() // (ranks if alone else recipe.runtime.workers * ranks))


def describe_hardware() -> dict[str, Any]:
    """Describe this process's hardware: processor, cores, memory and system, with a GPU its name and CUDA."""
    import torch

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        cpu = names[0] if names else cpu
    hardware: dict[str, Any] = {
        "cpu": cpu,
        "cores": os.cpu_count() or 1,
        "memory_mb": machine_memory() >> 20,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        every = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        hardware["gpus"] = [{"name": one.name, "memory_mb": one.total_memory >> 20} for one in every]
        hardware["cuda"] = torch.version.cuda
    return hardware


def kernel_implementation() -> str:
    """Return the kernels' implementation in this process (`OPD_KERNELS`), and the row kernels it has used. If
    `OPD_KERNELS` is invalid, return its value.
    """
    from opd.kernels.ops import implementation
    from opd.kernels.tilelang_rows import PROVED

    try:
        chosen = implementation()
    except ValueError:
        return os.environ["OPD_KERNELS"]
    name = getattr(chosen, "name", None) or chosen.__name__.rpartition(".")[2]
    if name == "rows":
        return "chunked, rows by TileLang" if PROVED else "chunked"
    return str(name)


_GIT_SECONDS = 20.0


def git_state(folder: Path) -> dict[str, Any]:
    """Return `commit` of the checkout `folder`, and `dirty` if tracked files changed. Empty without one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def run_git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_GIT_SECONDS, env=environment
        )
        return done.stdout.strip()

    try:
        if Path(run_git("rev-parse", "--show-toplevel")).resolve() != folder.resolve():
            return {}
        commit = run_git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(run_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}


def configure_machine(threads: int, tf32: bool, device: str = "auto") -> None:
    """Configure threads, device and arithmetic of this process.

    It sets the CPU threads, the GPU (of `model.device`) and whether GPUs may round float32 factors to TF32.
    It flushes numbers that are too small to be normal (in float32 below 1.2e-38) to 0. It retains freed
    memory for the next tensor. A CPU takes up to a hundred times as long for products of such small numbers.
    A training step with such gradients, of a model that is sure of its tokens, took 45 s instead of 1.5.
    Threads inherit the setting from their creator, so call this before they start. By default glibc gives
    every large block back to the kernel, which then zeroes it page by page for the next one. That was up to
    half of a small model's training step if processes share the machine.
    """
    import torch

    from opd.models.causal_lm import torch_device

    torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    target = torch_device(device)
    if target.type == "cuda":  # FSDP takes the current device if it gets no number
        torch.cuda.set_device(target)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 64 << 20)
