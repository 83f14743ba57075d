"""Tensors of a CPU that say they are CUDA's, for code that asks their type and does the same on both."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CudaTypes(TorchFunctionMode):
    """While the block runs, `tensor.type()` names a CUDA type, and what is made on "cuda" is made here.

    Megatron-Core's distributed optimiser refuses every other tensor by name. What it computes, and what it
    sends over gloo, is as on a GPU; streams and NCCL are not.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found
