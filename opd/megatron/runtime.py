"""What Megatron-Core needs around it: its import, its process groups, a device for its tensors.

Tried with Megatron-Core 0.16.1, on a CPU with gloo. Nothing here reads or writes a Megatron checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

import torch
import torch.distributed as dist

from opd.errors import MissingExtraError, TeacherError
from opd.ranks import process_group


def megatron_core() -> ModuleType:
    """`megatron.core`, imported. Raises `MissingExtraError` if it is not installed."""
    try:
        # It warns of Apex and Transformer Engine, of which nothing here is used.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron.core
            import megatron.core.models.gpt.gpt_model
            import megatron.core.models.gpt.moe_module_specs
            from megatron.core.transformer.moe import moe_utils
    except ImportError as error:
        raise MissingExtraError("a model on Megatron-Core", "megatron") from error
    # The router of 0.16.1 asks whether this is None, but without Transformer Engine it is not defined.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    return megatron.core


@contextmanager
def inside_megatron(device: torch.device) -> Iterator[None]:
    """While Megatron-Core runs: its current CUDA device is `device`, and its warnings are not shown.

    Its modules ask `torch.cuda.current_device()` where to put a tensor, which fails without CUDA. For a CPU
    the answer is "cpu" while the block runs. What it warns of are its own defaults and calls.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\..*")
        with torch.cuda.device(device) if device.type == "cuda" else _cpu_as_current_device():
            yield


@contextmanager
def _cpu_as_current_device() -> Iterator[None]:
    original = torch.cuda.current_device
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        torch.cuda.current_device = original


@contextmanager
def model_parallel(tensor_parallel: int) -> Iterator[dist.ProcessGroup]:
    """The tensor-parallel group of this rank: Megatron-Core's own if it has been initialised, else a new one.

    Ranks are taken in order: `tensor_parallel` neighbours share a model. With a size of 1 and no process
    group in this process, one of this process alone is made, without a port. What was made here is destroyed
    when the block ends. Raises `TeacherError` if the sizes do not fit.
    """
    core = megatron_core()
    state = core.parallel_state
    _check_world(tensor_parallel)
    with process_group(), ExitStack() as stack:
        if not state.model_parallel_is_initialized():
            state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
            stack.callback(state.destroy_model_parallel)
        group = state.get_tensor_model_parallel_group()
        others = [state.get_pipeline_model_parallel_world_size(), state.get_context_parallel_world_size()]
        if dist.get_world_size(group) != tensor_parallel or max(others) > 1:
            raise TeacherError(
                f"Megatron-Core runs with tensor parallel size {dist.get_world_size(group)}, pipeline size"
                f" {others[0]} and context size {others[1]} in this process, but a teacher was asked to run"
                f" with tensor parallel size {tensor_parallel} and no pipeline; give both the same."
            )
        yield group


def _check_world(tensor_parallel: int) -> None:
    """Raise `TeacherError` where processes cannot be grouped like that."""
    if not dist.is_initialized():
        if tensor_parallel != 1:
            raise TeacherError(
                f"tensor parallel size {tensor_parallel} needs {tensor_parallel} processes with a process"
                " group, and this one has none; make it first, or set distill.megatron.tensor_parallel to 1."
            )
        return
    if dist.get_world_size() % tensor_parallel:
        raise TeacherError(
            f"{dist.get_world_size()} processes cannot be divided into groups of {tensor_parallel}; choose a"
            " tensor parallel size that divides their number."
        )
