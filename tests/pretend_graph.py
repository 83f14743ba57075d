"""CUDA graphs on a GPU that is not there: what a capture records and what a replay does again.

`pretend_cuda.gpu` puts a graph of its own in the place of `torch.cuda.CUDAGraph`, so that code which captures
is tested as it is. As on CUDA, a capture computes nothing that stays: every operation is recorded with the
memory that it reads and writes, numbers of the host as they are then, and what was written is what it was
before. A replay does the operations again on that memory, without Python: what does not lie where it lay is
an error, and what the graph made for itself is not there afterwards. While capturing, the host may neither
read nor wait nor copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

POISON = 0xFF
"""Byte of memory that belongs to a graph: not a number, or none that an index may be."""


@dataclass
class _Place:
    """A tensor as a kernel knows it: an address and a form."""

    memory: StorageWeakRef
    dtype: torch.dtype
    form: tuple[int, tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        form = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return cls(StorageWeakRef(tensor.untyped_storage()), tensor.dtype, form)

    def tensor(self) -> Tensor:
        """What lies there now. `RuntimeError` if that memory was given back."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is None:
            raise RuntimeError("a graph reads or writes memory that was given back since its capture")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.form)


@dataclass
class _Operation:
    run: Callable[..., Any]
    arguments: Any
    results: Any


def _places(tree: Any) -> Any:
    return tree_map(lambda x: _Place.of(x) if isinstance(x, Tensor) else x, tree)


def _tensors(tree: Any) -> Any:
    return tree_map(lambda x: x.tensor() if isinstance(x, _Place) else x, tree)


class Recording:
    """The operations of one capture."""

    def __init__(self) -> None:
        self.operations: list[_Operation] = []
        self.own: list[torch.UntypedStorage] = []
        """Memory that the graph made for itself."""
        self.broken = False
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Memory from outside, and what was in it."""

    def refuse(self, what: str) -> None:
        """The host asks for something that a capture cannot give."""
        self.broken = True
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

    def do(self, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any], *, allocates: bool) -> Any:
        """Record `run`, and do it; `allocates`: it only makes room."""
        arguments = _places((args, kwargs))
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._save(tensor.untyped_storage())
        known = {*self._before, *(x.data_ptr() for x in self.own)}
        results = run(*args, **kwargs)
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.own.append(tensor.untyped_storage())
        if not allocates:
            self.operations.append(_Operation(run, arguments, _places(results)))
        return results

    def _save(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if address not in self._before and all(address != x.data_ptr() for x in self.own):
            self._before[address] = (storage, storage.clone())

    def end(self) -> None:
        """Everything is as it was."""
        for storage, content in self._before.values():
            storage.copy_(content)
        self._before.clear()
        self._poison()

    def _poison(self) -> None:
        for storage in self.own:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)

    def replay(self) -> None:
        """Do all of it again."""
        for operation in self.operations:
            args, kwargs = _tensors(operation.arguments)
            found = operation.run(*args, **kwargs)
            for place, made in zip(tree_leaves(operation.results), tree_leaves(found), strict=True):
                if isinstance(place, _Place):
                    target = place.tensor()
                    if target.data_ptr() != made.data_ptr():
                        target.copy_(made)
        self._poison()
