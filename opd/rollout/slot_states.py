"""States of recurrent layers by slot, beside the keys and values of those that attend."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from opd.models.recurrence import MixerCall, States, put_states, read_states


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """Sequences of one length `L` in a pass, which a mixer takes together."""

    length: int
    places: Tensor
    """[B * L] int64: their rows among the packed tokens."""
    read: list[int] | slice
    """[B]: the slots whose states they go on from; a slice, which is a view, if these are neighbours."""
    slots: list[int]
    """[R]: the slots that keep their states."""
    sources: list[int]
    """[R]: the sequence of each of these, among the `B`."""


def group_slots(
    bounds: Sequence[int], slots: Sequence[Sequence[int]], device: torch.device
) -> list[SlotGroup]:
    """Group sequences packed with `bounds` [P + 1] by length, so that none is padded: a padded token would
    change the state. `slots` of each keep its states. The sequence goes on from those of its first slot.
    """
    members: dict[int, list[int]] = {}
    for number, stop in enumerate(bounds[1:]):
        members.setdefault(stop - bounds[number], []).append(number)
    groups = []
    for length, numbers in members.items():
        starts = torch.tensor([bounds[number] for number in numbers])
        first = [slots[number][0] for number in numbers]
        neighbours = slice(first[0], first[0] + len(first))
        groups.append(
            SlotGroup(
                length,
                (starts[:, None] + torch.arange(length)).flatten().to(device),
                neighbours if first == list(range(neighbours.start, neighbours.stop)) else first,
                [slot for number in numbers for slot in slots[number]],
                [row for row, number in enumerate(numbers) for _ in slots[number]],
            )
        )
    return groups


class SlotStates:
    """The states of each layer `[S, ...]`: of every slot, after the last token that it has read."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self._empty: DynamicCache | None = None
        self.layers: dict[int, States] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for states in self.layers.values() for tensor in states.values())

    def mix(self, call: MixerCall, groups: Sequence[SlotGroup], *, begins: bool = False) -> Tensor:
        """Mix the packed tokens of `groups` -> [T, D], from the states of their slots on, or from none."""
        output = call.hidden.new_empty(len(call.hidden), call.hidden.shape[1])
        for group in groups:
            cache = self._fresh(call.layer_index)
            if not begins:
                states = self.layers[call.layer_index].items()
                put_states(cache, call.layer_index, {name: held[group.read] for name, held in states})
            hidden = call.hidden.index_select(0, group.places).unflatten(0, (-1, group.length))
            output.index_copy_(0, group.places, call.run(hidden, cache).flatten(0, 1))
            states = read_states(cache, call.layer_index)
            self._write_rows(call.layer_index, group.slots, states, group.sources)
        return output

    def _fresh(self, index: int) -> DynamicCache:
        """Return a cache whose layer `index` is empty, at the cost of that layer alone."""
        if self._empty is None:
            self._empty = DynamicCache(config=self._config)
        cache = copy.copy(self._empty)
        cache.layers = list(self._empty.layers)
        cache.layers[index] = copy.deepcopy(self._empty.layers[index])
        return cache

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
