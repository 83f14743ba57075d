"""What a back end writes of weights and of AdamW's state, and reads again, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from opd.errors import CheckpointError
from opd.storage.tensors import Piece, shape_of

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's running means of a gradient and of its square, by torch's names."""

State = Mapping[str, Mapping[str, Tensor | Piece]]
"""The files of a checkpoint, by name, and what this rank has of each."""
Saved = Mapping[str, Mapping[str, Tensor]]
"""A checkpoint, of which tensors are read when they are asked for."""


class Fields(Mapping[str, Tensor]):
    """The optimiser's state of one parameter in a checkpoint, read when it is asked for."""

    def __init__(self, saved: Mapping[str, Tensor], name: str, fields: Sequence[str]) -> None:
        self.saved, self._name, self._fields = saved, name, fields

    def __getitem__(self, key: str) -> Tensor:
        return self.saved[f"{self._name}/{key}"]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def optimizer_fields(saved: Mapping[str, Tensor], known: Mapping[str, object]) -> dict[str, Fields]:
    """The entries `NAME/FIELD` of a checkpoint by name of the parameter.

    Raises `CheckpointError` for a name that is not `known`.
    """
    by_name: dict[str, list[str]] = {}
    for key in saved:
        name, _, field = key.rpartition("/")
        by_name.setdefault(name, []).append(field)
    unknown = sorted(set(by_name) - set(known))
    if unknown:
        raise CheckpointError(
            f"the checkpoint holds optimiser state for {unknown[0]}, which this model does not have;"
            " resume with the recipe the run was started with."
        )
    return {name: Fields(saved, name, fields) for name, fields in by_name.items()}


def state_of(parameter: Tensor, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """AdamW's state of `parameter` from `fields` of a checkpoint, perhaps written in another precision."""
    # The fused AdamW keeps its step count, in its own dtype, where the parameter is, too.
    return {
        key: value.to(parameter.device, parameter.dtype if key in MOMENTS else value.dtype)
        for key, value in fields.items()
    }


def check_tensors(saved: Mapping[str, Tensor], own: Mapping[str, Sequence[int]], model: str) -> None:
    """`CheckpointError` unless a checkpoint has `saved` exactly the tensors that `model` has, in the shapes
    `own`.
    """
    shapes = {name: shape_of(saved, name) for name in saved}
    different = sorted(name for name in saved.keys() | own.keys() if shapes.get(name) != own.get(name))
    if different:
        raise CheckpointError(
            f"the checkpoint and {model} do not have the same tensors, {different[0]} among them; resume with"
            " the recipe the run was started with."
        )


def moments_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """The shapes of what AdamW keeps of parameters of these `shapes`, all of which have been updated."""
    fields = {f"{name}/{key}": shape for name, shape in shapes.items() for key in MOMENTS}
    return fields | {f"{name}/step": () for name in shapes}
