"""Which implementation of the operations runs: `OPD_KERNELS`."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch

from opd.kernels import chunked, reference, tilelang_target

NAMES = ("auto", "chunked", "reference", "tilelang")


def implementation() -> ModuleType:
    """The module `OPD_KERNELS` names. Asking for one that is not there is a `ValueError`, never a
    fallback.

    `auto` is `chunked`, everywhere. On a CPU the compiled kernels gain a few percent and their first use
    waits for a compiler; on a GPU nobody has run them yet, and what only a compiler has seen is not a
    default. Where `pytest -m gpu tests/kernels` has passed, ask for `tilelang`.
    """
    name = os.environ.get("OPD_KERNELS", "auto")
    if name not in NAMES:
        raise ValueError(f"OPD_KERNELS is {name!r}; set it to one of {', '.join(NAMES)}, or unset it")
    if name == "reference":
        return reference
    if name == "tilelang":
        return _tilelang()
    return chunked


def _tilelang() -> ModuleType:
    reason = tilelang_target.missing("cuda" if torch.cuda.is_available() else "cpu")
    if reason is not None:
        raise ValueError(f"OPD_KERNELS is 'tilelang', which cannot run here: {reason}")
    return importlib.import_module("opd.kernels.tilelang_ops")
