"""Which implementation of the operations runs: `OPD_KERNELS`."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch

from opd.kernels import chunked, reference, tilelang_target, triton_rows

NAMES = ("auto", "chunked", "reference", "tilelang", "triton")


def implementation() -> ModuleType:
    """The module `OPD_KERNELS` names. Asking for one that is not there is a `ValueError`, never a
    fallback.

    `auto` is `triton` on a machine whose GPU can run it, else `chunked`: on a CPU the compiled kernels gain a
    few percent and their first use waits for a compiler.
    """
    name = os.environ.get("OPD_KERNELS", "auto")
    if name not in NAMES:
        raise ValueError(f"OPD_KERNELS is {name!r}; set it to one of {', '.join(NAMES)}, or unset it")
    if name == "reference":
        return reference
    if name == "tilelang":
        return _compiled("tilelang", tilelang_target.missing("cuda" if torch.cuda.is_available() else "cpu"))
    if name == "triton":
        return _compiled("triton", triton_rows.missing())
    if name == "auto" and triton_rows.missing() is None:
        return _compiled("triton", None)
    return chunked


def _compiled(name: str, reason: str | None) -> ModuleType:
    if reason is not None:
        raise ValueError(f"OPD_KERNELS is {name!r}, which cannot run here: {reason}")
    return importlib.import_module(f"opd.kernels.{name}_ops")
