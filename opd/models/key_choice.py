"""Layers whose queries see only some keys, chosen by an indexer of the model's own (DeepSeek-V3.2, GLM-5).

The family's code scores all keys of a sequence and gives the best `K` of each query. Packed tokens are of
several sequences, and a step of the engine has only new ones. So an indexer of a packed pass gives a
`KeyChoice`, which comes with the layer's attention call. Who attends runs it for each sequence, on the keys
that it holds. Later layers may use the choice of an earlier one.

Shapes: `T` packed tokens, `B` sequences, `Q` queries of each, `L` keys of each, `d` size of an index key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_SCORES = 1 << 24
"""Most scores of an indexer, over its heads, that are computed at once."""


class _NoMask:
    """Stands for the mask that a packed pass has not, where a layer's code takes a part of it."""

    def __getitem__(self, part: Any) -> _NoMask:
        return self


NO_MASK = _NoMask()


class _KeysError(Exception):
    """Ends an indexer once its keys are made."""


@dataclass(slots=True)
class _IndexCache:
    """Stands for transformers' cache: an indexer gets `keys` [B, L, d] for the ones it made."""

    keys: Tensor | None = None
    made: Tensor | None = None

    def update_indexer(self, made: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.keys is None:
            self.made = made
            raise _KeysError
        return self.keys


class _EarliestFirst(TorchFunctionMode):
    """Lets `topk` take the earliest of equal scores. Many are 0, and which of these it takes otherwise
    depends on the length of the row, so that the trainer and the engine would see other keys.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.topk:
            return func(*args, **(kwargs or {}))
        scores, count = args
        order = scores.sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((order.values[..., :count], order.indices[..., :count]))


@dataclass(slots=True, eq=False)
class KeyChoice:
    """An indexer and the packed tokens that it chooses keys for. It has no gradient."""

    layer_index: int
    topk: int
    """Most keys that a query sees."""
    heads: int
    inputs: tuple[Tensor, ...]
    """`[T, ...]` each: hidden states, latents of queries, cosines and sines."""
    forward: Callable[..., Tensor]
    chosen: dict[Any, Tensor] = field(default_factory=dict)
    """What was chosen in this pass, for later layers."""
    _keys: Tensor | None = None

    @property
    def kept_at(self) -> int:
        """Where the engine keeps its keys, among the numbers of layers."""
        return -1 - self.layer_index

    @property
    def keys(self) -> Tensor:
        """[T, d]: the index keys of the tokens."""
        if self._keys is None:
            cache = _IndexCache()
            try:
                self._run([x[None] for x in self.inputs], None, cache)
            except _KeysError:
                assert cache.made is not None
                self._keys = cache.made[0]
        assert self._keys is not None
        return self._keys

    def choose(self, rows: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        """Return those of `visible` [B, Q, L] bool that the tokens `rows` [B * Q] see of `keys` [B, L, d]."""
        inputs = [x.index_select(0, rows).unflatten(0, visible.shape[:2]) for x in self.inputs]
        columns = max(1, _SCORES // (visible.shape[0] * visible.shape[2] * self.heads))
        parts = []
        for start in range(0, visible.shape[1], columns):
            part = slice(start, start + columns)
            seen = visible[:, part]
            best = self._run([x[:, part] for x in inputs], seen, _IndexCache(keys)).long()
            parts.append(torch.zeros_like(seen).scatter_(-1, best, True) & seen)
        return torch.cat(parts, 1)

    def _run(self, inputs: list[Tensor], mask: Tensor | None, cache: _IndexCache) -> Tensor:
        hidden, latents, cosines, sines = inputs
        with _EarliestFirst():
            return self.forward(hidden, latents, (cosines, sines), mask, None, cache=cache)


def install_indexers(module: nn.Module) -> None:
    """Let indexers of `module` give a `KeyChoice` where their layer is given an `attend`."""
    for part in module.modules():
        indexer = getattr(part, "indexer", part)
        if indexer is None or (indexer is not part and _is_known(indexer)):
            part.forward = MethodType(_attend_without_mask, part)
        elif indexer is part and _is_known(part):
            part.forward = MethodType(_choose_later, part)


def _is_known(part: nn.Module) -> bool:
    known = hasattr(part, "index_topk") and hasattr(part, "n_heads")
    return known and "q_resid" in inspect.signature(type(part).forward).parameters


def _attend_without_mask(part: Any, *arguments: Any, **options: Any) -> Any:
    """Stand for the `forward` of an attention, as a method, so that a copy of the module calls the copy."""
    if options.get("attend") is not None:
        options["attention_mask"] = NO_MASK
    return type(part).forward(part, *arguments, **options)


def _choose_later(indexer: Any, *arguments: Any, **options: Any) -> Any:
    forward = partial(type(indexer).forward, indexer)
    if NO_MASK not in arguments:
        return forward(*arguments, **options)
    hidden, latents, (cosines, sines) = arguments[:3]
    inputs = tuple(x[0].detach() for x in (hidden, latents, cosines, sines))
    return KeyChoice(int(indexer.layer_idx), int(indexer.index_topk), int(indexer.n_heads), inputs, forward)
