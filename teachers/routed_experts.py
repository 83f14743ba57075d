"""The experts of one layer as they are needed: only those that tokens were routed to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from opd.errors import TeacherError
from opd.models.stored_form import StoredForm

if TYPE_CHECKING:
    from opd.teachers.unit_memory import ByteMeter

TakeExperts = Callable[[Collection[int]], Mapping[int, Mapping[str, Tensor]]]
"""Experts that tokens were routed to -> those that were read since the last call, by names of files."""


class PartHolder(nn.Module):
    """Lets a caller use `part` for as long as `functional_call` lends it weights."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, call: Callable[[nn.Module], Any]) -> Any:
        return call(self.part)


class RoutedExperts:
    """Stands for the forward of `part`, a layer's experts, whose weights are one tensor for all of them.

    Those that were read are put together in the order in which they came, and tokens' choices renumbered.
    """

    def __init__(
        self, part: nn.Module, path: str, stored: StoredForm, take_experts: TakeExperts, meter: ByteMeter
    ) -> None:
        """`path`: of `part` in the whole model."""
        self._part = part
        self._path = path
        self._stored = stored
        self._take_experts = take_experts
        self._meter = meter
        self._slots: dict[int, int] = {}
        """Expert -> its place among those that were read."""
        self._weights: dict[str, Tensor] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While the block runs it stands for the part's forward; then its weights are let go."""
        self._part.forward = self._forward
        try:
            yield
        finally:
            del self._part.forward
            self._meter.remove_bytes(self._nbytes)
            self._weights = {}

    @property
    def _nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights.values())

    def _forward(self, hidden: Tensor, chosen: Tensor, *others: Any, **options: Any) -> Any:
        """`chosen` [T, K] int64: the experts of each token."""
        part: Any = self._part
        total = int(part.num_experts)
        self._add(self._take_experts(chosen.unique().tolist()))
        if not self._weights:  # there are no tokens
            return torch.zeros_like(hidden)
        slots = torch.tensor([self._slots.get(expert, total) for expert in range(total)])
        renumbered = slots.to(chosen.device)[chosen]

        def call(module: nn.Module) -> Any:
            return type(part).forward(module, hidden, renumbered, *others, **options)

        part.num_experts = len(self._slots)
        try:
            parameters = {f"part.{name}": weight for name, weight in self._weights.items()}
            return functional_call(PartHolder(part), parameters, (call,), tie_weights=False)
        finally:
            part.num_experts = total

    def _add(self, experts: Mapping[int, Mapping[str, Tensor]]) -> None:
        if not experts:
            return
        files = {name: tensor for tensors in experts.values() for name, tensor in tensors.items()}
        try:
            converted = self._stored.of_module(files)
        except ValueError as error:
            raise TeacherError(f"experts of {self._path} cannot be used: {error}.") from None
        for key, tensor in converted.items():
            name = key.removeprefix(f"{self._path}.")
            present = self._weights.get(name)
            self._weights[name] = tensor if present is None else torch.cat([present, tensor])
            self._meter.add_bytes(tensor.nbytes)
        read = len(self._slots)
        self._slots |= {expert: read + index for index, expert in enumerate(sorted(experts))}
