"""States of recurrent layers by slot, beside the keys and values of those that attend."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from opd.models.recurrence import MixerCall, States, put_states, read_states


class SlotStates:
    """The states of each layer `[S, ...]`: of every slot, after the last token that it has read."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self._empty: DynamicCache | None = None
        self.layers: dict[int, States] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(tensor.nbytes for states in self.layers.values() for tensor in states.values())

    def mix(
        self,
        call: MixerCall,
        bounds: Sequence[int],
        slots: Sequence[Sequence[int]],
        *,
        begins: bool = False,
    ) -> Tensor:
        """Mix sequences packed with `bounds` [P + 1] -> [T, D]. `slots` of each keep its states. The sequence
        goes on from those of its first slot, unless it `begins`.

        Sequences of equal length are one call without padding: a padded token would change the state.
        """
        groups: dict[int, list[int]] = {}
        for number, stop in enumerate(bounds[1:]):
            groups.setdefault(stop - bounds[number], []).append(number)
        output = call.hidden.new_empty(len(call.hidden), call.hidden.shape[1])
        for length, members in groups.items():
            starts = torch.tensor([bounds[number] for number in members])
            places = (starts[:, None] + torch.arange(length)).flatten().to(call.hidden.device)
            cache = self._fresh(call.layer_index)
            if not begins:
                held = self._read_rows(call.layer_index, [slots[number][0] for number in members])
                put_states(cache, call.layer_index, held)
            mixed = call.run(call.hidden.index_select(0, places).unflatten(0, (-1, length)), cache)
            output.index_copy_(0, places, mixed.flatten(0, 1))
            sources = [row for row, number in enumerate(members) for _ in slots[number]]
            targets = [slot for number in members for slot in slots[number]]
            self._write_rows(call.layer_index, targets, read_states(cache, call.layer_index), sources)
        return output

    def _fresh(self, index: int) -> DynamicCache:
        """Return a cache whose layer `index` is empty, at the cost of that layer alone."""
        if self._empty is None:
            self._empty = DynamicCache(config=self._config)
        cache = copy.copy(self._empty)
        cache.layers = list(self._empty.layers)
        cache.layers[index] = copy.deepcopy(self._empty.layers[index])
        return cache

    def _read_rows(self, index: int, slots: list[int]) -> States:
        """The states of `slots`, a view if these are neighbours."""
        rows: Any = slots
        if slots == list(range(slots[0], slots[0] + len(slots))):
            rows = slice(slots[0], slots[0] + len(slots))
        return {name: tensor[rows] for name, tensor in self.layers[index].items()}

    def _write_rows(self, index: int, slots: list[int], states: States, sources: list[int]) -> None:
        kept = self.layers.setdefault(index, {})
        for name, tensor in states.items():
            held = kept.get(name)
            if held is None:
                held = tensor[:0]
            elif slots[0] < len(held) and tensor.data_ptr() == held[slots[0]].data_ptr():
                continue  # updated in place
            kept[name] = _with_rows(held, max(slots) + 1)
            kept[name][slots] = tensor[sources]

    def clear(self) -> None:
        """Drop everything."""
        self.layers.clear()

    def move_slots(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy the slots `source` [M] to the slots `target` [M], which may be the same in another order."""
        for states in self.layers.values():
            for name, tensor in states.items():
                states[name] = _with_rows(tensor, int(target.max()) + 1)
                states[name][target.tolist()] = tensor[source.tolist()]

    def read_slot(self, slot: int) -> dict[int, States]:
        """Return copies of the states of a slot, by layer, `[...]` each."""
        return {
            index: {name: tensor[slot].clone() for name, tensor in states.items()}
            for index, states in self.layers.items()
        }

    def write_slots(self, slots: range, saved: dict[int, States]) -> None:
        """Put the same states into several slots."""
        for index, states in saved.items():
            rows = {name: tensor[None] for name, tensor in states.items()}
            if slots:
                self._write_rows(index, list(slots), rows, [0] * len(slots))


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return `tensor` [S, ...] with at least `rows` slots."""
    if len(tensor) >= rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
